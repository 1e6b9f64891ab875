"""What `vitcli compare` answers."""

from __future__ import annotations

from dataclasses import dataclass

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
    """None where a layer is the same for every example."""
    examples: str
    """What was compared across: images (all tokens of a layer in a row) or patches."""
    count: int
    minibatches: int


@dataclass(frozen=True)
class CompareResult(Result):
    """The answer of `vitcli compare`."""

    a: ModelInfo
    b: ModelInfo
    images: int
    verdict: str
    """identical (bit for bit), rounding, different, or incomparable (other shapes)."""
    summary: str
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
