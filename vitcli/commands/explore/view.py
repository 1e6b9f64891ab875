"""`vitcli explore` as a table: what is on the page."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from vitcli.commands.explore.result import ExploreResult
from vitcli.ui.console import table


def tables(result: ExploreResult) -> Iterator[str | Table]:
    """The file, then one row per encoder."""
    yield f"{result.path}  {result.bytes / 2**20:.1f} MiB, {len(result.images)} images"
    grid = table()
    grid.add_column("encoder", overflow="fold")
    for heading in ("layers", "directions", "cosine error"):
        grid.add_column(heading, justify="right", no_wrap=True)
    grid.add_column("left out")
    for encoder in result.encoders:
        grid.add_row(
            encoder.model.name,
            ",".join(map(str, encoder.layers)),
            f"{encoder.directions} of {encoder.model.hidden}",
            f"{encoder.cosine_error:.3f}",
            "; ".join(encoder.left_out) or "nothing",
        )
    yield grid
