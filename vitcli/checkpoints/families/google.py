"""Google's JAX ViTs (vision_transformer, big_vision): .npz files of flax parameters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vitcli.checkpoints.family import Family, From, Renames, Tell, Variant, joined, rows, transposed

BLOCK = "Transformer/encoderblock_{i}/"
ATTENTION = "MultiHeadDotProductAttention_0/"
# Parameters are spelled as torch's, block parts as big_vision numbers them.
ALIASES = (
    (r"/(kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
    (r"^Transformer/posembed_input/pos_embedding$", "pos_embedding"),
    (r"^(Transformer/encoderblock_\d+/)MultiHeadDotProductAttention_1/", rf"\1{ATTENTION}"),
    (r"^(Transformer/encoderblock_\d+/)LayerNorm_2\.", r"\1LayerNorm_1."),
    (r"^(Transformer/encoderblock_\d+/)MlpBlock_3/", r"\1MlpBlock_0/"),
)


def _in(kernel: Tensor) -> Tensor:
    """(D, heads, head width) as (heads * head width, D)."""
    return kernel.reshape(kernel.shape[0], -1).T


def _out(kernel: Tensor) -> Tensor:
    """(heads, head width, D) as (D, heads * head width)."""
    return kernel.reshape(-1, kernel.shape[-1]).T


def _flat(bias: Tensor) -> Tensor:
    return bias.reshape(-1)


def _joined(each: Callable[[Tensor], Tensor], *sources: str) -> From:
    return From(sources, lambda *parts: joined(*map(each, parts)))


def _attention(
    target: str, source: str, groups: tuple[tuple[str, tuple[str, ...]], ...]
) -> Renames:
    """A flax attention's projections, joined as `groups` says, and the one after it."""
    renames: dict[str, str | From] = {
        target + "proj.weight": _joined(_out, source + "out.weight"),
        target + "proj.bias": source + "out.bias",
    }
    for name, parts in groups:
        renames[f"{target}{name}.weight"] = _joined(_in, *(f"{source}{p}.weight" for p in parts))
        renames[f"{target}{name}.bias"] = _joined(_flat, *(f"{source}{p}.bias" for p in parts))
    return renames


def _dense(target: str, source: str) -> Renames:
    return {target + ".weight": transposed(source + ".weight"), target + ".bias": source + ".bias"}


VIT = Family(
    name="google-vit",
    library="google-research vision_transformer, big_vision",
    verified="tiny random models of timm as flax parameters; once beside the originals",
    signature=(
        "embedding.weight",
        BLOCK + ATTENTION + "query.weight",
        BLOCK + "LayerNorm_0.weight",
    ),
    prefixes=("", "opt/target/", "params/", "params/img/", "img/"),
    aliases=ALIASES,
    renames={
        "front_end.projection.weight": From(
            ("embedding.weight",), lambda kernel: kernel.permute(3, 2, 0, 1)
        ),
        "front_end.projection.bias": "embedding.bias",
        "front_end.prefix.cls": rows("cls"),
        "front_end.position.table": rows("pos_embedding"),
        "vit.blocks.{i}.norm1": BLOCK + "LayerNorm_0",
        **_attention(
            "vit.blocks.{i}.attention.", BLOCK + ATTENTION, (("qkv", ("query", "key", "value")),)
        ),
        "vit.blocks.{i}.norm2": BLOCK + "LayerNorm_1",
        **_dense("vit.blocks.{i}.feed_forward.fc1", BLOCK + "MlpBlock_0/Dense_0"),
        **_dense("vit.blocks.{i}.feed_forward.fc2", BLOCK + "MlpBlock_0/Dense_1"),
        "vit.norm": "Transformer/encoder_norm",
        "pooling.probe": rows("MAPHead_0/probe"),
        **_attention(
            "pooling.", "MAPHead_0/" + ATTENTION, (("q", ("query",)), ("kv", ("key", "value")))
        ),
        "pooling.norm": "MAPHead_0/LayerNorm_0",
        **_dense("pooling.feed_forward.fc1", "MAPHead_0/MlpBlock_0/Dense_0"),
        **_dense("pooling.feed_forward.fc2", "MAPHead_0/MlpBlock_0/Dense_1"),
    },
    drops=(r"(params/)?txt/.*", r"(params/)?[tb]", r"opt/state/.*"),
    # flax's gelu is the tanh approximation unless told otherwise; timm and transformers read the
    # same files with the exact one.
    fixed={
        "position": "learned",
        "position_table.resize": "bilinear_align_corners",
        "position_table.resize_dtype": "model",
        "norm_eps": 1e-6,
        "activation": "gelu_tanh",
    },
    needs=("heads", "pooling"),
    tells={"heads": Tell(BLOCK + ATTENTION + "query.weight", lambda t: t.shape[1])},
    any_prefix_rows=True,
    variants=(
        Variant(when=("cls",), unless=("MAPHead_0/probe",), settings={"pooling": "cls"}),
        Variant(unless=("cls", "MAPHead_0/probe"), settings={"pooling": "mean"}),
        Variant(
            unless=("pre_logits.weight", "head.weight"), settings={"head": "none", "head_out": None}
        ),
        Variant(
            when=("head.weight",),
            settings={"head": "linear"},
            renames=_dense("head.linear", "head"),
        ),
        Variant(
            when=("pre_logits.weight",),
            unless=("head.weight",),
            settings={"head": "tanh", "head_out": None},
            renames=_dense("head.linear", "pre_logits"),
        ),
        Variant(
            when=("pre_logits.weight", "head.weight"),
            settings={"head": "tanh_linear"},
            renames=_dense("head.pre_logits", "pre_logits"),
        ),
    ),
)
FAMILIES = (VIT,)
