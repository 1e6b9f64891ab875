"""`vitcli profile` as tables and as a figure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.markup import escape
from rich.table import Table

from vitcli.commands.profile.result import ProfileResult, ProfileRun
from vitcli.files import data_size
from vitcli.ui.console import fitted, plural, short, stream, table
from vitcli.ui.figures import (
    ABOVE,
    NARROW,
    across,
    caption,
    label_bar,
    merge_small,
    new_figure,
    series,
    side_by_side,
    styled,
)


def seconds(value: float) -> str:
    """A time with three digits in s, ms or us."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{_three_digits(value / size)} {unit}"
    return f"{_three_digits(value / 1e-6)} us"


def _three_digits(value: float) -> str:
    return f"{value:.{max(0, 2 - (value >= 10) - (value >= 100))}f}"


def tables(result: ProfileResult) -> Iterator[str | Table]:
    """The machine, the runs, each engine against the first, components, operators, the answer."""
    model, machine = result.model, result.machine
    height, width = result.image_size
    yield (
        f"[bold]{escape(model.name)}[/]  {short(model.parameters)} parameters, "
        f"{height}x{width} px, {result.tokens} tokens, "
        f"{result.macs_per_image / 1e9:.2f} G multiply-accumulates per image"
    )
    yield (
        f"{result.step}, {machine.dtype}, {escape(machine.device)}, "
        f"{plural(machine.threads, 'thread')}; {escape(machine.processor)}, {machine.system}, "
        f"torch {machine.torch}"
    )
    yield _runs(result)
    for run in result.runs:
        if run.error:
            yield f"[yellow]batch {run.batch}, {run.engine}: {escape(run.error)}[/]"
    for engine in result.engines:
        facts = [engine.note] if engine.note else []
        if engine.prepare_s:
            facts.append(f"prepared in {seconds(engine.prepare_s)}")
        if engine.max_error is not None:
            facts.append(f"outputs within {engine.max_error:.1e} of eager")
        if facts:
            yield f"{engine.engine}: {escape(', '.join(facts))}"
    if result.comparisons:
        yield _comparisons(result)
    if result.fidelity:
        yield _fidelity(result)
    componented = [run for run in result.runs if run.components]
    for name in dict.fromkeys(label(result, run) for run in componented):
        runs = [run for run in componented if label(result, run) == name]
        fit = max(1, (stream().width - COMPONENT_ROOM) // BATCH_ROOM)
        for start in range(0, len(runs), fit):
            yield _components(runs[start : start + fit], name)
    for run in result.runs:
        if run.ops:
            yield _operators(run)
    yield f"[bold]{escape(result.verdict)}[/]"


def _runs(result: ProfileResult) -> Table:
    several = [
        field
        for field in ("engine", "dtype")
        if len({getattr(run, field) for run in result.runs}) > 1
    ]
    grid = table(None, ">batch", *several)
    for name in ("median", "p10", "p90", "images/s", "peak", "GFLOP/s", "of GEMM", "first"):
        grid.add_column(name, justify="right", no_wrap=True)
    for run in result.runs:
        cells = [str(run.batch), *(getattr(run, field) for field in several)]
        if run.wall_s is None:
            grid.add_row(*cells, "[yellow]failed[/]")
            continue
        assert run.images_per_s and run.gflops and run.warmup_s
        wall = run.wall_s
        grid.add_row(
            *cells,
            *(seconds(value) for value in (wall.median, wall.p10, wall.p90)),
            f"{run.images_per_s:.4g}",
            "-" if run.peak_bytes is None else data_size(run.peak_bytes),
            f"{run.gflops:.4g}",
            "-" if run.gemm_fraction is None else f"{run.gemm_fraction:.0%}",
            seconds(run.warmup_s),
        )
    return fitted(grid, "first", "of GEMM", "GFLOP/s", "p10", "p90")


def _comparisons(result: ProfileResult) -> Table:
    baseline = result.comparisons[0].baseline
    title = f"Speed relative to {baseline} (above 1 is faster), steps timed alternately"
    grid = table(title, ">batch", "engine", ">median", ">p10", ">p90")
    for item in result.comparisons:
        ratio = item.speed_ratio
        grid.add_row(
            str(item.batch),
            item.engine if item.dtype == item.baseline_dtype else f"{item.engine}, {item.dtype}",
            *(f"{value:.2f}x" for value in (ratio.median, ratio.p10, ratio.p90)),
        )
    return grid


def _fidelity(result: ProfileResult) -> Table:
    count = plural(result.fidelity[0].images, "image")
    numbers = (">smallest cosine", ">of a pooled vector", ">largest relative difference")
    grid = table(f"Difference to plain torch in float32, on {count}", "engine", "dtype", *numbers)
    for item in result.fidelity:
        pooled = "" if item.pooled_cosine_min is None else f"{item.pooled_cosine_min:.6f}"
        far = f"{item.relative_difference:.2g}"
        grid.add_row(item.engine, item.dtype, f"{item.cosine_min:.6f}", pooled, far)
    return grid


COMPONENT_ROOM, BATCH_ROOM = 40, 20
"""Columns of a terminal for names and the share of operations, and for each batch size."""


def _components(runs: list[ProfileRun], name: str) -> Table:
    """A row per component; per batch size of an engine its own time per step and its share."""
    grid = table(f"Components ({name}): own time per step and share, under the profiler")
    grid.add_column("component", no_wrap=True)
    for name in (
        *[n for run in runs for n in (f"batch {run.batch}", "share")],
        "share of operations",
    ):
        grid.add_column(name, justify="right")
    for part_name in dict.fromkeys(part.name for run in runs for part in run.components):
        cells, flop_share = [], 0.0
        for run in runs:
            part = {item.name: item for item in run.components}.get(part_name)
            cells += ["-", "-"] if part is None else [seconds(part.self_s), f"{part.share:.1%}"]
            flop_share = part.flop_share if part else flop_share
        grid.add_row(part_name, *cells, f"{flop_share:.1%}")
    grid.add_section()
    totals = []
    for run in runs:
        totals += [
            seconds(sum(part.self_s for part in run.components)),
            f"{sum(part.share for part in run.components):.1%}",
        ]
    grid.add_row("total", *totals, f"{sum(part.flop_share for part in runs[0].components):.1%}")
    return grid


def _operators(run: ProfileRun) -> Table:
    grid = table(f"Operators of torch's profiler, batch {run.batch}, {run.engine}, {run.dtype}")
    grid.add_column("operator", overflow="fold")
    for name in ("calls", "self time", "share"):
        grid.add_column(name, justify="right")
    for item in run.ops:
        grid.add_row(
            escape(item.name), f"{item.calls:g}", seconds(item.self_s), f"{item.share:.1%}"
        )
    return fitted(grid, "calls", "share")


def label(result: ProfileResult, run: ProfileRun) -> str:
    """The engine of a run, with its dtype where the runs have several."""
    return run.engine if len({r.dtype for r in result.runs}) == 1 else f"{run.engine}, {run.dtype}"


@styled
def figure(result: ProfileResult) -> Any:
    """Shares of the components per batch, and throughput against batch, one line per engine."""
    from vitcli.commands.params.view import component_fills

    drawing = new_figure(2.9, panels=2)
    shares, speed = side_by_side(drawing, 2, gridspec_kw={"width_ratios": [1.2, 1]})
    fills = component_fills()
    runs = [run for run in result.runs if run.components]
    named: dict[str, Any] = {}
    for column, run in enumerate(runs):
        bottom = 0.0
        for name, share in merge_small([(c.name, c.share) for c in run.components]):
            bars = shares.bar(column, share, bottom=bottom, linewidth=0, **fills[name])
            named.setdefault(name, bars)
            if share >= 0.05:
                label_bar(shares, column, bottom + share / 2, share)
            bottom += share
    engines = [label(result, run) for run in runs]
    one = len(set(engines)) == 1
    shares.set(ylabel=f"share of a step's time{f' ({engines[0]})' if one else ''}", ylim=(0, 1))
    shares.set_xlabel("batch (images)")
    named_runs = [f"{run.batch}{'' if one else chr(10) + engines[i]}" for i, run in enumerate(runs)]
    shares.set_xticks(range(len(runs)), named_runs)
    if runs:
        names = [name for name in reversed(fills) if name in named]  # as the bars are stacked
        place = {"loc": "center left", "bbox_to_anchor": (1, 0.5), "frameon": False}
        if across() < NARROW:
            place = ABOVE | {"ncols": 2}
        shares.legend([named[name] for name in names], names, **place)
    else:
        shares.text(0.5, 0.5, "only the eager engine\nhas components", ha="center", va="center")
    fastest = 0.0
    ways = list(dict.fromkeys((run.engine, run.dtype) for run in result.runs))
    for index, way in enumerate(ways):
        timed = [r for r in result.runs if (r.engine, r.dtype) == way and r.images_per_s]
        if not timed:
            continue
        timed.sort(key=lambda run: run.batch)
        batches = [run.batch for run in timed]
        middle = [run.images_per_s or 0.0 for run in timed]
        # The slow tenth of the steps is the lower end of the rate.
        low = [run.batch / run.wall_s.p90 for run in timed if run.wall_s]
        high = [run.batch / run.wall_s.p10 for run in timed if run.wall_s]
        spread = [
            [max(m - end, 0.0) for m, end in zip(middle, low, strict=True)],
            [max(end - m, 0.0) for m, end in zip(middle, high, strict=True)],
        ]
        name = label(result, timed[0])
        speed.errorbar(batches, middle, yerr=spread, capsize=2, label=name, **series(index))
        fastest = max(fastest, *high, *middle)
    speed.set(xlabel="batch (images)", ylabel="throughput (images/s)", ylim=(0, 1.1 * fastest or 1))
    speed.set_xscale("log", base=2)
    batches = sorted({run.batch for run in result.runs})
    speed.set_xticks(batches, [str(batch) for batch in batches])
    speed.grid()
    if speed.containers:
        place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "frameon": False}
        speed.legend(ncols=2, **place)  # above the panel: error bars may be anywhere in it
    drawing.suptitle(
        f"{result.model.name}, {result.step}, {result.machine.dtype}, "
        f"{result.machine.processor}, {plural(result.machine.threads, 'thread')}"
    )
    caption(drawing, "throughput: median step; bars: p10 to p90 of the steps")
    return drawing
