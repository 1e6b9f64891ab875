"""The notebooks run from top to bottom, and what their cells end with shows itself."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import vitcli

FOLDER = Path(__file__).parents[2] / "experiments" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def last_value(source: str, names: dict[str, Any]) -> Any:
    """What a cell shows: the value of its last line, where that is an expression."""
    tree = ast.parse(source)
    end = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    if end is None:
        return None
    assert isinstance(end, ast.Expr)
    return eval(compile(ast.Expression(end.value), "cell", "eval"), names)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    names: dict[str, Any] = {"__name__": "notebook"}
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code), "results are not stored"
    shown = [last_value("".join(cell["source"]), names) for cell in code]
    tables = [v._repr_html_() for v in shown if isinstance(v, vitcli.Result)]
    assert tables and all("<pre" in html or "<table" in html for html in tables)
    figures = [v for v in shown if type(v).__name__ == "Figure"]
    for figure in figures:
        figure.savefig(tmp_path / "figure.png")
    assert figures or notebook.stem == "choose-a-tower"


def test_there_are_three() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["choose-a-tower", "debug-a-port", "tour"]
