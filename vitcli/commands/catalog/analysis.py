"""Which presets come with the package, and which checkpoint families are read."""

from __future__ import annotations

from vitcli.commands.catalog.result import FamiliesResult, FamilyRow, PresetRow, PresetsResult
from vitcli.commands.params.analysis import model_costs
from vitcli.config.load import load_config, preset_names
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError


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
        heads=costs.heads,
        patch_size=costs.patch_size,
        image_size=costs.image_size,
        native_size=costs.native_size,
        parameters=costs.total,
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
