"""`vitcli export` and `vitcli convert` as tables."""

from __future__ import annotations

from collections.abc import Iterator

from rich.markup import escape
from rich.table import Table

from vitcli.commands.export.result import ConvertResult, ExportResult
from vitcli.ui.console import table


def tables(result: ExportResult) -> Iterator[str | Table]:
    """The files, the graph's inputs and outputs, and the difference to eager."""
    for file in result.files:
        yield f"[bold]{escape(file.path)}[/]  {file.bytes / 2**20:.1f} MiB"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield f"{escape(result.model.name)}, opset {result.opset}; {versions}"
    grid = table()
    grid.add_column("tensor")
    grid.add_column("kind")
    grid.add_column("shape")
    for kind, tensors in (("input", result.inputs), ("output", result.outputs)):
        for tensor in tensors:
            grid.add_row(tensor.name, kind, "(" + ", ".join(map(str, tensor.shape)) + ")")
    yield grid
    batches = " and ".join(map(str, result.checked_batches))
    yield (
        f"checked against eager at batch {batches}: largest difference {result.max_error:.1e} "
        f"(tolerance {result.tolerance:.0e})"
    )


def convert_tables(result: ConvertResult) -> Iterator[Table]:
    """What was written, from what, and its digest."""
    grid = table()
    grid.show_header = False
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    grid.add_row("wrote", result.folder)
    grid.add_row("from", f"{result.checkpoint.source} ({result.checkpoint.family})")
    grid.add_row("parameters", f"{result.parameters:,}")
    grid.add_row("bytes", f"{result.bytes:,}")
    grid.add_row("sha256", result.sha256)
    yield grid
