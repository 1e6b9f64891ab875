"""`vitcli presets` as a table."""

from __future__ import annotations

from rich.table import Table

from vitcli.commands.params.result import PresetsResult
from vitcli.commands.params.view import size
from vitcli.ui.console import table
from vitcli.ui.numbers import exact


def presets_table(result: PresetsResult) -> Table:
    """One row a preset, a line between families."""
    grid = table()
    grid.add_column("preset", no_wrap=True)
    for heading in ("hidden", "depth", "heads", "patch", "image", "parameters"):
        grid.add_column(heading, justify="right", no_wrap=True)
    family = result.presets[0].family
    for row in result.presets:
        if row.family != family:
            grid.add_section()
            family = row.family
        numbers = (row.hidden, row.depth, row.heads, row.patch_size)
        grid.add_row(row.name, *map(str, numbers), size(row.image_size), exact(row.parameters))
    return grid
