"""The results of `vitcli compare` and `vitcli verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result

EXAMPLES = ("auto", "images", "patches")
"""What CKA compares across."""


@dataclass(frozen=True)
class ConfigDifference:
    """One dotted key that the two configs set differently, its values as YAML would write them."""

    key: str
    a: str
    b: str


@dataclass(frozen=True)
class LayerDifferences:
    """Differences of one layer's tokens, over all images."""

    layer: str
    max_abs: float
    """NaN (null in JSON) where one of the two is not finite; so are the other numbers then."""
    relative: float
    """`max_abs` over the largest absolute value of encoder A."""
    cosine: float
    """Mean over tokens."""
    cosine_min: float


@dataclass(frozen=True)
class LinearCka:
    """Linear CKA, unbiased, of every layer of A (rows) with every layer of B (columns)."""

    layers_a: tuple[str, ...]
    layers_b: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    """None where a layer is the same for every example, or not finite."""
    examples: str
    """The examples: images (all tokens of a layer in one row) or patches."""
    count: int
    minibatches: int
    standard_errors: tuple[tuple[float | None, ...], ...] | None = None
    """Of `values`, over images (jackknife); None with fewer than three images."""
    pairing: str = ""
    """How patches were paired if A and B crop the images differently."""


@dataclass(frozen=True)
class Hole:
    """The first layer of an encoder that is not finite."""

    side: str
    """A or B."""
    layer: str
    image: str
    """The first image of its minibatch."""


@dataclass(frozen=True)
class BestPair:
    """The layer of A and the layer of B with the largest CKA."""

    layer_a: str
    layer_b: str
    cka: float
    low: float | None
    """95% interval over images (jackknife, Student's t); None with fewer than three images."""
    high: float | None
    ties: int | None
    """Other pairs of layers whose CKA does not differ significantly from it."""


@dataclass(frozen=True)
class CompareResult(Result):
    """The result of `vitcli compare`."""

    rows_at: ClassVar[str] = "differences"

    a: ModelInfo
    b: ModelInfo
    images: int
    verdict: str
    """A sentence: where A and B differ, and by how much."""
    verdict_code: str
    """identical, rounding, different, incomparable (other shapes) or not finite."""
    summary: str
    """The same as `verdict`."""
    tolerance: float
    """Relative difference up to which layers are equal."""
    first_unequal: str | None
    """The first layer that is not equal bit for bit."""
    first_parted: str | None
    """The first layer that differs by more than the tolerance."""
    differences: tuple[LayerDifferences, ...]
    cka: LinearCka
    config_differences: tuple[ConfigDifference, ...]
    failed: tuple[FailedImage, ...]
    holes: tuple[Hole, ...] = ()
    """The first layers that are not finite; empty if all are finite."""
    best_pair: BestPair | None = None


@dataclass(frozen=True)
class Checked:
    """One value by vitcli and by the library, over all images."""

    name: str
    """pixels, layer 0, layer 1 and so on, tokens, pooled, output or deepstack."""
    shape: tuple[int, ...]
    """By vitcli, of the first image."""
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
    """A checkpoint run by vitcli and by the library that wrote it."""

    rows_at: ClassVar[str] = "checked"
    view_prefix: ClassVar[str] = "verify_"

    source: str
    model: ModelInfo
    library: str
    library_version: str
    architecture: str
    """The library's name of it."""
    images: tuple[str, ...]
    failed: tuple[FailedImage, ...]
    checked: tuple[Checked, ...]
    first_difference: str | None
    """The first value, in the order of the encoder, that is not equal."""
    equal: bool
    wall_s: float
    """Fastest forward pass of one image by vitcli, in plain torch."""
    reference_wall_s: float
    verdict: str
    notes: tuple[str, ...] = ()
