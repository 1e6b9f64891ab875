"""A command from another package: a function with typer's annotations."""

from __future__ import annotations

from typing import Annotated

import typer

import vitcli


def depth(
    preset: Annotated[str, typer.Argument(metavar="PRESET", help="A known encoder.")],
) -> None:
    """How many blocks a preset has."""
    print(vitcli.params(preset).models[0].depth)
