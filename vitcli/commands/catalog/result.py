"""The results of `vitcli presets` and `vitcli families`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
