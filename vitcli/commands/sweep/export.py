"""The trials as flat rows: CSV and Parquet."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from vitcli.commands.sweep.result import SweepReport
from vitcli.errors import VitcliError
from vitcli.files import atomic_write

FACTS = ("wall_s", "attempts", "error", "command", "cwd", "threads", "directory", "host")


def rows(report: SweepReport) -> list[dict[str, Any]]:
    """A row a trial: id, state, every parameter, every metric, and the facts of its run.

    A metric that is called like a parameter is written as `metric.<name>`.
    """
    params = list(dict.fromkeys(key for trial in report.trials for key in trial.params))
    taken = {"id", "state", *params, *FACTS}
    columns = {name: f"metric.{name}" if name in taken else name for name in report.metrics}
    return [
        {
            "id": trial.id,
            "state": trial.state,
            **{key: _plain(trial.params.get(key)) for key in params},
            **{columns[name]: _plain(trial.metrics.get(name)) for name in report.metrics},
            **{fact: getattr(trial, fact) for fact in FACTS},
        }
        for trial in report.trials
    ]


def check_files(csv_file: Path | None, parquet_file: Path | None) -> None:
    """Refuse, before anything is run, files that could not be written after it.

    Raises:
        VitcliError: there is no such folder, or no pyarrow.
    """
    for path in (csv_file, parquet_file):
        if path and not path.parent.is_dir():
            raise VitcliError(f"{path}: there is no folder {path.parent}", "make it first")
    if parquet_file and importlib.util.find_spec("pyarrow") is None:
        raise VitcliError(
            "--parquet needs pyarrow, which is not installed", "pip install 'vitcli[parquet]'"
        )


def write_csv(report: SweepReport, path: Path) -> None:
    """Write the rows; what has no value is an empty cell."""
    table = rows(report)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(table[0]) if table else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(table)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def write_parquet(report: SweepReport, path: Path) -> None:
    """Write the rows with one type a column; a column of mixed types is text."""
    import pyarrow
    from pyarrow import parquet

    table = rows(report)
    columns = {key: _one_type([row[key] for row in table]) for key in (table[0] if table else ())}
    with atomic_write(path) as file:
        parquet.write_table(pyarrow.table(columns), file)


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _one_type(values: list[Any]) -> list[Any]:
    kinds = {type(value) for value in values if value is not None}
    if kinds <= {int, float}:
        return [None if v is None else float(v) for v in values] if float in kinds else values
    return values if len(kinds) <= 1 else [None if v is None else str(v) for v in values]
