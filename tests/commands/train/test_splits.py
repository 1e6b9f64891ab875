from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.commands.train.sources import SMALL_RUN, Lines, folder
from vitcli.commands.train import analysis as train
from vitcli.commands.train.splits import (
    Input,
    Inputs,
    assign,
    held_out,
    read_inputs,
    repeats,
    same_inputs,
    side_notes,
)
from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError
from vitcli.images.folders import read_folder


def images(count: int, label: str = "a") -> list[Input]:
    return [Input(f"{label}/{i}.png", 1, "train", label) for i in range(count)]


def val_names(found: list[Input]) -> set[str]:
    return {image.path for image in found if image.side == "val"}


def test_a_files_side_follows_from_its_name_and_the_seed_alone() -> None:
    """Of 1,000 images and the same with 500 more, the first 1,000 stand where they stood."""
    few, many = (val_names(held_out(images(n), 0.1, 0)) for n in (1000, 1500))
    assert few == {name for name in many if int(name[2:-4]) < 1000}
    assert 65 <= len(few) <= 135  # 100 +- 3.7 standard deviations of a binomial
    assert val_names(held_out(images(1000), 0.1, 1)) != few


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("fraction", [0.001, 0.5, 0.999])
def test_every_class_of_two_is_on_both_sides(count: int, fraction: float) -> None:
    found = held_out(images(count, "a") + images(count, "b"), fraction, 0)
    for label in "ab":
        assert {image.side for image in found if image.label == label} == {"train", "val"}


def test_a_class_of_one_trains_and_is_named(tmp_path: Path) -> None:
    found = held_out([*images(4, "a"), *images(1, "10"), *images(1, "9")], 0.5, 0)
    assert all(image.side == "train" for image in found if image.label != "a")
    folder(tmp_path, 5)
    (tmp_path / "green").mkdir()
    shutil.copy(tmp_path / "red" / "1.png", tmp_path / "green" / "x.png")
    notes = side_notes(assign(read_folder(tmp_path), ImagesData(), 0))
    assert "without a validation image: green (a class of one image trains)" in notes


def test_names_that_are_no_text_are_trained_on(tmp_path: Path) -> None:
    """A file and a class whose names are not UTF-8, as an old archive leaves them."""
    path = folder(tmp_path / "pictures", 6)
    try:
        (path / os.fsdecode(b"caf\xe9")).mkdir()
        for name in (b"caf\xe9/\xfe.png", b"caf\xe9/1.png", b"red/\xff.png"):
            shutil.copy(path / "blue" / "1.png", path / os.fsdecode(name))
    except OSError:
        pytest.skip("this file system has no such names")
    out = tmp_path / "run"
    whole = train.train(path, **SMALL_RUN, out=out)
    assert whole.config["classes"] == ["blue", "caf\\xe9", "red"]
    assert train.train(out=out, resume=True, device="cpu").history == whole.history


def test_one_class_is_refused(tmp_path: Path) -> None:
    """It would be recognized on every image: an accuracy of 1 that says nothing."""
    (folder(tmp_path, 5) / "blue").rename(tmp_path / ".hidden")
    with pytest.raises(VitcliError, match=r"contains one class \(red, expected at least 2\)"):
        train.train(tmp_path, **SMALL_RUN)


def test_a_test_split_without_classes_cannot_be_reported(tmp_path: Path) -> None:
    folder(tmp_path / "train", 5)
    (folder(tmp_path / "test", 2) / "blue" / "0.png").rename(tmp_path / "test" / "0.png")
    shutil.rmtree(tmp_path / "test" / "blue")
    shutil.rmtree(tmp_path / "test" / "red")
    train.train(tmp_path, **SMALL_RUN)
    with pytest.raises(VitcliError, match="its test images have no classes, which --test needs"):
        train.train(tmp_path, **SMALL_RUN, test=True)


def test_a_class_whose_held_out_images_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = folder(tmp_path / "pictures", 12)
    for image in held_out([*images(12, "blue"), *images(12, "red")], 0.1, 0):
        if image.side == "val" and image.label == "red":
            (path / image.path).write_bytes(b"no image")
    lines: list[str] = []
    train.train(path, **SMALL_RUN, check=True, progress=Lines(lines))
    assert "without a validation image: red" in lines


def test_the_same_bytes_in_two_classes_or_on_two_sides_are_reported(tmp_path: Path) -> None:
    path = folder(tmp_path / "pictures", 12)
    shutil.copy(path / "red" / "1.png", path / "blue" / "copy.png")
    lines: list[str] = []
    train.train(path, **SMALL_RUN, progress=Lines(lines))
    assert any(line.startswith("the same file in two classes: 1 (") for line in lines)
    shutil.rmtree(path)
    folder(path / "train", 12)
    folder(path / "val", 3)  # the same noise in the same order
    lines.clear()
    train.train(path, **SMALL_RUN, progress=Lines(lines))
    assert any(line.startswith("the same file in two splits: ") for line in lines)


def test_copies_of_one_class_and_split_are_nothing_wrong(tmp_path: Path) -> None:
    for place, level in (
        ("train/cat/1.png", 1),
        ("train/cat/2.png", 1),  # the same class and split
        ("train/dog/3.png", 2),
        ("val/dog/4.png", 2),
        ("val/cat/5.png", 3),
        ("val/dog/6.png", 3),
    ):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), level).save(tmp_path / place)
    assert repeats(assign(read_folder(tmp_path), ImagesData(), 0)) == [
        "the same file in two classes: 1 (val/cat/5.png = val/dog/6.png)",
        "the same file in two splits: 1 (train/dog/3.png = val/dog/4.png)",
    ]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures and a run on it, two epochs long."""
    place = tmp_path_factory.mktemp("finished")
    folder(place / "pictures", 20)
    train.train(place / "pictures", **SMALL_RUN | {"epochs": 2}, out=place / "run")
    return place


def resumed(place: Path, **more: Any) -> Any:
    keys = {"train.weights": None, "data.path": str(place / "pictures")}
    return train.train(out=place / "run", resume=True, device="cpu", set=keys, **more)


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """The run moved with its folder, its config's path brought along."""
    there = tmp_path / "place"
    shutil.copytree(finished, there)
    config = there / "run" / "config.yaml"
    config.write_text(config.read_text().replace(str(finished), str(there)))
    return there


def test_a_run_without_a_test_split_cannot_report_it_later(place: Path) -> None:
    with pytest.raises(VitcliError, match=r"test split|no test images"):
        resumed(place, test=True)


def test_unchanged_files_go_on(place: Path) -> None:
    before = (place / "run" / "inputs.jsonl").read_bytes()
    assert resumed(place).result.val_accuracy is not None
    assert (place / "run" / "inputs.jsonl").read_bytes() == before
    rows = [json.loads(line) for line in before.splitlines()]
    assert rows[0] == {"classes": ["blue", "red"]} and len(rows) == 41
    assert {row[2] for row in rows[1:]} == {"train", "val"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("add", "1 added (red/new.png)"),
        ("remove", "1 removed (red/3.png)"),
        ("move", "1 moved (red/3.png to blue/other/3.png)"),
        ("rename", "1 renamed (red/3.png to red/new.png)"),
        ("edit", "1 changed (red/3.png)"),
        ("edit in place", "1 changed (red/3.png)"),
        ("replace", "1 added (red/new.png), 1 removed (red/3.png)"),
        ("move and rename", "1 moved (red/3.png to blue/other/new.png)"),
    ],
)
def test_changed_files_are_refused_by_name(place: Path, change: str, said: str) -> None:
    red, other = place / "pictures" / "red", place / "pictures" / "blue" / "other"
    if change == "add":
        (red / "new.png").write_bytes((red / "3.png").read_bytes() + b"more")
    elif change == "remove":
        (red / "3.png").unlink()
    elif change == "move":
        other.mkdir()
        (red / "3.png").rename(other / "3.png")
    elif change == "rename":
        (red / "3.png").rename(red / "new.png")
    elif change == "move and rename":
        other.mkdir()
        shutil.copy(red / "3.png", other / "new.png")  # with a new time of change
        (red / "3.png").unlink()
    elif change == "replace":  # by another picture of as many bytes
        (red / "new.png").write_bytes((red / "3.png").read_bytes()[::-1])
        (red / "3.png").unlink()
    elif change == "edit in place":
        (red / "3.png").write_bytes((red / "3.png").read_bytes()[::-1])
    else:
        (red / "3.png").write_bytes((red / "3.png").read_bytes() + b"more")
    with pytest.raises(VitcliError) as caught:
        resumed(place)
    assert said in caught.value.message
    assert ("--accept-new-data" in caught.value.hint) == (change == "add")
    if change != "add":
        with pytest.raises(VitcliError, match="not those of the run"):
            resumed(place, accept_new_data=True)


def test_without_contents_only_a_single_pair_has_moved_or_another_name() -> None:
    """A run of an older release, or a large one, knows sizes alone."""

    def difference(before: str, after: str) -> str:
        stored, now = (
            Inputs(("a", "b"), tuple(Input(n, 9, "train", n[0]) for n in names.split()))
            for names in (before, after)
        )
        with pytest.raises(VitcliError) as caught:
            same_inputs(stored, now, "x")
        return caught.value.message.partition("run: ")[2]

    assert difference("a/1 a/2 b/3", "a/1 a/2 a/3") == "1 moved (b/3 to a/3)"
    assert difference("a/1 a/2 b/3", "a/1 a/4 b/3") == "1 renamed (a/2 to a/4)"
    assert difference("a/1 a/2", "a/3 a/4") == "2 added (a/3, a/4), 2 removed (a/1, a/2)"
    assert difference("a/1 a/2", "a/1 b/3") == "1 added (b/3), 1 removed (a/2)"


def test_an_image_that_was_left_out_may_be_repaired_or_removed(tmp_path: Path) -> None:
    """The run never read it: `--check` had found it unreadable."""
    path = folder(tmp_path / "pictures", 12)
    for name in ("red/3.png", "red/4.png"):
        (path / name).write_bytes(b"no image")
    train.train(path, **SMALL_RUN, check=True, out=tmp_path / "run")
    (path / "red/3.png").unlink()
    shutil.copy(path / "red/1.png", path / "red/4.png")
    again = train.train(path, out=tmp_path / "run", resume=True, device="cpu")
    assert again.result.val_accuracy is not None
    (path / "red/5.png").unlink()
    with pytest.raises(VitcliError, match=r"of the run: 1 removed \(red/5\.png\)$"):
        train.train(path, out=tmp_path / "run", resume=True, device="cpu")


def test_accepted_files_train_and_no_other_moves(place: Path) -> None:
    before = read_inputs(place / "run" / "inputs.jsonl")
    assert before is not None
    for i in range(30):
        shutil.copy(
            place / "pictures" / "red" / "3.png", place / "pictures" / "red" / f"new{i}.png"
        )
    resumed(place, accept_new_data=True)
    after = read_inputs(place / "run" / "inputs.jsonl")
    assert after is not None and after.images[:40] == before.images
    assert len(after.images) == 70
    assert all(image.side == "train" for image in after.images[40:])
    resumed(place)  # they belong to the run now


def test_more_steps_of_an_epoch_are_said(place: Path) -> None:
    for i in range(16):
        shutil.copy(place / "pictures/red/3.png", place / f"pictures/red/new{i}.png")
    lines: list[str] = []
    found = resumed(place, accept_new_data=True, progress=Lines(lines)).result
    per_epoch = found.steps // 2
    assert (
        f"an epoch now has {per_epoch} steps instead of {per_epoch - 2}: the run ends at step "
        in ("\n".join(lines))
    )


def test_a_run_goes_on_where_its_folder_has_another_place(place: Path) -> None:
    (place / "pictures").rename(place / "elsewhere")
    keys = {"train.weights": None, "data.path": str(place / "elsewhere")}
    train.train(out=place / "run", resume=True, device="cpu", set=keys)
    train.train(out=place / "run", resume=True, device="cpu")  # which the run remembers


def test_a_run_killed_before_its_list_was_written_begins(place: Path) -> None:
    (place / "run" / "inputs.jsonl").unlink()
    with pytest.raises(VitcliError, match="kept no list of its images"):
        resumed(place)
    shutil.rmtree(place / "run" / "snapshots")
    (place / "run" / "snapshots").mkdir()
    (place / "run" / "metrics.jsonl").unlink()
    assert resumed(place).result.steps and (place / "run" / "inputs.jsonl").exists()


def test_a_new_class_needs_another_run(place: Path) -> None:
    (place / "pictures" / "green").mkdir()
    shutil.copy(place / "pictures" / "red" / "3.png", place / "pictures" / "green" / "x.png")
    with pytest.raises(VitcliError, match="has no class green"):
        resumed(place, accept_new_data=True)


def test_new_files_of_a_validation_split_stay_unseen(tmp_path: Path) -> None:
    folder(tmp_path / "train", 4)
    folder(tmp_path / "val", 2)
    stored = assign(read_folder(tmp_path), ImagesData(), 0)
    for split in ("train", "val"):
        shutil.copy(tmp_path / "val" / "red" / "1.png", tmp_path / split / "red" / "new.png")
    now = assign(read_folder(tmp_path), ImagesData(), 0)
    found = same_inputs(stored, now, "x", accept_new=True)
    sides = {image.path: image.side for image in found.images[len(stored.images) :]}
    assert sides == {"train/red/new.png": "train", "val/red/new.png": "unused"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"classes": 3}',
        '{"classes": ["a"]}\n[1, 2, 3, 4]',
        "[" * 9000,
        '{"classes": ["a"]}\n["x", 1, "elsewhere", "a"]',
        '{"classes": ["a"]}\n["x", true, "val", "a"]',
        '{"classes": ["a"]}\n["x", 1, "val", "a", 7]',
    ],
)
def test_a_tampered_list_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "inputs.jsonl").write_text(text)
    with pytest.raises(VitcliError, match=r"inputs\.jsonl"):
        read_inputs(tmp_path / "inputs.jsonl")


def test_a_longer_run_continues_where_the_schedule_allows(place: Path) -> None:
    with pytest.raises(VitcliError, match=r"train\.epochs is 2 in the run, 3 now") as caught:
        resumed(place, epochs=3)
    assert "--extend" in caught.value.hint
    lines: list[str] = []
    longer = resumed(place, epochs=3, extend=True, progress=Lines(lines))
    per_epoch = longer.result.steps // 3
    assert any(f"ends at step {3 * per_epoch} instead of {2 * per_epoch}" in x for x in lines)
    assert [row.epoch for row in longer.history if row.val_loss is not None] == [1, 2, 3]
    assert resumed(place).result.steps == longer.result.steps  # it is a run of three epochs now


def test_a_constant_rate_with_more_epochs_is_the_run_that_had_them(tmp_path: Path) -> None:
    """Warm-up of half an epoch stays that long."""
    keys = {"train.schedule": "constant", "train.warmup": 0.25}
    path = folder(tmp_path / "pictures", 20)
    common = SMALL_RUN | {"set": SMALL_RUN["set"] | keys}
    train.train(path, **common | {"epochs": 2}, out=tmp_path / "run")
    again = train.train(path, epochs=4, out=tmp_path / "run", resume=True, device="cpu")
    keys["train.warmup"] = 0.125
    whole = train.train(path, **common | {"set": common["set"] | keys, "epochs": 4})
    assert again.history == whole.history
