"""What the parts of an encoder are called wherever parameters, operations or time are told."""

from __future__ import annotations

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
