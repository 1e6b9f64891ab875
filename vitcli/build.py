"""The one composition root: an EncoderConfig becomes a VisionEncoder."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import nn

from vitcli.config import attention_variants as attention_specs
from vitcli.config import variants as specs
from vitcli.config.schema import EncoderConfig
from vitcli.errors import VitcliError
from vitcli.nn import attention, pooling, positions
from vitcli.nn.attention import initialize
from vitcli.nn.encoder import (
    ACTIVATIONS,
    BLOCKS,
    FEED_FORWARDS,
    NORMS,
    Block,
    LayerScale,
    PerHeadNorm,
    VisionEncoder,
    VisionFrontEnd,
    ViT,
)
from vitcli.nn.positions import NoPosition


def _norm(c: EncoderConfig) -> nn.Module:
    return NORMS[c.norm](c.hidden, c.norm_eps)


def _resize(c: EncoderConfig) -> dict[str, Any]:
    """How tables of positions follow another grid, as their classes take it."""
    table = c.position_table
    dtype = torch.float32 if table.resize_dtype == "float32" else None
    return {"resize": table.resize, "resize_dtype": dtype}


def _table(
    c: EncoderConfig,
    kind: type[positions.LearnedPosition] = positions.LearnedPosition,
    rope: NoPosition | None = None,
) -> NoPosition:
    return kind(c.hidden, c.grid, c.table_prefix_rows, **_resize(c), rope=rope)


def _rope(c: EncoderConfig) -> NoPosition:
    return positions.RopePosition(c.head_dim, **dict(c.rope))


def _mixed(c: EncoderConfig) -> NoPosition:
    return positions.MixedRopePosition(c.depth, c.heads, c.head_dim, c.rope.theta)


def _map_pooling(c: EncoderConfig) -> nn.Module:
    feed_forward = FEED_FORWARDS["plain"](
        c.hidden, c.pool_mlp_hidden or c.mlp_hidden, ACTIVATIONS[c.activation]()
    )
    heads = c.pool_heads or c.heads
    return pooling.MapPooling(c.hidden, heads, _norm(c), feed_forward, c.pool_prefix)


def _set(value: int | None) -> int:
    assert value is not None  # the schema refuses such a config
    return value


def _window(c: EncoderConfig) -> attention.Mask:
    full = [block - 1 for block in c.attention.full_blocks]
    return attention.WindowMask(_set(c.attention.window), full, c.attention.shift or 0)


def _merger(c: EncoderConfig, norm_joined: bool = False) -> pooling.MergerHead:
    norm = NORMS[c.norm](4 * c.hidden if norm_joined else c.hidden, c.norm_eps)
    return pooling.MergerHead(c.hidden, _set(c.head_out), norm, norm_joined)


POSITIONS: dict[str, Callable[[EncoderConfig], NoPosition]] = {
    "learned": _table,
    "sincos2d": lambda c: _table(c, positions.SinCosPosition),
    "rope2d": _rope,
    "learned+rope2d": lambda c: _table(c, rope=_rope(c)),
    "alibi2d": lambda c: positions.AlibiPosition(c.heads),
    "mixed_rope2d": _mixed,
    "learned+mixed_rope2d": lambda c: _table(c, rope=_mixed(c)),
    "relative2d": lambda c: positions.RelativePosition(
        c.heads, c.depth, c.grid, c.prefix_tokens, **_resize(c)
    ),
    "none": lambda c: NoPosition(),
}
MASKS: dict[str, Callable[[EncoderConfig], attention.Mask]] = {
    "none": lambda c: attention.Mask(),
    "causal": lambda c: attention.CausalMask(),
    "window": _window,
    "neighborhood": lambda c: attention.NeighborhoodMask(_set(c.attention.neighbors)),
}
POOLINGS: dict[str, Callable[[EncoderConfig], nn.Module]] = {
    "cls": lambda c: pooling.ClsPooling(),
    "mean": lambda c: pooling.MeanPooling(),
    "cls+mean": lambda c: pooling.ClsMeanPooling(),
    "map": _map_pooling,
    "query": lambda c: pooling.QueryPooling(
        c.hidden, c.pool_heads or c.heads, c.attention.qkv_bias == "qkv"
    ),
    "none": lambda c: pooling.NoPooling(),
}
HEADS: dict[str, Callable[[EncoderConfig], nn.Module]] = {
    "none": lambda c: pooling.NoHead(),
    "linear": lambda c: pooling.LinearHead(c.pooled_width, _set(c.head_out)),
    "projection": lambda c: pooling.LinearHead(c.pooled_width, _set(c.head_out), bias=False),
    "tanh": lambda c: pooling.TanhHead(c.pooled_width),
    "tanh_linear": lambda c: pooling.TanhLinearHead(c.pooled_width, _set(c.head_out)),
    "distilled": lambda c: pooling.DistilledHead(c.hidden, _set(c.head_out)),
    "merger": lambda c: _merger(c),
}
QK_NORMS: dict[str, Callable[[EncoderConfig], nn.Module]] = {
    "none": lambda c: nn.Identity(),
    "width": lambda c: NORMS[c.attention.qk_norm_kind](c.hidden, c.attention.qk_norm_eps),
    "head": lambda c: PerHeadNorm(
        NORMS[c.attention.qk_norm_kind](c.head_dim, c.attention.qk_norm_eps), c.heads
    ),
}


ATTENTIONS: dict[str, Callable[[EncoderConfig], nn.Module]] = {
    "tokens": lambda c: attention.ATTENDS[c.attention.attend](c.attention.dropout),
    "channels": lambda c: attention.ChannelAttention(c.heads, c.attention.dropout),
}
VARIANTS: dict[str, tuple[MutableMapping[str, Any], MutableMapping[str, Any]]] = {
    "position": (attention_specs.POSITIONS, POSITIONS),
    "pooling": (specs.POOLINGS, POOLINGS),
    "head": (specs.HEADS, HEADS),
    "attention.over": (attention_specs.ATTENTIONS, ATTENTIONS),
    "attention.mask": (attention_specs.MASKS, MASKS),
    "attention.qk_norm": (attention_specs.QK_NORMS, QK_NORMS),
    "attention.qkv_bias": (attention_specs.QKV_BIASES, attention.QKV_PROJECTIONS),
    "norm": (specs.NORMS, NORMS),
    "mlp": (specs.MLPS, FEED_FORWARDS),
}
"""The keys that name a variant: what the config says of each word, and what builds it."""


def register(key: str, word: str, spec: specs.Spec, build: Callable[..., Any]) -> None:
    """Add a variant from outside the package: `encoder.KEY: WORD` is then built like one of ours.

    Args:
        key: one of VARIANTS.
        spec: what the config says of it, as the specs of `config.variants` do.
        build: takes what the key's own table in this file takes, and returns the module.

    Raises:
        ValueError: the word is taken.
    """
    said, built = VARIANTS[key]
    if word in said:
        raise ValueError(f"{key}: {word} exists already")
    said[word], built[word] = spec, build


def _attention(c: EncoderConfig) -> attention.MultiHeadSelfAttention:
    qk_norm = QK_NORMS[c.attention.qk_norm]
    return attention.MultiHeadSelfAttention(
        c.hidden,
        c.heads,
        qkv=attention.QKV_PROJECTIONS[c.attention.qkv_bias](c.hidden),
        attend=ATTENTIONS[c.attention.over](c),
        q_norm=qk_norm(c),
        k_norm=qk_norm(c),
        dropout=c.dropout,
        norm=_norm(c) if c.attention.inner_norm else None,
        proj_bias=c.attention.proj_bias,
    )


def _scale(c: EncoderConfig) -> nn.Module:
    return nn.Identity() if c.layer_scale is None else LayerScale(c.hidden, c.layer_scale)


def build_block(c: EncoderConfig, index: int = 0) -> Block:
    """Block `index` of the stack, with its share of drop path."""
    mlp_norm = NORMS[c.norm](c.mlp_hidden, c.norm_eps) if c.mlp_norm else None
    feed_forward = FEED_FORWARDS[c.mlp](
        c.hidden, c.mlp_hidden, ACTIVATIONS[c.activation](), c.dropout, mlp_norm, c.mlp_bias
    )
    return BLOCKS[c.norm_placement](
        attention=_attention(c),
        feed_forward=feed_forward,
        norm1=_norm(c),
        norm2=_norm(c),
        scale1=_scale(c),
        scale2=_scale(c),
        drop_path=c.drop_path * index / max(c.depth - 1, 1),
    )


def compose(c: EncoderConfig) -> VisionEncoder:
    """The encoder's modules with unset parameters, on torch's current default device."""
    kinds = {"cls": int(c.cls_token), "dist": int(c.dist_token), "registers": c.registers}
    pooled_norm = NORMS[c.norm](c.pooled_width, c.norm_eps) if c.pool_norm else nn.Identity()
    return VisionEncoder(
        front_end=VisionFrontEnd(
            c.channels,
            c.hidden,
            c.patch_size,
            prefix={kind: count for kind, count in kinds.items() if count},
            position=POSITIONS[c.position](c),
            norm=_norm(c) if c.ln_pre else nn.Identity(),
            patch_bias=c.patch_bias,
            patch_norm=_norm(c) if c.patch_norm else None,
        ),
        vit=ViT(
            [build_block(c, index) for index in range(c.depth)],
            norm=_norm(c) if c.has_final_norm else nn.Identity(),
        ),
        mask=MASKS[c.attention.mask](c),
        pooling=POOLINGS[c.pooling](c),
        pool_norm=pooled_norm,
        head=HEADS[c.head](c),
        deepstack={block: _merger(c, norm_joined=True) for block in c.deepstack},
    )


def build_meta(config: EncoderConfig) -> VisionEncoder:
    """The encoder on the meta device: shapes and no storage."""
    with torch.device("meta"):
        return compose(config)


def allocate(encoder: VisionEncoder) -> VisionEncoder:
    """Give the parameters of a meta encoder storage on the CPU, with whatever values it holds.

    `Module.to_empty` does the same, but imports sympy on its way: half a second of each start.
    """
    for module in encoder.modules():
        for name, meta in list(module.named_parameters(recurse=False)):
            storage = torch.empty(meta.shape, dtype=meta.dtype)
            module.register_parameter(name, nn.Parameter(storage, meta.requires_grad))
    return encoder


def _check_room(parameters: int) -> None:
    """Refuse an encoder that this machine cannot hold, before a page of it is touched."""
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return
    needed = 4 * parameters
    if memory > 0 and needed > memory:
        raise VitcliError(
            "the encoder: its float32 weights do not fit in memory (got "
            f"{needed / 2**30:,.1f} GiB, expected at most {memory / 2**30:,.1f} GiB)",
            "choose a smaller preset from `vitcli presets`",
        )


def build_encoder(config: EncoderConfig, seed: int = 0) -> VisionEncoder:
    """An encoder on the CPU in float32, in eval mode, its weights drawn from `seed`.

    Raises:
        VitcliError: its weights are larger than the machine's memory.
    """
    meta = build_meta(config)
    _check_room(sum(p.numel() for p in meta.parameters()))
    encoder = allocate(meta)
    initialize(encoder, config.init, config.init_std, seed)
    return encoder.eval()
