"""Attention and positions of a config: their keys, and what each variant needs and costs; no torch.

See `config.variants`. D hidden, H heads, d = D / H, P prefix tokens, N patches. Operations are
multiply-accumulates of matrix products for one image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat

from vitcli.config.variants import NORMS, Config, Cost, Grid, Spec, Wrong, linear_cost, one_of
from vitcli.config.yaml import Floats, Ints, Rate, Section, Size, Width

AttendKind = Literal["fused", "explicit"]
TableResize = Literal[
    "bilinear",
    "bilinear_cropped",
    "buckets",
    "geometric",
    "bicubic",
    "bicubic_antialias",
    "bicubic_offset",
    "bicubic_align_corners",
    "bilinear_antialias",
    "bilinear_align_corners",
]
RopeCoordinates = Literal["centered", "index", "reference"]
RopeLayout = Literal["half", "interleaved"]


# Positions
class PositionSpec(Spec):
    """No table and no parameters."""

    has_table = False
    """A table of rows added to the tokens, of the native grid, that `position_table` resizes."""
    resizes = False
    """`position_table.resize` says how it follows another image size."""
    acts_on_pairs = False
    """It turns queries and keys or adds to their products."""

    def cost(self, c: Config) -> Cost:
        return Cost()


class TableSpec(PositionSpec):
    """A row for each patch of the native grid and for the first prefix tokens."""

    has_table = resizes = True

    def cost(self, c: Config) -> Cost:
        rows, columns = c.grid
        return Cost((c.table_prefix_rows + rows * columns) * c.hidden)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if c.position_table.resize == "geometric":
            yield "position_table.resize, position", "geometric belongs to position: relative2d"


class SinCosSpec(TableSpec):
    """Fixed values, stored as a table is."""

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        if c.hidden % 4:
            yield "position, hidden", f"sincos2d needs hidden = {c.hidden} to be a multiple of 4"


class RotarySpec(PositionSpec):
    """Rotations of queries and keys: half of the pairs of channels by row, half by column."""

    acts_on_pairs = True

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if c.head_dim % 4:
            needs = f"needs hidden / heads = {c.head_dim} to be a multiple of 4"
            yield "position, hidden, heads", f"{c.position} {needs}"


class RopeSpec(RotarySpec):
    """At fixed frequencies."""

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        if c.head_dim % 4 or c.rope.periods is None:
            return
        if c.rope.alternate:
            yield "rope.periods, rope.alternate", "frequencies between them need rope.theta"
        elif len(c.rope.periods) != c.head_dim // 4:
            needs = f"hidden / heads = {c.head_dim} needs {c.head_dim // 4} of them"
            yield "rope.periods, position, hidden, heads", needs


class MixedRopeSpec(RotarySpec):
    """At learned frequencies: two numbers per pair of channels, head and block."""

    def cost(self, c: Config) -> Cost:
        return Cost(c.depth * c.hidden)


class TableRopeSpec(TableSpec):
    """A learned table on the tokens, and rotations of queries and keys."""

    acts_on_pairs = True

    def __init__(self, rope: PositionSpec) -> None:
        self.rope = rope

    def cost(self, c: Config) -> Cost:
        return super().cost(c) + self.rope.cost(c)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        yield from self.rope.contradictions(c)


class AlibiSpec(PositionSpec):
    """Biases by distance, without parameters."""

    acts_on_pairs = True


class RelativeSpec(PositionSpec):
    """A table per block: a bias for each head and offset, and three rows for prefix tokens."""

    resizes = acts_on_pairs = True

    def cost(self, c: Config) -> Cost:
        rows, columns = (2 * n - 1 for n in c.grid)
        return Cost(c.depth * c.heads * (rows * columns + (3 if c.prefix_tokens else 0)))


POSITIONS: dict[str, PositionSpec] = {
    "learned": TableSpec(),
    "sincos2d": SinCosSpec(),
    "rope2d": RopeSpec(),
    "learned+rope2d": TableRopeSpec(RopeSpec()),
    "alibi2d": AlibiSpec(),
    "mixed_rope2d": MixedRopeSpec(),
    "learned+mixed_rope2d": TableRopeSpec(MixedRopeSpec()),
    "relative2d": RelativeSpec(),
    "none": PositionSpec(),
}


# Attention: the projection, the norm of queries and keys, who sees whom
class QkvSpec(Spec):
    """One projection D -> 3D; `biased` of its three parts have a bias."""

    def __init__(self, biased: int) -> None:
        self.biased = biased

    def cost(self, c: Config, tokens: int) -> Cost:
        biases = self.biased * c.hidden
        return linear_cost(c.hidden, 3 * c.hidden, tokens, bias=False) + Cost(biases, biases)


QKV_BIASES: dict[str, QkvSpec] = {"qkv": QkvSpec(3), "qv": QkvSpec(2), "none": QkvSpec(0)}


class QkNormSpec(Spec):
    """A norm of queries and one of keys, as wide as a field of the config; None for none."""

    def __init__(self, width: str | None) -> None:
        self.width = width

    def cost(self, c: Config) -> Cost:
        norm = NORMS[c.attention.qk_norm_kind]
        return norm.cost(getattr(c, self.width)) * 2 if self.width else Cost()


QK_NORMS: dict[str, QkNormSpec] = {
    "none": QkNormSpec(None),
    "width": QkNormSpec("hidden"),  # over all heads together
    "head": QkNormSpec("head_dim"),  # over the channels of a head, the same for all heads
}


class MaskSpec(Spec):
    """Every token sees every token; a causal mask too is computed whole, as kernels do."""

    needs: tuple[str, ...] = ()
    """Keys of `attention` that this mask needs, null without it."""
    takes: tuple[str, ...] = ()
    """Keys of `attention` that only this mask reads."""

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        for key in self.needs:
            if getattr(c.attention, key) is None:
                yield f"attention.{key}, attention.mask", f"mask: {c.attention.mask} needs it"
        for name, other in MASKS.items():
            for key in {*other.needs, *other.takes} - {*self.needs, *self.takes}:
                if getattr(c.attention, key) not in (None, ()):
                    yield f"attention.{key}, attention.mask", f"belongs to mask: {name}"

    def pairs(self, c: Config, grid: Grid, block: int) -> int:
        """(query, key) pairs whose product block `block`, from 1, needs."""
        tokens: int = c.prefix_tokens + grid[0] * grid[1]
        return tokens**2


class WindowSpec(MaskSpec):
    """Patches within a square window; prefix tokens see and are seen by all."""

    needs = ("window",)
    takes = ("full_blocks", "shift")

    def pairs(self, c: Config, grid: Grid, block: int) -> int:
        if block in c.attention.full_blocks:
            return super().pairs(c, grid, block)
        window = c.attention.window
        shift = (c.attention.shift or 0) if block % 2 == 0 else 0
        rows, columns = (sum(n**2 for n in _sides(axis, window, shift)) for axis in grid)
        return _with_prefix(c, grid, rows * columns)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        if not all(1 <= block <= c.depth for block in c.attention.full_blocks):
            yield "attention.full_blocks, depth", f"blocks count from 1 to {c.depth}"
        shift, window = c.attention.shift, c.attention.window
        if shift is not None and window is not None and shift >= window:
            yield "attention.shift, attention.window", f"is not below window = {window}"


def _sides(n: int, window: int, shift: int) -> list[int]:
    """The lengths that windows cut an axis of n patches into, the first at `shift`."""
    first = min(shift, n)
    whole, rest = divmod(n - first, window)
    return [first] * bool(first) + [window] * whole + [rest] * bool(rest)


def _with_prefix(c: Config, grid: Grid, pairs: int) -> int:
    """Pairs among patches, and those of prefix tokens, which see and are seen by all."""
    prefix: int = c.prefix_tokens
    return pairs + 2 * prefix * grid[0] * grid[1] + prefix**2


class NeighborhoodSpec(MaskSpec):
    """Each patch and its nearest; prefix tokens see and are seen by all."""

    needs = ("neighbors",)

    def pairs(self, c: Config, grid: Grid, block: int) -> int:
        patches = grid[0] * grid[1]
        return _with_prefix(c, grid, patches * min(c.attention.neighbors, patches))


MASKS: dict[str, MaskSpec] = {
    "none": MaskSpec(),
    "causal": MaskSpec(),
    "window": WindowSpec(),
    "neighborhood": NeighborhoodSpec(),
}


class AttentionSpec(Spec):
    """Softmax over tokens: Q K^T and A V, D per pair of tokens in each."""

    def cost(self, c: Config, grid: Grid, block: int) -> Cost:
        return Cost(macs=2 * MASKS[c.attention.mask].pairs(c, grid, block) * c.hidden)


class ChannelAttentionSpec(AttentionSpec):
    """Softmax over the d channels of a head: both products d per token and channel."""

    def cost(self, c: Config, grid: Grid, block: int) -> Cost:
        tokens = c.prefix_tokens + grid[0] * grid[1]
        return Cost(parameters=c.heads, macs=2 * tokens * c.hidden * c.head_dim)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if c.attention.mask != "none":
            wrong = f"channels see no tokens to mask, but mask is {c.attention.mask}"
            yield "attention.over, attention.mask", wrong
        if POSITIONS[c.position].acts_on_pairs:
            wrong = f"{c.position} acts on pairs of tokens, and channels attend over none"
            yield "attention.over, position", wrong


ATTENTIONS: dict[str, AttentionSpec] = {
    "tokens": AttentionSpec(),
    "channels": ChannelAttentionSpec(),
}


# The keys
class TableConfig(Section):
    """The table of position embeddings that is added to the tokens."""

    prefix_rows: int | None = Field(default=None, ge=0)
    """Rows for the first prefix tokens; null: one for CLS, one for distillation, none for
    registers."""
    resize: TableResize = "bicubic"
    """How the table is interpolated to another grid of patches; each family has its own rule.
    bilinear, bicubic: without antialiasing; with `_antialias` or `_align_corners` as torch's
    `interpolate` names them; bicubic_offset: bicubic by the scale (n + 0.1) / m (original DINOv2);
    bilinear_cropped: to a square, then its top left (RADIO); buckets: the row of the nearest cell
    before (Idefics 2 and 3); geometric: of `position: relative2d` alone, linear between offsets
    whose distances grow by one factor (timm)."""
    resize_dtype: Literal["float32", "model"] = "float32"
    """The dtype of the interpolation: float32, or model for the weights' own dtype."""


class RopeConfig(Section):
    """2D rotary position embedding on queries and keys of patches, not of prefix tokens."""

    theta: PositiveFloat = 100.0
    """Base of the frequencies: pair j of an axis rotates by coordinate * theta^(-4j / head dim)."""
    periods: Floats | None = None
    """One period per pair of channels of an axis, instead of `theta`; coordinates are divided by
    it (the original DINOv3 stores rounded periods)."""
    coordinates: Annotated[
        RopeCoordinates,
        BeforeValidator(lambda word: "centered" if word == "centred" else word),  # its old name
    ] = "centered"
    """The coordinate of a patch along an axis. centered: its center in [-1, 1], times 2 pi
    (DINOv3); index: its number (Qwen2-VL); reference: its number scaled to `reference_grid`
    (EVA-02)."""
    reference_grid: Size = (16, 16)
    """Rows and columns of patches that `coordinates: reference` scales to."""
    layout: RopeLayout = "half"
    """Which two channels rotate together, of d per head. half: i and i + d/2; interleaved: 2i and
    2i + 1."""
    offset: float = 0.0
    """Added to the number of a patch, in patches (Perception Encoder: 1)."""
    first_axis: Literal["rows", "columns"] = "rows"
    """The axis that rotates the first half of the pairs (Perception Encoder: columns)."""
    alternate: bool = False
    """Whether the frequencies of columns lie between those of rows (Pixtral)."""
    in_turns: bool = False
    """Whether pairs of rows and of columns take turns, frequency by frequency, in place of all of
    the first axis before the second (Kimi)."""


class AttentionConfig(Section):
    """The self-attention of every block."""

    mask: Annotated[str, one_of(MASKS)] = "none"
    """Which tokens a patch attends to. none: all; causal: itself and those before it; window: the
    patches of its square window; neighborhood: its nearest patches. Under window and neighborhood
    prefix tokens attend to all tokens and all tokens to them."""
    over: Annotated[str, one_of(ATTENTIONS)] = "tokens"
    """What the softmax runs over. tokens; channels: the channels of a head, at a cost linear in
    the number of tokens (XCiT)."""
    window: Width | None = None
    """Side of a window of `mask: window`, in patches."""
    full_blocks: Ints = ()
    """Blocks without the mask of `mask: window`, counted from 1."""
    shift: Width | None = None
    """How far `mask: window` moves its windows in every second block, in patches (Swin: half a
    window); null: not at all."""
    neighbors: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Patches that each patch attends to under `mask: neighborhood`, itself included."""
    qkv_bias: Annotated[str, one_of(QKV_BIASES)] = "qkv"
    """Which projections have a bias. qkv: queries, keys and values; qv: queries and values (BEiT);
    none."""
    qk_norm: Annotated[str, one_of(QK_NORMS)] = "none"
    """Normalization of queries and keys. none; width: over all heads together (InternViT); head:
    per head."""
    qk_norm_kind: Annotated[str, one_of(NORMS)] = "layernorm"
    """The norm of `qk_norm`: layernorm or rmsnorm."""
    qk_norm_eps: PositiveFloat = 1e-6
    """Added to the variance in the norm of `qk_norm`."""
    inner_norm: bool = False
    """Whether the heads' output is normalized before the output projection (EVA-02)."""
    proj_bias: bool = True
    """Whether the output projection has a bias."""
    dropout: Rate = 0.0
    """Probability that an attention weight is set to 0 in training."""
    attend: AttendKind = "fused"
    """How attention is computed. fused: torch's scaled_dot_product_attention; explicit: softmax of
    the (N, N) scores. Both give the same numbers up to rounding."""
