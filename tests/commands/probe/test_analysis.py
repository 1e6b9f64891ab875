"""Accuracies that are known beforehand, and intervals from the closed form."""

from __future__ import annotations

import gzip
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from vitcli.cli import app
from vitcli.commands.embed.analysis import encode_folder
from vitcli.commands.embed.inputs import Listing
from vitcli.commands.embed.result import FolderOptions
from vitcli.commands.probe.analysis import Labeled, probe
from vitcli.config.load import parse_setting
from vitcli.config.request import ModelRequest
from vitcli.errors import VitcliError
from vitcli.model import load_model

SETTINGS = [
    f"encoder.{s}" for s in ("patch_size=8", "hidden=24", "depth=1", "heads=3", "mlp_hidden=40")
]
SMALL = [f"--set={setting}" for setting in SETTINGS] + ["--image-size=16"]
REQUEST = ModelRequest(settings=tuple(map(parse_setting, SETTINGS)), image_size=(16, 16))


def labeled(vectors: np.ndarray, labels: list[str], is_test: np.ndarray | None = None) -> Labeled:
    return Labeled("m", "w", vectors, np.array(labels, object), is_test)


def test_classes_that_are_apart_are_all_told_and_noise_is_not() -> None:
    rng = np.random.default_rng(0)
    labels = [name for name in "abc" for _ in range(30)]
    centers = np.repeat(np.eye(3, 8) * 20, 30, axis=0)
    apart = probe(Path("x"), labeled(centers + rng.normal(size=(90, 8)), labels), k=5)
    assert [score.accuracy for score in apart.scores] == [1.0, 1.0]
    assert apart.protocol == "5-fold cross-validation"
    assert apart.largest_share == pytest.approx(1 / 3)
    noise = probe(Path("x"), labeled(rng.normal(size=(90, 8)), labels), k=5)
    for score in noise.scores:
        assert score.tested == 90 and score.low < 1 / 3 < score.high


def test_neighbors_are_counted_by_direction_not_length() -> None:
    angles = np.array([0.0, 0.1, 0.2, 1.3, 1.4, 1.5])
    lengths = np.array([1.0, 100, 5, 1, 100, 5])
    vectors = np.stack([np.cos(angles), np.sin(angles)], axis=1) * lengths[:, None]
    result = probe(Path("x"), labeled(vectors, list("aaabbb")), k=1, folds=3)
    assert result.scores[0].correct == 6


def test_no_more_neighbors_are_claimed_than_there_were() -> None:
    vectors = np.random.default_rng(0).normal(size=(8, 4))
    result = probe(Path("x"), labeled(vectors, ["a", "b"] * 4), k=20)
    assert result.protocol == "4-fold cross-validation"  # that leaves six to learn from
    assert [score.method for score in result.scores] == ["6 nearest neighbors", "linear probe"]


def test_a_given_split_is_kept() -> None:
    vectors = np.array([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1], [1, 0], [0, 1], [1, 0]])
    is_test = np.array([False] * 4 + [True] * 3)
    # The last one's class was never learned from, the one before is mislabeled on purpose.
    result = probe(Path("x"), labeled(vectors, ["a", "a", "b", "b", "a", "a", "z"], is_test), k=1)
    assert result.protocol == "learned from 4 images, tested on 2 others"
    assert [(s.correct, s.tested) for s in result.scores] == [(1, 2), (1, 2)]
    assert result.unlabelled == 1


def test_too_few_to_say() -> None:
    with pytest.raises(VitcliError, match="1 classes of at least two images"):
        probe(Path("x"), labeled(np.eye(4), ["a", "a", "b", "c"]))


def write_idx(path: Path, values: np.ndarray) -> None:
    head = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape)
    path.write_bytes(gzip.compress(head + values.astype(np.uint8).tobytes()))


def answer(*arguments: str | Path, code: int = 0) -> dict[str, object]:
    result = CliRunner().invoke(app, ["probe", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else {"error": result.stderr}


def test_files_of_fashion_mnist(tmp_path: Path) -> None:
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for half, count in (("train", 40), ("t10k", 20)):
        labels = np.arange(count) % 2
        # Trousers are bright, tops are dark: any encoder's vectors tell them.
        images = rng.integers(0, 30, (count, 28, 28)) + 200 * labels[:, None, None]
        write_idx(folder / f"{half}-images-idx3-ubyte.gz", images)
        write_idx(folder / f"{half}-labels-idx1-ubyte.gz", labels)
    said = answer(folder, *SMALL, "--limit", "30", "--k", "3")
    assert said["classes"] == ["T-shirt/top", "Trouser"]
    assert said["protocol"] == "learned from 30 images, tested on 20 others"
    assert [score["accuracy"] for score in said["scores"]] == [1.0, 1.0]  # type: ignore[attr-defined]


def test_folders_of_classes_and_their_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for name, level in (("dark", 20), ("light", 200)):
            folder = tmp_path / "in" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = (level + rng.integers(0, 20, (20, 20, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    (tmp_path / "in/val/dark/bad.png").write_bytes(b"")
    said = answer(tmp_path / "in", *SMALL, "--k", "3", "--workers", "1", "--out", tmp_path / "out")
    assert said["protocol"] == "learned from 12 images, tested on 6 others"
    assert [s["correct"] for s in said["scores"]] == [6, 6]  # type: ignore[attr-defined]
    assert said["failed"] == 1
    again = answer(tmp_path / "out", "--k", "3")
    assert {**again, "folder": ""} == {**said, "folder": ""}
    # The same classes where the inputs were named one by one, from outside their folder.
    model = load_model(REQUEST)
    for name, inputs in {
        "folders": tuple(str(path) for path in sorted((tmp_path / "in/train").iterdir())),
        "files": tuple(str(path) for path in sorted((tmp_path / "in/train").rglob("*.png"))),
    }.items():
        encode_folder(REQUEST, model, Listing(inputs), tmp_path / name, FolderOptions())
        assert answer(tmp_path / name, "--k", "1")["classes"] == ["dark", "light"]
    refused = answer(tmp_path / "out", *SMALL, code=2)
    assert "a model cannot change them" in str(refused["error"])


def test_images_without_folders_are_told_before_they_are_encoded(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    vectors = tmp_path / "vectors"
    result = CliRunner().invoke(app, ["probe", *SMALL, str(tmp_path), "--out", str(vectors)])
    assert result.exit_code == 2 and "no folders in there" in result.stderr
    assert not vectors.exists()


def test_a_missing_library_is_told_before_images_are_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("red", "blue"):
        (tmp_path / "in" / name).mkdir(parents=True)
        Image.new("RGB", (16, 16), name).save(tmp_path / "in" / name / "0.png")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    out = tmp_path / "out"
    told = CliRunner().invoke(app, ["probe", str(tmp_path / "in"), "--out", str(out), *SMALL])
    assert told.exit_code == 2 and "probe needs scikit-learn" in told.output
    assert not out.exists()
