"""A variant owns itself: one from outside the package is built, trained, counted and resized."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.conftest import tiny_config, tiny_encoder
from vitcli import build
from vitcli.build import build_encoder, build_meta, register
from vitcli.commands.params import analysis as components
from vitcli.commands.params.analysis import component_costs
from vitcli.commands.train.optimization import make_optimizer
from vitcli.commands.train.start import copy_weights
from vitcli.config.attention_variants import PositionSpec
from vitcli.config.request import load_config
from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.config.settings import parse_setting
from vitcli.config.training import TrainConfig
from vitcli.config.variants import Cost
from vitcli.errors import VitcliError
from vitcli.nn.attention import Grid, decayed_names, trunc_normal
from vitcli.nn.positions import NoPosition


class AxialSpec(PositionSpec):
    """A vector for each row of patches and one for each column."""

    def cost(self, c: EncoderConfig) -> Cost:
        return Cost(sum(c.grid) * c.hidden)


class AxialPosition(NoPosition):
    """Row and column vectors, two tables of rank 2, resized linearly."""

    def __init__(self, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.empty(grid[0], hidden))
        self.columns = nn.Parameter(torch.empty(grid[1], hidden))

    def reset(self, std: float, generator: torch.Generator) -> None:
        for table in (self.rows, self.columns):
            trunc_normal(table, std, generator)

    def converted(self, source: NoPosition) -> dict[str, Tensor]:
        assert isinstance(source, AxialPosition)
        sizes = {"rows": len(self.rows), "columns": len(self.columns)}
        return {name: stretched(getattr(source, name), n) for name, n in sizes.items()}

    def add(self, prefix: Tensor, patches: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
        rows, columns = stretched(self.rows, grid[0]), stretched(self.columns, grid[1])
        return prefix, patches + (rows[:, None] + columns[None]).flatten(0, 1)


def stretched(table: Tensor, n: int) -> Tensor:
    return nn.functional.interpolate(table.T[None], n, mode="linear", align_corners=True)[0].T


@pytest.fixture
def axial() -> Iterator[EncoderConfig]:
    register("position", "axial", AxialSpec(), lambda c: AxialPosition(c.hidden, c.grid))
    try:
        yield tiny_config(position="axial", head="linear", head_out=4)
    finally:
        for table in build.VARIANTS["position"]:
            del table["axial"]


def test_it_is_a_word_of_the_config(axial: EncoderConfig) -> None:
    config = load_config(ModelConfig, None, None, [parse_setting("encoder.position=axial")])
    assert config.encoder.position == "axial" and not config.encoder.has_position_table
    with pytest.raises(VitcliError, match="axial") as refused:
        load_config(ModelConfig, None, None, [parse_setting("encoder.position=axiom")])
    assert "did you mean axial?" in refused.value.hint
    with pytest.raises(ValueError, match="exists"):
        register("position", "axial", AxialSpec(), lambda c: NoPosition())


def test_it_is_built_from_the_seed(axial: EncoderConfig) -> None:
    first, again, other = (build_encoder(axial, seed).state_dict() for seed in (0, 0, 1))
    key = "front_end.position.rows"
    assert torch.equal(first[key], again[key]) and not torch.equal(first[key], other[key])
    assert 0 < first[key].std() < 0.1


def test_it_trains_and_is_not_decayed(axial: EncoderConfig) -> None:
    encoder = build_encoder(axial)
    assert not {name for name in decayed_names(encoder) if "position" in name}
    optimizer = make_optimizer(encoder, TrainConfig(lr=0.1, weight_decay=0.5))
    images = torch.randn(2, 3, *axial.image_size)
    before = encoder.front_end.position.rows.detach().clone()
    encoder(images).output.square().sum().backward()
    optimizer.step()
    after = encoder.front_end.position.rows.detach()
    # Adam's first step is lr times the sign of the gradient; a decay would show beside it.
    assert (after - before).abs().max().item() == pytest.approx(0.1, rel=1e-3)


def test_it_is_counted(axial: EncoderConfig) -> None:
    counted = {cost.name: cost.total.parameters for cost in component_costs(axial)}
    module = build_meta(axial).front_end.position
    assert counted[components.POSITIONS] == sum(p.numel() for p in module.parameters())
    assert sum(counted.values()) == sum(p.numel() for p in build_meta(axial).parameters())


def test_it_follows_another_image_size(axial: EncoderConfig) -> None:
    source = build_encoder(axial)
    height, width = axial.image_size
    larger = axial.model_copy(update={"image_size": (2 * height, 3 * width)})
    target = build_encoder(larger, seed=1)
    copy_weights(source, target)
    expected = stretched(source.front_end.position.columns, larger.grid[1])
    assert torch.equal(target.front_end.position.columns, expected)
    images = torch.randn(1, 3, *larger.image_size)
    assert torch.equal(target(images).tokens, source(images).tokens), "as it does while it runs"


@pytest.mark.parametrize("key", list(build.VARIANTS))
def test_each_word_has_a_spec_and_a_builder(key: str) -> None:
    specs, builders = build.VARIANTS[key]
    assert specs.keys() == builders.keys()


def test_an_unknown_parameter_is_not_left_unset() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = nn.Parameter(torch.empty(3, 3))

    encoder = tiny_encoder()
    encoder.pool_norm = Odd()
    with pytest.raises(TypeError, match="Odd: not a Part"):
        build.initialize(encoder, "trunc_normal", 0.02, 0)
    assert "pool_norm.odd" not in decayed_names(encoder)


def test_an_encoder_larger_than_the_machine_is_refused_before_it_is_made() -> None:
    """600 TiB: the meta device has its shapes, and nothing is touched."""
    config = EncoderConfig(hidden=65_536, heads=1_024, depth=3_000 // 3, mlp_hidden=1_000_000)
    with pytest.raises(VitcliError, match="do not fit in memory"):
        build_encoder(config)
