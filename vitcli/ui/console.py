"""The two streams: the answer on stdout, the talk on stderr."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

Advance = Callable[[int, int], None]
"""Told (done, total) as work goes on."""


def stream(stderr: bool = False) -> Console:
    """A console as wide as its terminal; into a pipe nothing is wrapped or cut."""
    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, highlight=False, emoji=False, width=None if terminal else 10_000)


def answer_width() -> int:
    """Columns that an answer has."""
    return stream().width


def answer(*parts: Any) -> None:
    """Print tables and lines to stdout."""
    console = stream()
    for part in parts:
        console.print(part)


def answer_text(text: str) -> None:
    """Print text to stdout as it is: JSON, YAML."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def as_text(parts: Iterable[Any], width: int) -> str:
    """What `answer` prints, without colors."""
    console = Console(file=io.StringIO(), width=width, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in written.splitlines()).rstrip()


def as_html(parts: Iterable[Any]) -> str:
    """What `answer` prints, as HTML for a notebook."""
    console = Console(file=io.StringIO(), width=160, record=True, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>'
    )


def note(text: str) -> None:
    """One line on stderr."""
    stream(stderr=True).print(f"[dim]note:[/] {escape(text)}")


def warn(text: str) -> None:
    """One line on stderr that should not be overlooked."""
    stream(stderr=True).print(f"[yellow]warning:[/] {escape(text)}")


def table(title: str | None = None, **options: Any) -> Table:
    """A table in the house style."""
    from rich import box

    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, **options
    )


@contextmanager
def progress(title: str) -> Iterator[Advance]:
    """A bar on stderr, on a terminal only, with what is done and the time left."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with bar:
        task = bar.add_task(title, total=None)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(text):
        yield


def exact(value: int) -> str:
    """`85,798,656`, and nothing for zero."""
    return f"{value:,}" if value else ""


def plural(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short(value: int, units: str = "KMBT") -> str:
    """`85.8M`: three significant digits, by thousands; nothing for zero.

    `units` names 10^3, 10^6 and so on; operations are told in KMGT.
    """
    if value < 1000:
        return str(value) if value else ""
    scaled, steps = value / 1000, 1
    while scaled >= 999.5 and steps < len(units):
        scaled, steps = scaled / 1000, steps + 1
    return f"{scaled:#.3g}".rstrip(".") + units[steps - 1]


def percent(share: float) -> str:
    """`24.8%`, `100%`, and nothing for zero: five characters at most."""
    text = f"{share:.1%}" if share else ""
    return "100%" if text == "100.0%" else text
