"""vitcli presets"""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.cli.answers import show
from vitcli.cli.options import JsonOption


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
    from vitcli.analyses.presets import presets as analysis

    result = analysis(word)
    from vitcli.render.presets import presets_table

    show(result, json, lambda result: [presets_table(result)])
