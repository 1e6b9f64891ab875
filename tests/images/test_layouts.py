"""Folders on disk with a known right answer, the same by `train`, `probe` and `embed`.

A layout is written as `folder*images`; a shard as `name.tar*cls=LABEL,...`.
"""

from __future__ import annotations

import io
import tarfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitcli.commands.embed.inputs import Listing, SeenFolders
from vitcli.commands.probe.labeled import Encoded, Images, with_classes
from vitcli.commands.train.splits import assign
from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError
from vitcli.images.folders import read_folder

SUFFIXES = (".png", ".jpg", ".gif", ".webp", ".bmp", ".JFIF", ".tiff")


@dataclass(frozen=True)
class Right:
    """What a folder is: its classes, and labeled images by split; those that train and validate."""

    classes: str
    splits: dict[str | None, int]
    drawn: bool = False
    """Validation images are held out of the training images."""
    tested: str = ""
    """The split that `probe` tests."""
    error: str = ""
    """Why it cannot be trained on."""


LAYOUTS: dict[str, tuple[str, Right]] = {
    "a folder per class": ("cat*3 dog*4", Right("cat dog", {None: 7}, drawn=True)),
    "classes below folders that all have": (
        "a/b/cat*3 a/b/dog/young/2024*4",
        Right("cat dog", {None: 7}, drawn=True),
    ),
    "three splits in mixed case": (
        "Train/cat*3 Train/dog*3 VALID/cat*2 valid/dog*1 tEsT/cat*2",
        Right("cat dog", {"train": 6, "val": 3, "test": 2}, tested="val"),
    ),
    "training, validation, dev and testing": (
        "training/a*4 training/b*4 validation/a*1 dev/b*2 testing/b*3",
        Right("a b", {"train": 8, "val": 3, "test": 3}, tested="val"),
    ),
    "a test split alone validates": (
        "train/a*3 train/b*3 test/a*2 test/b*2",
        Right("a b", {"train": 6, "test": 4}, tested="test"),
    ),
    "a test split without classes": (
        "train/a*3 train/b*3 test*5",
        Right("a b", {"train": 6}, drawn=True),
    ),
    "unlabeled images, and folders that are neither": (
        "train/a*3 train/b*3 val/a*1 unlabeled/c*4 notes/d*2",
        Right("a b", {"train": 6, "val": 1}, tested="val"),
    ),
    "the split inside the class": (
        "a/train*3 a/val*1 b/train*3 b/val*2",
        Right("a b", {"train": 6, "val": 3}, tested="val"),
    ),
    "ImageNet's wrapper, validation without folders": (
        "ILSVRC/Data/CLS-LOC/train/n01*3 ILSVRC/Data/CLS-LOC/train/n02*3 "
        "ILSVRC/Data/CLS-LOC/val*4 ILSVRC/Data/CLS-LOC/test*4",
        Right("n01 n02", {"train": 6}, drawn=True),
    ),
    "Tiny ImageNet": (
        "train/n01/images*3 train/n02/images*3 val/images*4 test/images*4",
        Right("n01 n02", {"train": 6}, drawn=True),
    ),
    "YOLO": (
        "train/images*3 train/labels*3 valid/images*2 valid/labels*2",
        Right("", {}, error="its images have no classes"),
    ),
    "images and masks": ("images*3 masks*3", Right("", {}, error="its images have no classes")),
    "images and masks, each with folders of classes": (
        "images/train/a*3 images/train/b*3 images/val/a*2 masks/train/a*3 masks/val/b*2",
        Right("a b", {"train": 6, "val": 2}, tested="val"),
    ),
    "classes below images below splits": (
        "train/images/a*3 train/images/b*3 train/masks/a*3 test/images/b*2",
        Right("a b", {"train": 6, "test": 2}, tested="test"),
    ),
    "two archives unpacked into folders of their own name": (
        "train/train/cat*3 train/train/dog*3 test1/test1*4",
        Right("cat dog", {"train": 6}, drawn=True),
    ),
    "an archive without classes": (
        "train/train*6 test/test*4",
        Right("", {}, error="its images have no classes"),
    ),
    "splits with a word in common": (
        "seg_train/sea*3 seg_train/ice*3 seg_test/sea*2 seg_pred/ice*2",
        Right("ice sea", {"train": 6, "test": 2}, tested="test"),
    ),
    "splits in one word with set": (
        "TrainingSet/a*3 trainset/b*3 TestSet/a*1 testset/b*1",
        Right("a b", {"train": 6, "test": 2}, tested="test"),
    ),
    "years behind the splits": (
        "train2017/a*3 train2017/b*3 val2017/b*2",
        Right("a b", {"train": 6, "val": 2}, tested="val"),
    ),
    "upper case with spaces": (
        "TRAIN_/a*3 TRAIN_/b*3 _VAL_DATA/a*2",
        Right("a b", {"train": 6, "val": 2}, tested="val"),
    ),
    "numbers with gaps": ("10*3 2*3 0*3 007*3", Right("0 2 007 10", {None: 12}, drawn=True)),
    "classes called like splits, below splits": (
        "train/test*3 train/train*3 val/test*1 val/dev*1",
        Right("dev test train", {"train": 6, "val": 2}, tested="val"),
    ),
    "a class called like a split": (
        "bus*3 train*3 tram*3",
        Right("bus train tram", {None: 9}, drawn=True),
    ),
    "one class in validation": (
        "train/a*3 train/b*3 val/b*2",
        Right("a b", {"train": 6, "val": 2}, tested="val"),
    ),
    "one class": ("train/a*3 val/a*3", Right("a", {"train": 3, "val": 3}, error="one class")),
    "no class": ("*4", Right("", {}, error="its images have no classes")),
    "accents as two systems write them": (
        "train/cafe\u0301*3 train/the\u0301*3 val/caf\u00e9*2 val/\u6a39*1",
        Right("caf\u00e9 th\u00e9 \u6a39", {"train": 6, "val": 3}, tested="val"),
    ),
    "shards with labels, splits in their names": (
        "x-train-0.tar*cls=10,cls=2,cls=2 x-train-1.tar*cls=10,cls=2 x-val-0.tar*cls=2,cls=10",
        Right("2 10", {"train": 5, "val": 2}, tested="val"),
    ),
    "shards with JSON in folders of splits": (
        "train/0.tar*json=dog,json=cat,json=cat val/0.tar*json=dog,none=",
        Right("cat dog", {"train": 3, "val": 1}, tested="val"),
    ),
    "shards in folders of classes": (
        "cat/0.tar*none=,none= dog/0.tar*none=,none=",
        Right("cat dog", {None: 4}, drawn=True),
    ),
}


def write(folder: Path, text: str) -> None:
    for number, part in enumerate(text.split()):
        name, _, what = part.partition("*")
        if not name.endswith(".tar"):
            place = folder / name.replace("_", " ") if "_VAL" in text else folder / name
            place.mkdir(parents=True, exist_ok=True)
            for i in range(int(what)):
                picture(number * 20 + i).save(place / f"{number}-{i}{SUFFIXES[i % 7]}")
            continue
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(folder / name, "w") as tar:
            for i, said in enumerate(what.split(",")):
                kind, _, label = said.partition("=")
                pixels = io.BytesIO()
                picture(number * 20 + i).save(pixels, "PNG")
                content = f'{{"label": "{label}"}}' if kind == "json" else label
                files = [("png", pixels.getvalue())]
                files += [(kind, content.encode())] if kind != "none" else []
                for suffix, data in files:
                    info = tarfile.TarInfo(f"{i:03d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    for extra in (".ipynb_checkpoints/1.png", "__MACOSX/2.png"):
        (folder / extra).parent.mkdir(parents=True)
        picture(0).save(folder / extra)
    (folder / "labels.csv").write_text("a,b\n")


def picture(level: int) -> Image.Image:
    return Image.fromarray(np.full((4, 4, 3), level, np.uint8))


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_taken_for_what(name: str, tmp_path: Path) -> None:
    text, right = LAYOUTS[name]
    write(tmp_path, text)
    found = read_folder(tmp_path)
    labeled = [i for i in found.items if i.label is not None and i.split != "unlabeled"]
    assert [*found.classes] == right.classes.split()
    assert Counter(item.split for item in labeled) == right.splits
    assert found.skipped["hidden or of a tool"] == 2 and found.skipped[".csv"] == 1

    seen = SeenFolders(Listing((str(tmp_path),)))
    assert {entry.name for entry in seen} == {item.entry.name for item in found.items}
    classes = right.classes.split()
    said = f"{len(classes)} classes: {', '.join(classes)}"
    assert seen.line().endswith(said if len(classes) > 1 else seen.line())

    if right.error:
        with pytest.raises(VitcliError, match=right.error):
            assign(found, ImagesData(), 0)
    else:
        sides = assign(found, ImagesData(), 0)
        trains = right.splits.get("train", right.splits.get(None, 0))
        assert sides.drawn == right.drawn and [*sides.classes] == right.classes.split()
        if right.drawn:
            assert len(sides.of("train")) + len(sides.of("val")) == trains
        else:
            assert len(sides.of("train")) == trains
            assert len(sides.of("val")) == right.splits[right.tested]

    names = tuple(item.entry.name for item in found.items)
    vectors = Encoded("m", "w", np.zeros((len(names), 2), np.float32))
    marks = {item.entry.name: item.entry.label for item in found.items}
    probed = with_classes(Images(names, (vectors,)), marks)
    assert probed.labels is not None
    assert set(probed.labels.tolist()) <= set(right.classes.split())
    assert probed.tested == right.tested or not right.splits or right.error
    if right.tested:
        assert probed.is_test is not None
        assert int(probed.is_test.sum()) == right.splits[right.tested]
        assert int((~probed.is_test).sum()) == right.splits["train"]
    elif not right.error:
        assert probed.is_test is None and len(probed.names) == sum(right.splits.values())
