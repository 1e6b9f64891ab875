"""One answer for every place: a terminal, JSON, CSV, Markdown or LaTeX.

JSON and CSV are made of the result's own fields, unrounded; Markdown and LaTeX are the tables of
the terminal at full width, with their units and rounding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich.table import Table

from vitcli.results import Result
from vitcli.ui.console import answer, answer_text, as_text, unlimited_width

FORMATS = ("table", "json", "csv", "markdown", "latex")

View = Callable[[Any], Iterable[Any]]


def show(result: Result, form: str | bool, tables: View | None = None) -> None:
    """Print the result in one of FORMATS; `tables` is its own view unless given."""
    view = tables or (lambda result: result.tables())
    if form in ("json", True):
        answer_text(result.to_json())
    elif form == "csv":
        answer_text(result.to_csv())
    elif form in ("markdown", "latex"):
        with unlimited_width():
            answer_text((to_markdown if form == "markdown" else to_latex)(view(result)))
    else:
        answer(*view(result))


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
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", _latex_row(header), r"\midrule"]
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


def complete(words: Iterable[str]) -> Callable[[str], Iterator[str]]:
    """What a shell completes an option's value with."""
    known = tuple(words)
    return lambda incomplete: (word for word in known if word.startswith(incomplete))
