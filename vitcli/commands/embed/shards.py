"""Tar shards, as webdataset writes them: their members are read where they lie, never unpacked."""

from __future__ import annotations

import json
import os
import tarfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path

from vitcli.files import printable

_SUFFIXES = 100


def members(
    path: str, name: str, suffixes: frozenset[str], any_suffix: bool, skipped: Counter[str]
) -> Iterator[Entry]:
    """The images in a tar file, named `name/member`.

    Two members of one name are two entries. A link, which has no content of its own, is an entry
    that fails. Of a damaged shard all members before the damage are given, then one entry that
    fails and stands for the rest.
    """
    try:
        with Path(path).open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            while member := tar.next():
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                yield from _member(member, path, name, suffixes, any_suffix, skipped)
            if damage := _end(tar, path):
                yield _damaged(path, name, damage)
    except OSError as error:
        yield Entry(name, path, code="unreadable", error=error.strerror or str(error))
    except (tarfile.TarError, ValueError, EOFError) as error:
        yield _damaged(path, name, str(error))


def count_suffix(skipped: Counter[str], suffix: str) -> None:
    """Count a file that is left out, in bounded memory even where each has its own suffix."""
    known = suffix in skipped or len(skipped) < _SUFFIXES
    skipped[suffix if known else "others"] += 1


def _member(
    member: tarfile.TarInfo,
    path: str,
    name: str,
    suffixes: frozenset[str],
    any_suffix: bool,
    skipped: Counter[str],
) -> Iterator[Entry]:
    suffix = Path(member.name).suffix.lower()
    if member.isdir():
        return
    if not any_suffix and suffix not in suffixes:
        count_suffix(skipped, suffix)
        return
    full = f"{name}/{member.name}"
    if member.isreg() and not member.issparse():
        yield Entry(full, path, member.offset_data, member.size)
    else:
        error = "a link or special member of a tar shard"
        yield Entry(full, path, member.offset, 0, code="unsupported", error=error)


def _end(tar: tarfile.TarFile, path: str) -> str:
    """What is wrong after the last member: tarfile takes any damage there for the end."""
    with Path(path).open("rb") as file:
        file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
    if not block:
        return "ends without an end mark: cut off?"
    return "" if not block.strip(b"\0") else "a damaged header"


def _damaged(path: str, name: str, reason: str) -> Entry:
    return Entry(name, path, code="corrupt", error=f"tar shard: {reason}; what follows is lost")


@dataclass(frozen=True, slots=True)
class Entry:
    """One image to encode: a file, or a member of a tar shard."""

    name: str
    """How tables call it. Bytes that are not UTF-8 are lone surrogates, as in `os.fsdecode`."""
    source: str
    """The absolute path of what to open: the image or its shard."""
    offset: int = -1
    """Where a member's content begins in its shard; -1 for a file of its own."""
    size: int = -1
    """Bytes of a member."""
    code: str = ""
    """Set where it is already known that there is nothing to decode."""
    error: str = ""

    @property
    def key(self) -> tuple[bytes, int]:
        """What inputs are sorted by, and what makes two of them the same."""
        return os.fsencode(self.name), self.offset

    def to_line(self) -> bytes:
        """One line of ASCII without a newline in it, whatever the name holds."""
        return json.dumps(astuple(self), separators=(",", ":")).encode("ascii") + b"\n"

    @classmethod
    def from_line(cls, line: bytes) -> Entry:
        return cls(*json.loads(line))


def escaped(name: str) -> tuple[str, bool]:
    """A name as valid text, and whether that took escapes.

    A name that is UTF-8 stays as it is. In any other, bytes that are not UTF-8 become `\\xNN` and
    backslashes are doubled, so that `unescaped` gives the name back.
    """
    if not any("\ud800" <= c <= "\udfff" for c in name):
        return name, False
    parts = name.split("\\")
    return "\\\\".join("".join(_byte(c) for c in part) for part in parts), True


def _byte(character: str) -> str:
    return printable(character) if "\ud800" <= character <= "\udfff" else character


def unescaped(text: str, was_escaped: bool) -> str:
    """The name that `escaped` wrote, as `os.fsdecode` gives it."""
    if not was_escaped:
        return text
    parts = []
    for part in text.split("\\\\"):
        plain, *codes = part.split("\\x")
        parts.append(plain + "".join(chr(0xDC00 + int(c[:2], 16)) + c[2:] for c in codes))
    return "\\".join(parts)
