"""Experiments use the command line and the public API, nothing deeper."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import vitcli
from tests.experiments.sources import ROOT

SCRIPTS = sorted((ROOT / "experiments").glob("*.py"))


def deeper(source: str) -> list[str]:
    """What a script takes from vitcli that is not public: imports, and attributes of `vitcli`."""
    found: list[str] = []
    tree = ast.parse(source)
    named = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "vitcli"
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.startswith("vitcli.")]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [alias.name for alias in node.names]
            if node.module.startswith("vitcli."):
                found.append(node.module)
            elif node.module == "vitcli":
                found += [name for name in names if name not in vitcli.__all__]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in named
            and node.attr not in vitcli.__all__
        ):
            found.append(f"vitcli.{node.attr}")
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_experiment_takes_only_what_is_public(script: Path) -> None:
    assert deeper(script.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import vitcli.nn", ["vitcli.nn"]),
        ("def f():\n    from vitcli.build import x", ["vitcli.build"]),
        ("from vitcli import load, nn", ["nn"]),
        ("import vitcli as v\nv.load; v.model", ["vitcli.model"]),
    ],
)
def test_what_is_deeper_is_found(source: str, found: list[str]) -> None:
    assert deeper(source) == found
