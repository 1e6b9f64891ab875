"""Tar shards, as webdataset writes them: their members are read where they lie, never unpacked."""

from __future__ import annotations

import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from vitcli.commands.embed.entries import Entry

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
