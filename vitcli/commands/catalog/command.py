"""vitcli presets, vitcli families: their options and tables."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vitcli.ui.completion import complete, complete_presets
from vitcli.ui.console import TIGHT, exact, fitted, remove_column, show, stream, table
from vitcli.ui.options import Output, grouped

if TYPE_CHECKING:
    from vitcli.commands.catalog.analysis import FamiliesResult, PresetsResult


LIBRARIES = (
    *("hf", "timm", "open_clip", "openai", "torchvision", "facebookresearch", "google"),
    "OpenGVLab",
)
"""Words that find families; their names themselves would bring torch."""


@grouped
def presets(
    word: Annotated[
        str,
        typer.Argument(
            metavar="[WORD]",
            help="Only presets whose name contains it.",
            autocompletion=complete_presets,
        ),
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
        str,
        typer.Argument(
            metavar="[WORD]",
            help="Only families whose name or library contains it.",
            autocompletion=complete(LIBRARIES),
        ),
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


def presets_tables(result: PresetsResult) -> Iterator[Table]:
    """A row per preset, a line between families."""
    from vitcli.commands.params.view import size

    grid = table()
    grid.add_column("preset", no_wrap=True)
    for heading in ("hidden", "depth", "heads", "patch", "input", "native", "parameters"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("hub id", no_wrap=True)
    family = result.presets[0].family
    for row in result.presets:
        if row.family != family:
            grid.add_section()
            family = row.family
        numbers = (row.hidden, row.depth, row.heads, row.patch_size)
        native = size(row.native_size) if row.native_size != row.image_size else ""
        places = (size(row.image_size), native)
        grid.add_row(row.name, *map(str, numbers), *places, exact(row.parameters), row.hub or "")
    yield fitted(grid, "native", "hub id", "heads", "depth", "hidden")


def families_tables(result: FamiliesResult) -> Iterator[Table]:
    """A row per family, a line between libraries."""
    narrow = stream().width < 100
    grid = table(**(TIGHT if narrow else {}))
    family = max((len(row.name) for row in result.families), default=0)
    names = [name for row in result.families for name in row.model_types]
    types = max([len("model_type"), *(len(name) + 1 for name in names)])  # and its comma
    grid.add_column("family", no_wrap=True)
    grid.add_column("library")
    grid.add_column("model_type", min_width=types)
    room = max(16, stream().width - family - types - 5) if narrow else None
    grid.add_column("verified against", max_width=room)
    library = result.families[0].library
    for row in result.families:
        if row.library != library:
            grid.add_section()
            library = row.library
        grid.add_row(row.name, row.library, ", ".join(row.model_types), row.verified)
    if narrow:  # the name begins with the library
        remove_column(grid, "library")
    if not names:
        remove_column(grid, "model_type")
    yield grid
