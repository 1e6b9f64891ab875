"""Accuracies that are known beforehand, and what the command makes of folders."""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

import vitcli
from tests.commands.probe.sources import SETTINGS, SMALL, blobs, labeled, write_idx, write_pictures
from vitcli.cli import app
from vitcli.commands.probe.labeled import Encoded, Images, with_classes, with_groups
from vitcli.commands.probe.result import ProbeResult
from vitcli.commands.probe.scores import Trial
from vitcli.errors import VitcliError


def single(*arguments: Any, k: int = 20, folds: int = 5, **more: Any) -> ProbeResult:
    return Trial(Path("x"), labeled(*arguments, **more), k, folds).single()


def test_classes_that_are_apart_are_all_told_and_noise_is_not() -> None:
    result = single(*blobs(30, 3, 20.0), k=5)
    assert [score.accuracy for score in result.scores] == [1.0, 1.0]
    assert result.protocol == "5-fold cross-validation with 5 split seeds"
    assert result.largest_share == pytest.approx(1 / 3)
    assert result.verdict_code == "better" and "always predicting 'a' is right" in result.verdict
    noise = single(*blobs(30, 3, 0.0), k=5)
    for score in noise.scores:
        assert score.tested == 5 * 90 and score.low < 1 / 3 < score.high
    assert noise.verdict_code == "no better"
    assert noise.verdict.startswith("no better than always predicting 'a' (33.3%)")


def test_small_classes_are_found_by_neighbors_too() -> None:
    """Three classes of five: k = 20 of 12 images would vote for whatever is most frequent."""
    result = single(*blobs(5, 3, 20.0))
    assert [score.method for score in result.scores] == ["4 nearest neighbors", "linear probe"]
    assert [score.accuracy for score in result.scores] == [1.0, 1.0]


def test_copies_never_stand_on_both_sides() -> None:
    """30 pictures, four copies each, random labels: nothing can be learned."""
    rng = np.random.default_rng(0)
    vectors = np.tile(rng.normal(size=(30, 8)), (4, 1))
    labels = [str(label) for label in rng.integers(0, 2, 120)]
    result = single(vectors, labels)
    assert result.duplicates == 120 and result.groups == 30
    for score in result.scores:
        assert score.accuracy < 0.75 and score.high - score.low > 0.25
    assert result.verdict_code != "better"


def test_groups_stay_on_one_side() -> None:
    """Near-copies of 24 pictures with random labels: without groups they look easy."""
    rng = np.random.default_rng(1)
    names = np.repeat(np.arange(24), 5)
    vectors = rng.normal(size=(24, 8))[names] + 1e-3 * rng.normal(size=(120, 8))
    labels = [str(label) for label in np.repeat(rng.integers(0, 2, 24), 5)]
    assert single(vectors, labels, k=3).scores[0].accuracy > 0.95
    grouped = single(vectors, labels, groups=[str(name) for name in names], k=3)
    assert grouped.groups == 24 and grouped.scores[0].accuracy < 0.8


def test_a_given_split_is_kept() -> None:
    vectors = np.array([[1.0, 0], [1, 0.1], [0, 1], [0.1, 1], [2, 0], [0, 2], [3, 0], [1, 0.1]])
    is_test = np.array([False] * 4 + [True] * 4)
    # The classes of the last but one were never learned from; the one before it is mislabeled on
    # purpose; the last one is a copy of an image that is learned from.
    labels = ["a", "a", "b", "b", "a", "a", "z", "a"]
    result = single(vectors, labels, is_test, k=1)
    assert result.protocol == "learned from 4 images, tested on 2 others"
    assert [(s.correct, s.tested) for s in result.scores] == [(1, 2), (1, 2)]
    assert (result.unlabelled, result.left_out) == (1, 1)


def test_four_of_six_images_are_too_few_for_either_verdict() -> None:
    """Wilson's interval of 4 of 6 is 0.300 to 0.903: both chance (1/3) and a good score."""
    vectors = np.repeat(np.eye(3), 6, axis=0) + 0.01 * np.random.default_rng(0).normal(size=(18, 3))
    labels = [*"aaaaab", *"bbbbba", *"cccccc"]  # one of a and one of b are the other's
    result = single(vectors, labels, np.array([False, False, False, False, True, True] * 3))
    assert [(s.correct, s.tested) for s in result.scores] == [(4, 6), (4, 6)]
    assert result.verdict_code == "too few images"
    assert result.verdict.startswith(
        "tested on too few images to tell it from always predicting 'a' (33.3%): linear probe 66.7%"
    )


def test_a_test_split_without_classes_leaves_the_training_images_to_be_probed() -> None:
    names = [f"train/{label}/{i}.png" for label in "xyz" for i in range(6)]
    names += [f"test/{i}.png" for i in range(5)]
    vectors = np.zeros((len(names), 2), np.float32)
    found = with_classes(Images(tuple(names), (Encoded("m", "w", vectors),)))
    assert found.is_test is None and len(found.names) == 18 and found.unlabelled == 5


def test_validation_images_are_tested_and_test_images_only_if_asked_for(tmp_path: Path) -> None:
    """As `train` does: val decides, test is reported once."""
    for number, (split, count) in enumerate((("train", 6), ("dev", 3), ("TEST", 4))):
        write_pictures(tmp_path / "in" / split, {"dark": 20, "light": 200}, count, number)
    how = (*SMALL, "--k", "3", "--workers", "1")
    result = CliRunner().invoke(app, ["probe", str(tmp_path / "in"), *how, "--json"])
    assert (
        json.loads(result.stdout)["protocol"] == "learned from 12 images, tested on 6 others (val)"
    )
    assert "test left out: 8 images; --test tests on it in place of val" in result.stderr
    said = answer(tmp_path / "in", *how, "--test", "--out", tmp_path / "out")
    assert said["protocol"] == "learned from 12 images, tested on 8 others (test)"
    assert said["images"] == 20
    assert answer(tmp_path / "out", "--test", "--k", "3")["protocol"] == said["protocol"]
    for place in ("dark", "light"):
        shutil.rmtree(tmp_path / "in" / "TEST" / place)
    lacking = answer(tmp_path / "in", *how, "--test", code=2)
    assert "no train and test splits with classes" in lacking["error"]
    both = answer(tmp_path / "out", "--test", "--unlabeled", code=2)
    assert "--test: needs classes (got --unlabeled)" in both["error"]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"limit": 3}, "--limit"),
        ({"out": "x"}, "--out"),
        ({"tokens": "cls"}, "--tokens"),
        ({"workers": 1}, "--workers"),
        ({"model": "vit-ti16"}, "a model"),
    ],
)
def test_what_is_for_images_is_refused_for_vectors(
    tmp_path: Path, given: dict[str, Any], named: str
) -> None:
    """From Python as on the command line, before anything is loaded."""
    (tmp_path / "_manifest.json").write_text("{}")
    with pytest.raises(VitcliError, match=rf"holds vectors already \({named} is only for images"):
        vitcli.probe(tmp_path, **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"unlabeled": True, "targets": "a.csv"}, "only one of them is possible"),
        ({"unlabeled": True, "seeds": 2}, "--seeds: has no effect with --unlabeled"),
        ({"targets": "a.csv", "test": True}, "--test: needs classes"),
    ],
)
def test_arguments_of_another_question_are_refused(
    tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(VitcliError, match=message):
        vitcli.probe(tmp_path, **given)


def test_too_few_to_say() -> None:
    with pytest.raises(VitcliError, match="got 1 classes"):
        single(np.eye(4), ["a", "a", "b", "c"])
    with pytest.raises(VitcliError, match="at least two different groups"):
        single(np.random.default_rng(0).normal(size=(8, 3)), list("aaaabbbb"), groups="xxxxyyyy")


def test_confusions_name_the_worst_pairs() -> None:
    """`a` and `b` come from one cloud, `c` is far away."""
    vectors, _ = blobs(40, 2, 8.0)
    labels = ["a", "b"] * 20 + ["c"] * 40
    result = Trial(Path("x"), labeled(vectors, labels), confusion=True).single()
    assert {(pair.is_class, pair.said_class) for pair in result.confusions} == {
        ("a", "b"),
        ("b", "a"),
    }
    assert result.per_class[-1].name == "c" and result.per_class[-1].accuracy == 1.0
    matrix = np.array(result.confusion_matrix)
    assert matrix.sum(1).tolist() == [20, 20, 40]
    first = result.confusions[0]
    assert first.count == matrix["ab".index(first.is_class), "ab".index(first.said_class)]
    assert first.share == first.count / 20


def test_numbers_are_predicted_by_ridge() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(80, 4)).astype(np.float32)
    values = vectors @ np.array([1.0, 2, 3, 4]) + 0.5 * rng.normal(size=80)
    result = single(vectors, values)
    assert result.regression is not None and result.scores == ()
    assert result.regression.low < 1 - 0.25 / values.var() < result.regression.high
    assert result.verdict.startswith("R² 0.9") and result.verdict_code == "better"
    assert single(vectors, rng.normal(size=80)).verdict_code == "no better"
    outlier = np.where(np.arange(80) == 7, 9.0, 0.0) + vectors @ np.array([30.0, 2, 3, 4])
    found = single(vectors, outlier).regression  # one large error: a wide interval near 1
    assert found is not None and found.r2 < found.high == 1.0


def answer(*arguments: str | Path, code: int = 0) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["probe", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else {"error": result.stderr}


def test_files_in_the_format_of_mnist(tmp_path: Path) -> None:
    """Their labels are not Fashion-MNIST's, whatever the folder is called."""
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
    assert said["classes"] == ["0", "1"]
    assert said["protocol"] == "learned from 30 images, tested on 20 others"
    assert [score["accuracy"] for score in said["scores"]] == [1.0, 1.0]
    for option, value in (("--layers", "all"), ("--out", tmp_path / "out"), ("--workers", 2)):
        refused = answer(folder, *SMALL, option, value, code=2)["error"]
        assert f"{option}: is for a folder of images" in refused
    refused = answer(folder, *SMALL, "--set=encoder.cls_token=false", "--set=encoder.pooling=mean",
                     "--tokens", "cls", code=2)["error"]  # fmt: skip
    assert "--tokens cls: vit-b16 does not have such tokens" in refused


def test_folders_of_classes_and_their_vectors(tmp_path: Path) -> None:
    for number, (split, count) in enumerate((("Train", 6), ("valid", 3))):
        write_pictures(tmp_path / "in" / split, {"dark": 20, "light": 200}, count, number)
    (tmp_path / "in/valid/dark/bad.png").write_bytes(b"")
    said = answer(tmp_path / "in", *SMALL, "--k", "3", "--workers", "1", "--out", tmp_path / "out")
    assert said["protocol"] == "learned from 12 images, tested on 6 others (val)"
    assert [s["correct"] for s in said["scores"]] == [6, 6]
    assert said["failed"] == 1
    again = answer(tmp_path / "out", "--k", "3")
    assert {**again, "folder": "", "verdict": ""} == {**said, "folder": "", "verdict": ""}
    refused = answer(tmp_path / "out", *SMALL, code=2)
    assert "a model is only for images" in refused["error"]


def test_classes_are_the_same_however_their_images_were_named(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 4)
    settings = dict(setting.split("=") for setting in SETTINGS)
    model = vitcli.load(set={key: int(value) for key, value in settings.items()}, image_size=16)
    inputs = {
        "folders": [str(path) for path in sorted((tmp_path / "in").iterdir())],
        "files": [str(path) for path in sorted((tmp_path / "in").rglob("*.png"))],
    }
    for name, paths in inputs.items():
        vitcli.embed(model, paths, tmp_path / name)
        assert answer(tmp_path / name, "--k", "1")["classes"] == ["dark", "light"]


def test_groups_and_targets_from_files(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 6)
    answer(tmp_path / "in", *SMALL, "--out", tmp_path / "out", "--workers", "1")
    names = [f"{c}/{i}.png" for c in ("dark", "light") for i in range(6)]
    groups = tmp_path / "groups.csv"
    groups.write_text("".join(f"{name},{place // 2}\n" for place, name in enumerate(names)))
    said = answer(tmp_path / "out", "--groups", groups)
    assert (said["groups"], said["protocol"][:6]) == (6, "3-fold")
    groups.write_text("dark/0.png,1\n")
    assert (
        "11 of 12 images are without a group"
        in answer(tmp_path / "out", "--groups", groups, code=2)["error"]
    )
    alone = answer(tmp_path / "out", "--groups", "parent", code=2)
    assert "at least two different groups" in alone["error"]
    targets = tmp_path / "targets.csv"
    lines = [f"{name},{200 if name[0] == 'l' else 20}\n" for name in names]
    targets.write_text("path,brightness\n" + "".join(lines))
    said = answer(tmp_path / "out", "--targets", targets)
    assert said["regression"]["r2"] > 0.9 and said["scores"] == []
    targets.write_text("".join(f"{name},20\n" for name in names))
    same = answer(tmp_path / "out", "--targets", targets, code=2)
    assert "every image has the number 20" in same["error"]
    targets.write_text("path,brightness\ndark/0.png,bright\n")
    assert (
        "targets.csv:2: is not a number (got 'bright')"
        in (answer(tmp_path / "out", "--targets", targets, code=2)["error"])
    )


def tabled(rows: Sequence[tuple[str, str]], names: Sequence[str], file: Path) -> Images:
    """Images of these names with the groups of a file of these rows."""
    file.write_text("".join(f"{path},{value}\n" for path, value in rows), encoding="utf-8")
    images = Images(tuple(names), (Encoded("m", "w", np.ones((len(names), 2), np.float32)),))
    return with_groups(images, str(file))


def test_a_table_names_images_as_other_systems_do(tmp_path: Path) -> None:
    rows = [("in\\cafe\u0301\\1.png", "a"), ("./caf\u00e9/2.png", "b"), ("3.png", "c")]
    names = ["in/caf\u00e9/1.png", "in/cafe\u0301/2.png", "in/tea/3.png"]
    assert tabled(rows, names, tmp_path / "groups.csv").groups == ("a", "b", "c")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([("1.png", "a")], r"1\.png is more than one image \(cat/1\.png, dog/1\.png\)"),
        ([("cat/1.png", "a"), ("cat/1.png", "b"), ("dog/1.png", "a")], "given twice"),
    ],
)
def test_a_table_that_can_be_read_two_ways_is_refused(
    rows: list[tuple[str, str]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(VitcliError, match=said):
        tabled(rows, ["cat/1.png", "dog/1.png"], tmp_path / "groups.csv")


def test_the_confusion_matrix_is_written(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"2": 20, "10": 200}, 5)
    answer(tmp_path / "in", *SMALL, "--out", tmp_path / "out", "--workers", "1")
    answer(tmp_path / "out", "--confusion", tmp_path / "c.csv")
    # Classes that are numbers are in the order of the numbers.
    assert (tmp_path / "c.csv").read_text() == "is \\ said,2,10\n2,5,0\n10,0,5\n"
    answer(tmp_path / "out", "--confusion", tmp_path / "c.png", "--plot", tmp_path / "p.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_images_without_folders_are_told_before_they_are_encoded(tmp_path: Path) -> None:
    Image.new("RGB", (16, 16)).save(tmp_path / "a.png")
    vectors = tmp_path / "vectors"
    result = CliRunner().invoke(app, ["probe", *SMALL, str(tmp_path), "--out", str(vectors)])
    assert result.exit_code == 2 and "classes" in result.stderr
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
    assert told.exit_code == 2 and "scikit-learn is missing" in told.output
    assert not out.exists()


def test_every_layer_is_probed_where_the_vectors_hold_layers(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 5)
    said = answer(
        tmp_path / "in", *SMALL, "--layers", "all", "--workers", "1", "--out", tmp_path / "out"
    )
    assert {one["name"] for one in said["ranked"]} == {"layer 0", "layer 1"}
    assert said["timing"] == "" and said["ranked"][0]["cost"] is None
    last = answer(tmp_path / "out", "--layers", "-1", "--plot", tmp_path / "layers.png")
    assert [one["layer"] for one in last["ranked"]] == [1]
    missing = answer(tmp_path / "out", "--layers", "3", code=2)
    assert "does not hold these layers (it holds: 0, 1)" in missing["error"]


def test_images_are_probed_without_keeping_their_vectors(tmp_path: Path) -> None:
    write_pictures(tmp_path / "in", {"dark": 20, "light": 200}, 5)
    said = answer(tmp_path / "in", *SMALL, "--workers", "1")
    assert [score["accuracy"] for score in said["scores"]] == [1.0, 1.0]
    layers = answer(tmp_path / "in", *SMALL, "--workers", "1", "--layers", "all")
    assert [one["vectors"] for one in layers["ranked"]] == ["", ""]
    for split, numbers in (("train", range(6)), ("val", range(6, 9))):
        with tarfile.open(tmp_path / f"{split}.tar", "w") as shard:
            for number in numbers:
                name = ("dark", "light")[number % 2]
                picture = tmp_path / f"in/{name}/{number % 5}.png"
                label = tmp_path / f"{number}.cls"
                label.write_text(str(number % 2))
                shard.add(picture, f"{number}.png")
                shard.add(label, f"{number}.cls")
    (tmp_path / "shards").mkdir()
    for split in ("train", "val"):
        (tmp_path / f"{split}.tar").rename(tmp_path / f"shards/{split}.tar")
    said = answer(tmp_path / "shards", *SMALL, "--workers", "1", "--k", "1")
    assert said["classes"] == ["0", "1"] and said["protocol"].startswith("learned from 6 images")
