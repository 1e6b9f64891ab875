"""The keys and values of a config: one pydantic schema, no torch.

Every key is a plain value; `vitcli.build` alone turns names into modules. The words of the variants
are the entries of `vitcli.config.variants`, which say what each needs and costs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PositiveFloat,
    model_validator,
)

from vitcli.config import variants
from vitcli.config.variants import one_of
from vitcli.config.yaml import Count, Floats, Ints, Names, Rate, Size, Triple, Width

# The words of the variants that come with the package; the fields know those added to the tables.
PositionKind: Any = Literal[*variants.POSITIONS]
PoolingKind: Any = Literal[*variants.POOLINGS]
HeadKind: Any = Literal[*variants.HEADS]
NormKind: Any = Literal[*variants.NORMS]
MlpKind: Any = Literal[*variants.MLPS]
MaskKind: Any = Literal[*variants.MASKS]
QkNormScope: Any = Literal[*variants.QK_NORMS]
BiasParts: Any = Literal[*variants.QKV_BIASES]
NormPlacement = Literal["pre", "post"]
ActivationKind = Literal["gelu", "gelu_tanh", "quick_gelu", "silu"]
AttendKind = Literal["fused", "explicit"]
InitScheme = Literal["trunc_normal", "xavier_uniform"]
TableResize = Literal[
    "bilinear",
    "buckets",
    "bicubic",
    "bicubic_antialias",
    "bicubic_offset",
    "bicubic_align_corners",
    "bilinear_antialias",
    "bilinear_align_corners",
]
RopeCoordinates = Literal["centered", "index", "reference"]
RopeLayout = Literal["half", "interleaved"]
ResizeKind = Literal["none", "shortest", "squash", "smart", "patches", "tile", "bounded"]
FilterKind = Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]


class Section(BaseModel):
    """A block of keys: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class TableConfig(Section):
    """The learned or stored additive position table."""

    prefix_rows: int | None = Field(default=None, ge=0)
    """Rows for the first k prefix tokens; null means CLS and distillation, not registers."""
    resize: TableResize = "bicubic"
    """How the table follows another image size; the rule is part of the family."""
    resize_dtype: Literal["float32", "model"] = "float32"


class RopeConfig(Section):
    """2D rotary positions on the queries and keys of patches; prefix tokens are not rotated."""

    theta: PositiveFloat = 100.0
    periods: Floats | None = None
    """One for each pair of channels of an axis, in place of theta's (the original DINOv3 stores
    them, rounded); coordinates are divided by them."""
    coordinates: Annotated[
        RopeCoordinates,
        BeforeValidator(lambda word: "centered" if word == "centred" else word),  # its old name
    ] = "centered"
    reference_grid: Size = (16, 16)
    """The grid that `coordinates: reference` scales indices to (EVA-02)."""
    layout: RopeLayout = "half"
    offset: float = 0.0
    """Added to the indices (Perception Encoder: 1)."""
    first_axis: Literal["rows", "columns"] = "rows"
    """The axis of the first half of the pairs of channels (Perception Encoder: columns)."""
    alternate: bool = False
    """Columns turn at the frequencies between those of the rows (Pixtral)."""


class AttentionConfig(Section):
    mask: Annotated[str, one_of(variants.MASKS)] = "none"
    over: Annotated[str, one_of(variants.ATTENTIONS)] = "tokens"
    """What the softmax is over: tokens, or the channels of a head (XCiT), linear in the tokens."""
    window: Width | None = None
    """Side in patches of the squares that `mask: window` attends within."""
    full_blocks: Ints = ()
    """Blocks, from 1, that attend over the whole image although `mask: window` is set."""
    shift: Width | None = None
    """Patches that `mask: window` is moved by in every second block (Swin: half a window)."""
    neighbors: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Nearest patches that each patch sees under `mask: neighborhood`, itself among them."""
    qkv_bias: Annotated[str, one_of(variants.QKV_BIASES)] = "qkv"
    qk_norm: Annotated[str, one_of(variants.QK_NORMS)] = "none"
    qk_norm_kind: Annotated[str, one_of(variants.NORMS)] = "layernorm"
    qk_norm_eps: PositiveFloat = 1e-6
    inner_norm: bool = False
    """A norm on what the heads give, before the output projection (EVA-02's CLIP towers)."""
    proj_bias: bool = True
    dropout: Rate = 0.0
    attend: AttendKind = "fused"


class EncoderConfig(Section):
    """The encoder; the defaults are ViT-B/16 at 224 px."""

    image_size: Size = (224, 224)
    """The native size: what the position table is made for."""
    patch_size: Width = 16
    channels: Width = 3
    hidden: Width = 768
    depth: Annotated[int, Field(ge=1, le=1_000)] = 12
    heads: Width = 12
    mlp_hidden: Annotated[int, Field(ge=1, le=1_000_000)] = 3072

    patch_bias: bool = True
    patch_norm: bool = False
    """A norm on the projected patches, before positions are added (AIMv2)."""
    cls_token: bool = True
    dist_token: bool = False
    registers: int = Field(default=0, ge=0, le=65_536)

    position: Annotated[str, one_of(variants.POSITIONS)] = "learned"
    position_table: TableConfig = TableConfig()
    rope: RopeConfig = RopeConfig()

    ln_pre: bool = False
    """A norm on the tokens before the first block (CLIP)."""
    norm: Annotated[str, one_of(variants.NORMS)] = "layernorm"
    norm_eps: PositiveFloat = 1e-6
    norm_placement: NormPlacement = "pre"
    final_norm: bool | None = None
    """The norm after the last block; null means yes for pre-norm and no for post-norm."""

    attention: AttentionConfig = AttentionConfig()
    mlp: Annotated[str, one_of(variants.MLPS)] = "plain"
    mlp_bias: bool = True
    mlp_norm: bool = False
    """A norm on the MLP's hidden channels, before its second map (EVA-02)."""
    activation: ActivationKind = "gelu"
    layer_scale: float | None = None
    """Initial value of the per-channel LayerScale; null means there is none."""

    dropout: Rate = 0.0
    drop_path: Rate = 0.0
    """Rate at the last block; it grows linearly from zero at the first."""

    pooling: Annotated[str, one_of(variants.POOLINGS)] = "cls"
    pool_heads: Width | None = None
    """Heads of `pooling: map`; null means those of the blocks."""
    pool_mlp_hidden: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Width of the MLP of `pooling: map`; null means that of the blocks."""
    pool_prefix: bool = False
    """`pooling: map` reads the prefix tokens too (Perception Encoder)."""
    pool_norm: bool = False
    """A norm on the pooled vector (CLIP's LN on CLS, timm's fc_norm)."""
    head: Annotated[str, one_of(variants.HEADS)] = "none"
    head_out: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Width of the head's output: classes, projection or language width."""

    init: InitScheme = "trunc_normal"
    init_std: PositiveFloat = 0.02

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
        return variants.POSITIONS[self.position].has_table

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
        return self.hidden * variants.POOLINGS[self.pooling].width

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

    def specs(self) -> tuple[variants.Spec, ...]:
        """What `vitcli.config.variants` says of each variant that this encoder has."""
        attention = self.attention
        return (
            variants.POSITIONS[self.position],
            variants.POOLINGS[self.pooling],
            variants.HEADS[self.head],
            variants.ATTENTIONS[attention.over],
            variants.MASKS[attention.mask],
            variants.NORMS[self.norm],
            variants.MLPS[self.mlp],
            variants.QKV_BIASES[attention.qkv_bias],
            variants.QK_NORMS[attention.qk_norm],
        )


class PreprocessConfig(Section):
    """From decoded RGB pixels to the tensor the encoder reads: resize, crop, scale, normalize."""

    resize: ResizeKind = "squash"
    """shortest: the shorter side to `resize_size`, aspect kept (two different numbers: the smallest
    image of this aspect that covers both); squash: both sides, aspect lost; smart: both sides to
    multiples of `multiple` between `min_pixels` and `max_pixels` (Qwen2-VL); patches: the aspect
    kept, at most `max_patches` squares of `multiple` px (SigLIP 2 NaFlex); tile: the longer side to
    `longest_edge`, with `split` then up to multiples of the tile, then squashed to `resize_size`,
    the tile (Idefics 3); bounded: the aspect kept while the longer side is at most `longest_edge`,
    then each side at least `shortest_edge` (Idefics 2)."""
    resize_size: Size | None = (224, 224)
    filter: FilterKind = "bilinear"
    resize_dtype: Literal["uint8", "float32"] = "uint8"
    """float32 divides by 255 before resizing, as DINOv3 does; uint8 rounds to 8 bits after."""
    crop_size: Size | None = None
    crop_rounding: Literal["floor", "round"] = "floor"
    """Offset of the center crop: floor((H-h)/2), or Python's round as torchvision and timm do.
    A crop larger than the image pads with black; an odd pixel goes first with floor, last else."""
    multiple: Width = 28
    min_pixels: Count = 56 * 56
    max_pixels: Count = 14 * 14 * 4 * 1280
    max_patches: Width = 256
    longest_edge: int = Field(default=1456, ge=1, le=4096)
    shortest_edge: int = Field(default=378, ge=1, le=4096)
    split: bool = True
    mean: Triple = (0.5, 0.5, 0.5)
    std: Triple = (0.5, 0.5, 0.5)

    @property
    def output_size(self) -> tuple[int, int] | None:
        """(height, width) of what the encoder reads; None where it follows the image."""
        return self.crop_size or (self.resize_size if self.resize in ("squash", "tile") else None)

    @classmethod
    def for_output(cls, size: tuple[int, int]) -> Self:
        """The plainest preprocessing whose output has this (height, width) in pixels."""
        return cls(resize="squash", resize_size=size)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.resize in ("shortest", "squash", "tile") and self.resize_size is None:
            raise ValueError(f"resize_size, resize: resize: {self.resize} needs it")
        if self.resize in ("none", "smart", "patches", "bounded") and self.resize_size is not None:
            raise ValueError(f"resize_size, resize: resize: {self.resize} takes none; write null")
        if any(s <= 0 for s in self.std):
            raise ValueError("std: each must be above zero")
        if self.min_pixels > self.max_pixels:
            raise ValueError("min_pixels, max_pixels: larger than max_pixels")
        return self


def pixel_keys(config: PreprocessConfig) -> list[str]:
    """The keys that decide the pixels under this config's resize rule."""
    keys = {
        "none": [],
        "shortest": ["resize_size"],
        "squash": ["resize_size"],
        "smart": ["multiple", "min_pixels", "max_pixels"],
        "patches": ["multiple", "max_patches"],
        "tile": ["resize_size", "longest_edge", "split"],
        "bounded": ["shortest_edge", "longest_edge"],
    }[config.resize]
    how = [] if config.resize == "none" else ["filter", "resize_dtype"]
    rounding = ["crop_rounding"] if config.crop_size else []
    return ["resize", *keys, *how, "crop_size", *rounding, "mean", "std"]


class ModelConfig(Section):
    """A whole model: the encoder and the preprocessing that belongs to it."""

    name: str = "custom"
    encoder: EncoderConfig = EncoderConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    classes: Names | None = None
    """What the outputs of a classifier stand for, in their order; null where that is unknown."""

    @property
    def input_size(self) -> tuple[int, int]:
        """THE size of a model, (height, width) in pixels: what the encoder reads.

        It is what the preprocessing gives (`--image-size` sets that), or the encoder's native size
        where the result follows the image. The native size, `encoder.image_size`, is what the
        position table is made for; where the two differ, both are named.
        """
        return self.preprocess.output_size or self.encoder.image_size
