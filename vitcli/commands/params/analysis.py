"""Parameters and operations of an encoder by component: from its config, without torch, or of
another library's from the module.

`vitcli.config`'s tables of variants say what each variant costs; here the parts are put together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from vitcli.config.attention_variants import ATTENTIONS, QK_NORMS, QKV_BIASES
from vitcli.config.attention_variants import POSITIONS as POSITION_SPECS
from vitcli.config.request import DTYPES, ModelRequest, check_grid, load_config, split_library
from vitcli.config.schema import EncoderConfig, ModelConfig, PreprocessConfig
from vitcli.config.variants import HEADS, MLPS, POOLINGS, Cost, linear_cost
from vitcli.config.variants import NORMS as NORM_SPECS
from vitcli.errors import VitcliError, check_choice
from vitcli.results import Result

if TYPE_CHECKING:
    from vitcli.model import Model


@dataclass(frozen=True)
class Component:
    """One part of an encoder's cost, summed over its copies (a block's part has `depth` of them).

    `biases` are the parameters that are added, of the linear maps and the norms; `macs` are the
    multiply-accumulates of matrix products for one image.
    """

    name: str
    copies: int
    parameters: int
    biases: int
    share: float
    bytes: int
    macs: int
    macs_share: float
    parameters_per_copy: int
    biases_per_copy: int
    macs_per_copy: int | float
    """The mean of the copies where a mask makes blocks differ."""


@dataclass(frozen=True)
class ModelCosts:
    name: str
    hidden: int
    depth: int
    heads: int | None
    mlp_hidden: int | None
    patch_size: int
    image_size: tuple[int, int]
    """(height, width) in pixels of the input that the multiply-accumulates are counted at."""
    native_size: tuple[int, int]
    """(height, width) in pixels that the position table is made for (`encoder.image_size`)."""
    tokens: int
    registers: int
    dtype: str
    total: int
    """Parameters; the components sum to it."""
    biases: int
    bytes: int
    block_parameters: int | float
    """Of one block; all blocks have equally many. Of an encoder of another library, whose layers
    may differ, the mean."""
    block_biases: int | float
    block_macs: int | float
    """Of one block; the mean where a mask makes them differ."""
    blocks_macs: tuple[int, ...]
    """Of each block in order."""
    components: tuple[Component, ...]
    """Of an encoder of another library: its layers and the parts beside them, by their names."""
    macs_per_image: int
    counted: str = "from the config"
    """From the config, or from the module of which library, with what counter."""


@dataclass(frozen=True)
class ParamsResult(Result):
    """Parameters, operations and bytes of one or several encoders."""

    rows_at: ClassVar[str] = "models.components"

    models: tuple[ModelCosts, ...]


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
BLOCK_COMPONENTS = (NORMS, QKV, QK_NORM, ATTENTION_PRODUCTS, OUTPUT_PROJECTION, FFN, LAYER_SCALE)
LAST_COMPONENTS = (FINAL_NORM, POOLING, HEAD)
COMPONENTS = (*FRONT_COMPONENTS, *BLOCK_COMPONENTS, *LAST_COMPONENTS)
"""Every part of an encoder, in the order in which an image meets it."""

OTHER = "residual and other"
"""Time outside every component: residual sums, joined tokens, what Python adds."""


@dataclass(frozen=True)
class ComponentCost:
    """One of COMPONENTS: the cost of each copy (`depth` of them in blocks, in order)."""

    name: str
    each: tuple[Cost, ...]

    @property
    def copies(self) -> int:
        return len(self.each)

    @property
    def total(self) -> Cost:
        return sum(self.each, Cost())


def component_costs(
    config: EncoderConfig, image_size: tuple[int, int] | None = None
) -> tuple[ComponentCost, ...]:
    """The cost of each of COMPONENTS, in that order, zero where the encoder has none.

    Parameters are those of the config, whose position table is made for its own image size;
    operations are those of one image of `image_size` (height, width), by default the config's.
    Counted are the matrix products, as torch's FlopCounterMode does (it reports two operations
    for each). The products of a windowed block are those within its windows, as the libraries that
    window compute them; a causal mask is computed whole.

    Raises:
        VitcliError: an image that the encoder cannot read.
    """
    c = config
    grid = check_grid(c, image_size or c.image_size)
    patches = grid[0] * grid[1]
    parts = {name: (cost,) for name, cost in (_front_end(c, patches) | _last(c, patches)).items()}
    for block in range(1, c.depth + 1):
        for name, cost in _block(c, grid, block).items():
            parts[name] = (*parts.get(name, ()), cost)
    return tuple(ComponentCost(name, parts[name]) for name in COMPONENTS)


def _front_end(c: EncoderConfig, patches: int) -> dict[str, Cost]:
    patch = c.channels * c.patch_size**2
    norm = NORM_SPECS[c.norm]
    return {
        PATCH_EMBEDDING: linear_cost(patch, c.hidden, patches, c.patch_bias)
        + norm.cost(c.hidden) * int(c.patch_norm),
        PREFIX_TOKENS: Cost(c.prefix_tokens * c.hidden),
        POSITIONS: POSITION_SPECS[c.position].cost(c),
        LN_PRE: norm.cost(c.hidden) if c.ln_pre else Cost(),
    }


def _block(c: EncoderConfig, grid: tuple[int, int], block: int) -> dict[str, Cost]:
    """Block `block`, from 1."""
    attention, tokens = c.attention, c.prefix_tokens + grid[0] * grid[1]
    norm, mlp = NORM_SPECS[c.norm], MLPS[c.mlp]
    return {
        NORMS: norm.cost(c.hidden) * (2 + attention.inner_norm),
        QKV: QKV_BIASES[attention.qkv_bias].cost(c, tokens),
        QK_NORM: QK_NORMS[attention.qk_norm].cost(c),
        ATTENTION_PRODUCTS: ATTENTIONS[attention.over].cost(c, grid, block),
        OUTPUT_PROJECTION: linear_cost(c.hidden, c.hidden, tokens, attention.proj_bias),
        FFN: mlp.cost(c.hidden, c.mlp_hidden, tokens, c.mlp_bias)
        + norm.cost(c.mlp_hidden) * int(c.mlp_norm),
        LAYER_SCALE: Cost(0 if c.layer_scale is None else 2 * c.hidden),
    }


def _last(c: EncoderConfig, patches: int) -> dict[str, Cost]:
    norm = NORM_SPECS[c.norm]
    pool_norm = norm.cost(c.pooled_width) if c.pool_norm else Cost()
    return {
        FINAL_NORM: norm.cost(c.hidden) if c.has_final_norm else Cost(),
        POOLING: POOLINGS[c.pooling].cost(c, patches) + pool_norm,
        HEAD: HEADS[c.head].cost(c, patches),
    }


def model_costs(
    config: ModelConfig, image_size: tuple[int, int] | None = None, dtype: str = "float32"
) -> ModelCosts:
    """One model's table at `image_size`, by default its input size; bytes in `dtype`.

    Raises:
        VitcliError: an image smaller than a patch, or an unknown dtype.
    """
    c, size = config.encoder, image_size or config.input_size
    parts = component_costs(c, size)
    inside = [part for part in parts if part.name in BLOCK_COMPONENTS]
    blocks = [sum((part.each[i] for part in inside), Cost()) for i in range(c.depth)]
    grid, mlp = c.grid_at(size), c.mlp_hidden
    return _table(config.name, c, grid, size, dtype, parts, blocks, "from the config", mlp)


def library_costs(
    model: Model, image_size: tuple[int, int] | None = None, dtype: str = "float32"
) -> ModelCosts:
    """The same of an encoder of another library, counted from its module."""
    import torch

    from vitcli.engines.backbone import input_errors, module_costs
    from vitcli.engines.reference import LibraryEncoder

    encoder, size = model.encoder, image_size or model.input_size
    assert isinstance(encoder, LibraryEncoder)
    library = encoder.backbone
    with input_errors(library, size):
        found = module_costs(library, size)
        grid = encoder.front_end.grid(torch.zeros(1, 3, *size).to(model.device, model.dtype))
    parts = [ComponentCost(one.name, (one.cost,)) for one in found]
    layers = [one.cost for one in found if one.is_layer]
    counter = "MACs by torch's FlopCounterMode"
    counted = f"from the module of {library.library} {library.version}; {counter}"
    return _table(model.name, model.config.encoder, grid, size, dtype, parts, layers, counted)


def _table(
    name: str,
    c: EncoderConfig,
    grid: tuple[int, int],
    size: tuple[int, int],
    dtype: str,
    parts: Sequence[ComponentCost],
    blocks: Sequence[Cost],
    counted: str,
    mlp_hidden: int | None = None,
) -> ModelCosts:
    check_choice("--dtype", dtype, DTYPES)
    total, width = sum((part.total for part in parts), Cost()), DTYPES[dtype]
    return ModelCosts(
        name=name,
        hidden=c.hidden,
        depth=c.depth,
        heads=c.heads,
        mlp_hidden=mlp_hidden,
        patch_size=c.patch_size,
        image_size=size,
        native_size=c.image_size,
        tokens=c.prefix_tokens + grid[0] * grid[1],
        registers=c.registers,
        dtype=dtype,
        total=total.parameters,
        biases=total.biases,
        bytes=total.parameters * width,
        block_parameters=_mean([block.parameters for block in blocks]),
        block_biases=_mean([block.biases for block in blocks]),
        block_macs=_mean([block.macs for block in blocks]),
        blocks_macs=tuple(block.macs for block in blocks),
        components=tuple(_component(part, total, width) for part in parts),
        macs_per_image=total.macs,
        counted=counted,
    )


def _mean(values: Sequence[int]) -> int | float:
    """An integer where it is one."""
    whole, rest = divmod(sum(values), len(values))
    return sum(values) / len(values) if rest else whole


def _component(cost: ComponentCost, total: Cost, width: int) -> Component:
    whole = cost.total
    return Component(
        name=cost.name,
        copies=cost.copies,
        parameters=whole.parameters,
        biases=whole.biases,
        share=whole.parameters / total.parameters,
        bytes=whole.parameters * width,
        macs=whole.macs,
        macs_share=whole.macs / total.macs,
        parameters_per_copy=cost.each[0].parameters,
        biases_per_copy=cost.each[0].biases,
        macs_per_copy=_mean([each.macs for each in cost.each]),
    )


def params(
    *models: str | os.PathLike[str] | ModelConfig | Model,
    image_size: int | tuple[int, int] | None = None,
    dtype: str = "float32",
) -> ParamsResult:
    """Parameters, operations and bytes of encoders, from their configs.

    Those of an encoder of another library are counted from its module, and the result says so.

    Args:
        models: what `vitcli.load` takes (a preset, a YAML config, a checkpoint), a Model, or a
            ModelConfig; several are compared in the order given.
        image_size: (height, width) in pixels of the input, or the side of a square; by default
            each model's own (`ModelConfig.input_size`).
        dtype: float32, bfloat16, float16 or float64, for the bytes.

    Raises:
        VitcliError: an unknown model or dtype, an image smaller than a patch.
    """
    if not models:
        raise VitcliError("vitcli.params: no model is given", 'vitcli.params("vit-b16")')
    size = (image_size, image_size) if isinstance(image_size, int) else image_size
    return ParamsResult(tuple(_costs(model, size, dtype) for model in models))


def _costs(
    model: str | os.PathLike[str] | ModelConfig | Model, size: tuple[int, int] | None, dtype: str
) -> ModelCosts:
    if isinstance(model, str | os.PathLike) and split_library(os.fspath(model))[0]:
        from vitcli.loading import load

        model = load(model, image_size=size)
    if isinstance(model, str | os.PathLike | ModelConfig) or not model.by_library:
        return model_costs(_config(model), size, dtype)
    return library_costs(model, size, dtype)


def _config(model: str | os.PathLike[str] | ModelConfig | Model) -> ModelConfig:
    if isinstance(model, ModelConfig):
        return model
    if not isinstance(model, str | os.PathLike):
        return model.config.model_copy(
            update={"preprocess": PreprocessConfig.for_output(model.input_size)}
        )
    from vitcli.loading import kind_of, plan_model

    text = os.fspath(model)
    kind = kind_of(text)
    if kind == "weights":
        plan, _ = plan_model(ModelRequest(weights=text))
        return with_known_size(plan.config, plan.preprocess_by)
    if kind == "preset":
        return load_config(ModelConfig, text)
    return load_config(ModelConfig, file=Path(text).expanduser())


def with_known_size(config: ModelConfig, preprocess_by: str | None) -> ModelConfig:
    """A checkpoint's config whose input is the native size where nothing says another."""
    if preprocess_by is not None:
        return config
    native = PreprocessConfig.for_output(config.encoder.image_size)
    return config.model_copy(update={"preprocess": native})
