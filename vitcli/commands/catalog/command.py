"""vitcli presets"""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.ui.options import JsonOption
from vitcli.ui.output import show


def presets(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only presets whose name contains it.")
    ] = "",
    json: JsonOption = False,
) -> None:
    """The encoders that --preset knows.

    \b
    Examples:
      vitcli presets
      vitcli presets siglip
    """
    from vitcli.commands.catalog.analysis import presets as analysis

    result = analysis(word)
    from vitcli.commands.catalog.view import presets_table

    show(result, json, lambda result: [presets_table(result)])
