"""The README shows command lines that the program takes, and files that are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from vitcli.cli import app
from vitcli.commands.sweep.space import CONFIGS
from vitcli.config.request import preset_names
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import known_keys

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
GROUP: Any = typer.main.get_command(app)


def lines() -> list[str]:
    """Every command line, of the indented blocks and between backticks."""
    blocks = re.findall(r"^    .*?\bvitcli (.*)$", TEXT, re.MULTILINE)
    inline = re.findall(r"`vitcli ([^`]*)`", TEXT)
    pieces = [piece for line in (*blocks, *inline) for piece in re.split(r"&& vitcli ", line)]
    shown = [re.sub(r"\s+#.*", "", piece) for piece in pieces]
    return sorted(
        {line for line in shown if line.split()[:1] and line.split()[0] in GROUP.commands}
    )


@pytest.mark.parametrize("line", lines())
def test_every_command_line_is_one_that_the_program_takes(line: str) -> None:
    name, *arguments = shlex.split(line)
    if line in GROUP.commands:  # named, not shown
        return
    context = GROUP.commands[name].make_context(name, arguments)
    keys = set(known_keys(CONFIGS.get(name, ModelConfig)))
    for setting in context.params.get("set") or ():
        assert "…" in setting or setting.split("=")[0] in keys
    presets = context.params.get("preset") or ()
    assert set([presets] if isinstance(presets, str) else presets) <= set(preset_names())
    for file in (a for a in arguments if a.startswith("experiments/")):
        assert (ROOT / file).is_file()


def test_every_command_is_in_the_readme() -> None:
    assert {line.split()[0] for line in lines()} == {
        name for name, command in GROUP.commands.items() if not command.hidden
    }


def test_what_it_says_of_places_is_there() -> None:
    for place in re.findall(r"\]\(([\w/.-]+)\)", TEXT):
        assert (ROOT / place).is_file(), place
    for extra in re.findall(r"\.\[([\w,]+)\]", TEXT):
        declared = (ROOT / "pyproject.toml").read_text()
        assert all(re.search(rf"^{one} = \[", declared, re.MULTILINE) for one in extra.split(","))
