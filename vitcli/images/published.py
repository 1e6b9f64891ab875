"""Published sets of labeled images, by their own files: MNIST, Fashion-MNIST and CIFAR.

They are recognized by what their files hold, never by a folder's name. CIFAR's files are pickles:
torchvision opens them only if their MD5 is that of the published ones.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitcli.errors import VitcliError, install_extra
from vitcli.files import printable

Items = Sequence[tuple[Any, int]]
"""Images, as what `decode` reads or a PIL image, and their labels, by index."""

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
FIRST_LABELS: dict[tuple[int, ...], str] = {
    (5, 0, 4, 1, 9, 2, 1, 3, 1, 4): "mnist",
    (9, 0, 0, 3, 0, 2, 7, 2, 5, 5): "fashion-mnist",
}
"""The sets that use the same four file names, by the first labels of their training half."""
IDX_FOLDERS = ("", "raw", "MNIST/raw", "FashionMNIST/raw")
CIFAR = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-python.tar.gz", "CIFAR10"),
    "cifar100": ("cifar-100-python", "cifar-100-python.tar.gz", "CIFAR100"),
}
"""Folder and archive as published, and the name that torchvision gives the set."""
DOWNLOADS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
MAX_VALUES = 2**31
"""Bytes of an IDX file that is read: twenty times the largest published one."""
EXAMPLE = "name a folder with a subfolder of images per class, or with CIFAR's or MNIST's files"


def recognized(path: Path) -> str:
    """The kind of data set in a folder, by its files: `folder` is images in folders.

    Raises:
        VitcliError: there is no such folder, or a file of a set cannot be read.
    """
    if not path.is_dir():
        raise VitcliError(f"{printable(path)}: no such folder", EXAMPLE)
    for kind, (folder, archive, _) in CIFAR.items():
        if (path / folder).is_dir() or (path / archive).is_file():
            return kind
    labels = idx_file(path, "train-labels-idx1")
    if labels is None:
        return "folder"
    first = tuple(int(label) for label in read_idx(labels, 1)[:10])
    return FIRST_LABELS.get(first, "idx")


def published_sets(
    path: Path, kind: str, download: bool = False
) -> tuple[Items, Items, tuple[str, ...]]:
    """Training items, test items and class names of a set of this kind (see `recognized`).

    `idx` is a set in MNIST's format that is neither; its classes are called by their numbers.

    Raises:
        VitcliError: its files are not there or not readable.
    """
    if kind in ("mnist", "fashion-mnist", "idx"):
        if download and idx_file(path, "train-labels-idx1") is None:
            torchvision_set(path, DOWNLOADS[kind], download)
        return idx_sets(path, kind)
    train, test = torchvision_set(path, CIFAR[kind][2], download)
    return train, test, tuple(train.classes)


def torchvision_set(path: Path, name: str, download: bool) -> tuple[Any, Any]:
    """Both halves as torchvision reads or fetches them."""
    try:
        from torchvision import datasets
    except ImportError as error:
        raise VitcliError(f"{name} needs torchvision", install_extra("train")) from error
    try:
        train, test = (
            getattr(datasets, name)(path, train=half, download=download) for half in (True, False)
        )
    except (RuntimeError, OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise VitcliError(
            f"{printable(path)}: {name}: {reason}", f"copy {name}'s files there, or add --download"
        ) from error
    return train, test


class Pixels(Sequence[tuple[Any, int]]):
    """Gray images in memory, (n, height, width), 8 bits."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.images = images
        self.labels = labels

    def __getitem__(self, index: Any) -> Any:
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def __len__(self) -> int:
        return len(self.images)


def idx_file(path: Path, name: str) -> Path | None:
    """A file of MNIST's names, compressed or not, where it is published or torchvision puts it."""
    for folder in IDX_FOLDERS:
        for suffix in ("-ubyte.gz", "-ubyte", ".ubyte"):
            file = path / folder / f"{name}{suffix}"
            if file.is_file():
                return file
    return None


def idx_sets(path: Path, kind: str) -> tuple[Items, Items, tuple[str, ...]]:
    """The four published files of MNIST or Fashion-MNIST, or of a set in their format."""
    sets, most = [], 0
    for part in ("train", "t10k"):
        files = [idx_file(path, f"{part}-{name}") for name in ("images-idx3", "labels-idx1")]
        if None in files:
            raise VitcliError(f"{printable(path)}: {part}'s images or labels are missing", EXAMPLE)
        images, labels = (
            read_idx(file, rank)
            for file, rank in zip(cast("list[Path]", files), (3, 1), strict=True)
        )
        if len(images) != len(labels):
            raise VitcliError(
                f"{printable(path)}: {len(images)} images, {len(labels)} labels", EXAMPLE
            )
        sets.append(Pixels(images, labels))
        most = max(most, int(labels.max(initial=0)))
    names = FASHION if kind == "fashion-mnist" else tuple(map(str, range(max(most + 1, 10))))
    if most >= len(names):
        raise VitcliError(
            f"{printable(path)}: is not {kind} (got label {most}, expected below {len(names)})",
            "leave data.kind out",
        )
    return sets[0], sets[1], names


def read_idx(path: Path, rank: int) -> NDArray[np.uint8]:
    """An IDX file of unsigned bytes: 0, 0, 8, rank, big-endian sizes, values (LeCun's format).

    No more is decompressed than the sizes in its head ask for, and those are bounded.

    Raises:
        VitcliError: not such a file.
    """
    where = printable(path)
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with cast("IO[bytes]", gzip.open(path) if packed else path.open("rb")) as file:
            head = file.read(4 + 4 * rank)
            if head[:4] != bytes((0, 0, 8, rank)) or len(head) < 4 + 4 * rank:
                raise VitcliError(
                    f"{where}: is not an IDX file of {rank} dimensions", "use the published file"
                )
            sizes = np.frombuffer(head, ">u4", rank, 4).astype(int).tolist()
            count = math.prod(sizes)
            if count > MAX_VALUES:
                raise VitcliError(
                    f"{where}: is too large (got {count:,} values, expected at most "
                    f"{MAX_VALUES:,})",
                    "use the published file",
                )
            values = np.frombuffer(file.read(count + 1), np.uint8)
    except (OSError, EOFError, zlib.error) as error:
        raise VitcliError(f"{where}: cannot be read: {error}", "use the published file") from error
    if values.size != count:
        got = "more" if values.size > count else f"{values.size:,}"
        raise VitcliError(
            f"{where}: does not match its header (got {got} values, expected {count:,})",
            "use the published file",
        )
    return values.reshape(sizes)
