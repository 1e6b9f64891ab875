"""`vitcli probe` as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape

from vitcli.commands.probe.result import ProbeResult
from vitcli.ui.console import table


def tables(result: ProbeResult) -> Iterator[Any]:
    yield (
        f"[bold]{escape(result.model)}[/], weights: {escape(result.weights)}, vectors of "
        f"{result.width}, on {result.images:,} images of {len(result.classes):,} classes"
    )
    rows = table()
    rows.add_column("")
    rows.add_column("accuracy", justify="right")
    rows.add_column("95 % interval", justify="right")
    rows.add_column("right of tested", justify="right")
    for score in result.scores:
        rows.add_row(
            score.method + ("" if score.converged else " (not converged)"),
            f"{score.accuracy:.1%}",
            f"{score.low:.1%} to {score.high:.1%}",
            f"{score.correct:,} / {score.tested:,}",
        )
    rows.add_row("the largest class, always", f"{result.largest_share:.1%}", "", "")
    yield rows
    facts = [result.protocol]
    facts += [f"images without a vector: {result.failed:,}"] * bool(result.failed)
    facts += [f"in no class that can be tested: {result.unlabelled:,}"] * bool(result.unlabelled)
    yield "; ".join(facts)
