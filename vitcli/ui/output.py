"""What every command does with its result: draw it, then print it as tables or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vitcli.ui.console import answer, answer_text, note


def show(result: Any, json: bool, tables: Callable[[Any], Iterable[Any]]) -> None:
    """The answer on stdout."""
    if json:
        from vitcli.ui.json import to_json

        answer_text(to_json(result))
    else:
        answer(*tables(result))


def draw(drawing: Any, file: Path, what: str = "") -> None:
    """Write a figure, and say so."""
    from vitcli.ui.figures import save_figure

    save_figure(drawing, file)
    note(f"drew {what} in {file}" if what else f"drew {file}")
