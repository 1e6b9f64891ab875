"""A job's progress while it runs, and its table at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.markup import escape

from vitcli.commands.embed.result import FolderResult
from vitcli.files import printable
from vitcli.ui.console import duration, plural, progress, table

_PLAIN_EVERY_S = 10.0
Watch = Callable[[int, int, "Counter[str]"], None]


@contextmanager
def watch_job(title: str) -> Iterator[Watch]:
    """Rate, time left and failures on stderr: a bar on a terminal, lines in a pipe."""
    pace = _Pace()
    last = time.monotonic()
    with progress(title, timed=False) as bar:

        def watch(done: int, total: int, failures: Counter[str]) -> None:
            nonlocal last
            facts = pace.facts(done, total, failures.total())
            bar(done, total, facts)
            if not bar.live and time.monotonic() - last >= _PLAIN_EVERY_S:
                last = time.monotonic()
                kinds = ", ".join(f"{count:,} {code}" for code, count in failures.most_common())
                line = f"{title}: {done:,} of {total:,}{facts and f', {facts}'}"
                bar.line(line + (f" ({kinds})" if kinds else ""))

        yield watch


class _Pace:
    """The rate since the first row that was not there before."""

    def __init__(self) -> None:
        self.begin: tuple[float, int] | None = None

    def facts(self, done: int, total: int, failed: int) -> str:
        now = time.monotonic()
        if self.begin is None:
            self.begin = (now, done)
        rate = (done - self.begin[1]) / max(now - self.begin[0], 1e-9)
        facts = []
        if rate > 0 and now > self.begin[0]:
            facts += [f"{rate:.1f} img/s", f"{duration((total - done) / rate)} left"]
        facts += [f"{failed:,} failed"] * bool(failed)
        return ", ".join(facts)


def summary(result: FolderResult) -> str:
    """The one line of a shard."""
    rate = "" if result.images_per_s is None else f", {result.images_per_s:.1f} img/s"
    there = result.rows - result.rows_encoded
    return (
        f"shard {result.shard}: {plural(result.rows, 'row')} in {plural(result.parts, 'part')} "
        f"read back from {printable(result.out)}, {result.ok:,} ok, {result.failed:,} failed; "
        f"{result.rows_encoded:,} in this run{f', {there:,} from before' if there else ''}, "
        f"{duration(result.wall_s)}{rate}"
    )


def tables(result: FolderResult) -> Iterator[Any]:
    """What was encoded with what, and the failures by kind."""
    model = result.model
    yield (
        f"[bold]{escape(model.name)}[/]  {model.parameters / 1e6:.1f}M parameters, weights: "
        f"{escape(model.weights)}; {result.engine} engine, {model.dtype} on {model.device}; "
        f"{result.kind} vectors of {result.width}"
    )
    counts = table()
    counts.add_column("status")
    counts.add_column("images", justify="right")
    counts.add_row("ok", f"{result.ok:,}")
    for failure in result.failures:
        counts.add_row(failure.code, f"{failure.count:,}")
    counts.add_section()
    counts.add_row("all", f"{result.rows:,}")
    yield counts
    for example in result.examples:
        yield f"{escape(printable(example.path))}: {example.code}: {escape(example.error)}"
    if result.failed > len(result.examples):
        yield f"... and {result.failed - len(result.examples):,} more: rows whose status is not ok"
