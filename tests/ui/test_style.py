"""What a paper and a color-blind reader need of every figure."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from numpy.typing import NDArray

from vitcli.errors import VitcliError
from vitcli.ui.figures import (
    COLORS,
    COLUMN,
    DASHES,
    MARKERS,
    PAGE,
    POINTS,
    Plot,
    draw,
    ended,
    fill,
    merge_small,
    new_figure,
    save_figure,
    series,
    spread_caption,
    styled,
)

SIGHT = {
    "normal": np.eye(3),
    # Machado, Oliveira and Fernandes (2009), severity 1.0, on linear RGB.
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
}
NAMES = (r"$\frac{$", r"\alpha_$x$", "a$b$c$", "{}_^~", "100 % & #1")


def lab(color: str, sight: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIE L*a*b* (D65) of an sRGB color as an eye sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(sight @ linear, 0, 1)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    scaled = to_xyz @ seen / [0.9505, 1.0, 1.089]
    cubes = np.where(scaled > 216 / 24389, np.cbrt(scaled), (24389 / 27 * scaled + 16) / 116)
    x, y, z = cubes
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colors_stay_apart_for_every_eye(sight: str) -> None:
    """A difference of 2.3 is just noticeable (CIE 1976); areas need several times as much."""
    seen = [lab(color, SIGHT[sight]) for color in COLORS]
    white = lab("white", SIGHT[sight])
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) > 10
    assert min(np.linalg.norm(a - white) for a in seen) > 20


@pytest.mark.parametrize("sight", ["protanopia", "deuteranopia"])
def test_matplotlibs_own_colors_would_fail_that_test(sight: str) -> None:
    seen = [lab(f"C{i}", SIGHT[sight]) for i in range(7)]
    assert min(np.linalg.norm(a - b) for a, b in combinations(seen, 2)) < 8


def test_each_of_color_marker_and_dash_tells_series_apart() -> None:
    made = [series(i) for i in range(7)]
    for key in ("color", "marker", "linestyle"):
        assert len({str(how[key]) for how in made}) == 7
    assert len(COLORS) == len(MARKERS) == len(DASHES)
    assert len({str(series(i, marker=False)) for i in range(49)}) == 49
    assert len({(fill(i)["color"], fill(i)["hatch"]) for i in range(28)}) == 28


@styled
def sample() -> object:
    drawing = new_figure(2.0)
    axes = drawing.subplots()
    for index, name in enumerate(NAMES):
        axes.plot([1, 2, 3], [10**index, 2, 300], label=name, **series(index))
    axes.set(title=NAMES[0], xlabel=NAMES[1], yscale="log")
    axes.set_xticks([1, 2, 3], NAMES[:3])
    axes.legend()
    drawing.suptitle(NAMES[2])
    return drawing


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_dollar_in_a_name_is_a_dollar(tmp_path: Path, suffix: str) -> None:
    from matplotlib.figure import Figure

    bare = Figure()  # of a view that forgot the style
    bare.subplots().set_xticks([0, 1], NAMES[:2])
    bare.suptitle(NAMES[0])
    save_figure(bare, tmp_path / f"bare.{suffix}")
    save_figure(sample(), tmp_path / f"x.{suffix}")


def test_svg_text_is_text_and_log_ticks_are_numbers(tmp_path: Path) -> None:
    save_figure(sample(), tmp_path / "x.svg")
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", (tmp_path / "x.svg").read_text())
    assert r"$\frac{$" in texts
    assert {"1", "100"} <= set(texts)


def test_pdf_fonts_are_embedded_truetype(tmp_path: Path) -> None:
    save_figure(sample(), tmp_path / "x.pdf")
    content = (tmp_path / "x.pdf").read_bytes()
    assert b"/FontFile2" in content
    assert b"/Type3" not in content


@pytest.mark.parametrize(
    ("width", "dpi", "pixels"), [(None, 100, 675), ("column", 200, 660), ("5", 50, 250)]
)
def test_width_and_dpi_give_the_pixels(
    tmp_path: Path, width: str | None, dpi: int, pixels: int
) -> None:
    from PIL import Image

    drawing = sample()
    assert drawing.get_size_inches()[0] == PAGE  # type: ignore[attr-defined]
    draw(sample, Plot(plot=tmp_path / "x.png", dpi=dpi, width=width))
    with Image.open(tmp_path / "x.png") as image:
        assert image.width == pixels


@pytest.mark.parametrize("width", ["wide", "0", "-3", "nan", "1e9"])
def test_what_is_no_width_is_refused(width: str) -> None:
    with pytest.raises(VitcliError, match="--width"):
        Plot(width=width)


def test_small_parts_are_merged_and_the_total_stays() -> None:
    parts = [("a", 90.0), ("b", 9.2), ("c", 0.5), ("d", 0.3), ("e", 0.0)]
    assert merge_small(parts) == [("a", 90.0), ("b", 9.2), ("other", pytest.approx(0.8))]
    assert merge_small([("a", 1.0), ("b", 0.0)]) == [("a", 1.0)]


def test_captions_say_what_the_bars_are() -> None:
    assert spread_caption(3) == "mean ± sd, 3 seeds; dots: seeds"
    assert spread_caption(1, "run", "95% interval", dots=False) == "mean ± 95% interval, 1 run"


def test_a_long_name_keeps_both_ends_and_no_title_is_wider_than_the_figure() -> None:
    assert ended("a" * 44) == "a" * 44
    assert ended("first" + "x" * 90 + "last.png", 21) == "firstxxxxx…xxlast.png"

    @styled
    def figure() -> Any:
        drawing = new_figure(2.0, COLUMN)
        drawing.suptitle("W" * 300)
        return drawing

    drawing = figure()
    lines = drawing.get_suptitle().split("\n")
    assert len(lines) == 2 and max(map(len, lines)) <= COLUMN * 72 / (0.6 * POINTS)
