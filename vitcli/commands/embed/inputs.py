"""The inputs of a job as one sorted list on disk, so that a million of them take no memory."""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import os
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vitcli.commands.embed.shards import Entry
from vitcli.files import printable

_IN_MEMORY = 50_000
"""Entries that are sorted at a time; above it, sorted runs are merged from disk."""


@dataclass(frozen=True)
class InputList:
    """A file of `Entry` lines, sorted by name without repetitions."""

    path: Path
    count: int
    digest: str
    """SHA-256 of names and places in shards: equal for the same inputs under any root."""
    duplicates: int
    part_rows: int
    starts: array[int]
    """Where in the file each part begins."""

    @property
    def parts(self) -> int:
        return len(self.starts)

    def rows_of(self, part: int) -> int:
        return min(self.part_rows, self.count - part * self.part_rows)

    def read(self, part: int) -> list[Entry]:
        """The entries of one part."""
        with self.path.open("rb") as file:
            file.seek(self.starts[part])
            return [Entry.from_line(file.readline()) for _ in range(self.rows_of(part))]


def write_inputs(entries: Iterable[Entry], folder: Path, part_rows: int) -> InputList:
    """Sort entries into a new file in `folder`; which of two equal ones stays does not matter."""
    fd, name = tempfile.mkstemp(prefix=".inputs.", suffix=".jsonl", dir=folder)
    digest, starts = hashlib.sha256(), array("q")
    count = duplicates = at = 0
    try:
        with os.fdopen(fd, "wb") as file, contextlib.ExitStack() as runs:
            os.fchmod(fd, 0o644)
            last: tuple[bytes, int] | None = None
            for entry in _sorted(entries, folder, runs):
                if entry.key == last:
                    duplicates += 1
                    continue
                last = entry.key
                if count % part_rows == 0:
                    starts.append(at)
                count += 1
                at += file.write(entry.to_line())
                digest.update(b"%d:%b:%d:%d\n" % (len(last[0]), *last, entry.size))
    except BaseException:
        Path(name).unlink()
        raise
    return InputList(Path(name), count, digest.hexdigest(), duplicates, part_rows, starts)


def _sorted(entries: Iterable[Entry], folder: Path, runs: contextlib.ExitStack) -> Iterator[Entry]:
    spilled: list[Iterator[Entry]] = []
    chunk: list[Entry] = []
    for entry in entries:
        chunk.append(entry)
        if len(chunk) == _IN_MEMORY:
            spilled.append(_spill(chunk, folder, runs))
            chunk = []
    chunk.sort(key=_key)
    return heapq.merge(*spilled, chunk, key=_key) if spilled else iter(chunk)


def _key(entry: Entry) -> tuple[bytes, int]:
    return entry.key


def _spill(chunk: list[Entry], folder: Path, runs: contextlib.ExitStack) -> Iterator[Entry]:
    chunk.sort(key=_key)
    file: BinaryIO = runs.enter_context(tempfile.TemporaryFile(dir=folder))  # noqa: SIM115
    file.writelines(entry.to_line() for entry in chunk)
    file.seek(0)
    return map(Entry.from_line, file)


def difference(before: Path, after: Path) -> str:
    """How two lists of inputs differ, with an example of each kind, in a few words."""
    gone = new = 0
    examples: list[str] = []
    with before.open("rb") as old, after.open("rb") as now:
        tagged = heapq.merge(
            ((Entry.from_line(line), 0) for line in old),
            ((Entry.from_line(line), 1) for line in now),
            key=lambda item: item[0].key,
        )
        for entry, sides in _by_key(tagged):
            if len(sides) == 2:
                continue
            gone, new = gone + (sides == {0}), new + (sides == {1})
            if len(examples) < 2:
                examples.append(f"{'new' if sides == {1} else 'gone'}: {printable(entry.name)}")
    facts = [f"{new:,} new"] * bool(new) + [f"{gone:,} gone"] * bool(gone)
    return f"{' and '.join(facts)} ({', '.join(examples)})" if facts else "members of a shard moved"


def _by_key(tagged: Iterable[tuple[Entry, int]]) -> Iterator[tuple[Entry, set[int]]]:
    current: Entry | None = None
    sides: set[int] = set()
    for entry, side in tagged:
        if current is not None and entry.key != current.key:
            yield current, sides
            sides = set()
        current = entry
        sides.add(side)
    if current is not None:
        yield current, sides
