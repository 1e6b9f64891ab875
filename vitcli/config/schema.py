"""The keys and values of a config: one pydantic schema, no torch.

Every key is a plain value; `vitcli.build` alone turns names into modules. The words of the variants
are the entries of the tables in `config.variants` and `config.attention_variants`, which say what
each needs and costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from vitcli.config.attention_variants import (
    ATTENTIONS,
    MASKS,
    POSITIONS,
    QK_NORMS,
    QKV_BIASES,
    AttentionConfig,
    RopeConfig,
    TableConfig,
)
from vitcli.config.variants import HEADS, MLPS, NORMS, POOLINGS, Spec, one_of
from vitcli.config.yaml import Count, Ints, Names, Rate, Section, Size, Triple, Width
from vitcli.errors import VitcliError

# The words that come with the package; the fields know those added to the tables.
PositionKind: Any = Literal[*POSITIONS]
PoolingKind: Any = Literal[*POOLINGS]
NormPlacement = Literal["pre", "post"]
ActivationKind = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
InitScheme = Literal["trunc_normal", "xavier_uniform"]
PIXEL_KEYS = {
    "none": (),
    "shortest": ("resize_size",),
    "squash": ("resize_size",),
    "smart": ("multiple", "min_pixels", "max_pixels"),
    "patches": ("multiple", "max_patches"),
    "tile": ("resize_size", "longest_edge", "split"),
    "bounded": ("shortest_edge", "longest_edge"),
    "within": ("multiple", "longest_edge"),
    "longest": ("shortest_edge", "longest_edge"),
    "shrink": ("multiple", "max_patches", "longest_edge"),
    "closest": ("resize_size", "multiple"),
    "area": ("multiple", "max_pixels"),
    "canvas": ("resize_size",),
}
"""The rules by which images are resized, and the keys that each reads."""
ResizeKind: Any = Literal[*PIXEL_KEYS]
FitKind = Literal["crop", "whole", "squash"]
FOLLOWS_IMAGE = tuple(kind for kind, keys in PIXEL_KEYS.items() if "resize_size" not in keys)
"""Rules that take no size of their own."""
FilterKind = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


class EncoderConfig(Section):
    """The encoder; the defaults are ViT-B/16 at 224 px."""

    image_size: Size = (224, 224)
    """The native size in pixels, height and width, for which the position table is stored; one
    number means a square."""
    patch_size: Width = 16
    """Side of a patch, in pixels."""
    channels: Width = 3
    """Channels of the image; 3 is RGB."""
    hidden: Width = 768
    """Width of a token, in channels."""
    depth: Annotated[int, Field(ge=1, le=1_000)] = 12
    """Number of blocks."""
    heads: Width = 12
    """Attention heads per block; they divide `hidden`."""
    mlp_hidden: Annotated[int, Field(ge=1, le=1_000_000)] = 3072
    """Inner width of the MLP of a block, in channels."""

    patch_bias: bool = True
    """Whether the patch embedding has a bias."""
    patch_norm: bool = False
    """Whether the embedded patches are normalized before positions are added (AIMv2)."""
    cls_token: bool = True
    """Whether a learned CLS token is the first token."""
    dist_token: bool = False
    """Whether a learned distillation token comes after CLS (DeiT)."""
    registers: int = Field(default=0, ge=0, le=65_536)
    """Learned register tokens before the patches (Darcet et al. 2023)."""

    position: Annotated[str, one_of(POSITIONS)] = "learned"
    """The position encoding. learned: a trained table; sincos2d: a fixed table of sines and
    cosines; rope2d: rotary; learned+rope2d: a table and rotary; mixed_rope2d: rotary by trained
    frequencies per block and head (RoPE-ViT); learned+mixed_rope2d: a table and those; alibi2d:
    biases of the scores by distance; relative2d: a trained bias of the scores per head and offset
    (BEiT); none."""
    position_table: TableConfig = TableConfig()
    """The table of `position: learned`, `sincos2d`, `learned+rope2d` and
    `learned+mixed_rope2d`."""
    rope: RopeConfig = RopeConfig()
    """The rotations of `position: rope2d` and `learned+rope2d`; of the mixed ones `theta` alone,
    for their initial frequencies."""

    ln_pre: bool = False
    """Whether the tokens are normalized before the first block (CLIP)."""
    norm: Annotated[str, one_of(NORMS)] = "layernorm"
    """The norm of blocks, final norm and pooling: layernorm or rmsnorm."""
    norm_eps: PositiveFloat = 1e-6
    """Added to the variance in every norm."""
    norm_placement: NormPlacement = "pre"
    """pre: before attention and MLP; post: after each residual sum."""
    final_norm: bool | None = None
    """Whether the tokens are normalized after the last block; null: with `norm_placement: pre`
    only."""

    attention: AttentionConfig = AttentionConfig()
    """The self-attention of every block."""
    mlp: Annotated[str, one_of(MLPS)] = "plain"
    """The MLP of a block. plain: two linear maps; gated: three, activation(gate) * value
    (SwiGLU with `activation: silu`)."""
    mlp_bias: bool = True
    """Whether the linear maps of the MLP have biases."""
    mlp_norm: bool = False
    """Whether the MLP's inner channels are normalized before its last linear map (EVA-02)."""
    activation: ActivationKind = "gelu"
    """The activation of the MLP. gelu: exact; gelu_tanh: by tanh; quick_gelu: x * sigmoid(1.702 x)
    (CLIP); silu."""
    layer_scale: float | None = None
    """Initial value of the per-channel factor on each residual branch (LayerScale); null: no such
    factor."""

    dropout: Rate = 0.0
    """Probability that a value of the attention's output or of the MLP's inner activation is set
    to 0 in training."""
    drop_path: Rate = 0.0
    """Probability that an image skips a residual branch in training (stochastic depth), at the
    last block; it rises linearly from 0 at the first."""

    pooling: Annotated[str, one_of(POOLINGS)] = "cls"
    """How tokens become one vector per image. cls: the CLS token; mean: the mean of the patches;
    cls+mean: both, concatenated; map: attention by a learned query and an MLP
    (SigLIP); query: attention by a learned query alone (AIMv2); none."""
    pool_heads: Width | None = None
    """Attention heads of `pooling: map` and `query`; null: as many as in a block."""
    pool_mlp_hidden: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Inner width of the MLP of `pooling: map`, in channels; null: `mlp_hidden`."""
    pool_prefix: bool = False
    """Whether `pooling: map` reads the prefix tokens too (Perception Encoder)."""
    pool_norm: bool = False
    """Whether the pooled vector is normalized (CLIP's LN on CLS, timm's fc_norm)."""
    head: Annotated[str, one_of(HEADS)] = "none"
    """What follows pooling. none; linear: a classifier; tanh: a square linear map and tanh;
    tanh_linear: a classifier on it; projection: a linear map without bias (CLIP); distilled: the
    mean of a classifier on CLS and one on the distillation token (DeiT); merger: a norm and an MLP
    on each 2x2 patches (Qwen2-VL)."""
    head_out: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Width of the head's output: number of classes, or channels of a projection or merger."""
    deepstack: Ints = ()
    """Blocks, from 1 and in order, whose outputs a merger of their own joins too, as
    `head: merger` joins the last one's (Qwen3-VL)."""

    init: InitScheme = "trunc_normal"
    """How matrices are initialized. trunc_normal: normal of standard deviation `init_std`, cut at
    2; xavier_uniform: uniform by the matrix's two widths (Glorot and Bengio 2010)."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of `init: trunc_normal` and of learned tokens and tables."""

    @property
    def grid(self) -> tuple[int, int]:
        """Patches along height and width at the native size; trailing pixels are dropped."""
        return self.grid_at(self.image_size)

    def grid_at(self, size: tuple[int, int]) -> tuple[int, int]:
        return size[0] // self.patch_size, size[1] // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        return int(self.cls_token) + int(self.dist_token) + self.registers

    @property
    def has_position_table(self) -> bool:
        return POSITIONS[self.position].has_table

    @property
    def table_prefix_rows(self) -> int:
        rows = self.position_table.prefix_rows
        return int(self.cls_token) + int(self.dist_token) if rows is None else rows

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden // self.heads

    @property
    def has_final_norm(self) -> bool:
        return self.norm_placement == "pre" if self.final_norm is None else self.final_norm

    @property
    def pooled_width(self) -> int:
        return self.hidden * POOLINGS[self.pooling].width

    @model_validator(mode="after")
    def _possible(self) -> Self:
        for keys, wrong in self._contradictions():
            raise ValueError(f"{keys}: {wrong}")
        return self

    def _contradictions(self) -> Iterator[tuple[str, str]]:
        """(keys, what is wrong with the first of them), in the order a reader would meet them."""
        height, width = self.image_size
        rows, columns = self.grid
        if self.hidden % self.heads:
            yield "hidden, heads", f"{self.hidden} is not divisible by heads = {self.heads}"
        if not rows * columns:
            yield (
                "patch_size, image_size",
                f"a patch of {self.patch_size} px is larger than the {height}x{width} image",
            )
        if self.table_prefix_rows > self.prefix_tokens:
            yield (
                "position_table.prefix_rows, cls_token, dist_token, registers",
                f"{self.table_prefix_rows} rows for {self.prefix_tokens} prefix tokens",
            )
        for spec in self.specs():
            yield from spec.contradictions(self)

    def specs(self) -> tuple[Spec, ...]:
        """What the config says of each variant that this encoder has."""
        attention = self.attention
        return (
            POSITIONS[self.position],
            POOLINGS[self.pooling],
            HEADS[self.head],
            ATTENTIONS[attention.over],
            MASKS[attention.mask],
            NORMS[self.norm],
            MLPS[self.mlp],
            QKV_BIASES[attention.qkv_bias],
            QK_NORMS[attention.qk_norm],
        )


class PreprocessConfig(Section):
    """From decoded RGB pixels to the tensor the encoder reads: resize, crop, scale, normalize."""

    resize: ResizeKind = "squash"
    """How the image is resized. none; shortest: its shorter side to `resize_size` at the same
    aspect ratio (two different numbers: the smallest such image that covers both); squash: to
    `resize_size` at another aspect ratio; smart: both sides to multiples of `multiple`, between
    `min_pixels` and `max_pixels` (Qwen2-VL); patches: at the same aspect ratio to at most
    `max_patches` squares of `multiple` pixels (SigLIP 2 NaFlex); tile: the longer side to
    `longest_edge`, with `split` then both to multiples of the tile, then to `resize_size`, the
    tile (Idefics 3); bounded: at the same aspect ratio to a longer side of at most `longest_edge`,
    then each side to at least `shortest_edge` (Idefics 2); within: at the same aspect ratio to a
    longer side of at most `longest_edge`, then both up to multiples of `multiple` (Pixtral);
    longest: the longer side to `longest_edge`, the other at the same aspect ratio to at least
    `shortest_edge` (Aria); shrink: never larger, at the same aspect ratio to at most
    `max_patches` squares of `multiple` pixels and a longer side of at most `longest_edge` (Kimi);
    closest: at the same aspect ratio so that one side is that of `resize_size`, the one that
    changes the image less, then both to multiples of `multiple` (DPT); area: at the same aspect
    ratio to `max_pixels`, then both down to multiples of `multiple` (Gemma 4); canvas: an image
    that fits into `resize_size` to the largest that does, in its top left corner with black
    around, a larger one squashed to it (Llama 4)."""
    resize_size: Size | None = (224, 224)
    """Height and width after resizing, in pixels; one number means a square. null with
    the rules that take none."""
    filter: FilterKind = "bilinear"
    """Pillow's filter for resizing: nearest, box, bilinear, hamming, bicubic or lanczos."""
    resize_dtype: Literal["uint8", "float32"] = "uint8"
    """uint8: resized values are rounded to 8 bits; float32: pixels are divided by 255 before
    resizing (DINOv3)."""
    crop_size: Size | None = None
    """Height and width of the center crop after resizing, in pixels; null: no crop. A crop larger
    than the image pads it with black."""
    crop_rounding: Literal["floor", "round"] = "floor"
    """Where half a pixel of the center crop goes. floor: the offset is rounded down; round: as
    Python's round, as torchvision and timm do. Of an odd number of padded pixels the extra one is
    first with floor and last with round."""
    square: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Side of a square, in pixels, in whose middle the whole image is put before it is resized
    (DeepSeek-VL); the color around is `mean`, and the image's shorter side is at least
    `shortest_edge`. 0: the image's own longer side (LLaVA); null: no square."""
    fill: Width | None = None
    """Pixels to whose multiples both sides are filled up after resizing, with black at the right
    and the bottom (Kimi); null: not."""
    multiple: Width = 28
    """Pixels whose multiples the sides are with `resize: smart`, `within`, `closest` and `area`;
    side of a patch with `resize: patches` and `shrink`."""
    min_pixels: Count = 56 * 56
    """Smallest area of `resize: smart`, in pixels."""
    max_pixels: Count = 14 * 14 * 4 * 1280
    """Largest area of `resize: smart` and `area`, in pixels."""
    max_patches: Width = 256
    """Most patches per image of `resize: patches` and `shrink`."""
    longest_edge: int = Field(default=1456, ge=1, le=16_384)
    """Longest side of the image in pixels, before `resize: tile` splits it and with
    `resize: bounded`, `within`, `longest` and `shrink`."""
    shortest_edge: int = Field(default=378, ge=1, le=4096)
    """Shortest side of the image with `resize: bounded` and `longest` and in a `square`, in
    pixels."""
    split: bool = True
    """Whether `resize: tile` splits the image into tiles."""
    fit: FitKind | None = None
    """What becomes of an image of another aspect ratio than the encoder's input, in place of
    `resize`. crop: its largest centered part of that ratio is resized; whole: all of it is resized
    at its own ratio, with `mean` as the color around; squash: all of it is resized at another
    ratio; null: as `resize` and `crop_size` say. `filter` and `resize_dtype` are kept."""
    mean: Triple = (0.5, 0.5, 0.5)
    """Subtracted from red, green, blue, which are 0 to 1."""
    std: Triple = (0.5, 0.5, 0.5)
    """Red, green, blue are divided by it after `mean` is subtracted."""

    @property
    def output_size(self) -> tuple[int, int] | None:
        """(height, width) of what the encoder reads; None where it follows the image."""
        if self.resize == "none" and self.square and not self.crop_size:
            return self.square, self.square
        fixed = self.resize in ("squash", "tile", "canvas")
        return self.crop_size or (self.resize_size if fixed else None)

    @property
    def fit_size(self) -> tuple[int, int]:
        """(height, width) of what `fit` gives.

        Raises:
            VitcliError: a resize rule whose result has the image's own aspect ratio.
        """
        if self.output_size is None:
            raise VitcliError(
                f"preprocess.fit {self.fit}: this encoder keeps each image's own aspect ratio "
                f"(got resize: {self.resize}, expected an input of one size)",
                "add --image-size 224",
            )
        return self.output_size

    @classmethod
    def for_output(cls, size: tuple[int, int]) -> Self:
        """The plainest preprocessing whose output has this (height, width) in pixels."""
        return cls(resize="squash", resize_size=size)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.resize not in FOLLOWS_IMAGE and self.resize_size is None:
            raise ValueError(f"resize_size, resize: resize: {self.resize} needs it")
        if self.fill and (self.output_size or self.resize == "shortest"):
            raise ValueError("fill, resize, crop_size: the result has a size of its own")
        if self.resize == "canvas" and self.crop_size:
            raise ValueError("crop_size, resize: resize: canvas takes none; write null")
        if self.resize in FOLLOWS_IMAGE and self.resize_size is not None:
            raise ValueError(f"resize_size, resize: resize: {self.resize} takes none; write null")
        if any(s < 1e-6 for s in self.std):  # what float32 would divide to infinity
            raise ValueError("std: each must be at least 1e-6")
        if any(abs(value) > 1e6 for value in (*self.mean, *self.std)):
            raise ValueError("mean, std: each must be at most 1e6")
        if self.min_pixels > self.max_pixels:
            raise ValueError("min_pixels, max_pixels: larger than max_pixels")
        return self


def pixel_keys(config: PreprocessConfig) -> list[str]:
    """The keys that decide the pixels under this config's resize rule."""
    how = [] if config.resize == "none" and not config.square else ["filter", "resize_dtype"]
    if config.fit:
        size = "crop_size" if config.crop_size else "resize_size"
        return [size, "filter", "resize_dtype", "mean", "std"]
    square = ["square", "shortest_edge"] if config.square is not None else []
    rounding = ["crop_rounding"] if config.crop_size else []
    keys = [*PIXEL_KEYS[config.resize], *how, *square, "crop_size", *rounding]
    return list(dict.fromkeys(["resize", *keys, *(["fill"] if config.fill else []), "mean", "std"]))


class ModelConfig(Section):
    """A whole model: the encoder and the preprocessing that belongs to it."""

    name: str = "custom"
    """The name of the model in tables and figures."""
    encoder: EncoderConfig = EncoderConfig()
    """The encoder's keys."""
    preprocess: PreprocessConfig = PreprocessConfig()
    """The keys of its preprocessing."""
    classes: Names | None = None
    """Names of the outputs of a classifier, in their order; null: unknown."""

    @property
    def input_size(self) -> tuple[int, int]:
        """THE size of a model, (height, width) in pixels: what the encoder reads.

        It is what the preprocessing gives (`--image-size` sets that), or the encoder's native size
        where the result follows the image. The native size, `encoder.image_size`, is what the
        position table is made for; where the two differ, both are named.
        """
        return self.preprocess.output_size or self.encoder.image_size
