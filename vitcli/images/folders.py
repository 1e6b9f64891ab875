"""Folders as people have them: which files are images, which folders are splits and classes.

One reader for `embed`, `probe` and `train`, so that they agree. A folder that is a split is never
a class; hidden folders and those of other programs are left out; a shard's file is no class.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from PIL import Image

from vitcli.errors import VitcliError
from vitcli.files import first_names, is_folder, printable
from vitcli.images import MEMORY_BYTES, TIMEOUT_S
from vitcli.images.decode import ImageError
from vitcli.images.sources import (
    HIDDEN,
    TOOL_NAMES,
    Entry,
    ShardMembers,
    ShardRequest,
    content,
    count_suffix,
    is_hidden,
    list_members,
)
from vitcli.images.workers import Decoded, DecodePool, DecodeWork

_HEAD = 1 << 14
"""Bytes by which a mark distinguishes contents."""
_MORE_SUFFIXES = {".avif", ".heic", ".heics", ".heif", ".heifs", ".hif", ".jxl", ".svg", ".mpo"}
_NOT_IMAGES = {".pdf", ".mpg", ".mpeg", ".h5", ".hdf", ".bufr", ".grib"}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
SPLITS = {
    **dict.fromkeys(("train", "training", "trainval"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev", "eval", "evaluation", "holdout"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
    **dict.fromkeys(("unlabeled", "unlabelled"), "unlabeled"),
}
"""Names of folders, in lower case, that are splits, and which one each is."""
_NO_NEWS = {"set", "data", "dataset", "image", "images", "imgs", "img", "split", "folder"}
"""Words beside a split's in a folder's name that say nothing."""
_OF_IMAGES = {"images", "image", "imgs", "img", "jpegimages", "data"}
_OF_LABELS = {"labels", "label", "masks", "mask", "annotations", "annotation"}
"""Names of folders, in lower case, that are no classes where there are no others beside them;
classes may be below those of images."""
Place = tuple[str | None, str | None]
"""(split, class) of an image; None where there is none."""


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Suffixes, in lower case, that make a file an image: the one list of all commands.

    All that Pillow knows, those of formats that are refused included: they get a coded row.
    """
    return frozenset(Image.registered_extensions()) - _NOT_IMAGES | _MORE_SUFFIXES


@dataclass
class Walk:
    """The images below folders and in shards, in no particular order."""

    any_suffix: bool = False
    out: Path | None = None
    """A folder that is left out wherever it lies."""
    timeout_s: float = TIMEOUT_S
    memory_bytes: int = MEMORY_BYTES
    """Limits of the process that lists shards, for each `_CHUNK` of members."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Files without an image suffix, by suffix (those of rare ones as `others`), and HIDDEN."""
    _pool: DecodePool | None = None

    def close(self) -> None:
        """End the process that lists shards."""
        if self._pool is not None:
            self._pool.__exit__(None, None, None)
            self._pool = None

    def folder(self, folder: str, prefix: str = "") -> Iterator[Entry]:
        """The files below a folder; `prefix` is what their names begin with.

        Links to folders are followed, but not in circles. A folder that cannot be read is an
        entry that fails.
        """
        waiting: list[tuple[str, str, tuple[tuple[int, int], ...], bool]] = [
            (folder, prefix, (), False)
        ]
        while waiting:
            folder, prefix, above, hidden = waiting.pop()
            try:
                status = Path(folder).stat()
                identity = (status.st_dev, status.st_ino)
                if identity in above or self._is_out(folder):
                    continue
                found = os.scandir(folder)
            except OSError as error:
                name, reason = prefix.rstrip("/") or folder, error.strerror or error
                if not hidden:
                    yield Entry(name, folder, code="unreadable", error=f"folder: {reason}")
                continue
            with found:
                for item in found:
                    aside = hidden or is_hidden(item.name)
                    if _is_folder(item):
                        below = (item.path, f"{prefix}{item.name}/", (*above, identity), aside)
                        waiting.append(below)
                    elif not self._taken(item.name, aside):
                        continue
                    elif aside:
                        self.skipped[HIDDEN] += 1
                    else:
                        yield from self.file(item.path, prefix + item.name)

    def file(self, path: str, name: str) -> Iterator[Entry]:
        """A file, or what is in it if it is a shard."""
        path, lower = os.path.abspath(path), path.lower()  # noqa: PTH100 (links stay as they are)
        if lower.endswith(".tar") and os.path.isfile(path):  # noqa: PTH113 (any name)
            yield from self._shard(path, name)
        elif lower.endswith(_COMPRESSED):
            error = "a compressed shard cannot be read at any place: decompress it first"
            yield Entry(name, path, code="unsupported", error=error)
        else:
            yield Entry(name, path)

    def _shard(self, path: str, name: str) -> Iterator[Entry]:
        """Members as a process with limits lists them; whatever ends it is an entry."""
        if self._pool is None:
            work = DecodeWork(memory_bytes=self.memory_bytes)
            self._pool = DecodePool(work, 1, self.timeout_s, 1, list_members)
        asked = ShardRequest(path, name, image_suffixes(), self.any_suffix)
        while asked.offset >= 0:
            (found,) = self._pool.decode([asked])
            if not isinstance(found, ShardMembers):
                assert isinstance(found, Decoded)
                error = f"tar shard: {found.error}; what follows is lost"
                yield Entry(name, path, code=found.code, error=error)
                return
            yield from found.entries
            for suffix, count in found.skipped:
                count_suffix(self.skipped, suffix, count)
            asked = replace(asked, offset=found.after)

    def _is_out(self, folder: str) -> bool:
        return bool(self.out and self.out.exists() and self.out.samefile(folder))

    def _taken(self, name: str, hidden: bool) -> bool:
        suffix = Path(name).suffix.lower()
        if self.any_suffix or suffix in image_suffixes() or suffix == ".tar":
            return True
        if hidden:
            return name.lower() in TOOL_NAMES or name.startswith("._")
        count_suffix(self.skipped, suffix)
        return False


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link in a circle
        return False


def class_order(names: Iterable[str]) -> list[str]:
    """Distinct names sorted, whole numbers first and by their value."""

    def key(name: str) -> tuple[int, int, str, str]:
        if re.fullmatch("-?[0-9]{1,300}", name):
            return 0, int(name), "", name
        return 1, 0, name, name

    return sorted(set(names), key=key)


def class_name(text: str) -> str:
    """The name of a class: an é is one, which macOS decomposes; bytes that are no text are escapes.

    Then it can be written into every file, and is the same by every command.
    """
    name = unicodedata.normalize("NFC", text)
    return re.sub("[\ud800-\udfff]", lambda found: printable(found[0]), name)


def _folders(name: str) -> tuple[str, ...]:
    """The folders of a name; a shard counts as the split that it is named for, else as nothing."""
    found: list[str] = []
    for part in name.split("/")[:-1]:
        if not part.lower().endswith(".tar"):
            found.append(part)
            continue
        split, _ = split_of(part[:-4])
        if split and not any(map(_is_split, found)):
            found.append(split)
    return tuple(f for f in found if f not in ("", "."))


def _is_split(name: str) -> bool:
    return name.strip().lower() in SPLITS


@functools.lru_cache(4096)
def split_of(name: str) -> tuple[str | None, str]:
    """The split that a folder is named for, and what else its name says.

    `train`, `Training_Set`, `trainset` and `train2017` say the same; `train_seg` and `trainSeg` say
    `seg` besides.
    """
    if _is_split(name):
        return SPLITS[name.strip().lower()], ""
    words = [word.lower() for word in re.findall(r"[A-Z]?[^\W\d_A-Z]+|[A-Z]+", name)]
    roles = [_role(word) for word in words]
    splits = [role for role in roles if role]
    pairs = zip(words, roles, strict=True)
    rest = " ".join(word for word, role in pairs if not role and word not in _NO_NEWS)
    return (splits[0], rest) if len(splits) == 1 else (None, rest)


def _role(word: str) -> str | None:
    """The split that a word means, also with `set` and the like at its end."""
    known = (word, *(word.removesuffix(end) for end in _NO_NEWS))
    return next((SPLITS[name] for name in known if name in SPLITS), None)


@dataclass(frozen=True)
class Layout:
    """Where names say their split and class: after `shared` folders that all have in common."""

    shared: int
    split_at: int | None
    """Which folder is the split, counted from 0 after the shared ones; None without splits."""
    rest: str = ""
    """What the names of the splits say besides."""
    doubled: frozenset[str] = frozenset()
    """Splits with all their images in a folder of the split's own name: train/train/cat."""
    wrapped: frozenset[str | None] = frozenset()
    """Splits whose folders are called `images`, `masks` and the like: val/images."""

    def place(self, name: str, label: str = "") -> Place:
        """Split and class of an image by its name; `label` is what its shard says of it."""
        folders = _folders(name)[self.shared :]
        split = None
        if self.split_at is not None:
            own = folders[self.split_at] if len(folders) > self.split_at else ""
            role, rest = split_of(own)
            split = role if role and rest == self.rest else "other"
            folders = folders[: self.split_at] + folders[self.split_at + 1 :]
            folders = folders[own in self.doubled :]
        if split in self.wrapped:
            folders = () if folders and folders[0].lower() in _OF_LABELS else folders[1:]
        aside = split in ("unlabeled", "other")
        named = label or (folders[0] if folders and not aside else None)
        return split, named and class_name(named)


def read_layout(names: Iterable[str]) -> Layout:
    """What the folders of some names are.

    Splits, in any letter case, are named in `SPLITS`, also within a name (`training_set`,
    `train2017`): where all top folders are, or
    where one for training stands beside one to evaluate on that says nothing else (then what else
    there is belongs to neither), or where each class has such folders inside. Otherwise the top
    folders are classes: a class may be called `train` beside `bus` and `car`. Folders that are all
    called `images`, `labels` and the like are no classes; those below `images` may be.
    """
    folders = {_folders(name) for name in names}
    layout = _layout(folders)
    named: dict[str | None, set[str]] = {}
    for own in folders:
        split, label = layout.place("/".join((*own, "")))
        named.setdefault(split, set()).update({label.lower()} if label else ())
    known = _OF_IMAGES | _OF_LABELS
    return replace(layout, wrapped=frozenset(s for s, own in named.items() if own and own <= known))


def _layout(folders: set[tuple[str, ...]]) -> Layout:
    """The same before its classes are looked at."""
    shared = _shared(folders)
    below: dict[str, set[str]] = {}
    for own in folders:
        if len(own) > shared:
            below.setdefault(own[shared], set()).add((*own, "")[shared + 1])
    if (rest := _splits_beside(set(below))) is not None:
        doubled = frozenset(top for top, inside in below.items() if inside == {top})
        return Layout(shared, 0, rest, doubled)
    inside = {name for own in below.values() for name in own}
    if len(below) > 1 and all(map(_is_split, inside)):
        return Layout(shared, 1)
    return Layout(shared, None)


def _splits_beside(names: set[str]) -> str | None:
    """What the names of the splits among top folders say besides; None where there are none."""
    if names and all(map(_is_split, names)):
        return ""
    roles: dict[str, set[str | None]] = {}
    for name in names:
        role, rest = split_of(name)
        roles.setdefault(rest, set()).add(role)
    whole = [rest for rest, own in roles.items() if "train" in own and own & {"val", "test"}]
    return min(whole, default=None)


def _shared(folders: set[tuple[str, ...]]) -> int:
    """How many leading folders say nothing: all have them, none is a split, more follow."""
    first, last = min(folders, default=()), max(folders, default=())
    shortest = min(map(len, folders), default=0)
    at = 0
    while at < shortest - 1 and first[at] == last[at] and not _is_split(first[at]):
        at += 1
    return at


@dataclass(frozen=True)
class Item:
    """One image of a folder: where it lies, its split and its class."""

    entry: Entry
    split: str | None
    """train, val, test, unlabeled, other; None where the folder has no splits."""
    label: str | None
    """None where neither a folder nor its shard gives a class."""


@dataclass(frozen=True)
class ImageFolder:
    """The images of a folder, sorted by name, with what its folders were taken for."""

    folder: str
    items: tuple[Item, ...]
    classes: tuple[str, ...]
    """Of all splits, numbers in their order."""
    skipped: Counter[str]
    """What was left out: by suffix, and HIDDEN."""

    def of(self, split: str | None) -> list[Item]:
        """The items of one split; of None all, where there are no splits."""
        return [item for item in self.items if item.split == split]

    def lines(self, labeled: bool = True) -> list[str]:
        """What was taken for what, in a few lines; only counts where classes do not matter."""
        lines = [self._roles() if labeled else f"{len(self.items):,} images"]
        failed = [item.entry for item in self.items if item.entry.code]
        if failed:
            errors = first_names([f"{entry.name}: {entry.error}" for entry in failed])
            lines.append(f"cannot be read: {len(failed):,} ({errors})")
        if self.skipped:
            most = self.skipped.most_common(5)
            kinds = (f"{count:,} {kind or 'without suffix'}" for kind, count in most)
            lines.append(f"left out: {', '.join(kinds)}")
        return lines

    def _roles(self) -> str:
        found = []
        for split in ("train", "val", "test", "unlabeled", "other"):
            if not (items := self.of(split)):
                continue
            named = sum(item.label is not None for item in items)
            without = "" if named == len(items) else f", {len(items) - named:,} without a class"
            found.append(f"{split} {len(items):,} images{without}")
        if not found:
            named = sum(item.label is not None for item in self.items)
            found.append(f"no splits, {len(self.items):,} images, {named:,} with a class")
        shown = ", ".join(map(printable, self.classes[:6])) + ", ..." * (len(self.classes) > 6)
        count = f"{len(self.classes):,} class{'es' * (len(self.classes) != 1)}"
        return "; ".join([*found, f"{count}: {shown}" if self.classes else "no classes"])


def bytes_of(entry: Entry) -> int:
    """The size of an image's file or member; -1 where it cannot be known."""
    if entry.offset >= 0:
        return entry.size
    try:
        return Path(entry.source).stat().st_size
    except (OSError, ValueError):
        return -1


def content_digest(entry: Entry) -> bytes:
    """SHA-256 of an image's bytes; nothing where they cannot be read."""
    try:
        found = content(entry)
        if isinstance(found, bytes):
            return hashlib.sha256(found).digest()
        if not os.path.isfile(found):  # noqa: PTH113 (any name; a pipe would block)
            return b""
        with Path(found).open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except (OSError, ImageError):
        return b""


def content_mark(entry: Entry) -> str:
    """16 hexadecimal digits from how an image's bytes begin; empty where they cannot be read."""
    try:
        if not os.path.isfile(entry.source):  # noqa: PTH113 (any name; a pipe would block)
            return ""
        with Path(entry.source).open("rb") as file:
            file.seek(max(entry.offset, 0))
            head = file.read(_HEAD if entry.offset < 0 else min(_HEAD, entry.size))
    except (OSError, ValueError):
        return ""
    return hashlib.blake2b(head, digest_size=8).hexdigest()


def read_folder(
    folder: str | Path, any_suffix: bool = False, out: Path | None = None
) -> ImageFolder:
    """The images of a folder with splits and classes, hidden and tool folders left out.

    Args:
        out: a folder of results, left out too.

    Raises:
        VitcliError: there is no such folder, or no image in it.
    """
    if not is_folder(str(folder)):
        raise VitcliError(f"{printable(folder)}: no such folder", "name a folder of images")
    walk = Walk(any_suffix, out)
    with contextlib.closing(walk):
        entries = sorted(walk.folder(str(folder)), key=lambda entry: entry.key)
    if not entries:
        left = sum(walk.skipped.values())
        hint = f"give the images an image suffix; {left:,} files were left out" if left else ""
        raise VitcliError(f"{printable(folder)}: contains no images", hint)
    layout = read_layout(entry.name for entry in entries)
    items = tuple(Item(entry, *layout.place(entry.name, entry.label)) for entry in entries)
    classes = class_order(i.label for i in items if i.label is not None and i.split != "other")
    return ImageFolder(str(folder), items, tuple(classes), walk.skipped)
