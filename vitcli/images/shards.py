"""Where one image lies: a file of its own, or a member of a tar shard as webdataset writes them.

Members are read where they lie, never unpacked. Needs Pillow and the standard library only.
"""

from __future__ import annotations

import errno
import json
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from os import fsencode
from pathlib import Path
from typing import Any

from vitcli.images.decode import ImageError

_SUFFIXES = 100
_CHUNK = 10_000
"""Members in one answer; groups of one key are never divided."""
_LABEL_BYTES = 1 << 16
_LABEL_KEYS = ("label", "class_name", "class", "cls", "category", "target")
_GROUP = 1000
"""Files of one key: more than a sample has, few enough to keep in memory."""


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
    fails and stands for the rest. Files of one key (the path up to the first dot of the name)
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
    label = _label(group, tar)
    for member in group:
        for entry in _member(member, asked, skipped):
            yield replace(entry, label=label) if label else entry


def _label(group: list[tarfile.TarInfo], tar: tarfile.TarFile) -> str:
    """The class that the sample's own files give, or nothing."""
    for member in group:
        suffix = Path(member.name).suffix.lower()
        if suffix not in (".cls", ".json") or not member.isreg() or member.size > _LABEL_BYTES:
            continue
        file = tar.extractfile(member)
        try:
            text = file.read().decode().strip() if file else ""
            if suffix == ".cls":
                return text
            values = json.loads(text)
        except (ValueError, RecursionError):
            continue
        if isinstance(values, dict):
            found = next((values[key] for key in _LABEL_KEYS if key in values), None)
            if isinstance(found, str | int) and not isinstance(found, bool):
                return str(found)
    return ""


def _member(member: tarfile.TarInfo, asked: ShardRequest, skipped: Counter[str]) -> Iterator[Entry]:
    suffix = Path(member.name).suffix.lower()
    if member.isdir():
        return
    if not asked.any_suffix and suffix not in asked.suffixes:
        count_suffix(skipped, suffix)
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
