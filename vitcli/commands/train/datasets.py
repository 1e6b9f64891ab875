"""Data sets on disk: a folder for each class, or published files; torchvision reads most of them.

CIFAR's files are pickles: torchvision opens them only if their MD5 is that of the published ones.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from vitcli.commands.train.data import Batch, Indices, channels, derived_seed, seed_cpu
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import ImagesData
from vitcli.errors import VitcliError, install_extra
from vitcli.images.decode import ImageError, decode
from vitcli.images.preprocess import preprocess

Items = Sequence[tuple[Any, int]]
"""Images, as a path or a PIL image, and their labels, by index."""

MARKS: dict[str, tuple[str, ...]] = {
    "cifar10": ("cifar-10-batches-py/batches.meta", "cifar-10-python.tar.gz"),
    "cifar100": ("cifar-100-python/meta", "cifar-100-python.tar.gz"),
    "fashion-mnist": ("FashionMNIST/raw/train-images-idx3-ubyte",),
    "mnist": ("MNIST/raw/train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"),
}
"""Files that tell a published set from a folder for each class."""
FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
"""The classes of Fashion-MNIST (Xiao et al. 2017, table 2)."""
EXAMPLE = "a folder for each class, or CIFAR's or MNIST's own files"


def torchvision() -> Any:
    """The library, or how to get it.

    Raises:
        VitcliError: it is not installed.
    """
    try:
        import torchvision as library
    except ImportError as error:
        raise VitcliError("training on images needs torchvision", install_extra("train")) from error
    return library


class Part(Sequence[tuple[Any, int]]):
    """Some of the items, by index."""

    def __init__(self, items: Items, indices: Sequence[int] | NDArray[np.int64]) -> None:
        self.items = items
        self.indices = indices

    def __getitem__(self, index: Any) -> Any:
        return self.items[int(self.indices[index])]

    def __len__(self) -> int:
        return len(self.indices)


def find_sets(
    path: Path, data: ImagesData, seed: int, download: bool = False
) -> tuple[Items, Items, tuple[str, ...]]:
    """Training items, validation items and the names of the classes.

    Raises:
        VitcliError: nothing to train on there.
    """
    kind = data.kind if data.kind != "auto" else recognized(path)
    if kind == "folder":
        return folder_sets(path, data.val_fraction, seed)
    if kind in ("mnist", "fashion-mnist") and (path / "train-images-idx3-ubyte.gz").exists():
        return idx_sets(path, kind)
    library = torchvision()
    if download and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise VitcliError("--download is for one process", "fetch the files first, then torchrun")
    name = {"cifar10": "CIFAR10", "cifar100": "CIFAR100", "mnist": "MNIST"}.get(
        kind, "FashionMNIST"
    )
    try:
        sets = [
            getattr(library.datasets, name)(path, train=train, download=download)
            for train in (True, False)
        ]
    except (RuntimeError, OSError, ValueError) as error:
        raise VitcliError(
            f"{path}: {name}: {str(error).splitlines()[0]}",
            f"put {name}'s files there, or --download",
        ) from error
    return sets[0], sets[1], tuple(sets[0].classes)


def recognized(path: Path) -> str:
    """The kind of data set in a folder, by its files.

    Raises:
        VitcliError: there is no such folder.
    """
    if not path.is_dir():
        raise VitcliError(f"{path}: there is no such folder", EXAMPLE)
    for kind, marks in MARKS.items():
        if any((path / mark).exists() for mark in marks):
            # MNIST and Fashion-MNIST publish the same file names: the folder's tells them apart.
            return "fashion-mnist" if kind == "mnist" and "fashion" in str(path).lower() else kind
    return "folder"


def folder_sets(path: Path, val_fraction: float, seed: int) -> tuple[Items, Items, tuple[str, ...]]:
    """`train` with `val` or `test` beside it, or one folder of which a part is held out."""
    library = torchvision()

    def read(folder: Path) -> Any:
        try:
            return library.datasets.ImageFolder(folder)
        except (OSError, RuntimeError) as error:
            reason = str(error).splitlines()[0]
            raise VitcliError(f"{folder}: {reason}", EXAMPLE) from error

    train_folder = path / "train"
    if not train_folder.is_dir():
        everything = read(path)
        order = np.random.default_rng(derived_seed(seed, "held out")).permutation(len(everything))
        held = max(1, round(val_fraction * len(order)))
        if len(order) <= held:
            raise VitcliError(f"{path}: {len(order)} images are too few to hold some out", EXAMPLE)
        items = everything.samples
        names = tuple(everything.classes)
        return Part(items, np.sort(order[held:])), Part(items, np.sort(order[:held])), names
    val_folder = next((f for f in (path / "val", path / "test") if f.is_dir()), None)
    if val_folder is None:
        raise VitcliError(f"{path}: train has no val or test beside it", "move the classes up")
    train, val = read(train_folder), read(val_folder)
    if train.classes != val.classes:
        odd = sorted(set(train.classes) ^ set(val.classes))
        raise VitcliError(f"{path}: the class {odd[0]} is not on both sides", EXAMPLE)
    return train.samples, val.samples, tuple(train.classes)


class Pixels(Sequence[tuple[Any, int]]):
    """Gray images in memory, (n, height, width), 8 bits."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.images = images
        self.labels = labels

    def __getitem__(self, index: Any) -> Any:
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def __len__(self) -> int:
        return len(self.images)


def idx_sets(path: Path, kind: str) -> tuple[Items, Items, tuple[str, ...]]:
    """The four published files of MNIST or Fashion-MNIST, compressed, in one folder."""
    sets = []
    for part in ("train", "t10k"):
        images = read_idx(path / f"{part}-images-idx3-ubyte.gz", 3)
        labels = read_idx(path / f"{part}-labels-idx1-ubyte.gz", 1)
        if len(images) != len(labels):
            raise VitcliError(f"{path}: {len(images)} images, {len(labels)} labels", EXAMPLE)
        sets.append(Pixels(images, labels))
    names = FASHION if kind == "fashion-mnist" else tuple(map(str, range(10)))
    return sets[0], sets[1], names


def read_idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: 0, 0, 8, rank, big-endian sizes, values (LeCun's format).

    Raises:
        VitcliError: not such a file.
    """
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise VitcliError(f"{path}: {error}", "the published file, compressed") from error
    if raw[:4] != bytes((0, 0, 8, rank)):
        raise VitcliError(f"{path}: not an IDX file of {rank} dimensions", "the published file")
    sizes = np.frombuffer(raw, ">u4", rank, 4).astype(int)
    values = np.frombuffer(raw, np.uint8, offset=4 + 4 * rank)
    if values.size != sizes.prod():
        raise VitcliError(f"{path}: {values.size} values for {sizes.tolist()}", "a whole file")
    return values.reshape(sizes)


class ImagesSource:
    """A training and a validation set of images, as `TrainingData`.

    Args:
        seed: decides the held-out part, the limit and the augmentation.
    """

    def __init__(
        self,
        path: Path,
        data: ImagesData,
        config: PreprocessConfig,
        seed: int,
        size: tuple[int, int],
        download: bool = False,
    ) -> None:
        self.data = data
        train, val, self.classes = find_sets(path, data, seed, download)
        if data.train_limit is not None and data.train_limit < len(train):
            order = np.random.default_rng(derived_seed(seed, "limit")).permutation(len(train))
            train = Part(train, order[: data.train_limit])
        self.train_size, self.val_size = len(train), len(val)
        self.train = Prepared(train, augmentation(data, config, size), seed)
        self.val = Prepared(val, lambda image: torch.from_numpy(preprocess(image, config)))

    def _loader(self, images: Prepared, wanted: Iterable[list[tuple[int, int]]]) -> Iterator[Batch]:
        workers = self.data.workers
        loader = DataLoader(
            images,
            batch_sampler=wanted,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=one_thread if workers else None,
            collate_fn=stacked_or_wrong,
        )
        for batch in loader:
            if isinstance(batch, Unreadable):
                raise VitcliError(
                    str(batch), "repair it, or leave it out and start again", exit_code=1
                )
            yield batch

    def train_batches(self, wanted: Iterable[tuple[int, Indices]]) -> Iterator[Batch]:
        return self._loader(
            self.train, Places([[(epoch, int(i)) for i in indices] for epoch, indices in wanted])
        )

    def val_batches(self, wanted: Iterable[Indices]) -> Iterator[Batch]:
        return self._loader(self.val, Places([[(0, int(i)) for i in part] for part in wanted]))


def one_thread(worker: int) -> None:
    torch.set_num_threads(1)


class Unreadable(str):
    """What is wrong with an image: workers hand it over, as errors do not cross processes whole."""


def stacked_or_wrong(items: list[Any]) -> Any:
    """A batch, or the first thing that is wrong with it."""
    return next((item for item in items if isinstance(item, Unreadable)), None) or default_collate(
        items
    )


class Places(list[list[tuple[int, int]]]):
    """Batches of (epoch, index), as a DataLoader's batch sampler."""


class Prepared(Dataset[tuple[Tensor, int] | Unreadable]):
    """Image (epoch, index), augmented from a seed of its own: the same in any worker."""

    def __init__(
        self, items: Items, transform: Callable[[Any], Tensor], seed: int | None = None
    ) -> None:
        self.items = items
        self.transform = transform
        self.seed = seed

    def __getitem__(self, place: tuple[int, int]) -> tuple[Tensor, int] | Unreadable:
        epoch, index = place
        image, label = self.items[index]
        if not isinstance(image, Image.Image):
            try:
                image = decode(image).image
            except ImageError as error:
                return Unreadable(error.message)
        if self.seed is not None:
            seed_cpu(derived_seed(self.seed, "augment", epoch, index))
        return self.transform(image.convert("RGB")), label

    def __len__(self) -> int:
        return len(self.items)


def augmentation(
    data: ImagesData, config: PreprocessConfig, size: tuple[int, int]
) -> Callable[[Any], Tensor]:
    """PIL image to the normalized tensor (3, height, width) that training sees."""
    torchvision()
    from torchvision.transforms import InterpolationMode, v2

    filter_ = InterpolationMode(config.filter)
    steps: list[Any] = []
    if data.crop_scale is not None:
        steps.append(v2.RandomResizedCrop(size, data.crop_scale, data.crop_ratio, filter_))
    else:
        steps.append(v2.Resize(size, filter_))
    if data.pad_crop:
        steps.append(v2.RandomCrop(size, padding=data.pad_crop))
    if data.flip:
        steps.append(v2.RandomHorizontalFlip(data.flip))
    mean, scale = channels(config)
    geometry = v2.Compose(steps)
    erase = v2.RandomErasing(data.erase) if data.erase else nn.Identity()

    def pipeline(image: Any) -> Tensor:
        pixels = torch.from_numpy(np.array(geometry(image))).permute(2, 0, 1).float()
        out: Tensor = erase(pixels.sub_(mean).mul_(scale).contiguous())
        return out

    return pipeline
