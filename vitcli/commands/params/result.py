"""The result of `vitcli params`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vitcli.results import Result


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
    macs_per_copy: int | float
    """The mean of the copies where a mask makes blocks differ."""


@dataclass(frozen=True)
class ModelCosts:
    name: str
    hidden: int
    depth: int
    heads: int
    mlp_hidden: int
    patch_size: int
    image_size: tuple[int, int]
    """(height, width) in pixels of the input that the multiply-accumulates are counted at."""
    native_size: tuple[int, int]
    """(height, width) in pixels that the position table is made for (`encoder.image_size`)."""
    tokens: int
    registers: int
    dtype: str
    total: int
    """Parameters; the components sum to it."""
    biases: int
    bytes: int
    block_parameters: int
    """Of one block; all blocks have equally many."""
    block_biases: int
    block_macs: int | float
    """Of one block; the mean where a mask makes them differ."""
    blocks_macs: tuple[int, ...]
    """Of each block in order."""
    components: tuple[Component, ...]
    macs_per_image: int


@dataclass(frozen=True)
class ParamsResult(Result):
    """Parameters, operations and bytes of one or several encoders."""

    rows_at: ClassVar[str] = "models.components"

    models: tuple[ModelCosts, ...]


PATCH_EMBEDDING = "patch embedding"
PREFIX_TOKENS = "prefix tokens"
POSITIONS = "positions"
LN_PRE = "norm before blocks"
NORMS = "norms"
QKV = "qkv"
QK_NORM = "q/k norm"
ATTENTION_PRODUCTS = "attention products"
OUTPUT_PROJECTION = "output projection"
FFN = "FFN"
LAYER_SCALE = "LayerScale"
FINAL_NORM = "final norm"
POOLING = "pooling"
HEAD = "head"

FRONT_COMPONENTS = (PATCH_EMBEDDING, PREFIX_TOKENS, POSITIONS, LN_PRE)
BLOCK_COMPONENTS = (
    NORMS,
    QKV,
    QK_NORM,
    ATTENTION_PRODUCTS,
    OUTPUT_PROJECTION,
    FFN,
    LAYER_SCALE,
)
LAST_COMPONENTS = (FINAL_NORM, POOLING, HEAD)
COMPONENTS = (*FRONT_COMPONENTS, *BLOCK_COMPONENTS, *LAST_COMPONENTS)
"""Every part of an encoder, in the order in which an image meets it."""

OTHER = "residual and other"
"""Time outside every component: residual sums, joined tokens, what Python adds."""
