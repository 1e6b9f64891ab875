"""The result of `vitcli attn-entropy`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vitcli.errors import VitcliError
from vitcli.results import FailedImage, Result

if TYPE_CHECKING:
    from vitcli.images.preprocess import Box


@dataclass(frozen=True)
class OutlierCut:
    """Above which norm a patch token is an outlier (Darcet et al. 2024, section 2.1).

    They cut DINOv2-g at a norm of 150, read off its histogram; a multiple of the layer's median
    norm is such a cut without a unit.
    """

    value: float
    of_median: bool

    @classmethod
    def parse(cls, text: str) -> OutlierCut:
        """`3x` is three times the median of the layer, `150` a norm."""
        number = text.removesuffix("x")
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > 0):
            raise VitcliError(
                f"--outlier-cut {text}: is not a norm (expected for example 3x or 150)",
                "--outlier-cut 3x, which is 3 times the layer's median norm",
            )
        return cls(value, text != number)

    def norm(self, median: float) -> float:
        return self.value * median if self.of_median else self.value

    def __str__(self) -> str:
        of = "times the median norm of the layer's patch tokens" if self.of_median else "in norm"
        return f"above {self.value:g} {of}"


OUTLIER_CUT = OutlierCut(3.0, of_median=True)


@dataclass(frozen=True)
class ClsMass:
    """Where a CLS query's attention falls; the four sum to 1."""

    cls: float
    distillation: float
    registers: float
    patches: float


@dataclass(frozen=True)
class HeadAttention:
    """One head of one block, means over images and seeds. Entropies in nats."""

    head: int
    """Counted from 1."""
    entropy: float
    """Over the chosen queries."""
    entropy_normalised: float
    """Of each query, divided by the log of the number of tokens that it can attend to (log N
    without a mask).

    NaN (null in JSON) where no chosen query can attend to more than one token.
    """
    entropy_cls: float | None
    entropy_patches: float
    entropy_registers: float | None
    attention_distance_px: float
    """Mean distance from patch queries to the patches they attend to, in input pixels."""
    cls_mass: ClsMass | None


@dataclass(frozen=True)
class LayerAttention:
    """One block, means over heads, images and seeds. Blocks are counted from 1."""

    layer: int
    entropy: float
    entropy_normalised: float
    head_spread: float | None
    """Standard deviation of the normalized entropy over heads, mean over seeds; None with a
    single head."""
    image_spread: float | None
    """Standard deviation of the normalized entropy over images; None with a single image."""
    seed_spread: float | None
    """Standard deviation of the normalized entropy over seeds; None with a single seed."""
    entropy_cls: float | None
    entropy_patches: float
    entropy_registers: float | None
    attention_distance_px: float
    cls_mass: ClsMass | None
    patch_norm_median: float
    patch_norm_max: float
    outlier_cut: float
    """Patch tokens with a larger norm, as the block leaves them, are outliers."""
    outlier_share: float
    by_image: tuple[float, ...]
    """Normalized entropy of each image, mean over heads and seeds, in the order of `images`."""
    by_seed: tuple[float, ...]
    """Normalized entropy with each seed's weights, mean over heads and images, as `seeds`."""
    heads: tuple[HeadAttention, ...]


@dataclass(frozen=True)
class SeenImage:
    path: str
    tokens: int
    """Tokens of the sequence, prefix tokens included."""
    grid: tuple[int, int]
    """(rows, columns) of patches."""


@dataclass(frozen=True)
class EncoderAttention:
    """One encoder on all images that could be read."""

    name: str
    weights: str
    device: str
    dtype: str
    fresh: bool
    seeds: tuple[int, ...]
    """Of random weights; empty for a checkpoint."""
    registers: int
    tokens: int | None
    """Tokens of every sequence; None where the images give different numbers."""
    heads: int
    depth: int
    row_sum_error: float
    """Largest distance of any attention row's sum from 1."""
    images: tuple[SeenImage, ...]
    layers: tuple[LayerAttention, ...]


@dataclass(frozen=True)
class AttentionResult(Result):
    """The result of `vitcli attn-entropy`."""

    rows_at: ClassVar[str] = "models.layers"

    query: str
    """all, cls, patch or "ROW,COL": the queries of `entropy` and `entropy_normalised`."""
    outlier_rule: str
    models: tuple[EncoderAttention, ...]
    failed: tuple[FailedImage, ...]
    verdict: str
    """A sentence: which encoder's last layer is smoother, by how much, and how certain."""
    verdict_code: str = ""
    """one encoder, identical, one image, one seed, distinguished, cannot be distinguished,
    undefined or no image."""


@dataclass(frozen=True)
class MapPanel:
    title: str
    values: tuple[tuple[float, ...], ...]
    """A value for each patch, by rows."""


@dataclass(frozen=True)
class MapSheet:
    """Attention maps of one image by one block of one encoder."""

    image: int
    """Which picture of the figure the maps belong to."""
    title: str
    box: Box
    """What the patch grid covers of the picture."""
    query_box: Box | None
    """The query's own patch, where it is one."""
    panels: tuple[MapPanel, ...]
    margin: tuple[int, int, int] = (0, 0, 0)
    """The color where `box` reaches over the picture's edges."""
