"""`vitcli families` and `vitcli convert` as tables."""

from __future__ import annotations

from rich.table import Table

from vitcli.load_report import ConvertResult, FamiliesResult
from vitcli.ui.console import table


def families_table(result: FamiliesResult) -> Table:
    """One row a family, a line between libraries."""
    grid = table()
    grid.add_column("family", no_wrap=True)
    grid.add_column("library")
    grid.add_column("model_type")
    grid.add_column("compared with")
    library = result.families[0].library
    for row in result.families:
        if row.library != library:
            grid.add_section()
            library = row.library
        grid.add_row(row.name, row.library, ", ".join(row.model_types), row.verified)
    return grid


def convert_table(result: ConvertResult) -> Table:
    grid = table()
    grid.show_header = False
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("wrote", result.folder)
    grid.add_row("from", f"{result.checkpoint.source} ({result.checkpoint.family})")
    grid.add_row("parameters", f"{result.parameters:,}")
    grid.add_row("bytes", f"{result.bytes:,}")
    grid.add_row("sha256", result.sha256)
    return grid
