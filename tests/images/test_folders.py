"""Folders in the shapes that people have them, each with a known right answer."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitcli.errors import VitcliError
from vitcli.images.folders import class_order, read_folder, read_layout
from vitcli.images.sources import HIDDEN


def layout(*names: str) -> list[tuple[str | None, str | None]]:
    found = read_layout(names)
    return [found.place(name) for name in names]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        # classes alone, also below a folder that all have in common
        (["cat/1.png", "dog/1.png"], [(None, "cat"), (None, "dog")]),
        (["pets/cat/1.png", "pets/dog/x/1.png"], [(None, "cat"), (None, "dog")]),
        (["cat/1.png", "cat/2.png"], [(None, "cat"), (None, "cat")]),
        # splits by any of their names, in any letter case
        (
            ["Train/cat/1.png", "VALID/cat/2.png", "test/3.png"],
            [("train", "cat"), ("val", "cat"), ("test", None)],
        ),
        (
            ["training/a/1.png", "testing/a/2.png", "validation/b/3.png", "dev/b/4.png"],
            [("train", "a"), ("test", "a"), ("val", "b"), ("val", "b")],
        ),
        (
            ["set/train/a/1.png", "set/val/b/2.png"],
            [("train", "a"), ("val", "b")],
        ),
        (["train/a/1.png", "train/b/2.png"], [("train", "a"), ("train", "b")]),
        # what stands beside splits is neither a split nor a class
        (
            ["train/a/1.png", "test/a/2.png", "unlabeled/x/3.png", "extras/y/4.png"],
            [("train", "a"), ("test", "a"), ("unlabeled", None), ("other", None)],
        ),
        # splits within longer names, also where an archive repeats them inside
        (
            ["training_set/cat/1.png", "test_set/dog/2.png"],
            [("train", "cat"), ("test", "dog")],
        ),
        (["train2017/a/1.png", "val2017/b/2.png"], [("train", "a"), ("val", "b")]),
        (["trainval/a/1.png", "test-images/a/2.png"], [("train", "a"), ("test", "a")]),
        (
            ["seg_train/seg_train/sea/1.png", "seg_test/seg_test/ice/2.png", "seg_pred/x/3.png"],
            [("train", "sea"), ("test", "ice"), ("other", None)],
        ),
        (["train/train/1.png", "test/test/2.png"], [("train", None), ("test", None)]),
        (
            ["train_station/1.png", "test_tube/2.png", "tv_set/3.png"],
            [(None, "train_station"), (None, "test_tube"), (None, "tv_set")],
        ),
        (
            ["TrainingSet/cat/1.png", "valset/dog/2.png", "eval data/cat/3.png", "Extra/4.png"],
            [("train", "cat"), ("val", "dog"), ("val", "cat"), ("other", None)],
        ),
        # unpaired sets of two domains: one pair of splits, the rest is neither
        (
            ["trainA/1.png", "testA/2.png", "trainB/3.png", "testB/4.png"],
            [("train", None), ("test", None), ("other", None), ("other", None)],
        ),
        # upper case with spaces around
        (
            ["TRAIN /cat/1.png", " Val/cat/2.png", "TEST/3.png"],
            [("train", "cat"), ("val", "cat"), ("test", None)],
        ),
        # classes called like splits, under a split
        (
            ["train/test/1.png", "train/train/2.png", "train/dev/3.png", "val/test/4.png"],
            [("train", "test"), ("train", "train"), ("train", "dev"), ("val", "test")],
        ),
        # a folder that only holds images or annotations is no class (Tiny ImageNet, YOLO)
        (
            ["train/n01/images/1.png", "train/n02/images/2.png", "val/images/3.png"],
            [("train", "n01"), ("train", "n02"), ("val", None)],
        ),
        (["images/1.png", "labels/2.png"], [(None, None), (None, None)]),
        (
            ["train/images/1.png", "train/labels/1.png", "valid/images/2.png"],
            [("train", None), ("train", None), ("val", None)],
        ),
        (["images/train/a/1.png", "images/val/b/2.png"], [("train", "a"), ("val", "b")]),
        (["images/1.png", "text/2.png"], [(None, "images"), (None, "text")]),
        # one class alone in validation; classes with folders inside; images beside folders
        (
            ["cover.png", "train/a/1.png", "train/b/x/y/2.png", "val/b/3.png", "train/4.png"],
            [("other", None), ("train", "a"), ("train", "b"), ("val", "b"), ("train", None)],
        ),
        # an accent as macOS writes it and as others do is one class; other characters stay
        (
            ["train/cafe\u0301/1.png", "val/caf\u00e9/2.png", "val/\u6a39 /3.png"],
            [("train", "caf\u00e9"), ("val", "caf\u00e9"), ("val", "\u6a39 ")],
        ),
        # a class may be called like a split
        (["bus/1.png", "train/1.png", "car/1.png"], [(None, c) for c in ("bus", "train", "car")]),
        # the class outside, the split inside
        (
            ["cat/train/1.png", "cat/val/2.png", "dog/train/3.png", "dog/val/4.png"],
            [("train", "cat"), ("val", "cat"), ("train", "dog"), ("val", "dog")],
        ),
        # shard files are not classes; they can be splits
        (["s-0.tar/1.png", "s-1.tar/2.png"], [(None, None), (None, None)]),
        (
            ["train/s-0.tar/1.png", "val/s-0.tar/2.png"],
            [("train", None), ("val", None)],
        ),
        (["x-train-00.tar/1.png", "x-val-00.tar/2.png"], [("train", None), ("val", None)]),
        (["MyTrainSet0.tar/1.png", "MyTestSet0.tar/2.png"], [("train", None), ("test", None)]),
    ],
)
def test_layouts(names: list[str], expected: list[tuple[str | None, str | None]]) -> None:
    assert layout(*names) == expected


def test_numbers_are_classes_in_their_order() -> None:
    names = [str(number) for number in range(12)]
    assert class_order(reversed(names)) == names
    assert class_order(["b", "10", "a", "9", "09", "b"]) == ["09", "9", "10", "a", "b"]
    assert class_order(["1", "-10", "0", "-9", "-a"]) == ["-10", "-9", "0", "1", "-a"]


def test_what_is_no_text_in_the_name_of_a_class_is_escaped() -> None:
    """Of a folder whose name is not UTF-8, and of half a character in a shard's JSON."""
    assert read_layout(["a/x", "b/x"]).place("caf\udce9/x") == (None, "caf\\xe9")
    assert read_layout(["a/x", "b/x"]).place("a/x", "\ud83d") == (None, "\\ud83d")


def test_a_shard_that_is_cut_off_is_said(tmp_path: Path) -> None:
    """It is no image of a class, so that nothing else would say what was lost."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for number in range(4):
            for suffix in ("png", "cls"):
                info = tarfile.TarInfo(f"{number}.{suffix}")
                info.size = 1000
                tar.addfile(info, io.BytesIO(b"1" * 1000))
    (tmp_path / "0.tar").write_bytes(whole.getvalue()[:6000])
    lines = read_folder(tmp_path).lines()
    (said,) = [line for line in lines if line.startswith("cannot be read: 1 (0.tar: tar shard: ")]
    assert "what follows is lost" in said


def picture(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), level, np.uint8)).save(path)


def test_hidden_folders_and_those_of_other_programs_are_left_out_with_a_count(
    tmp_path: Path,
) -> None:
    for number, suffix in enumerate((".png", ".gif", ".JPG", ".jfif", ".webp")):
        picture((tmp_path / f"cat/{number}").with_suffix(suffix), number)
    for place in (".ipynb_checkpoints/1.png", "__MACOSX/cat/1.png", "cat/@eaDir/1.png"):
        picture(tmp_path / place, 9)
    for name in ("cat/._1.png", "Thumbs.db", "cat/.hidden.png"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "notes.txt").touch()
    found = read_folder(tmp_path)
    assert len(found.items) == 5 and found.classes == ("cat",)
    assert found.skipped == {HIDDEN: 6, ".txt": 1}
    assert found.lines() == [
        "no splits, 5 images, 5 with a class; 1 class: cat",
        f"left out: 6 {HIDDEN}, 1 .txt",
    ]
    assert found.lines(labeled=False) == ["5 images", f"left out: 6 {HIDDEN}, 1 .txt"]


def test_lists_beside_images_and_links_to_folders(tmp_path: Path) -> None:
    """Class names with gaps, a class that is a link, a CSV and lists of files in the folder."""
    elsewhere = tmp_path / "elsewhere"
    for place in ("0/1.png", "7/1.png", "10/1.png", "10/2.png"):
        picture(elsewhere / place, len(place))
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("0", "10"):
        (folder / name).symlink_to(elsewhere / name)
    picture(folder / "7" / "b.png", 3)
    (folder / "labels.csv").write_text("0/1.png,zero\n")
    for name in ("train.txt", "val.txt"):
        (folder / name).write_text("0/1.png\n")
    (folder / "7" / "loop").symlink_to(folder)
    found = read_folder(folder)
    assert found.classes == ("0", "7", "10")
    assert [(item.entry.name, item.label) for item in found.items] == [
        ("0/1.png", "0"),
        ("10/1.png", "10"),
        ("10/2.png", "10"),
        ("7/b.png", "7"),
    ]
    assert found.skipped == {".csv": 1, ".txt": 2}


def test_labels_of_shards_and_their_splits(tmp_path: Path) -> None:
    def shard(path: Path, labels: list[tuple[str, bytes]]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for number, (suffix, content) in enumerate(labels):
                parts = [(suffix, content), ("png", b"pixels")]
                for kind, data in parts if number % 2 else reversed(parts):
                    info = tarfile.TarInfo(f"{number}.{kind}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))

    shard(tmp_path / "train/0.tar", [("cls", b"10\n"), ("cls", b"2"), ("json", b'{"label": 7}')])
    shard(tmp_path / "val/0.tar", [("cls", b"2"), ("txt", b"no label"), ("json", b"[[")])
    found = read_folder(tmp_path)
    assert found.classes == ("2", "7", "10")
    assert [(i.entry.name, i.split, i.label) for i in found.items] == [
        ("train/0.tar/0.png", "train", "10"),
        ("train/0.tar/1.png", "train", "2"),
        ("train/0.tar/2.png", "train", "7"),
        ("val/0.tar/0.png", "val", "2"),
        ("val/0.tar/1.png", "val", None),
        ("val/0.tar/2.png", "val", None),
    ]


def test_a_folder_that_is_missing_or_empty_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(VitcliError, match="no such folder"):
        read_folder(tmp_path / "none")
    with pytest.raises(VitcliError, match="contains no images"):
        read_folder(tmp_path)
