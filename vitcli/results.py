"""The results of the commands: frozen dataclasses of scalars, strings and tuples.

Field names carry the unit. Nothing here knows tensors, colors or how it will be shown.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib
import importlib.util
import io
import json
import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from vitcli.errors import VitcliError

SCHEMA_VERSION = 1
RANDOM_WEIGHTS = "weights are random: results describe the architecture, not a trained encoder"
"""Beside every result of an encoder without a checkpoint."""


class Progress(Protocol):
    """What work reports to while it goes on: `ui.console.progress`, or `Quiet`."""

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """`done` of `total` is done; `facts` in a few words."""
        ...

    def line(self, text: str) -> None:
        """Something to know."""
        ...


class Quiet:
    """A `Progress` that shows nothing."""

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        pass

    def line(self, text: str) -> None:
        pass


QUIET = Quiet()


@dataclass(frozen=True)
class ModelInfo:
    """The encoder of a result."""

    name: str
    parameters: int
    hidden: int
    depth: int
    heads: int | None
    """None for an encoder of another library that has no one number of them."""
    weights: str
    device: str
    dtype: str
    checkpoint: LoadReport | None = None
    """How the weights were read; None for random weights."""


@dataclass(frozen=True)
class FailedImage:
    path: str
    code: str
    error: str


def to_plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, NaN and infinities as null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@dataclass(frozen=True)
class Result:
    """The result of a command: `print` shows its tables, a notebook shows them as HTML.

    `figure()` is what `--plot` draws and `to_dict()` what `--json` prints. Tables and figures are
    made by the `view` module beside the class's own, or by `command` where they are short, so a
    result imports nothing that draws.
    """

    rows_at: ClassVar[str] = ""
    """Dotted path of the list that is the result's main table."""
    view_prefix: ClassVar[str] = ""
    """Before `tables` and `figure` in a view that shows several kinds of results."""

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data, and `schema_version`; what is not a finite number is None."""
        return {"schema_version": SCHEMA_VERSION, **to_plain(self)}

    def to_json(self) -> str:
        """`to_dict()` as `--json` prints it: ASCII only, so that any file name survives a pipe."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    def records(self) -> list[dict[str, Any]]:
        """The result's main table, a dict per row: its scalars, and those of what holds it.

        That is the list at `rows_at` (`models.layers`: one row per layer of each model); a result
        without a list, or with an empty one, has one row. Nested fields have dotted names; lists
        are JSON.
        """
        plain = to_plain(self)
        if not self.rows_at:
            return [_row(plain)]
        outer: list[tuple[dict[str, Any], Any]] = [({}, plain)]
        *above, last = self.rows_at.split(".")
        for name in above:
            prefix = name.removesuffix("s")
            outer = [
                (before | {f"{prefix}.{key}": value for key, value in _row(item).items()}, item)
                for before, holder in outer
                for item in holder[name]
            ]
        rows = [before | _row(item) for before, holder in outer for item in holder[last]]
        return rows or [_row(plain)]

    def to_csv(self) -> str:
        """`records()` as CSV (RFC 4180), numbers unrounded; see `csv_text`."""
        return csv_text(self.records())

    def figure(self) -> Any:
        """The `matplotlib.figure.Figure` that `--plot` draws.

        Raises:
            VitcliError: this kind of result has no figure.
        """
        draw = self._of_view("figure")
        if draw is None:
            raise VitcliError(
                f"{type(self).__name__}: this result has no figure", "print it, or take to_dict()"
            )
        return draw(self)

    def tables(self, **how: Any) -> Iterable[Any]:
        """The lines and rich tables that are printed; `how` is what the view can choose."""
        made: Iterable[Any] = self._of_view("tables")(self, **how)
        return made

    def __str__(self) -> str:
        width = shutil.get_terminal_size((120, 24)).columns
        return str(_console().as_text(self.tables(), width))

    def _repr_html_(self) -> str:
        return str(_console().as_html(self.tables()))

    def _of_view(self, name: str) -> Any:
        package = type(self).__module__.rpartition(".")[0]
        has_view = importlib.util.find_spec(f"{package}.view") is not None
        view = importlib.import_module(f"{package}.{'view' if has_view else 'command'}")
        return getattr(view, self.view_prefix + name, None)


def _row(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Scalars by dotted name; lists of objects have rows of their own and are left out."""
    row: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            row |= {f"{key}.{name}": inner for name, inner in _row(value).items()}
        elif isinstance(value, list):
            if not any(isinstance(item, dict | list) for item in value):
                row[key] = json.dumps(value)
        else:
            row[key] = value
    return row


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV; the columns are the keys in the order in which they first appear.

    Text that begins with `=`, `+`, `-`, `@`, a tab or a carriage return is preceded by an
    apostrophe: a spreadsheet would run it as a formula. Numbers are not text and stay.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines: list[list[Any]] = [[*names], *([row.get(name) for name in names] for row in rows)]
    return "".join(map(_csv_line, lines))


def _csv_line(cells: Sequence[Any]) -> str:
    written = io.StringIO()
    csv.writer(written).writerow(map(_csv_cell, cells))  # its \r\n has it quote both characters
    return written.getvalue().removesuffix("\r\n") + "\n"


def _csv_cell(value: Any) -> Any:
    if isinstance(value, str):
        value = value.encode("utf-8", "backslashreplace").decode()
        return "'" + value if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
    return json.dumps(value) if isinstance(value, bool | list | dict) else value


def _console() -> Any:
    return importlib.import_module("vitcli.ui.console")


@dataclass(frozen=True)
class ResolvedSetting:
    """One setting of the encoder and who decided it: the tensors, a config's key, the user."""

    key: str
    value: Any
    by: str


@dataclass(frozen=True)
class LoadReport:
    """What loading a checkpoint found out; `checkpoints.weights.report_line` says it in one line.

    `tensors_dropped` are the names that a drop rule of the family matched; `stored_dtypes` are
    those of the tensors used, `dtype` is the one they were read as; `preprocess_by` is None where
    no preprocessing config was found. `preprocess` is that preparation, and `tensors_resized`
    says what follows from the size it gives.
    """

    source: str
    family: str
    library: str
    files: tuple[str, ...]
    tensors_used: int
    tensors_dropped: tuple[str, ...]
    stored_dtypes: tuple[str, ...]
    dtype: str
    settled: tuple[ResolvedSetting, ...]
    preprocess_by: str | None
    preprocess: Mapping[str, Any] | None = None
    tensors_resized: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    """What else a reader should know, one sentence each: for example tensors beside the tower."""
