"""From what stands on the command line to entries: files, folders, globs, lists, tar shards."""

from __future__ import annotations

import codecs
import contextlib
import functools
import glob
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from vitcli.commands.embed.shards import Entry, count_suffix, members
from vitcli.errors import VitcliError
from vitcli.files import is_folder, printable

_MORE_SUFFIXES = {".avif", ".heic", ".heics", ".heif", ".heifs", ".hif", ".jxl", ".svg", ".mpo"}
_NOT_IMAGES = {".pdf", ".mpg", ".mpeg", ".h5", ".hdf", ".bufr", ".grib"}
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
_CHUNK = 1 << 20


@functools.cache
def image_suffixes() -> frozenset[str]:
    """Suffixes, in lower case, of what a folder's walk takes for an image.

    All that Pillow knows, those of formats that are refused included: they get a coded row.
    """
    return frozenset(Image.registered_extensions()) - _NOT_IMAGES | _MORE_SUFFIXES


@dataclass
class Listing:
    """The inputs of a job, walked anew each time it is iterated, in no particular order.

    A folder gives its files with an image suffix (`any_suffix`: all of them) and the members of
    its tar shards, recursively; links to folders are followed, but not in circles. A glob is taken
    for one where no file has that very name. `@FILE` and `-` are lists of files and shards, one a
    line, or NUL-separated; their lines are never folders or globs. A file that is not there is an
    entry: its row will say so.
    """

    inputs: tuple[str, ...]
    any_suffix: bool = False
    out: Path | None = None
    """The job's own folder, left out of any walk."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Files in folders without an image suffix, by suffix; those of rare ones as `others`."""

    @property
    def root(self) -> str:
        """The folder that names are relative to: the only input, if that is a folder."""
        first = self.inputs[0]
        return first if len(self.inputs) == 1 and is_folder(first) else ""

    def __iter__(self) -> Iterator[Entry]:
        for text in self.inputs:
            yield from self._expand(text)

    def _expand(self, text: str) -> Iterator[Entry]:
        if text == "-":
            if sys.stdin is not None:  # closed
                yield from self._listed(sys.stdin.buffer, "stdin")
        elif text.startswith("@") and not os.path.lexists(text):
            yield from self._list_file(text[1:])
        elif is_folder(text):
            yield from self._walk(text, "" if self.root else _as_prefix(text))
        elif os.path.lexists(text) or not glob.has_magic(text):
            yield from self._file(text, text)
        else:
            found = False
            for match in _matches(text):
                found = True
                if not is_folder(match):
                    yield from self._file(match, match)
                elif "**" not in text:
                    yield from self._walk(match, _as_prefix(match))
            if not found:
                raise VitcliError(f"{printable(text)}: matches no file")

    def _list_file(self, path: str) -> Iterator[Entry]:
        try:
            with Path(path).open("rb") as file:
                yield from self._listed(file, path)
        except OSError as error:
            raise VitcliError(
                f"cannot read the list {printable(path)}: {error.strerror or error}",
                "write one path a line",
            ) from error

    def _listed(self, file: BinaryIO, list_name: str) -> Iterator[Entry]:
        for line in _lines(file, list_name):
            name = os.fsdecode(line)
            yield from self._file(name, name)

    def _file(self, path: str, name: str) -> Iterator[Entry]:
        """A file, or what is in it if it is a shard."""
        path, lower = os.path.abspath(path), path.lower()  # noqa: PTH100 (links stay as they are)
        if lower.endswith(".tar") and os.path.isfile(path):  # noqa: PTH113 (any name)
            yield from members(path, name, image_suffixes(), self.any_suffix, self.skipped)
        elif lower.endswith(_COMPRESSED):
            error = "a compressed shard cannot be read at any place: decompress it first"
            yield Entry(name, path, code="unsupported", error=error)
        else:
            yield Entry(name, path)

    def _walk(self, folder: str, prefix: str) -> Iterator[Entry]:
        """The files below a folder; `prefix` is what their names begin with."""
        waiting: list[tuple[str, str, tuple[tuple[int, int], ...]]] = [(folder, prefix, ())]
        while waiting:
            folder, prefix, above = waiting.pop()
            try:
                status = Path(folder).stat()
                identity = (status.st_dev, status.st_ino)
                if identity in above or self._is_out(folder):
                    continue
                found = os.scandir(folder)
            except OSError as error:
                name, reason = prefix.rstrip("/") or folder, error.strerror or error
                yield Entry(name, folder, code="unreadable", error=f"folder: {reason}")
                continue
            with found:
                for item in found:
                    if _is_folder(item):
                        waiting.append((item.path, f"{prefix}{item.name}/", (*above, identity)))
                    elif self._taken(item.name):
                        yield from self._file(item.path, prefix + item.name)

    def _is_out(self, folder: str) -> bool:
        return bool(self.out and self.out.exists() and self.out.samefile(folder))

    def _taken(self, name: str) -> bool:
        suffix = Path(name).suffix.lower()
        if self.any_suffix or suffix in image_suffixes() or suffix == ".tar":
            return True
        count_suffix(self.skipped, suffix)
        return False


def _matches(pattern: str, under: str = "") -> Iterator[str]:
    """What a glob matches. `**` stands for folders that are neither hidden nor links.

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


def _is_folder(item: os.DirEntry[str]) -> bool:
    try:
        return item.is_dir()
    except OSError:  # a link in a circle
        return False


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
        yield from _cleaned(whole, separator)
    yield from _cleaned([rest], separator or b"\n")


def _cleaned(records: Iterable[bytes], separator: bytes) -> Iterator[bytes]:
    for record in records:
        line = record.removesuffix(b"\r") if separator == b"\n" else record
        if line:
            yield line
