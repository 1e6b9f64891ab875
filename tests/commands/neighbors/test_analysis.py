"""Nearest images against scikit-learn's brute force."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.neighbors import NearestNeighbors

from vitcli.commands.embed.analysis import encode_folder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.job import (
    CHECKSUMS,
    INPUTS,
    MANIFEST,
    iterate_parts,
)
from vitcli.commands.embed.parts import FORMATS
from vitcli.commands.embed.result import FolderOptions, recalled, remembered
from vitcli.commands.neighbors.analysis import neighbors, pictures
from vitcli.config.request import ModelRequest
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError
from vitcli.loading import load_model

REQUEST = ModelRequest(
    settings=tuple(
        parse_setting(f"encoder.{s}")
        for s in ("patch_size=8", "hidden=24", "depth=1", "heads=3", "mlp_hidden=40")
    ),
    image_size=(16, 16),
    seed=5,
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`in` with 21 images and one that fails, their vectors in `out`."""
    place = tmp_path_factory.mktemp("neighbours")
    rng = np.random.default_rng(0)
    (place / "in/d").mkdir(parents=True)
    for number in range(21):
        pixels = rng.integers(0, 256, (9, 12 + number, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"in/d/{number:02d}.png")
    (place / "in/bad.png").write_bytes(b"no")
    options = FolderOptions(part_rows=5, workers=1)
    listing = Listing((str(place / "in"),))
    encode_folder(load_model(REQUEST), listing, place / "out", options)
    return place


ROUNDING = 24 * 2.0**-23
"""Of a float32 dot product of two unit vectors with 24 entries."""


def test_as_brute_force_finds_them(place: Path) -> None:
    parts = list(iterate_parts(place / "out"))
    names = [name for part in parts for name in part.names]
    vectors = np.concatenate([part.arrays["vector"] for part in parts])
    assert names[0] == "bad.png"
    vectors = vectors.astype(np.float64)
    reference = NearestNeighbors(n_neighbors=8, metric="cosine").fit(vectors[1:])
    distances, rows = reference.kneighbors(vectors[[7]])
    result = neighbors(place / "out", names[7], count=7)
    assert [n.path for n in result.neighbours] == [names[1 + row] for row in rows[0][1:]]
    np.testing.assert_allclose(
        [n.cosine for n in result.neighbours], 1 - distances[0][1:], rtol=0, atol=ROUNDING
    )
    assert (result.searched, result.index) == (20, 7)
    unit = vectors[1:] / np.linalg.norm(vectors[1:], axis=1, keepdims=True)
    others = np.delete(unit @ unit[6], 6)
    assert result.cosine_mean == pytest.approx(others.mean(), abs=ROUNDING)
    assert result.cosine_std == pytest.approx(others.std(), abs=ROUNDING)


def test_another_file_is_encoded_by_the_same_model(place: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.png"
    copy.write_bytes((place / "in/d/03.png").read_bytes())
    result = neighbors(place / "out", str(copy), count=2)
    assert result.neighbours[0].path == "d/03.png" and result.index is None
    assert result.neighbours[0].cosine == pytest.approx(1)
    assert result.searched == 21
    by_path = neighbors(place / "out", str(place / "in/d/03.png"), count=2)
    assert by_path.index == 4 and by_path.neighbours[0].path != "d/03.png"


def test_one_of_the_images_is_known_under_every_path_to_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(place)
    for path in (tmp_path / "link/in/d/03.png", place / "in/../in/d/03.png"):
        assert neighbors(place / "out", str(path), count=1).index == 4
    # Names as they were given, here two relative ones and an absolute one.
    monkeypatch.chdir(place)
    names = ("./in/d/01.png", "in/d/02.png", str(place / "in/d/03.png"))
    encode_folder(load_model(REQUEST), Listing(names), tmp_path / "v", FolderOptions())
    for number in (1, 2, 3):
        by_name = [f"in/d/{number:02d}.png", f"./in/d/{number:02d}.png"]
        for asked in (*by_name, str(place / by_name[0])):
            found = neighbors(tmp_path / "v", asked)
            assert len(found.neighbours) == 2, asked
            assert found.cosine_mean < 1 - 1e-6


def test_pictures_are_those_of_the_rows(place: Path) -> None:
    result = neighbors(place / "out", "d/03.png", count=3)
    first, *rest = pictures(result)
    assert first.size == (15, 9)
    assert [p.size for p in rest] == [(n.width, n.height) for n in result.neighbours]


@pytest.mark.parametrize("line", [b"[" * 100_000, b"{}", b"[1, 2]", b"\xff", b""])
def test_a_damaged_list_of_inputs_is_named(place: Path, tmp_path: Path, line: bytes) -> None:
    copy = shutil.copytree(place / "out", tmp_path / "copy")
    (inputs,) = copy.rglob(INPUTS)
    query = place / "in/d/07.png"
    result = neighbors(inputs.parent, query, count=1)
    inputs.write_bytes(line + b"\n" + inputs.read_bytes().partition(b"\n")[2])
    with pytest.raises(VitcliError, match="list of inputs is damaged"):
        pictures(dataclasses.replace(result, index=0))


def test_what_cannot_be_asked(place: Path, tmp_path: Path) -> None:
    with pytest.raises(VitcliError, match=r"bad\.png: its vector is missing \(unsupported"):
        neighbors(place / "out", "bad.png")
    with pytest.raises(VitcliError, match="No such file") as caught:
        neighbors(place / "out", "gone.png")
    assert caught.value.exit_code == 1
    _, _, folder, image = shlex.split(caught.value.hint)
    assert neighbors(folder, image).index is not None  # the hint's command works
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "bad.png").write_bytes(b"no")
    listing = Listing((str(tmp_path / "in"),))
    encode_folder(load_model(REQUEST), listing, tmp_path / "none", FolderOptions())
    with pytest.raises(VitcliError, match="No such file") as caught:
        neighbors(tmp_path / "none", "gone.png")
    assert "--retry-failed" in caught.value.hint  # no image has a vector that could be named
    with pytest.raises(VitcliError, match="no vectors of"):
        neighbors(tmp_path, "d/03.png")
    copy, other = tmp_path / "out", tmp_path / "other.png"
    other.write_bytes((place / "in/d/03.png").read_bytes())
    copy.mkdir()
    for path in (place / "out").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    manifest = copy / MANIFEST
    manifest.write_text(manifest.read_text().replace('"seed": 5', '"seed": 6'))
    with pytest.raises(VitcliError, match="not the weights that made"):
        neighbors(copy, str(other))
    (copy / "part-00001.parquet").unlink()
    with pytest.raises(VitcliError, match=r"part-00001\.parquet: is missing"):
        neighbors(copy, "d/03.png")


def test_a_request_comes_back_from_the_manifest(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("name: x")
    request = dataclasses.replace(REQUEST, config_file=file, image_size=(16, 24))
    assert recalled(remembered(request)) == request


def test_an_image_in_memory_is_encoded_by_the_same_model(place: Path) -> None:
    with Image.open(place / "in/d/03.png") as picture:
        found = neighbors(place / "out", picture.convert("RGB"), count=1)
    assert found.neighbours[0].path == "d/03.png" and found.index is None
    assert found.neighbours[0].cosine == pytest.approx(1)


def test_classes_are_counted_and_frame_equal_thumbnails(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, level in (("dark", 0), ("light", 200)):
        (tmp_path / "in" / name).mkdir(parents=True)
        for number in range(4):
            size = (12 + 9 * number, 30)
            pixels = (level + rng.integers(0, 30, (*size, 3))).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"in/{name}/{number}.png")
    inputs = Listing((str(tmp_path / "in"),))
    encode_folder(load_model(REQUEST), inputs, tmp_path / "out", FolderOptions())
    result = neighbors(tmp_path / "out", "light/1.png", count=7)
    assert (result.label, result.same_class) == ("light", 3)
    assert result.class_share == pytest.approx(3 / 7)
    assert [found.label for found in result.neighbours][:3] == ["light"] * 3
    panels = [axes for axes in result.figure().axes if axes.images]
    assert {axes.images[0].get_array().shape for axes in panels} == {(160, 160, 3)}
    frames = [axes.spines["top"].get_edgecolor() for axes in panels]
    assert len(set(frames[:4])) == 1 and len(set(frames[4:])) == 1 and frames[0] != frames[-1]
    assert "3 of 7 neighbors are of its class (light), which is 42.9% of all images" in str(result)


def test_classes_of_a_shard_are_those_that_it_says(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "0.tar", "w") as tar:
        for number, label in enumerate(("cat", "dog", "dog", "cat", "dog")):
            picture = io.BytesIO()
            Image.new("RGB", (8, 8), (50 * number, 0, 90)).save(picture, "PNG")
            for suffix, data in (("png", picture.getvalue()), ("cls", label.encode())):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    listing = Listing((str(tmp_path / "0.tar"),))
    encode_folder(load_model(REQUEST), listing, tmp_path / "out", FolderOptions())
    (name, *_), *_ = (part.names for part in iterate_parts(tmp_path / "out"))
    found = neighbors(tmp_path / "out", name, count=4)
    assert found.label == "cat" and (found.same_class, found.class_share) == (1, 0.25)
    assert sorted(one.label or "" for one in found.neighbours) == ["cat", "dog", "dog", "dog"]


def test_a_folder_of_the_first_release_is_read_and_not_written(place: Path, tmp_path: Path) -> None:
    """Without columns, layers and checksums, and entries without labels."""
    old = tmp_path / "old"
    shutil.copytree(place / "out", old)
    manifest = json.loads((old / MANIFEST).read_text())
    for part in range(5):
        rows, about = FORMATS["parquet"].read(old, part)
        FORMATS["parquet"].write(old, part, rows, _of_first_release(about))
    manifest["settings"] = _of_first_release(manifest["settings"])
    (old / MANIFEST).write_text(json.dumps(manifest))
    (old / CHECKSUMS).unlink()
    lines = [json.loads(line)[:6] for line in (old / INPUTS).read_text().splitlines()]
    (old / INPUTS).write_text("".join(json.dumps(line) + "\n" for line in lines))

    (tmp_path / "copy.png").write_bytes((place / "in/d/03.png").read_bytes())
    for image in ("d/03.png", tmp_path / "copy.png"):
        found, expected = (neighbors(folder, image, count=3) for folder in (old, place / "out"))
        assert found.neighbours == expected.neighbours
    listing = Listing((str(place / "in"),))
    with pytest.raises(VitcliError, match="vectors of the first release") as caught:
        encode_folder(load_model(REQUEST), listing, old, FolderOptions(part_rows=5))
    assert caught.value.exit_code == 2
    (old / "part-00001.parquet").write_bytes((old / "part-00002.parquet").read_bytes())
    with pytest.raises(VitcliError, match=r"part-00001\.parquet: its rows are of other images"):
        neighbors(old, "d/03.png")


def _of_first_release(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key not in ("columns", "layers")}
