"""What `vitcli explore` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class ExploredEncoder:
    """What the page holds of one encoder."""

    model: ModelInfo
    layers: tuple[int, ...]
    """0 is the input of the first block, i the output of block i."""
    grids: tuple[tuple[int, int], ...]
    """(rows, columns) of patches, for each image."""
    directions: int
    """Directions of feature space that are kept, of `model.hidden`."""
    cosine_error: float
    """Largest error of a cosine similarity on the page, over a sample of pairs of patches."""
    attention_error: float
    """Largest error of an attention value on the page, relative to the largest of its map."""
    kept: tuple[str, ...]
    left_out: tuple[str, ...]
    """What would have made the page too large, most useful first."""


@dataclass(frozen=True)
class ExploreResult(Result):
    """The page that `vitcli explore` wrote."""

    rows_at: ClassVar[str] = "encoders"

    path: str
    bytes: int
    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    encoders: tuple[ExploredEncoder, ...]
