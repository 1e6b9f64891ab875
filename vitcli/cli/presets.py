"""vitcli presets"""

from __future__ import annotations

from typing import Annotated

import typer

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
    from vitcli.render.console import answer, answer_text

    result = analysis(word)
    if json:
        from vitcli.render.json import to_json

        answer_text(to_json(result))
    else:
        from vitcli.render.presets import presets_table

        answer(presets_table(result))
