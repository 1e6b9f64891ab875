from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands.train.runs import TINY
from vitcli.commands.train import analysis as train
from vitcli.commands.train.datasets import ImagesSource, find_sets, read_idx
from vitcli.config.load import Setting
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import ImagesData, TrainRequest
from vitcli.errors import VitcliError
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess

PLAIN = ImagesData(crop_scale=None, flip=0.0)
SMALL = PreprocessConfig(resize_size=(16, 16))


def folder(path: Path, per_class: int = 12, names: tuple[str, ...] = ("blue", "red")) -> Path:
    """Noisy pictures of one color for each class, 20x16 pixels."""
    random = np.random.default_rng(0)
    for channel, name in enumerate(names):
        (path / name).mkdir(parents=True)
        for i in range(per_class):
            pixels = random.integers(0, 120, (16, 20, 3), dtype=np.uint8)
            pixels[..., channel] += 100
            Image.fromarray(pixels).save(path / name / f"{i}.png")
    return path


def idx_folder(path: Path, train_size: int = 40, test_size: int = 20) -> Path:
    """The four files of MNIST: label k is an image of gray 20 k."""
    path.mkdir(parents=True, exist_ok=True)
    for part, size in (("train", train_size), ("t10k", test_size)):
        labels = np.arange(size, dtype=np.uint8) % 10
        images = np.broadcast_to(20 * labels[:, None, None], (size, 28, 28)).astype(np.uint8)
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            head = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
            file = path / f"{part}-{name}-ubyte.gz"
            file.write_bytes(gzip.compress(head + values.tobytes()))
    return path


def source(path: Path, data: ImagesData = PLAIN, seed: int = 0) -> ImagesSource:
    return ImagesSource(path, data, SMALL, seed, (16, 16))


def run(path: Path, **keys: Any) -> Any:
    encoder = {key: value for key, value in TINY.items() if not key.startswith("data")}
    plain = {"train.mixup": 0.0, "train.cutmix": 0.0, "encoder.patch_size": 8}
    values = encoder | plain | {key.replace("__", "."): value for key, value in keys.items()}
    settings = [Setting(tuple(key.split(".")), v, key) for key, v in values.items()]
    settings.append(Setting(("data", "path"), str(path), "DATA"))
    asked = TrainRequest(settings=tuple(settings), device="cpu")
    config = train.images_config(asked)
    return train.train_images(asked, config, train.images_of(config))


def test_a_folder_is_split_once_and_for_all_by_the_seed(tmp_path: Path) -> None:
    path = folder(tmp_path)
    train_items, val_items, names = find_sets(path, ImagesData(val_fraction=0.25), seed=0)
    assert names == ("blue", "red")
    assert (len(train_items), len(val_items)) == (18, 6)
    both = [
        item for items in (train_items, val_items) for item in (items[i] for i in range(len(items)))
    ]
    assert len({path for path, _ in both}) == 24
    again = find_sets(path, ImagesData(val_fraction=0.25), seed=0)[1]
    assert [again[i] for i in range(6)] == [val_items[i] for i in range(6)]


def test_train_with_val_beside_it_is_used_as_it_is(tmp_path: Path) -> None:
    folder(tmp_path / "train", 5)
    folder(tmp_path / "val", 3)
    train_items, val_items, _ = find_sets(tmp_path, ImagesData(), seed=0)
    assert (len(train_items), len(val_items)) == (10, 6)


def test_validation_sees_what_other_commands_see(tmp_path: Path) -> None:
    data = source(folder(tmp_path))
    path, label = data.val.items[0]
    images, labels = next(data.val_batches([[0]]))
    assert torch.equal(images[0], torch.from_numpy(preprocess(decode(path).image, SMALL)))
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
    expected = torch.from_numpy(preprocess(decode(item).image, SMALL))
    assert torch.allclose(images[0], expected, atol=1e-6)


def test_augmentation_follows_from_epoch_and_index_in_any_worker(tmp_path: Path) -> None:
    path = folder(tmp_path)
    wanted = [(0, [1, 2]), (1, [1, 2])]
    alone = list(source(path, ImagesData(erase=0.5)).train_batches(wanted))
    shared = list(source(path, ImagesData(erase=0.5, workers=1)).train_batches(wanted))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(alone, shared, strict=True))
    assert not torch.equal(alone[0][0], alone[1][0])  # another epoch, another crop


def test_mnist_files_are_read_and_told_apart_by_their_folder(tmp_path: Path) -> None:
    train_items, val_items, names = find_sets(idx_folder(tmp_path / "mnist"), PLAIN, 0)
    assert (len(train_items), len(val_items)) == (40, 20)
    image, label = train_items[13]
    assert label == 3 and np.array_equal(np.asarray(image), np.full((28, 28), 60))
    assert names == tuple("0123456789")
    assert find_sets(idx_folder(tmp_path / "fashion-mnist"), PLAIN, 0)[2][9] == "Ankle boot"


def test_idx_reader_agrees_with_torchvisions(tmp_path: Path) -> None:
    from torchvision.datasets.mnist import read_sn3_pascalvincent_tensor

    file = idx_folder(tmp_path) / "train-images-idx3-ubyte.gz"
    (tmp_path / "plain").write_bytes(gzip.decompress(file.read_bytes()))
    theirs = read_sn3_pascalvincent_tensor(str(tmp_path / "plain"))
    assert np.array_equal(read_idx(file, 3), theirs.numpy())


def test_broken_files_are_told(tmp_path: Path) -> None:
    path = idx_folder(tmp_path / "mnist")
    file = path / "t10k-images-idx3-ubyte.gz"
    whole = gzip.decompress(file.read_bytes())
    for broken, said in (
        (b"not gzip", "t10k-images"),
        (gzip.compress(whole[:-1]), "values for"),
        (gzip.compress(b"\0\0\x0d\3" + whole[4:]), "not an IDX file"),
    ):
        file.write_bytes(broken)
        with pytest.raises(VitcliError, match=said):
            find_sets(path, PLAIN, 0)
    with pytest.raises(VitcliError, match="no such folder"):
        find_sets(tmp_path / "nowhere", PLAIN, 0)
    with pytest.raises(VitcliError, match="CIFAR10"):
        find_sets(tmp_path, ImagesData(kind="cifar10"), 0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(VitcliError, match="empty"):
        find_sets(tmp_path / "empty", PLAIN, 0)


def test_two_colors_are_learned_and_every_class_is_reported(tmp_path: Path) -> None:
    result = run(
        folder(tmp_path, per_class=60), train__epochs=4, train__lr=3e-3, data__val_fraction=0.3
    ).result
    assert result.verdict == "learned" and result.val_accuracy == 1.0
    assert [(row.name, row.accuracy) for row in result.classes] == [("blue", 1.0), ("red", 1.0)]
    assert sum(row.images for row in result.classes) == 36


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unreadable_image_is_one_line_from_any_process(tmp_path: Path, workers: int) -> None:
    (folder(tmp_path) / "red" / "3.png").write_bytes(b"not an image")
    images = source(tmp_path, PLAIN.model_copy(update={"workers": workers, "val_fraction": 0.5}))
    with pytest.raises(VitcliError, match=r"^\S*red.3\.png: not an image") as caught:
        list(images.train_batches([(0, range(12))]))
        list(images.val_batches([range(12)]))
    assert caught.value.hint and "Traceback" not in caught.value.message
