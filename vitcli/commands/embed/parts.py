"""Parts of a job: a fixed number of rows in one file, as Parquet, .npy + .csv or safetensors.

The rows of a part are the same in every format: `index` in the sorted inputs, `path` (`escaped`
says whether bytes that are not UTF-8 were written as `\\xNN`, see `escaped`),
`width`, `height`, `status` (`ok` or a code), `error`, and vectors of float32 or float16 in columns
named as `FolderOptions.columns` says, null (NaN in the other formats) where the status is not `ok`.
"""

from __future__ import annotations

import csv
import io
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from vitcli.errors import VitcliError, check_choice, install_extra
from vitcli.files import atomic_write, printable
from vitcli.images.sources import Entry

OK = "ok"
ABOUT = "vitcli"
"""The key of a part's metadata: JSON on the model, its weights and the preprocessing."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
"""Bytes that `os.fsdecode` kept as lone surrogates."""
_ESCAPES = re.compile(r"\\(?:\\|x([0-9a-f]{2}))")
_COLUMNS = ("index", "path", "escaped", "width", "height", "status", "error")


@dataclass
class Rows:
    """The rows of one part; R of them."""

    first: int
    """`index` of the first row."""
    names: list[str]
    """As `Entry.name` has them."""
    width: list[int | None]
    height: list[int | None]
    status: list[str]
    error: list[str]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    """Vectors by column, (R, W) or (R, h, w, D), and the optional norms; NaN in failed rows."""

    @classmethod
    def empty(cls, first: int, entries: list[Entry]) -> Rows:
        count = len(entries)
        nothing: list[int | None] = [None] * count
        names = [entry.name for entry in entries]
        return cls(first, names, nothing, [*nothing], [""] * count, [""] * count)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def good(self) -> np.ndarray:
        return np.array([status == OK for status in self.status])

    @property
    def failures(self) -> Counter[str]:
        """How many failed by code; a row without a status is still to be done."""
        return Counter(status for status in self.status if status not in (OK, ""))


class PartError(Exception):
    """A part that cannot be read."""


class PartFormat(ABC):
    """How rows lie in files; `write` gives the same bytes for the same rows."""

    suffixes: tuple[str, ...]
    """The files of one part; the last one is written last."""

    def files(self, folder: Path, part: int) -> list[Path]:
        return [folder / f"part-{part:05d}{suffix}" for suffix in self.suffixes]

    @abstractmethod
    def write(self, folder: Path, part: int, rows: Rows, about: dict[str, Any]) -> None: ...

    def read(self, folder: Path, part: int) -> tuple[Rows, dict[str, Any]]:
        """The rows and what was said about them.

        Raises:
            PartError: there is no such part, or it is not whole.
        """
        try:
            return self._read(folder, part)
        except (VitcliError, MemoryError):
            raise
        except Exception as error:  # each library has its own for a damaged file
            raise PartError(f"{self.files(folder, part)[0].name}: {error}") from error

    @abstractmethod
    def _read(self, folder: Path, part: int) -> tuple[Rows, dict[str, Any]]: ...


class ParquetParts(PartFormat):
    suffixes = (".parquet",)

    def write(self, folder: Path, part: int, rows: Rows, about: dict[str, Any]) -> None:
        pa, pq = _pyarrow()
        types = {"index": pa.int64(), "escaped": pa.bool_()}
        types |= {"width": pa.int32(), "height": pa.int32()}
        columns = _as_columns(rows)
        arrays = [pa.array(columns[name], types.get(name, pa.string())) for name in _COLUMNS]
        fields = [pa.field(name, array.type) for name, array in zip(_COLUMNS, arrays, strict=True)]
        for name, array in rows.arrays.items():
            arrays.append(self._lists(array, rows.good))
            shape = {"shape": json.dumps(array.shape[1:])}
            fields.append(pa.field(name, arrays[-1].type, metadata=shape))
        table = pa.table(arrays, pa.schema(fields, {ABOUT: _dump(about)}))
        with atomic_write(self.files(folder, part)[0]) as file:
            plain = ["status", "error"]
            pq.write_table(table, file, use_dictionary=plain, write_page_checksum=True)

    @staticmethod
    def _lists(array: np.ndarray, good: np.ndarray) -> Any:
        """A list for each row, null where it failed.

        Not of a fixed size: before pyarrow 26 those can neither be written nor read with nulls.
        """
        pa, _ = _pyarrow()
        lists = pa.array(np.ascontiguousarray(array[good]).reshape(-1))
        for size in array.shape[:1:-1]:  # from the innermost list outwards
            offsets = np.arange(0, len(lists) + 1, size, dtype=np.int32)
            lists = pa.ListArray.from_arrays(offsets, lists)
        ends = np.cumsum(np.where(good, array.shape[1], 0), dtype=np.int32)
        offsets = np.concatenate([np.zeros(1, np.int32), ends])
        return pa.ListArray.from_arrays(offsets, lists, mask=pa.array(~good))

    def _read(self, folder: Path, part: int) -> tuple[Rows, dict[str, Any]]:
        _, pq = _pyarrow()
        path = self.files(folder, part)[0]
        table = pq.read_table(path, page_checksum_verification=True, partitioning=None)
        about = json.loads((table.schema.metadata or {})[ABOUT.encode()])
        columns = {name: table[name].to_pylist() for name in _COLUMNS}
        arrays = {}
        for name in table.column_names[len(_COLUMNS) :]:
            lists, there = table[name].combine_chunks(), table[name].is_valid().to_numpy()
            shape = json.loads((table.schema.field(name).metadata or {}).get(b"shape", "[]"))
            while hasattr(lists, "flatten"):
                if hasattr(lists.type, "list_size"):  # as they were written before
                    shape.append(lists.type.list_size)
                lists = lists.flatten()  # without those that are null
            values = lists.to_numpy(zero_copy_only=False)
            arrays[name] = np.full((len(table), *shape), np.nan, values.dtype)
            arrays[name][there] = values.reshape(-1, *shape)
        return _as_rows(columns, arrays), about


class NumpyParts(PartFormat):
    suffixes = (".npy", ".csv")

    def write(self, folder: Path, part: int, rows: Rows, about: dict[str, Any]) -> None:
        if list(rows.arrays) != ["vector"]:
            raise ValueError("a .npy file holds vectors alone")
        array, table = self.files(folder, part)
        with atomic_write(array) as file:
            np.save(file, rows.arrays["vector"], allow_pickle=False)
        text = io.StringIO(newline="")
        columns = _as_columns(rows)
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow((*_COLUMNS, ABOUT))
        for number, row in enumerate(zip(*columns.values(), strict=True)):
            writer.writerow((*row, "" if number else _dump(about)))
        with atomic_write(table) as file:
            file.write(text.getvalue().encode())

    def _read(self, folder: Path, part: int) -> tuple[Rows, dict[str, Any]]:
        array, table = self.files(folder, part)
        text = table.read_bytes().decode()
        if not text.endswith("\n"):
            raise ValueError("cut off")
        rows = list(csv.reader(io.StringIO(text, newline="")))
        (header, first, *_) = rows
        if header != [*_COLUMNS, ABOUT]:
            raise ValueError(f"{table}: other columns")
        columns: dict[str, list[Any]] = dict(
            zip(_COLUMNS, map(list, zip(*rows[1:], strict=True)), strict=False)
        )
        for name in ("index", "width", "height"):
            columns[name] = [int(text) if text else None for text in columns[name]]
        columns["escaped"] = [text == "True" for text in columns["escaped"]]
        vectors = np.load(array, allow_pickle=False)
        return _as_rows(columns, {"vector": vectors}), json.loads(first[-1])


class SafetensorsParts(PartFormat):
    suffixes = (".safetensors",)

    def write(self, folder: Path, part: int, rows: Rows, about: dict[str, Any]) -> None:
        columns = _as_columns(rows)
        metadata = {ABOUT: _dump({**about, "rows": columns})}  # one key: their order is random
        arrays = {name: np.ascontiguousarray(array) for name, array in rows.arrays.items()}
        with atomic_write(self.files(folder, part)[0]) as file:
            file.write(safetensors.numpy.save(arrays, metadata))

    def _read(self, folder: Path, part: int) -> tuple[Rows, dict[str, Any]]:
        with safetensors.safe_open(self.files(folder, part)[0], "numpy") as file:
            about = json.loads(file.metadata()[ABOUT])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        columns = about.pop("rows")
        vectors_first = sorted(arrays, key=lambda name: name != "vector")  # the file sorts them
        order = [name for name, *_ in about.get("columns", zip(vectors_first, strict=True))]
        ordered = {name: arrays[name] for name in sorted(arrays, key=order.index)}
        return _as_rows(columns, ordered), about


FORMATS: dict[str, PartFormat] = {
    "parquet": ParquetParts(),
    "npy": NumpyParts(),
    "safetensors": SafetensorsParts(),
}


def check_format(name: str, dtype: str) -> None:
    """Refuse a format that is unknown or whose library is missing, or a type that none can hold.

    Raises:
        VitcliError: as said.
    """
    check_choice("--format", name, FORMATS)
    check_choice("--vector-dtype", dtype, ("float32", "float16"))
    if name == "parquet":
        _pyarrow(", or --format npy")


def _pyarrow(instead: str = "") -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise VitcliError("Parquet needs pyarrow", install_extra("parquet") + instead) from error
    return pyarrow, pyarrow.parquet


def _dump(about: dict[str, Any]) -> str:
    return json.dumps(about, sort_keys=True)


def _as_columns(rows: Rows) -> dict[str, list[Any]]:
    texts = [escaped(name) for name in rows.names]
    return {
        "index": list(range(rows.first, rows.first + len(rows))),
        "path": [text for text, _ in texts],
        "escaped": [flag for _, flag in texts],
        "width": rows.width,
        "height": rows.height,
        "status": rows.status,
        "error": rows.error,
    }


def _as_rows(columns: dict[str, list[Any]], arrays: dict[str, np.ndarray]) -> Rows:
    count = len(columns["path"])
    lengths = [*map(len, columns.values()), *map(len, arrays.values())]
    if any(length != count for length in lengths):
        raise ValueError("columns of different lengths")
    pairs = zip(columns["path"], columns["escaped"], strict=True)
    return Rows(
        first=columns["index"][0],
        names=[unescaped(text, flag) for text, flag in pairs],
        width=columns["width"],
        height=columns["height"],
        status=columns["status"],
        error=columns["error"],
        arrays=arrays,
    )


def escaped(name: str) -> tuple[str, bool]:
    """A name as valid text, and whether that took escapes.

    A name that is UTF-8 stays as it is. In any other, bytes that are not UTF-8 become `\\xNN` and
    backslashes are doubled, so that `unescaped` gives the name back.
    """
    if not _NOT_UTF8.search(name):
        return name, False
    return _NOT_UTF8.sub(lambda byte: printable(byte[0]), name.replace("\\", "\\\\")), True


def unescaped(text: str, was_escaped: bool) -> str:
    """The name that `escaped` wrote, as `os.fsdecode` gives it."""
    if not was_escaped:
        return text
    return _ESCAPES.sub(lambda e: chr(0xDC00 + int(e[1], 16)) if e[1] else "\\", text)
