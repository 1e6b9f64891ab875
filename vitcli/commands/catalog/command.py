"""vitcli presets, vitcli families"""

from __future__ import annotations

from typing import Annotated

import typer

from vitcli.ui.console import show
from vitcli.ui.options import Output, grouped


@grouped
def presets(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only presets whose name contains it.")
    ] = "",
    *,
    output: Output,
) -> None:
    """List the encoders that --preset takes.

    \b
    Examples:
      vitcli presets
      vitcli presets siglip
    """
    from vitcli.commands.catalog.analysis import presets as analysis

    show(analysis(word), output.form)


@grouped
def families(
    word: Annotated[
        str, typer.Argument(metavar="[WORD]", help="Only families whose name contains it.")
    ] = "",
    *,
    output: Output,
) -> None:
    """List the checkpoint families that --weights reads, and how each was verified.

    \b
    Examples:
      vitcli families
      vitcli families timm --json
    """
    from vitcli.commands.catalog.analysis import families as analysis

    show(analysis(word), output.form)
