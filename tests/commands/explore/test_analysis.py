"""What the page holds: bytes with scales, what fits, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import json
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.commands.explore.sources import TINY, pictures, tiny
from vitcli.cli import app
from vitcli.commands.explore.analysis import choose_layers, explore, quantized
from vitcli.commands.explore.grid import grid
from vitcli.config.schema import PreprocessConfig
from vitcli.errors import VitcliError
from vitcli.files import data_size


def held(page: Path) -> dict[str, Any]:
    """The JSON of a page."""
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text()
    )
    found: dict[str, Any] = json.loads(text)
    return found


def arrays(entry: dict[str, Any]) -> list[np.ndarray]:
    """The arrays of one entry, as a browser would read them."""
    raw = zlib.decompress(base64.b64decode(entry["data"]))
    found, offset = [], 0
    for length, kind in zip(entry["lengths"], entry["types"], strict=True):
        found.append(np.frombuffer(raw, kind, length, offset))
        offset += found[-1].nbytes
    assert offset == len(raw)
    return found


def test_bytes_are_off_by_half_a_step_at_most() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 30))
    values, scales = quantized(rows, signed=True)
    error = np.abs(values * scales[:, None].astype(float) - rows).max(axis=1)
    assert (error <= np.abs(rows).max(axis=1) * (1 / 254 + 1e-6)).all() and error.max() > 0
    rows = np.abs(rows)
    values, scales = quantized(rows, signed=False)
    error = np.abs(values * scales[:, None].astype(float) - rows).max(axis=1)
    assert (error <= rows.max(axis=1) * (1 / 510 + 1e-6)).all()
    assert (quantized(np.zeros((2, 3)), signed=False)[0] == 0).all()


def test_cosines_of_the_page_are_those_of_the_features(tmp_path: Path) -> None:
    model, files = tiny(), pictures(tmp_path)
    result = explore([model], files, tmp_path / "page.html", layers=[0, -1])
    assert result.encoders[0].layers == (0, 3) and result.encoders[0].left_out == ()
    entries = {(d["kind"], d["layer"]): d for d in held(tmp_path / "page.html")["data"]}
    first, first_scales, second, second_scales = arrays(entries["features", 3])
    width = len(first) // len(first_scales)
    a = first.reshape(-1, width) * first_scales[:, None]
    b = second.reshape(-1, width) * second_scales[:, None]
    tokens = [
        torch.nn.functional.normalize(x.flatten(0, 1).double(), dim=-1)
        for x in (model.features(file, layers=[3]).layers[3].patches[0] for file in files)
    ]
    error = float(np.abs(a @ b.T - (tokens[0] @ tokens[1].T).numpy()).max())
    assert 0 < error <= 1.5 * max(result.encoders[0].cosine_error, 0.005)
    norms = arrays(entries["norms", 3])[0]
    expected = model.features(files[0], layers=[3]).layers[3].patches[0].flatten(0, 1).norm(dim=-1)
    np.testing.assert_allclose(norms, expected.numpy(), rtol=1e-5)


def test_attention_of_the_page_is_in_times_uniform(tmp_path: Path) -> None:
    model, files = tiny(), pictures(tmp_path, 1)
    explore([model], files, tmp_path / "page.html", layers=[2])
    entries = {d["kind"]: d for d in held(tmp_path / "page.html")["data"]}
    rows = model.attention(files[0], block=2)[0]  # (H, T, T)
    tokens = rows.shape[-1]
    for kind, expected in {
        "heads": rows[:, 1:, 1:].flatten(0, 1),
        "mean": rows.mean(0)[1:, 1:],
        "cls": rows[:, 0, 1:],
    }.items():
        values, scales = arrays(entries[kind])
        shown = values.reshape(len(scales), -1) * scales[:, None].astype(float)
        limit = expected.max(-1, keepdim=True).values.numpy() * tokens * (1 / 510 + 1e-5)
        assert (np.abs(shown - expected.numpy() * tokens) <= limit).all(), kind


def test_what_does_not_fit_is_left_out_and_named(tmp_path: Path) -> None:
    model, files = tiny(patch=4), pictures(tmp_path)
    whole = explore([model], files, tmp_path / "whole.html")
    small = explore([model], files, tmp_path / "small.html", max_bytes=whole.bytes // 2)
    for result, name in ((whole, "whole"), (small, "small")):
        assert result.bytes == (tmp_path / f"{name}.html").stat().st_size
    assert small.bytes <= whole.bytes // 2
    assert small.encoders[0].left_out and not whole.encoders[0].left_out
    assert small.encoders[0].left_out[0].startswith("attention from patches by head")
    assert set(small.encoders[0].kept) | set(small.encoders[0].left_out) == set(
        whole.encoders[0].kept
    )
    (encoder,) = held(tmp_path / "small.html")["encoders"]
    assert encoder["left_out"] == list(small.encoders[0].left_out)
    with pytest.raises(VitcliError, match="too small for the features"):
        explore([model], files, tmp_path / "none.html", max_bytes=20_000)
    assert not (tmp_path / "none.html").exists()


def test_a_name_cannot_end_the_script(tmp_path: Path) -> None:
    (file,) = pictures(tmp_path, 1)
    odd = tmp_path / "<!--<script>&.png"
    Path(file).rename(odd)
    explore([tiny()], [str(odd)], tmp_path / "page.html")
    assert held(tmp_path / "page.html")["images"][0]["name"] == odd.name
    assert "<!--<script>" not in (tmp_path / "page.html").read_text()


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    model = tiny()
    assert choose_layers(model, None) == [1, 2, 3] and choose_layers(model, [-1, 0]) == [0, 3]
    with pytest.raises(VitcliError, match="expected 0 to 3"):
        choose_layers(model, [4])
    with pytest.raises(VitcliError, match="1 or 2 encoders"):
        explore([model] * 3, [], tmp_path / "p.html")
    with pytest.raises(VitcliError, match=r"\.html"):
        explore([model], [], tmp_path / "p.png")
    with pytest.raises(VitcliError, match="no image could be read"):
        explore([model], [str(tmp_path / "missing.png")], tmp_path / "p.html")
    broken = tiny()
    with torch.no_grad():
        broken.encoder.vit.blocks[1].feed_forward.fc2.bias.fill_(float("nan"))  # type: ignore[union-attr]
    with pytest.raises(VitcliError, match=r"not finite .*from layer 2 on"):
        explore([broken], [], tmp_path / "p.html")


def test_the_command_says_the_size_before_it_writes(tmp_path: Path) -> None:
    files = pictures(tmp_path)
    options = [part for key, value in TINY.items() for part in ("--set", f"{key}={value}")]
    arguments = ["explore", *files, "--preset", "vit-ti16", *options, "--json"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "p.html")])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    assert answer["bytes"] == (tmp_path / "p.html").stat().st_size
    assert f"writing {data_size(answer['bytes'])}" in done.stderr
    marked = tmp_path / "q[b].html"  # no markup of the terminal's
    shown = CliRunner().invoke(app, [*arguments[:-1], "--out", str(marked)])
    assert f"{marked}  {data_size(answer['bytes'])}, {len(files)} images" in shown.stdout
    done = CliRunner().invoke(app, [*arguments, "gone.png", "--out", str(tmp_path / "q.html")])
    assert done.exit_code == 1 and len(json.loads(done.stdout)["failed"]) == 1
    done = CliRunner().invoke(app, [*arguments, "--layers", "1,x", "--out", "q.html"])
    assert done.exit_code == 2 and "--layers 1,x" in done.stderr


def test_an_image_that_one_encoder_refuses_is_left_out_for_both(tmp_path: Path) -> None:
    """The smart resize refuses a longer side of more than 200 times the shorter."""
    config = PreprocessConfig(
        resize="smart", resize_size=None, multiple=32, min_pixels=32 * 32, max_pixels=64 * 64
    )
    picky = dataclasses.replace(tiny(patch=8, seed=1), known_preprocessing=config)
    narrow = tmp_path / "narrow.png"
    Image.new("RGB", (402, 2)).save(narrow)
    file = pictures(tmp_path)[0]
    for models in ([tiny(), picky], [picky, tiny()]):
        page = explore(models, [str(narrow), file], tmp_path / "p.html")
        assert page.images == (Path(file).name,)
        assert [(one.path, one.code) for one in page.failed] == [(str(narrow), "unsupported")]
        assert [len(one.grids) for one in page.encoders] == [1, 1]
        assert grid(models, [str(narrow), file]).images == (file,)
