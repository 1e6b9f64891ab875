"""Vectors in two dimensions as a page: its data, and what a real browser does with it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.browser import needs_browser, opened, wait_for
from vitcli.commands.embed.command import draw_plane, plane_page
from vitcli.images.preprocess import small_jpeg
from vitcli.stats import Plane
from vitcli.ui.figures import COLORS, Plot

HOSTILE = "</script><script>window.bad = 1</script><img src=x onerror='window.bad = 1'>"


def four(labels: tuple[Any, ...] = ("a", HOSTILE, "a", None)) -> Plane:
    """Four corners of a rectangle: (0, 0), (4, 0), (0, 2), (4, 2)."""
    names = ("a.png", HOSTILE, "new\nline\udcff.png", "d.png")
    points = ((0.0, 0.0), (4.0, 0.0), (0.0, 2.0), (4.0, 2.0))
    return Plane("pca", HOSTILE, "random", 9, names, labels, points, (0.75, 0.25))


def photos() -> list[str]:
    colors = ("red", "green", "blue")
    return [*(small_jpeg(Image.new("RGB", (90, 60), color), 30)[1] for color in colors), ""]


def data(page: bytes) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.decode())
    return json.loads(text)


def test_the_page_holds_points_from_0_to_1_and_the_true_places() -> None:
    page = plane_page(four(), photos())
    found = data(page)
    assert found["points"] == [[0, 0], [1, 0], [0, 1], [1, 1]]
    assert found["places"][3] == ["4", "2"]
    assert found["colors"] == [COLORS[1], COLORS[0], COLORS[1], "#999999"]
    assert found["markers"] == [1, 0, 1, 0]
    assert "4 of 9 images; 3 with a picture" in found["caption"]
    assert found["names"][2] == r"new\nline\xff.png"
    assert b"<img src=x" not in page and page.count(b"</script>") == 2
    assert not re.search(rb'(src|href)="?(?!data:)\w+:', page), "a page needs no network"


def test_classes_have_one_order_whatever_comes_first() -> None:
    found = data(plane_page(four(("10", "b", "9", "10")), [""] * 4))
    assert [name for name, _ in found["classes"]] == ["9", "10", "b"]
    assert found["markers"] == [1, 2, 0, 1]


def test_numbers_are_colored_by_their_size() -> None:
    found = data(plane_page(four((1.0, 2.0, 1.5, 1.0)), [""] * 4))
    assert found["colors"][0] == found["colors"][3] == "#440154"  # the ends of viridis
    assert found["colors"][1] == "#fde725" and found["classes"] == []


def test_pictures_are_read_for_a_page_alone(tmp_path: Path) -> None:
    asked: list[Any] = []

    def read(names: Any) -> list[str]:
        asked.append(names)
        return photos()

    draw_plane(four(), Plot(plot=tmp_path / "x.png"), read)
    assert not asked and (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    draw_plane(four(), Plot(plot=tmp_path / "x.html"), read)
    assert len(asked) == 1 and len(data((tmp_path / "x.html").read_bytes())["pictures"]) == 4


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@needs_browser
@pytest.mark.parametrize("width", [400, 1600])
def test_pointing_keys_zoom_and_classes_work_without_an_error(
    browser: Any, width: int, tmp_path: Path
) -> None:
    from selenium.webdriver import ActionChains, Keys

    page = tmp_path / "page.html"
    page.write_bytes(plane_page(four(), photos()))
    browser.set_window_size(width, 1000)
    browser.get_log("browser")
    browser.get(f"file://{page}")
    wait_for(browser, "window.plane && plane.ready")
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    canvas = browser.find_element("css selector", "canvas")
    shown = browser.find_element("id", "shown")

    def point(i: int) -> None:
        x, y = browser.execute_script(f"return plane.place({i})")
        side = canvas.size["width"]
        aside = (round(x - side / 2), round(y - side / 2))
        ActionChains(browser).move_to_element_with_offset(canvas, *aside).perform()

    point(1)
    assert HOSTILE in shown.text and "4, 0" in shown.text
    assert len(shown.find_elements("css selector", "img")) == 1
    point(3)
    assert "d.png" in shown.text and not shown.find_elements("css selector", "img")
    canvas.send_keys(Keys.ARROW_LEFT)
    assert r"new\nline\xff.png" in shown.text
    canvas.send_keys(Keys.ARROW_DOWN)
    assert "a.png" in shown.text and "0, 0" in shown.text
    before = browser.execute_script("return plane.place(3)")
    browser.find_element("id", "in").click()
    middle = browser.execute_script("return document.querySelector('canvas').clientWidth / 2")
    after = browser.execute_script("return plane.place(3)")
    assert [v - middle for v in after] == pytest.approx([1.5 * (v - middle) for v in before])
    browser.find_element("id", "all").click()
    assert browser.execute_script("return plane.place(3)") == pytest.approx(before)
    ink = "return plane.draw(), document.querySelector('canvas').toDataURL()"
    dots = browser.execute_script(ink)
    browser.find_element("id", "pictures").click()
    assert browser.execute_script(ink) != dots
    browser.find_elements("css selector", "#classes button")[1].click()
    assert browser.execute_script("return plane.view.only") == "a"
    assert browser.execute_script("return window.bad") is None
    assert browser.get_log("browser") == []
