from __future__ import annotations

import gzip
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tests.commands.train.runs import TINY
from tests.commands.train.sources import MIXLESS, SMALL_RUN, Lines, folder
from vitcli.commands.train import analysis as train
from vitcli.commands.train.data import ImagesSource, read_image
from vitcli.config.schema import PreprocessConfig
from vitcli.config.settings import Setting
from vitcli.config.training import ImagesData, ImagesRun, TrainRequest
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.images.sources import published_sets, read_idx, recognized

PLAIN = ImagesData(crop_scale=None, flip=0.0)
SMALL = PreprocessConfig(resize_size=(16, 16))


def idx_folder(
    path: Path, train_size: int = 40, test_size: int = 20, first: list[int] | None = None
) -> Path:
    """The four files of MNIST: label k is an image of gray 20 k."""
    path.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", train_size), ("t10k", test_size)):
        labels = np.arange(size, dtype=np.uint8) % 10
        if first and part == "train":
            labels[:10] = first
        images = np.broadcast_to(20 * labels[:, None, None], (size, 28, 28)).astype(np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            file = path / f"{part}-{name}-ubyte.gz"
            file.write_bytes(gzip.compress(head + values.tobytes()))
    return path


def source(path: Path, data: ImagesData = PLAIN, seed: int = 0, **flags: bool) -> ImagesSource:
    asked = data.model_copy(update={"path": str(path)})
    small = {"encoder": {"image_size": 16, "patch_size": 8}, "preprocess": SMALL, "data": asked}
    config = ImagesRun.model_validate({**small, "train": {"seed": seed}})
    return ImagesSource(config, TrainRequest(**flags))


def run(path: Path, **keys: Any) -> Any:
    encoder = {key: value for key, value in TINY.items() if not key.startswith("data")}
    plain = {"train.mixup": 0.0, "train.cutmix": 0.0, "encoder.patch_size": 8}
    values = encoder | plain | {key.replace("__", "."): value for key, value in keys.items()}
    settings = [Setting(tuple(key.split(".")), v, key) for key, v in values.items()]
    settings.append(Setting(("data", "path"), str(path), "DATA"))
    asked = TrainRequest(settings=tuple(settings), device="cpu")
    return train.run_images(asked, train.images_config(asked))


def test_validation_sees_what_other_commands_see(tmp_path: Path) -> None:
    data = source(folder(tmp_path))
    item, label = data.val.items[0]
    images, labels = next(data.val_batches([[0]]))
    seen = decode(tmp_path / item.name).image
    assert torch.equal(images[0], torch.from_numpy(preprocess(seen, SMALL)))
    assert labels.tolist() == [label]


def test_without_augmentation_training_sees_the_same(tmp_path: Path) -> None:
    path = tmp_path
    (path / "one").mkdir()
    (path / "two").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (6, 16, 16, 3), dtype=np.uint8)
    for i, pixels in enumerate(noise):
        Image.fromarray(pixels).save(path / ("one" if i % 2 else "two") / f"{i}.png")
    data = source(path)
    item, _ = data.train.items[0]
    images, _ = next(data.train_batches([(0, [0])]))
    expected = torch.from_numpy(preprocess(read_image(item), SMALL))
    assert torch.allclose(images[0], expected, atol=1e-6)


def test_augmentation_follows_from_epoch_and_index_in_any_worker(tmp_path: Path) -> None:
    path = folder(tmp_path)
    wanted = [(0, [1, 2]), (1, [1, 2])]
    alone = list(source(path, ImagesData(erase=0.5)).train_batches(wanted))
    shared = list(source(path, ImagesData(erase=0.5, workers=1)).train_batches(wanted))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(alone[0][0], alone[1][0])  # another epoch, another crop


def test_workers_that_are_not_forked_get_the_same_images(tmp_path: Path) -> None:
    """They are started afresh on macOS and Windows, and on Linux from Python 3.14 on."""
    data = source(folder(tmp_path), ImagesData(erase=0.5))
    for images in (data.train, data.val):
        sent = pickle.loads(pickle.dumps(images))
        assert torch.equal(sent[1, 2][0], images[1, 2][0])


def test_sets_of_mnists_format_are_recognized_by_their_labels(tmp_path: Path) -> None:
    """Not by a word in the path: the first labels are those of the published files."""
    mnist, fashion = [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]
    for name, first, kind in (
        ("fashion-mnist", mnist, "mnist"),
        ("mnist", fashion, "fashion-mnist"),
        ("other", list(range(10)), "idx"),
    ):
        path = idx_folder(tmp_path / name, first=first)
        assert recognized(path) == kind
        train_items, val_items, names = published_sets(path, kind)
        assert (len(train_items), len(val_items)) == (40, 20)
        assert names[9] == ("Ankle boot" if kind == "fashion-mnist" else "9")
        image, label = train_items[13]
        assert label == 3 and np.array_equal(np.asarray(image), np.full((28, 28), 60))


def test_a_published_set_holds_out_of_its_training_half_if_test_is_reported(
    tmp_path: Path,
) -> None:
    path = idx_folder(tmp_path / "set")
    plain = source(path)
    with_test = source(path, test=True)
    assert (plain.train_size, plain.val_size, plain.test_size) == (40, 20, 0)
    assert (with_test.train_size, with_test.val_size, with_test.test_size) == (36, 4, 20)


def test_idx_reader_agrees_with_torchvisions(tmp_path: Path) -> None:
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    file = idx_folder(tmp_path) / "train-images-idx3-ubyte.gz"
    (tmp_path / "plain").write_bytes(gzip.decompress(file.read_bytes()))
    theirs = read_sn3_pascalvincent_tensor(str(tmp_path / "plain"))
    assert np.array_equal(read_idx(file, 3), theirs.numpy())


def test_broken_files_are_errors(tmp_path: Path) -> None:
    path = idx_folder(tmp_path / "mnist")
    file = path / "t10k-images-idx3-ubyte.gz"
    whole = gzip.decompress(file.read_bytes())
    for broken, said in (
        (b"not gzip", "t10k-images"),
        (gzip.compress(whole)[:-20], "t10k-images"),
        (gzip.compress(whole[:-1]), "does not match its header"),
        (gzip.compress(whole + bytes(100_000)), "does not match its header"),
        (gzip.compress(whole[:4] + b"\xff" * 12 + bytes(1000)), "is too large"),
        (gzip.compress(b"\0\0\x0d\3" + whole[4:]), "is not an IDX file"),
        (b"", "is not an IDX file"),
    ):
        file.write_bytes(broken)
        with pytest.raises(VitcliError, match=said):
            published_sets(path, "mnist")
    with pytest.raises(VitcliError, match="no such folder"):
        recognized(tmp_path / "nowhere")
    with pytest.raises(VitcliError, match="CIFAR10"):
        published_sets(tmp_path, "cifar10")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitcliError, match="empty"):
        source(tmp_path / "empty")


@pytest.mark.parametrize("make", [folder, idx_folder])
def test_a_run_inside_its_own_data_goes_on(make: Any, tmp_path: Path) -> None:
    """Its files are none of the data's, a figure among them neither."""
    make(tmp_path)
    out = tmp_path / "run"
    whole = train.train(tmp_path, **SMALL_RUN, out=out)
    Image.new("RGB", (8, 8)).save(out / "plot.png")
    resumed = train.train(out=out, resume=True, device="cpu")
    assert resumed.history == whole.history


def test_two_colors_are_learned_and_every_class_is_reported(tmp_path: Path) -> None:
    result = run(
        folder(tmp_path, per_class=60), train__epochs=4, train__lr=3e-3, data__val_fraction=0.3
    ).result
    assert result.verdict == "learned" and result.val_accuracy == 1.0
    assert [(row.name, row.accuracy) for row in result.classes] == [("blue", 1.0), ("red", 1.0)]
    assert 24 <= sum(row.images for row in result.classes) <= 48  # 36 +- 2.4 deviations


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_costs_itself_alone(tmp_path: Path, workers: int) -> None:
    """In training the next one stands in for it; in validation it counts nowhere."""
    (folder(tmp_path) / "red" / "3.png").write_bytes(b"not an image")
    data = PLAIN.model_copy(update={"workers": workers, "val_fraction": 0.5})
    images = source(tmp_path, data)
    bad = [i for i, (item, _) in enumerate(images.train.items) if item.name == "red/3.png"]
    wanted = [(0, range(images.train_size))]
    pixels, labels = next(images.train_batches(wanted))
    val_labels = next(images.val_batches([range(images.val_size)]))[1]
    assert list(images.unreadable) == ["red/3.png"]
    assert "not an image" in images.unreadable["red/3.png"]
    if bad:
        following = (bad[0] + 1) % images.train_size
        assert torch.equal(pixels[bad[0]], pixels[following])
        assert labels[bad[0]] == labels[following] and (val_labels >= 0).all()
    else:
        assert (val_labels < 0).sum() == 1
    strict = source(tmp_path, data, fail_fast=True)
    with pytest.raises(VitcliError, match=r"^red/3\.png: not an image") as caught:
        list(strict.train_batches(wanted))
        list(strict.val_batches([range(strict.val_size)]))
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("check", [False, True])
def test_a_run_lists_what_it_left_out(tmp_path: Path, check: bool) -> None:
    path = folder(tmp_path / "pictures", per_class=20)
    for name in ("red/3.png", "blue/5.png", "blue/6.png"):
        (path / name).write_bytes(b"")
    result = train.train(path, **SMALL_RUN | {"epochs": 2}, check=check)
    assert [image.path for image in result.unreadable] == ["blue/5.png", "blue/6.png", "red/3.png"]
    text = str(result)
    assert "3 images could not be read" in text and "blue/5.png" in text


def test_when_no_image_can_be_read_there_is_no_run(tmp_path: Path) -> None:
    path = folder(tmp_path / "pictures")
    for file in path.rglob("*.png"):
        file.write_bytes(b"x")
    with pytest.raises(VitcliError, match=r"none of \d+ training images can be read"):
        train.train(path, **SMALL_RUN)


def test_the_test_split_is_reported_once_and_decides_nothing(tmp_path: Path) -> None:
    for split, count in (("TRAIN", 20), ("Valid", 6), ("test", 8)):
        folder(tmp_path / split, count)
    result = train.train(tmp_path, **SMALL_RUN | {"epochs": 2}, test=True)
    assert result.test is not None and result.test.images == 16
    assert sum(row.images for row in result.result.classes) == 12
    assert "test: accuracy" in str(result)
    assert train.train(tmp_path, **SMALL_RUN).test is None


def test_without_a_validation_split_test_stays_unseen_if_it_is_reported(tmp_path: Path) -> None:
    folder(tmp_path / "train", 20)
    folder(tmp_path / "test", 8)
    with_test = train.train(tmp_path, **SMALL_RUN, test=True)
    assert with_test.test is not None and with_test.test.images == 16
    assert 2 <= sum(row.images for row in with_test.result.classes) < 16  # held out of train
    without = train.train(tmp_path, **SMALL_RUN)
    assert sum(row.images for row in without.result.classes) == 16


def test_names_of_outputs_outlive_a_kill_before_the_first_snapshot(tmp_path: Path) -> None:
    """A run that begins again keeps the outputs that --classes named, as it would have."""
    train.train(folder(tmp_path / "a"), **SMALL_RUN, out=tmp_path / "run")
    weights, named = tmp_path / "weights", ("red", "")
    weights.mkdir()
    for name in ("config.yaml", "model.safetensors"):
        shutil.copy(tmp_path / "run" / name, weights / name)
    config = weights / "config.yaml"
    config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), "classes": None}))
    lines: list[str] = []
    how = {**SMALL_RUN, "out": tmp_path / "next", "progress": Lines(lines)}
    del how["set"]
    first = train.train(tmp_path / "a", weights=weights, classes=named, **how)
    shutil.rmtree(tmp_path / "next" / "snapshots")
    again = train.train(out=tmp_path / "next", resume=True, device="cpu", progress=Lines(lines))
    assert again.history == first.history
    said = "classifier: 1 of the weights' outputs kept by name; new: blue"
    assert lines.count(said) == 2


def test_weights_meet_folders_by_the_names_of_classes(tmp_path: Path) -> None:
    """Twelve folders 0 to 11 are numbers in their order; a run on some of them keeps those."""
    names = tuple(map(str, range(12)))
    first = train.train(folder(tmp_path / "a", 4, names), **SMALL_RUN, out=tmp_path / "run")
    assert tuple(first.config["classes"]) == names
    lines: list[str] = []
    train.train(
        folder(tmp_path / "b", 12, ("10", "2", "zebra")),
        batch=8,
        weights=tmp_path / "run",
        set=MIXLESS,
        device="cpu",
        progress=Lines(lines),
    )
    (said,) = [line for line in lines if line.startswith("classifier")]
    assert said == (
        "classifier: 2 of the weights' outputs kept by name; new: zebra; "
        "left out: 0, 1, 3 and 7 more"
    )
    with pytest.raises(VitcliError, match="wrong number of names"):
        train.train(tmp_path / "b", weights=tmp_path / "run", classes=("x",), device="cpu", batch=8)
