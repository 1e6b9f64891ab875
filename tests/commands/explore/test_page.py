"""The page in a real browser, its numbers held to those computed in Python."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.browser import needs_browser, opened, wait_for
from tests.commands.explore.sources import pictures, tiny
from vitcli.commands.explore.analysis import explore
from vitcli.model import Model

pytestmark = needs_browser


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Model], list[str], Path]:
    folder = tmp_path_factory.mktemp("explore")
    models, files = [tiny(), tiny(patch=8, seed=1)], pictures(folder)
    explore(models, files, folder / "page.html", layers=[1, 3])
    return models, files, folder / "page.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


def settle(browser: Any) -> None:
    """Until the page has drawn what its state asks for."""
    wait_for(browser, "window.explore && explore.ready > 0")
    browser.execute_async_script(
        "const done = arguments[0], before = explore.ready; explore.update();"
        "(function wait() { explore.ready > before ? done() : setTimeout(wait, 5); })();"
    )


def shown(browser: Any, page: Path, state: str, encoder: int, image: int) -> np.ndarray:
    """The numbers that the page draws for an encoder and an image."""
    browser.get(f"file://{page}#{state}")
    browser.refresh()
    settle(browser)
    values = browser.execute_async_script(
        "explore.values(arguments[0], arguments[1])"
        ".then(found => arguments[2](Array.from(found.values)));",
        encoder,
        image,
    )
    return np.array(values)


def center(row: int, column: int, model: Model, image: int) -> str:
    """The place of a patch in a picture that is squashed to 64 x 64 pixels."""
    side = 64 // model.config.encoder.patch_size
    return f"image={image}&x={(column + 0.5) / side}&y={(row + 0.5) / side}"


def test_similarity_is_the_cosine_in_both_encoders(browser: Any, scene: Any) -> None:
    models, files, page = scene
    for encoder, model in enumerate(models):
        assert model.preprocessing.crop_size is None, "the place assumes no crop"
        patches = [
            torch.nn.functional.normalize(tokens.flatten(0, 1).double(), dim=-1)
            for tokens in (model.features(f, layers=[3]).layers[3].patches[0] for f in files)
        ]
        side = 64 // model.config.encoder.patch_size
        state = f"mode=similarity&layer=1&pinned=1&{center(1, 2, model, 0)}"
        for image in range(2):
            expected = (patches[image] @ patches[0][side + 2]).numpy()
            found = shown(browser, page, state, encoder, image)
            np.testing.assert_allclose(found, expected, atol=0.03)
        assert found[: side * side].std() > 0


def test_attention_is_in_times_uniform(browser: Any, scene: Any) -> None:
    models, files, page = scene
    for encoder, model in enumerate(models):
        rows = model.attention(files[1], block=3)[0].double()
        tokens, side = rows.shape[-1], 64 // model.config.encoder.patch_size
        query = 1 + side + 2
        at = f"mode=attention&layer=1&pinned=1&{center(1, 2, model, 1)}"
        for state, expected in {
            f"{at}&head=2": rows[1, query, 1:],
            f"{at}&head=mean": rows[:, query, 1:].mean(0),
            f"{at}&head=mean&cls=1": rows[:, 0, 1:].mean(0),
            f"{at}&head=1&cls=1": rows[0, 0, 1:],
        }.items():
            exact = (expected * tokens).numpy()
            found = shown(browser, page, state, encoder, 1)
            np.testing.assert_allclose(found, exact, atol=exact.max() / 500)


@pytest.mark.parametrize("width", [400, 1600])
def test_pointing_keys_and_the_slider_work_without_an_error(
    browser: Any, scene: Any, width: int
) -> None:
    from selenium.webdriver import ActionChains, Keys

    _, _, page = scene
    browser.set_window_size(width, 1000)
    browser.get_log("browser")
    browser.get(f"file://{page}")
    browser.refresh()
    settle(browser)
    assert browser.execute_script("return document.documentElement.scrollWidth <= innerWidth")
    canvases = browser.find_elements("css selector", "canvas.view")
    assert len(canvases) == 4 and all(c.size["width"] > 100 for c in canvases)
    read = lambda: browser.find_element("id", "readout").text  # noqa: E731
    ActionChains(browser).move_to_element(canvases[3]).perform()
    settle(browser)
    assert "p1.png" in read() and "A: patch" in read() and "B: patch" in read()
    before = read()
    ActionChains(browser).move_to_element_with_offset(canvases[3], -30, 0).click().perform()
    settle(browser)
    assert read() != before and "query pinned" in read()
    pinned = browser.execute_script("return explore.state.x")
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT, "m", "2", "c").perform()
    settle(browser)
    assert browser.execute_script("return explore.state.x") > pinned
    state = browser.execute_script("return explore.state")
    assert (state["mode"], state["cls"], state["match"]) == ("attention", True, 0)
    assert browser.find_elements("css selector", "svg.lines line")
    slider = browser.find_element("id", "layer")
    slider.send_keys(Keys.ARROW_LEFT)
    settle(browser)
    assert browser.find_element("id", "layername").text == "1"
    slider.send_keys("h")  # only arrows are the slider's own
    settle(browser)
    assert browser.find_element("id", "head").get_attribute("value") == "rollout"
    slider.send_keys("H")
    settle(browser)
    address = browser.current_url
    assert "mode=attention" in address and "layer=0" in address and "match=0" in address
    browser.get("about:blank")
    browser.get(address)
    settle(browser)
    again = browser.execute_script("return explore.state")
    assert {key: again[key] for key in ("mode", "cls", "match", "layer", "pinned")} == {
        "mode": "attention",
        "cls": True,
        "match": 0,
        "layer": 0,
        "pinned": True,
    }
    for mode in ("features", "norms", "similarity"):
        browser.find_element("id", f"mode-{mode}").click()
        settle(browser)
        if mode == "norms":  # those of two encoders have no common scale
            high = browser.find_element("id", "high").text
            assert re.fullmatch(r"A [\d.]+, B [\d.]+ norm", high), high
    assert browser.get_log("browser") == []


def test_a_finger_pins_where_it_taps_and_moves_sideways(browser: Any, scene: Any) -> None:
    _, _, page = scene
    browser.set_window_size(400, 1000)
    browser.get(f"file://{page}")
    browser.refresh()
    settle(browser)
    canvas = browser.find_elements("css selector", "canvas.view")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", canvas)
    box = browser.execute_script(
        "const b = arguments[0].getBoundingClientRect(); return [b.left, b.top, b.width, b.height]",
        canvas,
    )
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": True})

    def touch(kind: str, *share: tuple[float, float]) -> None:
        places = [{"x": box[0] + x * box[2], "y": box[1] + y * box[3]} for x, y in share]
        browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": kind, "touchPoints": places})

    touch("touchStart", (0.75, 0.6))
    touch("touchEnd")
    wait_for(browser, "explore.state.pinned")
    state = browser.execute_script("return explore.state")
    assert state["image"] == 1
    assert (state["x"], state["y"]) == pytest.approx((0.75, 0.6), abs=0.02)
    touch("touchStart", (0.75, 0.6))
    for step in range(1, 11):
        touch("touchMove", (0.75 - 0.05 * step, 0.6))
    touch("touchEnd")
    wait_for(browser, "explore.state.x < 0.5")
    browser.execute_cdp_cmd("Emulation.setTouchEmulationEnabled", {"enabled": False})
