"""What a reader needs of a figure: whole ticks where things are counted, a color for a part."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.colors import to_rgb

from vitcli.commands.encode import view as encode
from vitcli.commands.encode.result import EncodedImage, EncodeResult, LayerNorms
from vitcli.commands.params.analysis import COMPONENTS, OTHER, params
from vitcli.commands.params.view import component_fills
from vitcli.commands.params.view import figure as params_figure
from vitcli.commands.train import view as train
from vitcli.commands.train.result import HistoryRow, TrainResult, TrainSummary
from vitcli.results import ModelInfo
from vitcli.ui.figures import count_along_x, save_figure


def whole(ticks: list[float]) -> bool:
    return all(float(tick).is_integer() for tick in ticks)


def encoded(images: int) -> EncodeResult:
    layers = tuple(LayerNorms(i, f"block {i}", 1.0 + i, 2.0, 3.0, 0.5) for i in range(4))
    image = EncodedImage("a", "RGB", 8, 8, "", (1, 3, 8, 8), (1, 5, 4), layers, 1.0, None)
    model = ModelInfo("tiny", 1, 4, 3, 2, "random (seed 0)", "cpu", "float32")
    named = tuple(replace(image, path=str(i)) for i in range(images))
    return EncodeResult(model, "eager", named, ())


def test_layers_are_counted_in_whole_numbers() -> None:
    drawing = encode.figure(encoded(1))
    one_point = drawing.add_subplot()
    one_point.plot([12], [0.5])
    count_along_x(one_point)
    assert list(one_point.get_xticks())[1:-1] in ([11, 12, 13], [12])
    assert all(whole(list(axes.get_xticks())) for axes in drawing.axes)


@pytest.mark.parametrize(("images", "told"), [(1, False), (9, True)])
def test_lines_without_a_legend_are_counted(images: int, told: bool) -> None:
    assert (f"{images} images" in encode.figure(encoded(images)).get_suptitle()) is told


def test_every_component_has_its_own_color_in_every_figure() -> None:
    fills = component_fills()
    assert list(fills) == [*COMPONENTS, OTHER, "other"]
    assert len({(how["color"], how.get("hatch")) for how in fills.values()}) == len(fills)
    for preset in ("vit-ti16", "clip-b16"):
        drawing = params_figure(params(preset))
        bars = {
            container.get_label(): container.patches[0].get_facecolor()[:3]
            for container in drawing.axes[0].containers
        }
        assert bars["FFN"] == pytest.approx(to_rgb(fills["FFN"]["color"]))


def trained(steps: int) -> TrainResult:
    rows = tuple(HistoryRow(i, float(i), 1.0, 0.5, 1e-3, 2.0) for i in range(1, steps + 1))
    summary = TrainSummary("learned", 0.9, 0.1, 0.25, 0.8, 0.3, steps, None, None, 1.0, 1, 1, ())
    config = {
        "name": "tiny",
        "encoder": {"norm_placement": "pre", "init": "trunc_normal"},
        "train": {"warmup": 0, "weights": None},
    }
    return TrainResult(summary, rows, (), "cpu", 1, config)


@pytest.mark.parametrize(("steps", "smooth"), [(3, False), (40, True)])
def test_the_legend_names_the_curves_that_are_drawn(steps: int, smooth: bool) -> None:
    drawing = train.figure(trained(steps))
    loss, (legend,) = drawing.axes[0], drawing.legends
    labels = [text.get_text() for text in legend.get_texts()]
    assert "a training batch" in labels
    assert ("mean of 20 training batches" in labels) is smooth
    assert whole(list(loss.get_xticks()))


def test_a_character_that_the_font_lacks_is_no_talk_on_stderr(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    drawing = Figure()
    drawing.suptitle("图.png")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save_figure(drawing, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("weights", "told"), [(None, "init trunc_normal"), ("runs/a", "weights runs/a")]
)
def test_a_run_tells_where_its_weights_came_from(weights: str | None, told: str) -> None:
    result = trained(3)
    result.config["train"] |= {"weights": weights, "lr": 1e-3, "batch": 8, "epochs": 1, "seed": 0}
    result.config["encoder"] |= {"depth": 2, "hidden": 8}
    assert told in str(next(train.tables(result)))
    assert told in train.figure(result).get_suptitle()
    assert ("trunc_normal" in train.figure(result).get_suptitle()) is (weights is None)
