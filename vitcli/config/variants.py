"""What a config says of each variant: what it needs, what contradicts it, what it costs; no torch.

A variant is its class in `vitcli.nn`, its spec here (poolings and heads: `config.pooling`) and its
line in `vitcli.build`; nothing else asks which variant an encoder has. `vitcli.build.register` adds
one from outside.

D hidden, M mlp_hidden, H heads, d = D / H, P prefix tokens, N patches. Operations are
multiply-accumulates of matrix products for one image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

Config = Any
"""An `EncoderConfig`; the schema is built on this file."""
Grid = tuple[int, int]
Wrong = tuple[str, str]
"""The keys that contradict each other, with commas, and what is wrong with the first of them."""


@dataclass(frozen=True)
class Cost:
    """Parameters (of which `biases`), and multiply-accumulates for one image."""

    parameters: int = 0
    biases: int = 0
    macs: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.parameters + other.parameters,
            self.biases + other.biases,
            self.macs + other.macs,
        )

    def __mul__(self, copies: int) -> Cost:
        return Cost(self.parameters * copies, self.biases * copies, self.macs * copies)


def linear_cost(width: int, out: int, rows: int = 1, bias: bool = True) -> Cost:
    """A linear map of `rows` vectors."""
    biases = out if bias else 0
    return Cost(width * out + biases, biases, rows * width * out)


class Spec:
    """What every variant may say."""

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        """What in the config this variant cannot be built with."""
        yield from ()


# Norms and the MLP
class NormSpec(Spec):
    """RMSNorm: one weight per channel."""

    def cost(self, width: int) -> Cost:
        return Cost(width)


class LayerNormSpec(NormSpec):
    """A weight and a bias per channel."""

    def cost(self, width: int) -> Cost:
        return Cost(2 * width, width)


NORMS: dict[str, NormSpec] = {"layernorm": LayerNormSpec(), "rmsnorm": NormSpec()}


class MlpSpec(Spec):
    """Two linear maps, D -> M -> D."""

    maps_in = 1

    def cost(self, width: int, hidden: int, rows: int, bias: bool = True) -> Cost:
        first = linear_cost(width, self.maps_in * hidden, rows, bias)
        return first + linear_cost(hidden, width, rows, bias)


class GatedMlpSpec(MlpSpec):
    """The first map is a gate and a value, twice as wide."""

    maps_in = 2


MLPS: dict[str, MlpSpec] = {"plain": MlpSpec(), "gated": GatedMlpSpec()}


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


class RopeSpec(PositionSpec):
    """Rotations of queries and keys by row and column."""

    acts_on_pairs = True

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if c.head_dim % 4:
            yield (
                "position, hidden, heads",
                f"{c.position} needs hidden / heads = {c.head_dim} to be a multiple of 4",
            )
        elif c.rope.periods is not None and c.rope.alternate:
            yield "rope.periods, rope.alternate", "frequencies between them need rope.theta"
        elif c.rope.periods is not None and len(c.rope.periods) != c.head_dim // 4:
            yield (
                "rope.periods, position, hidden, heads",
                f"hidden / heads = {c.head_dim} needs {c.head_dim // 4} of them",
            )


class TableRopeSpec(TableSpec):
    """A learned table on the tokens, and rotations of queries and keys."""

    acts_on_pairs = True

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        yield from RopeSpec().contradictions(c)


class MixedRopeSpec(PositionSpec):
    """Rotations by learned frequencies: two numbers per pair of channels, head and block."""

    acts_on_pairs = True

    def cost(self, c: Config) -> Cost:
        return Cost(c.depth * c.hidden)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if c.head_dim % 4:
            yield (
                "position, hidden, heads",
                f"{c.position} needs hidden / heads = {c.head_dim} to be a multiple of 4",
            )


class TableMixedRopeSpec(TableSpec):
    """A learned table on the tokens, and rotations by learned frequencies."""

    acts_on_pairs = True

    def cost(self, c: Config) -> Cost:
        return super().cost(c) + MixedRopeSpec().cost(c)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        yield from MixedRopeSpec().contradictions(c)


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
    "learned+rope2d": TableRopeSpec(),
    "alibi2d": AlibiSpec(),
    "mixed_rope2d": MixedRopeSpec(),
    "learned+mixed_rope2d": TableMixedRopeSpec(),
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
    """Queries and keys as they are projected."""

    def cost(self, c: Config) -> Cost:
        return Cost()


class QkWidthNormSpec(QkNormSpec):
    """One norm over all heads together."""

    def cost(self, c: Config) -> Cost:
        return NORMS[c.attention.qk_norm_kind].cost(c.hidden) * 2


class QkHeadNormSpec(QkNormSpec):
    """One norm over the channels of a head, the same for all heads."""

    def cost(self, c: Config) -> Cost:
        return NORMS[c.attention.qk_norm_kind].cost(c.head_dim) * 2


QK_NORMS: dict[str, QkNormSpec] = {
    "none": QkNormSpec(),
    "width": QkWidthNormSpec(),
    "head": QkHeadNormSpec(),
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
            yield (
                "attention.over, attention.mask",
                f"channels see no tokens to mask, but mask is {c.attention.mask}",
            )
        if POSITIONS[c.position].acts_on_pairs:
            yield (
                "attention.over, position",
                f"{c.position} acts on pairs of tokens, and channels attend over none",
            )


ATTENTIONS: dict[str, AttentionSpec] = {
    "tokens": AttentionSpec(),
    "channels": ChannelAttentionSpec(),
}


def one_of(table: Mapping[str, Any]) -> AfterValidator:
    """A word that names an entry of `table`, those added from outside included."""

    def check(word: str) -> str:
        if word not in table:
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": _listed(table)}
            )
        return word

    return AfterValidator(check)


def _listed(words: Collection[str]) -> str:
    *most, last = (f"'{word}'" for word in words)
    return f"{', '.join(most)} or {last}" if most else last
