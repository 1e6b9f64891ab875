"""What `vitcli encode` answers on a few images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import FailedImage, ModelInfo, Result


@dataclass(frozen=True)
class LayerNorms:
    """One layer's tokens: 0 is the input of the first block, then each block, then the norm."""

    layer: int
    name: str
    cls_norm: float | None
    patch_norm_mean: float
    patch_norm_max: float
    cls_cosine_prev: float | None


@dataclass(frozen=True)
class EncodedImage:
    path: str
    mode: str
    width: int
    height: int
    preparation: str
    """How the image was resized, cropped and normalized."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    layers: tuple[LayerNorms, ...]
    pooled_norm: float | None
    head_shape: tuple[int, ...] | None


@dataclass(frozen=True)
class EncodeResult(Result):
    """The answer of `vitcli encode`."""

    rows_at: ClassVar[str] = "images.layers"

    model: ModelInfo
    engine: str
    """What ran the encoder, one of `vitcli.engines.ENGINES`."""
    images: tuple[EncodedImage, ...]
    failed: tuple[FailedImage, ...]
    not_finite_from: str | None = None
    """The layer from which on tokens hold NaN or infinities, None where all are finite."""
