"""The results of `vitcli compare` and `vitcli verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class ConfigDifference:
    """One dotted key that the two configs set differently, its values as YAML would write them."""

    key: str
    a: str
    b: str


@dataclass(frozen=True)
class LayerDifferences:
    """How far one layer's tokens are apart, over all images."""

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
    """What was compared across: images (all tokens of a layer in a row) or patches."""
    count: int
    minibatches: int
    standard_errors: tuple[tuple[float | None, ...], ...] | None = None
    """Of `values`, over images (jackknife); None with fewer than three images."""
    pairing: str = ""
    """How patches were paired where A and B saw different crops of the images."""


@dataclass(frozen=True)
class Hole:
    """The first layer of an encoder that is not finite."""

    side: str
    """A or B."""
    layer: str
    image: str
    """The first image of the minibatch in which it was met."""


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
    """Other pairs of layers whose CKA cannot be told apart from it on these images."""


@dataclass(frozen=True)
class CompareResult(Result):
    """The result of `vitcli compare`."""

    rows_at: ClassVar[str] = "differences"

    a: ModelInfo
    b: ModelInfo
    images: int
    verdict: str
    """In words: where A and B part, and by how much."""
    verdict_code: str
    """identical, rounding, different, incomparable (other shapes) or not finite."""
    summary: str
    """The same as `verdict`."""
    tolerance: float
    """Relative difference up to which it is called rounding."""
    first_unequal: str | None
    """The first layer that is not equal bit for bit."""
    first_parted: str | None
    """The first layer that is apart by more than the tolerance."""
    differences: tuple[LayerDifferences, ...]
    cka: LinearCka
    config_differences: tuple[ConfigDifference, ...]
    failed: tuple[FailedImage, ...]
    holes: tuple[Hole, ...] = ()
    """Where A and B begin to be not finite; empty where all layers are finite."""
    best_pair: BestPair | None = None


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
    view_prefix: ClassVar[str] = "verify_"

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
