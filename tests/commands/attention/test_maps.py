from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.commands.sources import tiny_model
from tests.conftest import tiny_encoder
from vitcli.commands.attention import reducers as attention
from vitcli.commands.attention.analysis import MOST_PANELS, OverlayCollector, attn_entropy
from vitcli.commands.attention.reducers import Rollout, attention_maps, default_query, fuse_heads
from vitcli.commands.attention.result import MapPanel, MapSheet
from vitcli.commands.attention.view import overlay_figure
from vitcli.config.schema import PreprocessConfig
from vitcli.images.preprocess import levels
from vitcli.nn.encoder import explicit_attention, hooked


def test_rollout_of_three_tokens_by_hand() -> None:
    """Two blocks, A' = (A + I) / 2, and A'_2 A'_1 multiplied out on paper."""
    first = torch.tensor([[[0.5, 0.5, 0.0], [0.0, 1.0, 0.0], [0.2, 0.2, 0.6]]], dtype=torch.float64)
    second = torch.tensor([[[0.0, 0.0, 1.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]]).double()
    # A'_1 = [.75 .25 0; 0 1 0; .1 .1 .8]    A'_2 = [.5 0 .5; .25 .75 0; .5 0 .5]
    by_hand = torch.tensor(
        [[0.425, 0.175, 0.4], [0.1875, 0.8125, 0.0], [0.425, 0.175, 0.4]], dtype=torch.float64
    )
    roll = Rollout()
    roll.add(first)
    roll.add(second)
    assert roll.matrix is not None
    assert (roll.matrix[0] - by_hand).abs().max() < 1e-15


def test_rollout_makes_fused_rows_sum_to_one_and_an_empty_row_keeps_itself() -> None:
    roll = Rollout()
    roll.add(torch.tensor([[[2.0, 2.0, 0.0], [0.0, 0.0, 0.0], [0.1, 0.1, 0.2]]]).double())
    expected = [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0], [0.125, 0.125, 0.75]]
    assert roll.matrix is not None
    assert (roll.matrix[0] - torch.tensor(expected).double()).abs().max() < 1e-15


def test_head_fusions() -> None:
    heads = [torch.tensor([0.2, 0.8]), torch.tensor([0.6, 0.4])]
    assert fuse_heads(heads, "mean").tolist() == pytest.approx([0.4, 0.6])
    assert fuse_heads(heads, "max").tolist() == pytest.approx([0.6, 0.8])
    assert fuse_heads(heads, "min").tolist() == pytest.approx([0.2, 0.4])


def whole_arrays(encoder: torch.nn.Module, images: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    with explicit_attention(encoder) as points, hooked((p, kept.append) for p in points):  # type: ignore[arg-type]
        encoder(images)
    return kept


@pytest.mark.parametrize("registers", [0, 4])
@pytest.mark.parametrize("fusion", ["mean", "max", "min"])
def test_maps_are_rows_of_the_attention_without_prefix_tokens(
    registers: int, fusion: str, images: Tensor
) -> None:
    encoder = tiny_encoder(registers=registers)
    first, second = whole_arrays(encoder, images)
    maps = attention_maps(encoder, images, (1, 2), fusion=fusion, rollout=True)
    prefix = 1 + registers
    assert maps.query == "cls"
    assert maps.heads.shape == (2, 2, 3, 3, 4)
    assert (maps.heads[1].flatten(-2) - second[:, :, 0, prefix:]).abs().max() < 1e-12
    reduce = {"mean": torch.mean, "max": torch.amax, "min": torch.amin}[fusion]
    fused = reduce(second[:, :, 0, prefix:], dim=1)
    assert (maps.fused[1].flatten(-2) - fused).abs().max() < 1e-12

    result = torch.eye(13 + registers, dtype=torch.float64)
    for rows, shown in zip((first, second), maps.rollout, strict=True):  # type: ignore[arg-type]
        step = reduce(rows, dim=1)
        step = step / step.sum(-1, keepdim=True)
        result = (0.5 * step + 0.5 * torch.eye(13 + registers)) @ result
        assert (result.sum(-1) - 1).abs().max() < 1e-12
        assert (shown.flatten(-2) - result[:, 0, prefix:]).abs().max() < 1e-12


def test_without_cls_it_is_the_mean_over_patch_queries(images: Tensor) -> None:
    encoder = tiny_encoder(cls_token=False, pooling="mean", registers=2)
    assert default_query(encoder) == "patch"
    maps = attention_maps(encoder, images, (2,))
    rows = whole_arrays(encoder, images)[1][:, :, 2:, 2:].mean(2)
    assert (maps.heads[0].flatten(-2) - rows).abs().max() < 1e-12
    assert maps.rollout is None


def test_one_patch_as_query(images: Tensor) -> None:
    encoder = tiny_encoder(registers=2)
    maps = attention_maps(encoder, images, (1,), query="2,1")
    rows = whole_arrays(encoder, images)[0][:, :, 3 + 2 * 4 + 1, 3:]
    assert (maps.heads[0].flatten(-2) - rows).abs().max() < 1e-12


def test_small_parts_of_a_batch_give_the_same_maps(
    images: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tiny_encoder()
    whole = attention_maps(encoder, images, (1, 2), rollout=True)
    monkeypatch.setattr(attention, "ROWS_AT_ONCE", 1)
    parts = attention_maps(encoder, images, (1, 2), rollout=True)
    assert (whole.heads - parts.heads).abs().max() < 1e-12
    assert whole.rollout is not None and parts.rollout is not None
    assert (whole.rollout - parts.rollout).abs().max() < 1e-12


def sheet(*levels: float) -> MapSheet:
    """A panel for each level, one value everywhere, over the right half of a picture."""
    panels = tuple(MapPanel(f"{level}", ((level, level), (level, level))) for level in levels)
    return MapSheet(0, "sheet", (20.0, 0.0, 40.0, 20.0), (30.0, 0.0, 40.0, 10.0), panels)


def drawn(figure: Any, title: str) -> Any:
    (axes,) = [a for a in figure.axes if a.get_title().startswith(title)]
    return np.asarray(axes.images[0].get_array())


def test_one_scale_for_all_panels_and_no_uniform_map_looks_bright() -> None:
    picture = Image.new("RGB", (40, 20), "white")
    shared = overlay_figure([sheet(0.0, 1.0, 8.0)], [picture])
    nothing, uniform, most = (drawn(shared, f"{x}, max") for x in (0.0, 1.0, 8.0))
    assert nothing == pytest.approx(1.0)  # the white picture itself
    assert np.abs(uniform - nothing).max() < 0.2 < 0.6 < np.abs(most - nothing).max()
    alone = overlay_figure([sheet(1.0)], [picture])
    assert np.abs(drawn(alone, "1.0, max") - drawn(alone, "1.0, max").max()).max() < 0.9
    own = overlay_figure([sheet(1.0, 8.0)], [picture], "panel")
    assert drawn(own, "1.0, max") == pytest.approx(drawn(own, "8.0, max"))
    labels = [axes.get_xlabel() for part in shared.subfigs for axes in part.axes]
    assert sum("times uniform" in label for label in labels) == 1


def test_the_overlay_shows_what_the_encoder_saw() -> None:
    picture = Image.new("RGB", (40, 20), "black")
    picture.paste((255, 0, 0), (20, 0, 40, 20))
    figure = overlay_figure([sheet(1.0)], [picture])
    seen = drawn(figure, "what the encoder saw")
    assert seen.shape == (20, 20, 3) and (seen == (255, 0, 0)).all()


def test_the_margin_of_a_whole_picture_has_the_color_that_the_encoder_saw() -> None:
    picture = Image.new("RGB", (24, 24), "red")  # the encoder reads 32x24: no resize, a margin
    whole = PreprocessConfig(fit="whole", resize_size=(24, 32), mean=(0.2, 0.4, 0.6))
    model = dataclasses.replace(tiny_model(), known_preprocessing=whole)
    maps = OverlayCollector("cls", None, "mean", rollout=False)
    attn_entropy([model], [picture], watch=maps)
    seen = drawn(overlay_figure(maps.sheets, maps.pictures), "what the encoder saw")
    encoded = levels(picture, model.preprocessing)
    assert (seen == encoded).all() and (seen[:, 0] == (51, 102, 153)).all()


def test_maps_are_in_times_uniform(tmp_path: Path) -> None:
    """Queries of zero: attention is uniform, so that every patch has 1, also under a window."""
    Image.new("RGB", (32, 24), "teal").save(tmp_path / "a.png")
    for mask in ({"mask": "none"}, {"mask": "window", "window": 2}):
        model = tiny_model(attention=mask, registers=2)
        with torch.no_grad():
            for block in model.encoder.vit.blocks:
                block.attention.qkv.weight[:24] = 0
                block.attention.qkv.bias[:24] = 0
        maps = OverlayCollector("0,0", None, "mean", rollout=False)
        attn_entropy(model, str(tmp_path / "a.png"), watch=maps)
        (found,) = maps.sheets
        assert [panel.title for panel in found.panels][1:] == ["head 1", "head 2", "head 3"]
        for panel in found.panels:
            values = np.array(panel.values)
            inside = values[:2, :2] if mask["mask"] == "window" else values
            assert inside == pytest.approx(1.0, abs=1e-6)


def test_a_figure_of_many_images_stays_a_page(tmp_path: Path) -> None:
    paths = []
    for number in range(40):
        Image.new("RGB", (32, 24), (number, 0, 0)).save(tmp_path / f"{number}.png")
        paths.append(str(tmp_path / f"{number}.png"))
    maps = OverlayCollector("cls", "1,2", "mean", rollout=True)
    attn_entropy(tiny_model(), paths, watch=maps)
    assert len(maps.sheets) + maps.left_out == 80
    assert sum(len(one.panels) + 1 for one in maps.sheets) <= MOST_PANELS
