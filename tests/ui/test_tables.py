"""One result in every format: CSV as pandas reads it, Markdown and LaTeX as the tables show it."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from PIL import Image
from rich.text import Text
from typer.testing import CliRunner

from tests.commands.sources import SMALL
from vitcli.cli import app
from vitcli.commands.catalog.analysis import families, presets
from vitcli.results import csv_text
from vitcli.ui.console import FORMATS, as_text, fitted, show, table, to_latex, to_markdown

MODELS = ("params", "--preset", "vit-b16", "--preset", "vit-ti16")


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == code, done.output
    return done.output


def test_csv_holds_the_numbers_of_the_json() -> None:
    models = json.loads(run(*MODELS, "--json"))["models"]
    read = pd.read_csv(io.StringIO(run(*MODELS, "--format", "csv")))
    parts = [(m["name"], c) for m in models for c in m["components"]]
    assert len(read) == len(parts)
    assert list(read["model.name"]) == [name for name, _ in parts]
    for key in ("name", "parameters", "share", "macs"):
        assert list(read[key]) == [part[key] for _, part in parts]


def test_json_is_the_short_form() -> None:
    assert run(*MODELS, "--json") == run(*MODELS, "--format", "json")
    assert run(*MODELS) == run(*MODELS, "--format", "table")


def test_an_unknown_format_ends_before_the_work() -> None:
    assert "(expected table, json" in run("params", "--format", "xml", code=2)
    assert "two formats" in run("params", "--format", "csv", "--json", code=2)


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1 apples", "@SUM(A1)", "\t=1", "\r=1"])
def test_text_that_a_spreadsheet_would_run_is_quoted(text: str) -> None:
    read = pd.read_csv(io.StringIO(csv_text([{"a": text, "b": -1.5, "c": "x-=y"}])))
    assert read["a"][0] == "'" + text
    assert (read["b"][0], read["c"][0]) == (-1.5, "x-=y")


def test_csv_keeps_floats_exact_and_nested_fields_apart() -> None:
    rows = [{"x": 0.1 + 0.2, "y": None}, {"x": 1e-300, "z": 'say "hi", you'}]
    read = pd.read_csv(io.StringIO(csv_text(rows)))
    assert list(read["x"]) == [0.1 + 0.2, 1e-300]
    assert list(read.columns) == ["x", "y", "z"]
    assert read["z"][1] == 'say "hi", you'


def sample() -> object:
    grid = table("results")
    grid.add_column(Text("two\nlines"))
    grid.add_column("", min_width=4)
    grid.add_column("accuracy (%)", justify="right")
    grid.add_row("a_b & c|d", "██▌", "1 ± 2", end_section=True)
    grid.add_row("[bold]50%[/]", "█", "3")
    return grid


def test_markdown_has_the_cells_without_the_bars() -> None:
    lines = to_markdown(["[bold]name[/]", sample()]).splitlines()
    assert lines[0] == "name"
    assert lines[2] == "**results**"
    assert lines[4:] == [
        "| two lines | accuracy (%) |",
        "| --- | ---: |",
        r"| a\_b & c\|d | 1 ± 2 |",
        "| 50% | 3 |",
    ]


def test_latex_is_booktabs_with_special_characters_escaped() -> None:
    assert to_latex(["name 100%", sample()]).splitlines() == [
        "% name 100%",
        "% results",
        r"\begin{tabular}{lr}",
        r"\toprule",
        r"two lines & accuracy (\%) \\",
        r"\midrule",
        r"a\_b \& c\textbar{}d & 1 $\pm$ 2 \\",
        r"\midrule",
        r"50\% & 3 \\",
        r"\bottomrule",
        r"\end{tabular}",
    ]


@pytest.mark.skipif(not shutil.which("pdflatex"), reason="pdflatex is not installed")
def test_the_tables_of_every_command_compile(tmp_path: Path) -> None:
    photo = str(tmp_path / "a_photo 100% & more.png")
    Image.new("RGB", (40, 24), "teal").save(photo)
    for number in range(12):
        place = tmp_path / "photos" / ("a_b", "c&d")[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (9, 9), (20 * number, 9, 200 * (number % 2))).save(place / f"{number}.png")
    photos, vectors = str(tmp_path / "photos"), str(tmp_path / "vectors")
    tiny = ("--preset", "vit-ti16", *SMALL)
    other = ("--set-b", "encoder.registers=2")
    commands: list[tuple[str, ...]] = [
        ("presets",),
        ("families",),
        MODELS,
        MODELS[:3],
        ("encode", photo, *tiny),
        ("attn-entropy", photo, *tiny, "--registers", "0,2"),
        ("compare", "vit-ti16", "vit-ti16", photo, *SMALL),
        ("compare", "vit-ti16", "vit-ti16", photo, *SMALL, *other),
        ("grid", photo, *tiny),
        ("explore", photo, *tiny, "--out", str(tmp_path / "page.html")),
        ("profile", *tiny, "--batch", "1", "--runs", "2"),
        ("embed", photos, *tiny, "--out", vectors, "--workers", "1"),
        ("neighbors", vectors, "a_b/0.png"),
        ("probe", vectors, "--k", "2", "--folds", "2"),
    ]
    printed = []
    for command in commands:
        option = "--result-format" if command[0] == "embed" else "--format"
        printed.append(CliRunner().invoke(app, [*command, option, "latex"]))
    assert [done.stderr for done in printed if done.exit_code] == []
    tables = [done.stdout for done in printed]
    assert [c for c, text in zip(commands, tables, strict=True) if r"\toprule" not in text] == []
    document = (
        r"\documentclass{article}\usepackage[utf8]{inputenc}\usepackage{booktabs}\begin{document}"
        + "\n\n".join([to_latex([sample()]), *tables])
        + r"\end{document}"
    )
    (tmp_path / "x.tex").write_text(document)
    subprocess.run(
        ["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL
    )


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("command", ["presets", "families"])
def test_every_format_names_every_row(command: str, form: str) -> None:
    names = [row["name"] for row in json.loads(run(command, "--json"))[command]]
    assert names
    shown = re.sub(r"\\(?=[_&%])", "", run(command, "--format", form))
    assert [name for name in names if name not in shown] == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Where stdout goes to from now on: a terminal of so many columns."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")  # a dumb one has 80 columns whatever it says
    monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    return terminal


@pytest.mark.parametrize("columns", [80, 200])
def test_columns_give_way_before_a_cell_is_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal of 80 columns loses the least needed columns; no name and no number is broken."""
    terminal = on_terminal(columns, monkeypatch)
    result = presets("")
    show(result, "table")
    lines = terminal.getvalue().splitlines()
    assert "…" not in terminal.getvalue()
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert max(map(len, plain)) <= columns
    names = {line.split()[0] for line in plain if line.strip()}
    assert {row.name for row in result.presets} <= names
    (header,) = [line for line in plain if line.split()[:1] == ["preset"]]
    assert ("native" in header) is (columns == 200)
    assert ("no room here for: native, hub id" in terminal.getvalue()) is (columns == 80)


@pytest.mark.parametrize("columns", [40, 60])
def test_a_tight_table_without_some_columns_keeps_its_cells_whole(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = on_terminal(columns, monkeypatch)
    grid = table(padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    words = [f"{name:>10}" for name in ("first", "less", "least", "value", "last")]
    for name in words:
        grid.add_column(name.strip(), justify="right")
    grid.add_row(*(10 * str(place) for place in range(5)))
    terminal.write("\n".join(as_text([fitted(grid, "least", "less")], columns).splitlines()))
    assert "…" not in terminal.getvalue()
    kept = (0, 3, 4) if columns == 40 else (0, 1, 2, 3, 4)
    assert [str(p) * 10 in terminal.getvalue() for p in range(5)] == [p in kept for p in range(5)]


def test_a_table_of_families_without_types_has_no_such_column(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for columns in (80, 200):
        terminal = on_terminal(columns, monkeypatch)
        show(families("timm"), "table")
        assert "model_t" not in terminal.getvalue() and "timm-eva02" in terminal.getvalue()


@pytest.mark.parametrize("columns", [80, 99, 200])
def test_families_are_whole_in_a_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = on_terminal(columns, monkeypatch)
    result = families("")
    show(result, "table")
    text = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    words = set(re.split(r"[\s,]+", text))
    assert {name for row in result.families for name in (row.name, *row.model_types)} <= words
    assert {w.strip(",") for row in result.families for w in row.verified.split()} <= words
