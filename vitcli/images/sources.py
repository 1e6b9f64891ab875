"""Where an image is: a file, a member of a tar shard (webdataset), or in MNIST's or CIFAR's files.

Members are read where they lie, never unpacked. Needs Pillow and the standard library only.
"""

from __future__ import annotations

import errno
import gzip
import json
import math
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from os import fsencode
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitcli.errors import VitcliError, install_extra
from vitcli.files import printable
from vitcli.images.decode import ImageError

_SUFFIXES = 100
TOOL_NAMES = {
    *("__macosx", "@eadir", "thumbs.db", "desktop.ini", "ehthumbs.db", "#recycle", "$recycle.bin"),
    *("lost+found", "system volume information", "__pycache__"),
}
HIDDEN = "hidden or of a tool"
"""The count of images and shards that are left out for where they lie or what they are called."""
_CHUNK = 10_000
"""Members in one answer; groups of one key are never divided."""
_LABEL_BYTES = 1 << 16
_LABEL_KEYS = ("label", "class_name", "class", "cls", "category", "target")
_GROUP = 1000
"""Files of one key: more than a sample has, few enough to keep in memory."""


def is_hidden(name: str) -> bool:
    """Whether a file or folder of that name is hidden or another program's own."""
    return name.startswith(".") or name.lower() in TOOL_NAMES


@dataclass(frozen=True, slots=True)
class Entry:
    """One image to read: a file, or a member of a tar shard."""

    name: str
    """The name in tables. Bytes that are not UTF-8 are lone surrogates, as in `os.fsdecode`."""
    source: str
    """The absolute path of the image or its shard."""
    offset: int = -1
    """Where a member's content begins in its shard; -1 for a file of its own."""
    size: int = -1
    """Bytes of a member."""
    code: str = ""
    """Set where it is already known that there is nothing to decode."""
    error: str = ""
    label: str = ""
    """The class that the shard itself gives (`.cls`, `.json`), if any."""

    @property
    def key(self) -> tuple[bytes, int]:
        """What inputs are sorted by, and what makes two of them the same."""
        return fsencode(self.name), self.offset

    def to_line(self) -> bytes:
        """One line of ASCII without a newline in it, whatever the name holds."""
        return json.dumps(astuple(self), separators=(",", ":")).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        """The entry that `to_line` wrote.

        Raises:
            ValueError: it is not such a line.
        """
        values = json.loads(line)
        kinds = (str, str, int, int, str, str, str)
        if not isinstance(values, list) or not 2 <= len(values) <= len(kinds):
            raise ValueError("not an entry")
        if any(type(value) is not kind for value, kind in zip(values, kinds, strict=False)):
            raise ValueError("not an entry")
        return cls(*values)


def content(entry: Entry) -> str | bytes:
    """What `decode` reads: the file's path, or the bytes of a member.

    Raises:
        ImageError: the shard cannot be read, or ends before the member does.
    """
    if entry.offset < 0:
        return entry.source
    try:
        with Path(entry.source).open("rb") as file:
            there = file.seek(0, 2) - entry.offset  # a header can claim any size
            if there < entry.size:
                raise ImageError(
                    "truncated", f"the shard ends after {max(there, 0)} of {entry.size} bytes"
                )
            file.seek(entry.offset)
            return file.read(entry.size)
    except OSError as error:
        raise ImageError("unreadable", f"shard: {error.strerror or error}") from error


@dataclass(frozen=True)
class ShardRequest:
    """What to list of a shard: its members from `offset` on."""

    path: str
    name: str
    suffixes: frozenset[str]
    any_suffix: bool = False
    offset: int = 0


@dataclass(frozen=True)
class ShardMembers:
    """Some members of a shard in their order, and where to go on; `after` is -1 at the end."""

    entries: tuple[Entry, ...] = ()
    skipped: tuple[tuple[str, int], ...] = ()
    after: int = -1


def list_members(asked: ShardRequest, _: Any = None) -> ShardMembers:
    """The images in a tar file, named `name/member`, with the labels that lie beside them.

    Two members of one name are two entries. A link, which has no content of its own, is an entry
    that fails. Of a damaged shard all members before the damage are given, then one entry that
    fails in place of the rest. Files of one key (the path up to the first dot of the name)
    that lie side by side are one sample: `.cls` is its class, as is `label` (or `class_name`,
    `class`, `cls`, `category`, `target`) in `.json`.
    """
    skipped: Counter[str] = Counter()
    entries: list[Entry] = []
    after, damage = -1, None
    try:
        with Path(asked.path).open("rb") as file:
            file.seek(asked.offset)
            with tarfile.open(fileobj=file, mode="r:") as tar:
                for start, group in _groups(tar):
                    if len(entries) >= _CHUNK:
                        after = start
                        break
                    entries += _sample(group, tar, asked, skipped)
                else:
                    damage = _end(tar, asked.path)
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place that no file reaches
            damage = "a header claims more than any file holds"
        else:
            entries.append(_failed(asked, "unreadable", error.strerror or str(error)))
    except (tarfile.TarError, ValueError, EOFError) as error:
        damage = str(error)
    except RecursionError:
        damage = "headers inside headers without end"
    except (MemoryError, OverflowError):
        damage = "a header claims more than memory holds"
    if damage:
        entries.append(_failed(asked, "corrupt", f"tar shard: {damage}; what follows is lost"))
    return ShardMembers(tuple(entries), tuple(skipped.items()), after)


def count_suffix(skipped: Counter[str], suffix: str, count: int = 1) -> None:
    """Count files that are left out, in bounded memory even where each has its own suffix."""
    known = suffix in skipped or len(skipped) < _SUFFIXES
    skipped[suffix if known else "others"] += count


def _failed(asked: ShardRequest, code: str, error: str) -> Entry:
    return Entry(asked.name, asked.path, code=code, error=error)


def _groups(tar: tarfile.TarFile) -> Iterator[tuple[int, list[tarfile.TarInfo]]]:
    """Neighboring members of one key, with the place of the first one's header."""
    group: list[tarfile.TarInfo] = []
    key = ""
    while True:
        try:
            member = tar.next()
        except Exception:
            if group:
                yield group[0].offset, group  # what lies before the damage
            raise
        tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
        if member is None:
            break
        folder, _, base = member.name.rpartition("/")
        own = f"{folder}/{base.split('.', 1)[0]}"
        if group and (own != key or len(group) >= _GROUP):
            yield group[0].offset, group
            group = []
        key = own
        group.append(member)
    if group:
        yield group[0].offset, group


def _sample(
    group: list[tarfile.TarInfo], tar: tarfile.TarFile, asked: ShardRequest, skipped: Counter[str]
) -> Iterator[Entry]:
    label, beside = _label(group, tar)
    for member in group:
        if member is beside:
            continue
        for entry in _member(member, asked, skipped):
            yield replace(entry, label=label) if label else entry


def _label(
    group: list[tarfile.TarInfo], tar: tarfile.TarFile
) -> tuple[str, tarfile.TarInfo | None]:
    """The class that one of the sample's own files gives, or nothing; and that file."""
    for member in group:
        suffix = Path(member.name).suffix.lower()
        if suffix not in (".cls", ".json") or not member.isreg() or member.size > _LABEL_BYTES:
            continue
        file = tar.extractfile(member)
        try:
            text = file.read().decode().strip() if file else ""
            if suffix == ".cls":
                return text, member
            values = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            found = next((values[key] for key in _LABEL_KEYS if key in values), None)
            if isinstance(found, str | int) and not isinstance(found, bool):
                return str(found), member
    return "", None


def _member(member: tarfile.TarInfo, asked: ShardRequest, skipped: Counter[str]) -> Iterator[Entry]:
    suffix = Path(member.name).suffix.lower()
    if member.isdir():
        return
    if not asked.any_suffix and suffix not in asked.suffixes:
        count_suffix(skipped, suffix)
        return
    if any(is_hidden(part) for part in member.name.split("/") if part.strip(".")):
        skipped[HIDDEN] += 1  # macOS's tar adds ._NAME beside each NAME
        return
    full = f"{asked.name}/{member.name}"
    if member.isreg() and not member.issparse():
        yield Entry(full, asked.path, member.offset_data, member.size)
    else:
        error = "a link or special member of a tar shard"
        yield Entry(full, asked.path, member.offset, 0, code="unsupported", error=error)


def _end(tar: tarfile.TarFile, path: str) -> str:
    """What is wrong after the last member: tarfile takes any damage there for the end."""
    with Path(path).open("rb") as file:
        file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
    if not block:
        return "ends without an end mark: cut off?"
    return "" if not block.strip(b"\0") else "a damaged header"


Items = Sequence[tuple[Any, int]]
"""Images, as what `decode` reads or a PIL image, and their labels, by index."""

FASHION = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag"),
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
