"""What `vitcli verify` answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class Checked:
    """One value that both sides give, over all images."""

    name: str
    """pixels, layer 0, layer 1 and so on, tokens, pooled or output."""
    shape: tuple[int, ...]
    """Here, of the first image."""
    reference_shape: tuple[int, ...]
    largest_difference: float
    """Relative to the largest value of the reference (for pixels in levels of 255); NaN where a
    side is not finite or the shapes differ."""
    smallest_cosine: float
    """Over all vectors of the value; NaN as above, and for pixels."""
    tolerance: float
    equal: bool


@dataclass(frozen=True)
class VerifyResult(Result):
    """A checkpoint run twice: here, and by the library that wrote it."""

    rows_at: ClassVar[str] = "checked"

    source: str
    model: ModelInfo
    library: str
    library_version: str
    architecture: str
    """What the library calls it."""
    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    checked: tuple[Checked, ...]
    first_difference: str | None
    """The first value, in the order of the encoder, that is not equal."""
    equal: bool
    wall_s: float
    """Best forward pass of one image here, by plain torch."""
    reference_wall_s: float
    verdict: str
    notes: tuple[str, ...] = ()
