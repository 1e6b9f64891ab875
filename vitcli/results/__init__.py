"""What each command answers: frozen dataclasses of scalars, strings and tuples.

Field names carry the unit. Nothing here knows tensors, colours or how it will be shown; the JSON
of a result is its fields plus `schema_version` (see `vitcli.render.json`).
"""

from __future__ import annotations

from dataclasses import dataclass

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
    images: tuple[EncodedImage, ...]
    failed: tuple[FailedImage, ...]


@dataclass(frozen=True)
class Component:
    """One part of an encoder's cost, summed over its copies (a block's part has `depth` of them).

    `biases` are the parameters that are added, of the linear maps and the norms; `macs` are the
    multiply-accumulates of matrix products for one image.
    """

    name: str
    copies: int
    parameters: int
    biases: int
    share: float
    bytes: int
    macs: int
    macs_share: float
    parameters_per_copy: int
    biases_per_copy: int
    macs_per_copy: int


@dataclass(frozen=True)
class ModelCosts:
    name: str
    hidden: int
    depth: int
    heads: int
    mlp_hidden: int
    patch_size: int
    image_size: tuple[int, int]
    """(height, width) in pixels that the multiply-accumulates are counted at."""
    tokens: int
    dtype: str
    total: int
    """Parameters; the components sum to it."""
    biases: int
    bytes: int
    block_parameters: int
    """Of one block; all blocks are equal."""
    block_biases: int
    block_macs: int
    components: tuple[Component, ...]
    macs_per_image: int


@dataclass(frozen=True)
class ParamsResult:
    """The answer of `vitcli params`."""

    models: tuple[ModelCosts, ...]


@dataclass(frozen=True)
class PresetRow:
    name: str
    hidden: int
    depth: int
    heads: int
    patch_size: int
    image_size: tuple[int, int]
    parameters: int


@dataclass(frozen=True)
class PresetsResult:
    """The answer of `vitcli presets`."""

    presets: tuple[PresetRow, ...]
