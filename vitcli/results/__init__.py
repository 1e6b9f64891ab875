"""What each command answers: frozen dataclasses of scalars, strings and tuples.

Field names carry the unit. Nothing here knows tensors, colours or how it will be shown; the JSON
of a result is its fields plus `schema_version` (see `vitcli.render.json`).
"""

from __future__ import annotations

from dataclasses import dataclass

from vitcli.results.weights import LoadReport

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class ModelInfo:
    """The encoder that gave an answer."""

    name: str
    parameters: int
    hidden: int
    depth: int
    heads: int
    weights: str
    checkpoint: LoadReport | None = None
    """How the weights were read; None where they are fresh."""


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
    """How the image was resized, cropped and normalised."""
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    layers: tuple[LayerNorms, ...]
    pooled_norm: float | None
    head_shape: tuple[int, ...] | None


@dataclass(frozen=True)
class FailedImage:
    path: str
    code: str
    error: str


@dataclass(frozen=True)
class EncodeResult:
    """The answer of `vitcli encode`."""

    model: ModelInfo
    engine: str
    """What ran the encoder: eager, compile or onnx."""
    device: str
    dtype: str
    images: tuple[EncodedImage, ...]
    failed: tuple[FailedImage, ...]
