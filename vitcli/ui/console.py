"""Results go to stdout in one of several formats; progress, notes and warnings to stderr."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.results import Result


class CleanConsole(Console):
    """A console on which no text of a file can write escapes, turn its direction or add a line.

    Every string is one line: what cannot be printed in it, newlines included, is shown as an
    escape before it is measured. Renderables may have lines; what else they hold is cleaned as it
    leaves. The console's own colors and cursor movements are not text and pass.
    """

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options)

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(_cleaned(segment) for segment in buffer)


def _cleaned(segment: Segment) -> Segment:
    if segment.control or segment.text.isprintable():
        return segment
    lines = map(printable, segment.text.split("\n"))
    return Segment("\n".join(lines), segment.style)


_live: list[Console] = []
"""The console that a bar is drawn on; what is printed goes above the bar."""


def stream(stderr: bool = False) -> Console:
    """A console as wide as its terminal; into a pipe nothing is wrapped or cut."""
    if stderr and _live:
        return _live[-1]
    console = CleanConsole(stderr=stderr, highlight=False, emoji=False)
    if _unlimited and not stderr:
        console.width = 10_000
    if not (sys.stderr if stderr else sys.stdout).isatty() and not (stderr and console.is_terminal):
        console.width = 10_000
    return console


_unlimited: list[bool] = []


@contextmanager
def unlimited_width() -> Iterator[None]:
    """Inside it, an answer has as many columns as it wants, on a terminal too."""
    _unlimited.append(True)
    try:
        yield
    finally:
        _unlimited.pop()


def answer_width() -> int:
    """Columns that an answer has."""
    return stream().width


def answer(*parts: Any) -> None:
    """Print tables and lines to stdout."""
    console = stream()
    for part in parts:
        console.print(part)


def answer_text(text: str) -> None:
    """Print JSON, YAML or CSV to stdout as it is; a terminal gets no control characters."""
    if sys.stdout.isatty():
        text = "\n".join(map(printable, text.split("\n")))
    sys.stdout.write(text if text.endswith("\n") else text + "\n")


def as_text(parts: Iterable[Any], width: int) -> str:
    """What `answer` prints, without colors."""
    console = CleanConsole(file=io.StringIO(), width=width, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    written: str = console.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in written.splitlines()).rstrip()


def as_html(parts: Iterable[Any]) -> str:
    """What `answer` prints, as HTML for a notebook."""
    console = CleanConsole(file=io.StringIO(), width=160, record=True, highlight=False, emoji=False)
    for part in parts:
        console.print(part)
    return console.export_html(
        inline_styles=True, code_format='<pre style="line-height:normal">{code}</pre>'
    )


_verbosity = 0


def set_verbosity(level: int) -> None:
    """-1: the answer and errors alone; 0: notes, warnings and progress too; 1: details too."""
    global _verbosity
    _verbosity = level


def note(text: str, label: str = "[dim]note:[/]", least: int = 0) -> None:
    """One line on stderr, at this verbosity and above."""
    if _verbosity >= least:
        stream(stderr=True).print(f"{label} {escape(text)}")


def warn(text: str) -> None:
    """One line on stderr that should not be overlooked."""
    note(text, "[yellow]warning:[/]")


def detail(text: str) -> None:
    """One line on stderr for who asked for more."""
    note(text, "[dim]detail:[/]", least=1)


TIGHT: dict[str, Any] = {"padding": (0, 1, 0, 0), "pad_edge": False, "show_edge": False}
"""Options of a table of many columns."""


def table(title: str | None = None, *columns: str, **options: Any) -> Table:
    """A table in the house style; a column `>name` is aligned at the right."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, **options)
    for column in columns:
        side: Literal["left", "right"] = "right" if column.startswith(">") else "left"
        grid.add_column(column.removeprefix(">"), justify=side)
    return grid


def fitted(grid: Table, *less: str) -> Table:
    """The table without as many of the columns `less`, in this order, as the terminal has no room
    for, which are named below it; JSON and CSV have them all."""
    console, gone = stream(), []
    for header in less:
        options = console.options.update(max_width=10_000)
        if Measurement.get(console, options, grid).maximum <= console.width:
            break
        gone.append(header)
        remove_column(grid, header)
    if gone:
        grid.caption, grid.caption_justify = f"no room here for: {', '.join(gone)}", "left"
    return grid


def remove_column(grid: Table, header: str) -> None:
    """The last one that is called so; a column of the user's may have the same name."""
    del grid.columns[max(i for i, column in enumerate(grid.columns) if column.header == header)]
    for place, column in enumerate(grid.columns):
        column._index = place  # which of them is the last has other padding


PLAIN_EVERY_S = 10.0
Lines = Literal["", "tenths", "seconds"]


class progress:
    """What is done of a task, on stderr; a `results.Progress` for a `with` statement.

    On a terminal (`live`) it is a bar with the time left, which disappears however the work ends.

    Args:
        timed: else it is drawn by no thread, only when it is called: a process that starts others
            safely has no second thread.
        unit: of the rate, which is shown with the time that it leaves, e.g. `img/s`.
        lines: what is written where there is no terminal: a line per tenth of the work, a line
            every PLAIN_EVERY_S, or nothing.
    """

    def __init__(self, title: str, timed: bool = True, unit: str = "", lines: Lines = "") -> None:
        from rich import progress as bars
        from rich.constrain import Constrain
        from rich.table import Column

        class Narrow(bars.Progress):
            """With room for the ^C that a terminal echoes: on a line of its own it would leave the
            bar above it where the run was interrupted."""

            def get_renderable(self) -> Any:
                return Constrain(super().get_renderable(), console.width - 3)

        console = self._console = stream(stderr=True)
        self.live = console.is_terminal and _verbosity >= 0
        self._progress = Narrow(
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(bar_width=None, table_column=Column(ratio=1)),  # what the text leaves
            bars.MofNCompleteColumn(table_column=Column(no_wrap=True)),
            bars.TextColumn("{task.fields[facts]}", markup=False),
            *([bars.TimeRemainingColumn()] if timed else []),
            console=console,
            transient=True,
            expand=True,
            auto_refresh=timed,
            disable=not self.live,
        )
        self._task = self._progress.add_task(title, total=None, facts="")
        self._redraw = not timed
        self._title, self._unit, self._lines = title, unit, lines
        self._tenth, self._shown = -1, time.monotonic()
        self._first: tuple[float, int] | None = None

    def __call__(self, done: int, total: int, facts: str = "") -> None:
        """Report that `done` of `total` is done, with `facts` in a few words."""
        now = time.monotonic()
        if self._unit:
            facts = ", ".join(filter(None, [*self._pace(now, done, total), facts]))
        if not self.live and self._is_due(now, done, total):
            title = f"{self._title}: " if self._title else ""
            self.line(f"{title}{done:,} of {total:,}{facts and f', {facts}'}")
        self._progress.update(self._task, completed=done, total=total, facts=facts)
        if self._redraw:
            self._progress.refresh()

    def _pace(self, now: float, done: int, total: int) -> Iterator[str]:
        """Rate and time left since the first call: what was there before is no work of this run."""
        begin, before = self._first = self._first or (now, done)
        if now > begin and done > before:
            rate = (done - before) / (now - begin)
            yield f"{rate:.1f} {self._unit}"
            yield f"{duration((total - done) / rate)} left"

    def _is_due(self, now: float, done: int, total: int) -> bool:
        """Whether a line is due where no bar is drawn."""
        if self._lines == "tenths":
            before, self._tenth = self._tenth, 10 * done // max(total, 1)
            return self._tenth != before
        if self._lines == "" or now - self._shown < PLAIN_EVERY_S:
            return False
        self._shown = now
        return True

    def line(self, text: str) -> None:
        """A line of its own, above the bar."""
        if _verbosity >= 0:
            self._console.print(text, markup=False)

    def __enter__(self) -> progress:
        _live.append(self._console)
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        _live.pop()


@contextmanager
def status(text: str) -> Iterator[None]:
    """A spinner on stderr while something takes its time."""
    console = stream(stderr=True)
    if not console.is_terminal or _live or _verbosity < 0:
        yield
        return
    with console.status(escape(text)):
        _live.append(console)
        try:
            yield
        finally:
            _live.pop()


def duration(seconds: float) -> str:
    """`0.31 s`, `42 s`, `3 min 20 s`, `2 h 5 min`."""
    if seconds < 9.95:
        return f"{seconds:.2g} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def exact(value: int) -> str:
    """`85,798,656`, and nothing for zero."""
    return f"{value:,}" if value else ""


def plural(count: int, noun: str) -> str:
    """`1 thread`, `2 threads`."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def short(value: int, units: str = "KMBT") -> str:
    """`85.8M`: three significant digits, by thousands; nothing for zero.

    `units` names 10^3, 10^6 and so on; operations are counted in KMGT.
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


FORMATS = ("table", "json", "csv", "markdown", "latex")


def show(result: Result, form: str, **how: Any) -> None:
    """Print the result in one of FORMATS; `how` is what its tables can choose."""
    if form == "json":
        answer_text(result.to_json())
    elif form == "csv":
        answer_text(result.to_csv())
    elif form in ("markdown", "latex"):
        with unlimited_width():
            answer_text((to_markdown if form == "markdown" else to_latex)(result.tables(**how)))
    else:
        answer(*result.tables(**how))


def to_markdown(parts: Iterable[Any]) -> str:
    """Lines as paragraphs and rich tables as Markdown's (GitHub's extension)."""
    blocks: list[str] = []
    for part in parts:
        if not isinstance(part, Table):
            blocks += filter(None, [_markdown_text(_plain(part))])
            continue
        sides, header, rows = _cells(part)
        if title := _plain(part.title):
            blocks.append(f"**{_markdown_text(title)}**")
        rule = ["---:" if side == "right" else "---" for side in sides]
        lines = [[_markdown_text(cell) for cell in row] for row, _ in [(header, False), *rows]]
        lines.insert(1, rule)
        blocks.append("\n".join("| " + " | ".join(line) + " |" for line in lines))
    return "\n\n".join(blocks)


def to_latex(parts: Iterable[Any]) -> str:
    r"""Rich tables as LaTeX's, with booktabs (\usepackage{booktabs}); lines between as comments."""
    blocks: list[str] = []
    for part in parts:
        if not isinstance(part, Table):
            blocks += [f"% {line}" for line in _plain(part).splitlines() if line.strip()]
            continue
        sides, header, rows = _cells(part)
        if title := _plain(part.title):
            blocks.append(f"% {title}")
        columns = "".join("r" if side == "right" else "l" for side in sides)
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule"]
        if any(header):
            lines += [_latex_row(header), r"\midrule"]
        for position, (row, ends_section) in enumerate(rows, start=1):
            lines.append(_latex_row(row))
            if ends_section and position < len(rows):
                lines.append(r"\midrule")
        blocks.append("\n".join([*lines, r"\bottomrule", r"\end{tabular}"]))
    return "\n".join(blocks)


Rows = list[tuple[list[str], bool]]


def _cells(table: Table) -> tuple[list[str], list[str], Rows]:
    """Justification and header of each column, and the rows; drawn bars are left out."""
    columns = []
    for column in table.columns:
        header, cells = _plain(column.header), [_plain(cell) for cell in column.cells]
        if header or not all(re.fullmatch(r"[\s█-▟░▒▓━─]*", cell) for cell in cells):
            columns.append((column.justify, header, cells))
    ends = [row.end_section for row in table.rows]
    rows = [
        ([cells[i] for _, _, cells in columns], ends_section) for i, ends_section in enumerate(ends)
    ]
    return [side for side, _, _ in columns], [header for _, header, _ in columns], rows


def _plain(part: Any) -> str:
    text = as_text([part], 10_000) if part else ""
    return " ".join(text.split())


def _markdown_text(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


_LATEX = {
    **{c: "\\" + c for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "−": "$-$",
    "→": r"$\to$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "·": r"$\cdot$",
    "…": r"\dots{}",
    "²": "$^2$",
    "°": r"$^\circ$",
    "µ": r"$\mu$",
}


def _latex_row(cells: Iterable[str]) -> str:
    return " & ".join(map(_latex_text, cells)) + r" \\"


def _latex_text(text: str) -> str:
    # A bracket after \\ would be taken for the space below the row.
    escaped = "".join(_LATEX.get(character, character) for character in text)
    return "{" + escaped + "}" if escaped.startswith(("[", "*")) else escaped


def chosen_form(option: str, form: str, json: bool) -> str:
    """One of FORMATS."""
    if form not in FORMATS:
        vectors = form in ("parquet", "npy", "safetensors")
        raise VitcliError(
            f"{option} {form}: unknown (expected {', '.join(FORMATS)})",
            f"vitcli embed PATH --out DIR --format {form}" if vectors else f"{option} json",
        )
    if json and form not in ("table", "json"):
        raise VitcliError(f"--json and {option} {form}: two formats", "give one of them")
    return "json" if json else form
