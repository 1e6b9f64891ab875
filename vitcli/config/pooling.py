"""What a config says of each pooling and head: what it needs, what contradicts it, what it costs.

D hidden. Operations are multiply-accumulates of matrix products for one image.
"""

from __future__ import annotations

from collections.abc import Iterator

from vitcli.config.variants import MLPS, NORMS, Config, Cost, Spec, Wrong, linear_cost


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
            yield (
                "pool_norm, pooling",
                f"there is no pooled vector to normalize when pooling is {c.pooling}",
            )
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
            yield (
                "head, image_size, patch_size",
                f"{c.head} joins {self.cell}x{self.cell} patches, "
                f"but the grid is {c.grid[0]}x{c.grid[1]}",
            )
        if self.needs_out and c.head_out is None:
            yield (
                "head_out, head",
                f"head: {c.head} needs head_out, the width of its output",
            )
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
            yield (
                "head, cls_token, dist_token",
                f"{c.head} needs cls_token: true and dist_token: true",
            )
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
