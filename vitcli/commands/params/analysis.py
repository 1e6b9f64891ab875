"""Where an encoder's parameters and operations are: arithmetic on its config, no torch.

D hidden, M mlp_hidden, H heads, C channels, p patch, P prefix tokens, N patches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vitcli.commands.params.result import (
    ATTENTION_PRODUCTS,
    BLOCK_COMPONENTS,
    COMPONENTS,
    FFN,
    FINAL_NORM,
    HEAD,
    LAYER_SCALE,
    LN_PRE,
    NORMS,
    OUTPUT_PROJECTION,
    PATCH_EMBEDDING,
    POOLING,
    POSITIONS,
    PREFIX_TOKENS,
    QK_NORM,
    QKV,
    Component,
    ModelCosts,
    ParamsResult,
)
from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.errors import VitcliError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}


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


@dataclass(frozen=True)
class ComponentCost:
    """One of COMPONENTS: what a copy of it costs, and how many there are (`depth` in blocks)."""

    name: str
    each: Cost
    copies: int

    @property
    def total(self) -> Cost:
        return self.each * self.copies


def component_costs(
    config: EncoderConfig, image_size: tuple[int, int] | None = None
) -> tuple[ComponentCost, ...]:
    """The cost of each of COMPONENTS, in that order, zero where the encoder has none.

    Parameters are those of the config, whose position table is made for its own image size;
    operations are those of one image of `image_size` (height, width), by default the config's.
    Counted are the matrix products, as torch's FlopCounterMode does (it reports two operations
    for each); a masked product is computed whole, so a window saves nothing here.

    Raises:
        VitcliError: an image that the encoder cannot read.
    """
    c = config
    rows, columns = _grid(c, image_size)
    patches = rows * columns
    block = _block(c, c.prefix_tokens + patches)
    parts = _front_end(c, patches) | block | _last(c, patches)
    return tuple(
        ComponentCost(name, parts[name], c.depth if name in block else 1) for name in COMPONENTS
    )


def _grid(c: EncoderConfig, image_size: tuple[int, int] | None) -> tuple[int, int]:
    size = image_size or c.image_size
    rows, columns = c.grid_at(size)
    image = f"an image of {size[0]}x{size[1]} px"
    if not rows * columns:
        raise VitcliError(
            f"{image} is smaller than a patch of {c.patch_size} px", "a larger --image-size"
        )
    if c.head == "merger" and (rows % 2 or columns % 2):
        raise VitcliError(
            f"{image} has {rows}x{columns} patches, but the merger joins 2x2",
            f"an --image-size that is a multiple of {2 * c.patch_size}",
        )
    return rows, columns


def _linear(width: int, out: int, rows: int = 1, bias: bool = True) -> Cost:
    """A linear map of `rows` vectors."""
    biases = out if bias else 0
    return Cost(width * out + biases, biases, rows * width * out)


def _norm(kind: str, width: int) -> Cost:
    """LayerNorm has a weight and a bias, RMSNorm a weight; no matrix products."""
    biases = width if kind == "layernorm" else 0
    return Cost(width + biases, biases)


def _mlp(width: int, hidden: int, rows: int, gated: bool = False) -> Cost:
    """Two linear maps, of which a gated MLP makes the first twice as wide."""
    return _linear(width, 2 * hidden if gated else hidden, rows) + _linear(hidden, width, rows)


def _front_end(c: EncoderConfig, patches: int) -> dict[str, Cost]:
    grid = c.grid
    table = c.table_prefix_rows + grid[0] * grid[1]
    has_table = c.position in ("learned", "sincos2d")
    patch = c.channels * c.patch_size**2
    return {
        PATCH_EMBEDDING: _linear(patch, c.hidden, patches, c.patch_bias),
        PREFIX_TOKENS: Cost(c.prefix_tokens * c.hidden),
        POSITIONS: Cost(table * c.hidden if has_table else 0),
        LN_PRE: _norm(c.norm, c.hidden) if c.ln_pre else Cost(),
    }


def _block(c: EncoderConfig, tokens: int) -> dict[str, Cost]:
    """One block; `tokens` is P + N."""
    attention = c.attention
    qkv_biases = {"qkv": 3, "qv": 2, "none": 0}[attention.qkv_bias] * c.hidden
    qk_width = {"none": 0, "width": c.hidden, "head": c.head_dim}[attention.qk_norm]
    return {
        NORMS: _norm(c.norm, c.hidden) * 2,
        QKV: _linear(c.hidden, 3 * c.hidden, tokens, bias=False) + Cost(qkv_biases, qkv_biases),
        QK_NORM: _norm(attention.qk_norm_kind, qk_width) * 2,
        # Q K^T and A V: H heads of width D / H, so D per pair of tokens in each product.
        ATTENTION_PRODUCTS: Cost(macs=2 * tokens**2 * c.hidden),
        OUTPUT_PROJECTION: _linear(c.hidden, c.hidden, tokens),
        FFN: _mlp(c.hidden, c.mlp_hidden, tokens, gated=c.mlp == "gated"),
        LAYER_SCALE: Cost(0 if c.layer_scale is None else 2 * c.hidden),
    }


def _last(c: EncoderConfig, patches: int) -> dict[str, Cost]:
    pool_norm = _norm(c.norm, c.pooled_width) if c.pool_norm else Cost()
    return {
        FINAL_NORM: _norm(c.norm, c.hidden) if c.has_final_norm else Cost(),
        POOLING: (_map_pooling(c, patches) if c.pooling == "map" else Cost()) + pool_norm,
        HEAD: _head(c, patches),
    }


def _map_pooling(c: EncoderConfig, patches: int) -> Cost:
    """A probe, its query, keys and values of the patches, two products, projection, norm, MLP."""
    width = c.hidden
    return (
        Cost(width)
        + _linear(width, width)
        + _linear(width, 2 * width, patches)
        + Cost(macs=2 * patches * width)
        + _linear(width, width)
        + _norm(c.norm, width)
        + _mlp(width, c.mlp_hidden, 1)
    )


def _head(c: EncoderConfig, patches: int) -> Cost:
    pooled, out = c.pooled_width, c.head_out or 0
    match c.head:
        case "linear":
            return _linear(pooled, out)
        case "projection":
            return _linear(pooled, out, bias=False)
        case "tanh":
            return _linear(pooled, pooled)
        case "tanh_linear":
            return _linear(pooled, pooled) + _linear(pooled, out)
        case "distilled":
            return _linear(c.hidden, out) * 2
        case "merger":
            cells, cell = patches // 4, 4 * c.hidden
            maps = _linear(cell, cell, cells) + _linear(cell, out, cells)
            return _norm(c.norm, c.hidden) + maps
        case "none":
            return Cost()


def model_costs(
    config: ModelConfig, image_size: tuple[int, int] | None = None, dtype: str = "float32"
) -> ModelCosts:
    """One model's table; `image_size` as in `component_costs`, bytes of parameters in `dtype`.

    Raises:
        VitcliError: an image that the encoder cannot read, or an unknown dtype.
    """
    if dtype not in DTYPE_BYTES:
        raise VitcliError(f"--dtype {dtype}: unknown", "one of " + ", ".join(DTYPE_BYTES))
    c, width = config.encoder, DTYPE_BYTES[dtype]
    size = image_size or c.image_size
    costs = component_costs(c, size)
    total = sum((cost.total for cost in costs), Cost())
    block = sum((cost.each for cost in costs if cost.name in BLOCK_COMPONENTS), Cost())
    rows, columns = c.grid_at(size)
    return ModelCosts(
        name=config.name,
        hidden=c.hidden,
        depth=c.depth,
        heads=c.heads,
        mlp_hidden=c.mlp_hidden,
        patch_size=c.patch_size,
        image_size=size,
        tokens=c.prefix_tokens + rows * columns,
        registers=c.registers,
        dtype=dtype,
        total=total.parameters,
        biases=total.biases,
        bytes=total.parameters * width,
        block_parameters=block.parameters,
        block_biases=block.biases,
        block_macs=block.macs,
        components=tuple(_component(cost, total, width) for cost in costs),
        macs_per_image=total.macs,
    )


def _component(cost: ComponentCost, total: Cost, width: int) -> Component:
    each, whole = cost.each, cost.total
    return Component(
        name=cost.name,
        copies=cost.copies,
        parameters=whole.parameters,
        biases=whole.biases,
        share=whole.parameters / total.parameters,
        bytes=whole.parameters * width,
        macs=whole.macs,
        macs_share=whole.macs / total.macs,
        parameters_per_copy=each.parameters,
        biases_per_copy=each.biases,
        macs_per_copy=each.macs,
    )


def params(
    configs: Iterable[ModelConfig],
    image_size: tuple[int, int] | None = None,
    dtype: str = "float32",
) -> ParamsResult:
    """The table of each model, in order; arguments as in `model_costs`."""
    return ParamsResult(tuple(model_costs(config, image_size, dtype) for config in configs))
