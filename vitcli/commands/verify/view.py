"""`vitcli verify` as a table and a figure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from rich.table import Table

from vitcli.commands.verify.result import VerifyResult
from vitcli.ui.console import table
from vitcli.ui.style import COLORS, new_figure, series, styled


def tables(result: VerifyResult, every: int = 1) -> Iterator[str | Table]:
    """One row per value, the times, the verdict."""
    grid = table()
    grid.add_column("value", no_wrap=True)
    grid.add_column("shape", no_wrap=True)
    grid.add_column("largest difference", justify="right")
    grid.add_column("smallest cosine", justify="right")
    grid.add_column("")
    last = max((i for i, c in enumerate(result.checked) if c.name.startswith("layer")), default=0)
    for index, one in enumerate(result.checked):
        layer = one.name.removeprefix("layer ")
        if layer.isdecimal() and int(layer) % every and one.equal and index != last:
            continue
        shape = "x".join(map(str, one.shape))
        if one.shape != one.reference_shape:
            shape += " / " + "x".join(map(str, one.reference_shape))
        unit = " levels" if one.name == "pixels" else ""
        grid.add_row(
            one.name,
            shape,
            f"{one.largest_difference:.1e}{unit}",
            "" if math.isnan(one.smallest_cosine) else f"{one.smallest_cosine:.9f}",
            "equal" if one.equal else "[bold]differs[/]",
        )
    yield f"{result.source}: vitcli beside {result.library} {result.library_version}"
    yield grid
    ratio = result.reference_wall_s / result.wall_s
    yield (
        f"one image: {result.wall_s:.3f} s here, {result.reference_wall_s:.3f} s there "
        f"({ratio:.2f} times as long), {result.model.dtype} on {result.model.device}"
    )
    yield from result.notes
    yield f"[bold]{result.verdict}[/]"


@styled
def figure(result: VerifyResult) -> Any:
    """The largest relative difference of each value, beside what rounding allows."""
    shown = [one for one in result.checked if one.name != "pixels"]
    drawing = new_figure(3.0)
    axes = drawing.subplots()
    floor = shown[0].tolerance / 1e4
    heights = [max(one.largest_difference, floor) for one in shown]
    places = range(len(shown))
    axes.plot(places, heights, **series(0) | {"linestyle": ""}, label="largest difference")
    axes.axhline(shown[0].tolerance, **series(1, marker=False), label="rounding allows")
    for place, one in enumerate(shown):
        if math.isnan(one.largest_difference):
            axes.plot(place, shown[0].tolerance * 10, "x", color=COLORS[1])
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor / 2)
    names = [one.name.removeprefix("layer ") for one in shown]
    axes.set_xticks(list(places), names, rotation=90 if len(shown) > 20 else 0)
    axes.set_xlabel("layer (0: input of the first block), then what is returned")
    axes.set_ylabel("relative difference")
    axes.set_title(f"{result.model.name} beside {result.library} {result.library_version}")
    axes.legend()
    return drawing
