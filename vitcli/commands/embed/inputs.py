"""The inputs of a job: from the words of the command line to one sorted list on disk.

The list is on disk so that a million inputs take no memory.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import glob
import hashlib
import heapq
import itertools
import os
import re
import sqlite3
import stat
import sys
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from vitcli.errors import VitcliError
from vitcli.files import SHOWN, as_new, first_names, is_folder, printable
from vitcli.images import MEMORY_BYTES, TIMEOUT_S
from vitcli.images.folders import Walk, class_order, read_layout
from vitcli.images.sources import Entry

_URL = re.compile(r"[a-zA-Z][\w+.-]+://")
_CHUNK = 1 << 20
_LONGEST = 1 << 16
"""Bytes of one line of a list; no system has longer paths."""
_MOST_LINES = 10**8
_MOST_FOLDERS = 100_000


@dataclass
class Listing:
    """The inputs of a job, walked anew each time it is iterated, in no particular order.

    A folder gives its files with an image suffix (`any_suffix`: all of them) and the members of
    its tar shards, recursively; hidden folders and files and those of other programs are left
    out; links to folders are followed, but not in circles. A glob is taken for one where no file
    has that very name. `@FILE` and `-` are lists of files and shards, one per line, or
    NUL-separated; their lines are never folders or globs. A file that is missing is an entry: its
    row will say so.
    """

    inputs: tuple[str, ...]
    any_suffix: bool = False
    out: Path | None = None
    """The job's own folder, left out of any walk."""
    timeout_s: float = TIMEOUT_S
    memory_bytes: int = MEMORY_BYTES
    """Limits of the process that lists shards."""
    skipped: Counter[str] = field(default_factory=Counter)
    """What folders hold and was left out; see `images.folders.Walk`."""

    @property
    def root(self) -> str:
        """The folder that names are relative to: the only input, if that is a folder."""
        first = self.inputs[0]
        return first if len(self.inputs) == 1 and is_folder(first) else ""

    def __iter__(self) -> Iterator[Entry]:
        how = self.any_suffix, self.out, self.timeout_s, self.memory_bytes
        with contextlib.closing(Walk(*how, self.skipped)) as walk:
            for text in self.inputs:
                yield from self._expand(text, walk)

    def _expand(self, text: str, walk: Walk) -> Iterator[Entry]:
        if text == "-":
            if sys.stdin is not None:  # closed
                yield from _listed(sys.stdin.buffer, "stdin", walk)
        elif text.startswith("@") and not os.path.lexists(text):
            yield from _list_file(text[1:], walk)
        elif is_folder(text):
            yield from walk.folder(text, "" if self.root else _as_prefix(text))
        elif _URL.match(text) and not os.path.lexists(text):
            raise VitcliError(
                f"{printable(text)}: is a URL (expected a path on this machine)",
                "download the images, and name their folder",
            )
        elif os.path.lexists(text) or not glob.has_magic(text):
            yield from walk.file(text, text)
        else:
            found = False
            for match in _matches(text):
                found = True
                if not is_folder(match):
                    yield from walk.file(match, match)
                elif "**" not in text:
                    yield from walk.folder(match, _as_prefix(match))
            if not found:
                raise VitcliError(f"{printable(text)}: matches no file", "check the pattern")


class SeenFolders:
    """Passes entries on and remembers their folders, to say what these were taken for."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.entries = entries
        self.folders: set[str] = set()
        self.labels: set[str] = set()

    def __iter__(self) -> Iterator[Entry]:
        for entry in self.entries:
            if len(self.folders) < _MOST_FOLDERS:
                self.folders.add(entry.name.rpartition("/")[0] + "/")
                if entry.label and len(self.labels) < _MOST_FOLDERS:
                    self.labels.add(entry.label)
            yield entry

    def line(self) -> str:
        """Splits and classes in one line, nothing where there are none."""
        layout = read_layout(self.folders)
        places = [layout.place(folder) for folder in self.folders]
        splits = [s for s in ("train", "val", "test", "unlabeled", "other") if s in dict(places)]
        classes = class_order(self.labels or {label for _, label in places if label})
        if len(classes) < 2 and not splits:
            return ""
        shown = ", ".join(map(printable, classes[:5])) + ", ..." * (len(classes) > 5)
        facts = [f"splits {', '.join(splits)}"] * bool(splits)
        facts += [f"{len(classes):,} class{'es' * (len(classes) != 1)}: {shown}"] * bool(classes)
        return f"folders: {'; '.join(facts)}"


def _list_file(path: str, walk: Walk) -> Iterator[Entry]:
    try:
        with Path(path).open("rb") as file:
            if stat.S_ISCHR(os.fstat(file.fileno()).st_mode) and not file.isatty():
                raise VitcliError(f"{printable(path)}: is a device, not a list", "name a file")
            yield from _listed(file, path, walk)
    except OSError as error:
        raise VitcliError(
            f"cannot read the list {printable(path)}: {error.strerror or error}",
            "write one path per line",
        ) from error


def _listed(file: BinaryIO, list_name: str, walk: Walk) -> Iterator[Entry]:
    for number, line in enumerate(_lines(file, list_name)):
        if number >= _MOST_LINES:
            raise _endless(list_name, f"more than {_MOST_LINES:,} lines")
        name = os.fsdecode(line)
        yield from walk.file(name, name)


def _endless(name: str, what: str) -> VitcliError:
    return VitcliError(f"the list {printable(name)}: {what}", "write one path per line")


def _matches(pattern: str, under: str = "") -> Iterator[str]:
    """What a glob matches. `**` means folders that are neither hidden nor links.

    Not `glob`'s own `**`, which follows links, in circles too.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        found = glob.iglob(pattern, root_dir=under or None)  # noqa: PTH207 (any bytes)
        yield from (under + match for match in found)
        return
    at = parts.index("**")
    head = "/".join([*parts[:at], ""])
    tail = "/".join(itertools.dropwhile("**".__eq__, parts[at:])) or "*"
    below = list(_matches(head, under)) if at and glob.has_magic(head) else [under + head]
    while below:
        folder = below.pop()
        yield from _matches(tail, folder)
        with contextlib.suppress(OSError), os.scandir(folder or ".") as inside:
            folders = (item.name for item in inside if item.is_dir(follow_symlinks=False))
            below += [f"{folder}{name}/" for name in folders if not name.startswith(".")]


def _as_prefix(folder: str) -> str:
    return folder if folder.endswith("/") else folder + "/"


def _lines(file: BinaryIO, name: str) -> Iterator[bytes]:
    """Lines, or NUL-separated records if there is a NUL in the first megabyte; no empty ones."""
    separator: bytes | None = None
    rest = b""
    while chunk := file.read(_CHUNK):
        if separator is None:
            if chunk.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) and b"\0" in chunk:
                raise VitcliError(f"the list {printable(name)} is UTF-16", "save it as UTF-8")
            chunk = chunk.removeprefix(codecs.BOM_UTF8)
            separator = b"\0" if b"\0" in chunk else b"\n"
        *whole, rest = (rest + chunk).split(separator)
        if len(rest) > _LONGEST:
            raise _endless(name, f"a line of more than {_LONGEST:,} bytes")
        if len(chunk) == _CHUNK and not rest and not any(whole):
            raise _endless(name, f"{_CHUNK:,} bytes of empty lines")
        yield from _cleaned(whole, separator)
    yield from _cleaned([rest], separator or b"\n")


def _cleaned(records: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    for record in records:
        line = record.removesuffix(b"\r") if separator == b"\n" else record
        if line:
            yield line


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
        """The entries of one part.

        Raises:
            VitcliError: the list is damaged.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.starts[part])
                return [Entry.from_line(file.readline()) for _ in range(self.rows_of(part))]
        except (OSError, ValueError, RecursionError) as error:
            raise VitcliError(
                f"{printable(self.path)}: the list of inputs is damaged",
                "embed the images again into another folder",
            ) from error


def write_inputs(entries: Iterable[Entry], folder: Path, part_rows: int) -> InputList:
    """Sort entries into a new file in `folder`; which of two equal ones stays does not matter.

    Raises:
        OSError: no room there.
    """
    fd, name = tempfile.mkstemp(prefix=".inputs.", suffix=".jsonl", dir=folder)
    digest, starts = hashlib.sha256(), array("q")
    count = total = at = 0
    try:
        as_new(Path(name))
        with os.fdopen(fd, "wb") as file, _sorter(folder) as sorter:
            for entry in entries:
                total += 1
                sorter.execute("insert or ignore into entries values (?, ?, ?, ?)", _record(entry))
            for mark, line in sorter.execute("select mark, line from entries order by name, place"):
                if count % part_rows == 0:
                    starts.append(at)
                count += 1
                at += file.write(line)
                digest.update(mark)
    except BaseException as error:
        Path(name).unlink()
        if isinstance(error, sqlite3.OperationalError):
            raise OSError(errno.ENOSPC, f"the inputs cannot be sorted: {error}") from error
        raise
    return InputList(Path(name), count, digest.hexdigest(), total - count, part_rows, starts)


@contextlib.contextmanager
def _sorter(folder: Path) -> Iterator[sqlite3.Connection]:
    """A table on disk that keeps distinct entries in order, gone with this block."""
    with tempfile.TemporaryDirectory(prefix=".inputs.", dir=folder) as name:
        place = (Path(name) / "sorted").resolve().as_uri() + "?nolock=1"  # some systems have none
        database = sqlite3.connect(place, uri=True, isolation_level=None)
        try:
            database.execute("pragma journal_mode = off")
            database.execute("pragma synchronous = off")
            database.execute(
                "create table entries (name blob, place int, mark blob, line blob, "
                "primary key (name, place)) without rowid"
            )
            database.execute("begin")
            yield database
        finally:
            database.close()


def _record(entry: Entry) -> tuple[bytes, int, bytes, bytes]:
    """What an entry is sorted by, what identifies it in the digest, and its line."""
    name, place = entry.key
    label = entry.label.encode("utf-8", "surrogatepass")
    mark = b"%d:%b:%d:%d%b\n" % (len(name), name, place, entry.size, label)
    return name, place, mark, entry.to_line()


def difference(before: Path, after: Path) -> str:
    """How two lists of inputs differ, with examples of each kind, in a few words."""
    counts = Counter[str]()
    examples: dict[str, list[str]] = {"added": [], "removed": []}
    with before.open("rb") as old, after.open("rb") as now:
        tagged = heapq.merge(
            ((Entry.from_line(line), "removed") for line in old),
            ((Entry.from_line(line), "added") for line in now),
            key=lambda item: item[0].key,
        )
        for _, same in itertools.groupby(tagged, key=lambda item: item[0].key):
            (entry, kind), *more = same
            if not more:
                counts[kind] += 1
                examples[kind] += [entry.name] * (counts[kind] <= SHOWN)
    facts = [
        f"{counts[kind]:,} {kind} ({first_names(names, counts[kind])})"
        for kind, names in examples.items()
        if names
    ]
    return ", ".join(facts) or "members of a shard moved"
