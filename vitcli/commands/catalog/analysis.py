"""Which presets come with the package, and which checkpoint families are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.commands.params.analysis import model_costs
from vitcli.config.request import load_config, preset_names
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError
from vitcli.results import Result


@dataclass(frozen=True)
class PresetRow:
    name: str
    family: str
    hidden: int
    depth: int
    heads: int
    patch_size: int
    image_size: tuple[int, int]
    """(height, width) in pixels of the input (`ModelConfig.input_size`)."""
    native_size: tuple[int, int]
    """(height, width) in pixels that the position table is made for."""
    parameters: int
    hub: str | None
    """The repository that publishes weights for it, for --weights; None where none is known."""


@dataclass(frozen=True)
class PresetsResult(Result):
    """The presets, by family and size."""

    rows_at: ClassVar[str] = "presets"

    view_prefix: ClassVar[str] = "presets_"

    presets: tuple[PresetRow, ...]


@dataclass(frozen=True)
class FamilyRow:
    """How a library names the tensors of one kind of encoder, and what it was compared with."""

    name: str
    library: str
    model_types: tuple[str, ...]
    verified: str


@dataclass(frozen=True)
class FamiliesResult(Result):
    """The checkpoint families, in the order they are tried."""

    rows_at: ClassVar[str] = "families"

    view_prefix: ClassVar[str] = "families_"

    families: tuple[FamilyRow, ...]


HUB = {
    "clip-bigg14": "laion/CLIP-ViT-bigG-14-laion2B-39B-b160k",
    "clip-h14": "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
    "clip-l14": "openai/clip-vit-large-patch14",
    "clip-l14-336": "openai/clip-vit-large-patch14-336",
    "deit-b16-distilled": "facebook/deit-base-distilled-patch16-224",
    "deit-s16-distilled": "facebook/deit-small-distilled-patch16-224",
    "dinov2-b14": "facebook/dinov2-base",
    "dinov2-b14-reg-timm": "timm/vit_base_patch14_reg4_dinov2.lvd142m",
    "dinov2-b14-timm": "timm/vit_base_patch14_dinov2.lvd142m",
    "dinov2-g14": "facebook/dinov2-giant",
    "dinov2-l14-reg-timm": "timm/vit_large_patch14_reg4_dinov2.lvd142m",
    "dinov2-l14-timm": "timm/vit_large_patch14_dinov2.lvd142m",
    "dinov2-s14": "facebook/dinov2-small",
    "eva02-l14-448": "timm/eva02_large_patch14_448.mim_in22k_ft_in1k",
    "ijepa-h14": "facebook/ijepa_vith14_22k",
    "internvit-6b": "OpenGVLab/InternViT-6B-448px-V1-5",
    "internvit-6b-224": "OpenGVLab/InternViT-6B-224px",
    "internvit-6b-v1.0": "OpenGVLab/InternViT-6B-448px-V1-0",
    "mae-h14": "facebook/vit-mae-huge",
    "mae-l16": "facebook/vit-mae-large",
    "siglip-b16-224": "google/siglip-base-patch16-224",
    "siglip-b16-384": "google/siglip-base-patch16-384",
    "siglip-b16-512": "google/siglip-base-patch16-512",
    "siglip-l16-256": "google/siglip-large-patch16-256",
    "siglip2-b16-512": "google/siglip2-base-patch16-512",
    "vit-b16-timm": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
    "vit-ti16-timm": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
}
"""Where weights of a preset are published, as far as their configs were compared with it."""


def presets(word: str = "") -> PresetsResult:
    """The presets whose name contains `word`, by family, then by size.

    Raises:
        VitcliError: there is none.
    """
    names = preset_names()
    rows = [_row(name) for name in names if word.lower() in name]
    if not rows:
        families = sorted({family(name) for name in names})
        raise VitcliError(
            f"presets: no name contains {word!r} (expected one of {', '.join(families)})",
            "run `vitcli presets` for the list",
        )
    return PresetsResult(tuple(sorted(rows, key=lambda r: (r.family, r.parameters, r.name))))


def family(name: str) -> str:
    """`dinov2` of `dinov2-s14-reg`."""
    return name.partition("-")[0]


def _row(name: str) -> PresetRow:
    costs = model_costs(load_config(ModelConfig, preset=name))
    return PresetRow(
        name=costs.name,
        family=family(name),
        hidden=costs.hidden,
        depth=costs.depth,
        heads=costs.heads or 0,
        patch_size=costs.patch_size,
        image_size=costs.image_size,
        native_size=costs.native_size,
        parameters=costs.total,
        hub=HUB.get(name),
    )


def families(word: str = "") -> FamiliesResult:
    """The families whose name or library contains `word`, in the order they are tried.

    Raises:
        VitcliError: there is none.
    """
    from vitcli.checkpoints.families import FAMILIES  # brings torch

    rows = tuple(
        FamilyRow(f.name, f.library, f.model_types, f.verified)
        for f in FAMILIES
        if word.lower() in f"{f.name} {f.library}".lower()
    )
    if not rows:
        raise VitcliError(
            f"families: no name contains {word!r}", "run `vitcli families` for the list"
        )
    return FamiliesResult(rows)
