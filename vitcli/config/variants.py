"""What a config says of each variant: what it needs, what contradicts it, what it costs; no torch.

A variant is its class in `vitcli.nn`, its spec here (positions and attention:
`config.attention_variants`) and its line in `vitcli.build`; nothing else asks which one it is.
`vitcli.build.register` adds one from outside.

D hidden, M mlp_hidden, H heads, d = D / H, P prefix tokens, N patches. Operations are
multiply-accumulates of matrix products for one image.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from vitcli.errors import either

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
        biases, macs = self.biases + other.biases, self.macs + other.macs
        return Cost(self.parameters + other.parameters, biases, macs)

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


def one_of(table: Mapping[str, Any]) -> AfterValidator:
    """A word that names an entry of `table`, those added from outside included."""

    def check(word: str) -> str:
        if word not in table:
            expected = either([f"'{known}'" for known in table])
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": expected}
            )
        return word

    return AfterValidator(check)


# Norms and the MLP
class NormSpec(Spec):
    """A weight per channel, and with `bias` a bias."""

    def __init__(self, bias: bool) -> None:
        self.bias = bias

    def cost(self, width: int) -> Cost:
        return Cost(2 * width, width) if self.bias else Cost(width)


NORMS: dict[str, NormSpec] = {"layernorm": NormSpec(bias=True), "rmsnorm": NormSpec(bias=False)}


class MlpSpec(Spec):
    """D -> M -> D; `maps_in` linear maps at once come first (a gate and a value)."""

    def __init__(self, maps_in: int) -> None:
        self.maps_in = maps_in

    def cost(self, width: int, hidden: int, rows: int, bias: bool = True) -> Cost:
        first = linear_cost(width, self.maps_in * hidden, rows, bias)
        return first + linear_cost(hidden, width, rows, bias)


MLPS: dict[str, MlpSpec] = {"plain": MlpSpec(1), "gated": MlpSpec(2)}


# Poolings and heads
class PoolingSpec(Spec):
    """One vector per image; `width` in multiples of D, 0 for none."""

    takes: tuple[str, ...] = ()
    """Keys that only this pooling reads."""
    trained = False
    """It has parameters, so it pools only what it was trained on."""

    def __init__(self, width: int = 1, needs_cls: bool = False) -> None:
        self.width = width
        self.needs_cls = needs_cls

    def cost(self, c: Config, patches: int) -> Cost:
        return Cost()

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if self.needs_cls and not c.cls_token:
            yield "pooling, cls_token", f"{c.pooling} needs cls_token: true"
        if c.pool_norm and not self.width:
            wrong = f"there is no pooled vector to normalize when pooling is {c.pooling}"
            yield "pool_norm, pooling", wrong
        for key in MapPoolingSpec.takes:
            if getattr(c, key) not in (None, False) and key not in self.takes:
                owners = [word for word, spec in POOLINGS.items() if key in spec.takes]
                yield f"{key}, pooling", f"belongs to pooling: {' or '.join(owners)}"
        if "pool_heads" in self.takes and c.pool_heads and c.hidden % c.pool_heads:
            yield "pool_heads, hidden", f"does not divide hidden = {c.hidden}"


class MapPoolingSpec(PoolingSpec):
    """A probe, its query, keys and values of the tokens, two products, projection, norm, MLP."""

    takes = ("pool_heads", "pool_mlp_hidden", "pool_prefix")
    trained = True

    def cost(self, c: Config, patches: int) -> Cost:
        width = c.hidden
        read = patches + (c.prefix_tokens if c.pool_prefix else 0)
        return (
            Cost(width)
            + linear_cost(width, width)
            + linear_cost(width, 2 * width, read)
            + Cost(macs=2 * read * width)
            + linear_cost(width, width)
            + NORMS[c.norm].cost(width)
            + MLPS["plain"].cost(width, c.pool_mlp_hidden or c.mlp_hidden, 1)
        )


class QueryPoolingSpec(PoolingSpec):
    """A query, keys and values of the patches, two products, projection."""

    takes = ("pool_heads",)
    trained = True

    def cost(self, c: Config, patches: int) -> Cost:
        width, bias = c.hidden, c.attention.qkv_bias == "qkv"
        return (
            Cost(width)
            + linear_cost(width, 2 * width, patches, bias)
            + Cost(macs=2 * patches * width)
            + linear_cost(width, width)
        )


POOLINGS: dict[str, PoolingSpec] = {
    "cls": PoolingSpec(needs_cls=True),
    "mean": PoolingSpec(),
    "cls+mean": PoolingSpec(2, needs_cls=True),
    "map": MapPoolingSpec(),
    "query": QueryPoolingSpec(),
    "none": PoolingSpec(0),
}


class HeadSpec(Spec):
    """No head."""

    needs_pooled = False
    needs_out = False
    """`head_out`, the width of the output, is the user's to choose."""
    classifies_tokens = False
    """A classifier that reads prefix tokens and no pooled vector."""
    merges = False
    """It joins patches, so that `deepstack` may do so too."""
    cell = 1
    """Patches along a side of what is joined; the grid is a multiple of it."""

    def cost(self, c: Config, patches: int) -> Cost:
        return Cost()

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if self.needs_pooled and not POOLINGS[c.pooling].width:
            yield "head, pooling", f"{c.head} needs a pooled vector, but pooling is {c.pooling}"
        if any(side % self.cell for side in c.grid):
            cell, grid = f"{self.cell}x{self.cell}", f"{c.grid[0]}x{c.grid[1]}"
            wrong = f"{c.head} joins {cell} patches, but the grid is {grid}"
            yield "head, image_size, patch_size", wrong
        if self.needs_out and c.head_out is None:
            yield "head_out, head", f"head: {c.head} needs head_out, the width of its output"
        if not self.needs_out and c.head_out is not None:
            yield "head_out, head", f"head: {c.head} has no width to choose"
        if c.deepstack and not self.merges:
            yield "deepstack, head", f"needs head: merger, but head is {c.head}"


class LinearHeadSpec(HeadSpec):
    """A classifier; a projection has no bias."""

    needs_pooled = needs_out = True

    def __init__(self, bias: bool = True) -> None:
        self.bias = bias

    def cost(self, c: Config, patches: int) -> Cost:
        return linear_cost(c.pooled_width, c.head_out, bias=self.bias)


class TanhHeadSpec(HeadSpec):
    """A square map and tanh."""

    needs_pooled = True

    def cost(self, c: Config, patches: int) -> Cost:
        return linear_cost(c.pooled_width, c.pooled_width)


class TanhLinearHeadSpec(TanhHeadSpec):
    """A classifier on a tanh head."""

    needs_out = True

    def cost(self, c: Config, patches: int) -> Cost:
        return super().cost(c, patches) + linear_cost(c.pooled_width, c.head_out)


class DistilledHeadSpec(HeadSpec):
    """A classifier on CLS and one on the distillation token."""

    needs_out = classifies_tokens = True

    def cost(self, c: Config, patches: int) -> Cost:
        return linear_cost(c.hidden, c.head_out) * 2

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        if not (c.cls_token and c.dist_token):
            wrong = f"{c.head} needs cls_token: true and dist_token: true"
            yield "head, cls_token, dist_token", wrong
        yield from super().contradictions(c)


class MergerHeadSpec(HeadSpec):
    """A norm per patch and an MLP on each 2x2 cell."""

    needs_out = merges = True
    cell = 2

    def cost(self, c: Config, patches: int) -> Cost:
        cells, cell = patches // 4, 4 * c.hidden
        maps = linear_cost(cell, cell, cells) + linear_cost(cell, c.head_out, cells)
        norm = NORMS[c.norm]
        return norm.cost(c.hidden) + maps + (norm.cost(cell) + maps) * len(c.deepstack)

    def contradictions(self, c: Config) -> Iterator[Wrong]:
        yield from super().contradictions(c)
        blocks = sorted(set(c.deepstack))
        if list(c.deepstack) != blocks or not all(1 <= block <= c.depth for block in blocks):
            yield "deepstack, depth", f"blocks count from 1 to {c.depth}, in order"


HEADS: dict[str, HeadSpec] = {
    "none": HeadSpec(),
    "linear": LinearHeadSpec(),
    "tanh": TanhHeadSpec(),
    "tanh_linear": TanhLinearHeadSpec(),
    "projection": LinearHeadSpec(bias=False),
    "distilled": DistilledHeadSpec(),
    "merger": MergerHeadSpec(),
}
