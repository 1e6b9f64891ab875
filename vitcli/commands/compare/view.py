"""`vitcli compare` and `vitcli verify` as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from vitcli.commands.compare.result import CompareResult, LinearCka, VerifyResult
from vitcli.ui.console import plural, table
from vitcli.ui.figures import (
    ABOVE,
    CHANCE,
    COLORS,
    COLUMN,
    NARROW,
    PAGE,
    across,
    caption,
    ended,
    new_figure,
    series,
    side_by_side,
    styled,
)


def tables(result: CompareResult, every: int = 1) -> Iterator[str | Table]:
    """Values that are not finite first; the encoders, their layers and settings; the verdict."""
    if result.holes:
        yield f"[bold red]{escape(result.verdict)}[/]"
    for letter, model in (("A", result.a), ("B", result.b)):
        yield (
            f"[bold]{letter}[/]  {escape(model.name)}, {plural(model.depth, 'block')}, "
            f"{model.hidden} hidden, weights: {escape(model.weights)}; "
            f"{model.dtype} on {model.device}"
        )
    cka = result.cka
    batches = "1 minibatch" if cka.minibatches == 1 else f"{cka.minibatches} minibatches"
    yield f"linear CKA over {cka.count} {cka.examples} in {batches}"
    yield _layers(result, every)
    if result.config_differences:
        settings = table("settings that differ")
        for name in ("key", "A", "B"):
            settings.add_column(name, overflow="fold")
        for row in result.config_differences:
            settings.add_row(escape(row.key), escape(row.a), escape(row.b))
        yield settings
    if not result.holes:
        yield escape(result.verdict)


def _layers(result: CompareResult, every: int) -> Table:
    numbers = (">max |A-B|", ">relative", ">cosine", ">CKA", ">most similar in B")
    grid = table(None, "layer", *numbers)
    differences = {row.layer: row for row in result.differences}
    cka_cells = _cka_cells(result.cka)
    names = [*(["pixels"] if "pixels" in differences else []), *result.cka.layers_a]
    names += [name for name in differences if name not in names]
    blocks = [name for name in names if name.startswith("block")]
    always_shown = {*blocks[-1:], result.first_unequal, result.first_parted}
    hidden = {name for i, name in enumerate(blocks, start=1) if i % every} - always_shown
    for name in names:
        if name in hidden:
            continue
        row = differences.get(name)
        cells = ["", "", ""]
        if row is not None:
            cells = [f"{row.max_abs:.2e}", f"{row.relative:.1e}", f"{row.cosine:.7f}"]
        grid.add_row(name, *cells, *cka_cells.get(name, ("", "")))
    return grid


def _cka_cells(cka: LinearCka) -> dict[str, tuple[str, str]]:
    """For each layer of A: CKA with B's layer of the same name, and B's layer of largest CKA."""
    cells = {}
    for name, row in zip(cka.layers_a, cka.values, strict=True):
        same = dict(zip(cka.layers_b, row, strict=True)).get(name)
        known = [(v, other) for v, other in zip(row, cka.layers_b, strict=True) if v is not None]
        best = max(known, default=None)
        cells[name] = (
            "" if same is None else f"{same:.4f}",
            "" if best is None else f"{best[1]} {best[0]:.4f}",
        )
    return cells


@styled
def figure(result: CompareResult) -> Any:
    """The CKA matrix as a heat map; beside it the relative difference, where there is one."""
    import numpy as np

    cka = result.cka
    rows = [
        row
        for row in result.differences
        if row.layer in cka.layers_a and not math.isnan(row.max_abs)
    ]
    count = 2 if rows else 1
    drawing = new_figure(3.3, PAGE if rows else COLUMN + 0.6, panels=count)
    panels = side_by_side(drawing, count)
    heat = panels[0]
    image = heat.imshow(
        np.array(cka.values, dtype=float), origin="lower", vmin=0, vmax=1, cmap="viridis"
    )
    drawing.colorbar(image, ax=heat, shrink=0.8, label="linear CKA")
    a, b = axis_names(result)
    heat.set_xlabel(f"layer of B: {ended(b)}")
    heat.set_ylabel(f"layer of A: {ended(a)}")
    for axis, names in ((heat.xaxis, cka.layers_b), (heat.yaxis, cka.layers_a)):
        _name_layers(axis, names)
    if rows:
        gaps = panels[1]
        sizes = np.array([row.relative for row in rows])
        gaps.semilogy(range(len(rows)), np.where(sizes > 0, sizes, np.nan), **series(0))
        gaps.axhline(result.tolerance, **CHANCE)
        where = {"xycoords": ("axes fraction", "data"), "va": "bottom"}
        gaps.annotate("rounding", (0.02, result.tolerance), **where)
        if not sizes.any():
            gaps.set_ylim(result.tolerance / 100, 1)
            gaps.text(0.5, 0.6, "identical bit for bit", ha="center", transform=gaps.transAxes)
        _name_layers(gaps.xaxis, [row.layer for row in rows])
        gaps.set_ylabel("largest difference / largest value")
        gaps.set_xlabel("layer")
        gaps.grid()
    pairing = "; patches paired by place" if cka.pairing else ""
    images = plural(result.images, "image")
    caption(drawing, f"CKA over {cka.count:,} {cka.examples} of {images}{pairing}")
    return drawing


def axis_names(result: CompareResult) -> tuple[str, str]:
    """The encoders' names; where they are equal, with the weights or the first setting that differ.

    Settings of the encoder come first: those of preprocessing often follow from them.
    """
    a, b = result.a, result.b
    if a.name != b.name:
        return a.name, b.name
    if a.weights != b.weights:
        return f"{a.name}, {a.weights}", f"{b.name}, {b.weights}"
    rows = sorted(result.config_differences, key=lambda row: row.key.startswith("preprocess"))
    for row in rows[:1]:
        key = row.key.rpartition(".")[2]
        return f"{a.name}, {key} {row.a}", f"{b.name}, {key} {row.b}"
    return a.name, b.name


def _name_layers(axis: Any, names: Sequence[str]) -> None:
    """At most some 12 of the layers: `input`, the numbers of blocks, `norm`."""
    step = max(1, len(names) // 12)
    short = [name.removeprefix("block ") for name in names]
    axis.set_ticks(range(0, len(names), step), short[::step])
    for label in axis.get_ticklabels():
        label.set_rotation(90 if axis.axis_name == "x" else 0)


def verify_tables(result: VerifyResult, every: int = 1) -> Iterator[str | Table]:
    """One row per value, the times, the verdict."""
    grid = table(None, "value", "shape", ">largest difference", ">smallest cosine", "")
    for column in grid.columns[:2]:
        column.no_wrap = True
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
    yield f"{escape(result.source)}: vitcli and {result.library} {result.library_version}"
    yield grid
    ratio = result.reference_wall_s / result.wall_s
    yield (
        f"one image: vitcli {1000 * result.wall_s:,.1f} ms, {result.library} "
        f"{1000 * result.reference_wall_s:,.1f} ms ({ratio:.2f} times as long), "
        f"{result.model.dtype} on {result.model.device}"
    )
    yield from result.notes
    yield f"[bold]{result.verdict}[/]"


@styled
def verify_figure(result: VerifyResult) -> Any:
    """The largest relative difference of each value, and the tolerance."""
    shown = [one for one in result.checked if one.name != "pixels"]
    drawing = new_figure(3.0)
    axes = drawing.subplots()
    floor = shown[0].tolerance / 1e4
    heights = [max(one.largest_difference, floor) for one in shown]
    places = range(len(shown))
    axes.plot(places, heights, **series(0) | {"linestyle": ""}, label="largest difference")
    axes.axhline(shown[0].tolerance, **series(1, marker=False), label="tolerance (rounding)")
    for place, one in enumerate(shown):
        if math.isnan(one.largest_difference):
            axes.plot(place, shown[0].tolerance * 10, "x", color=COLORS[1])
    axes.set_yscale("log")
    axes.set_ylim(bottom=floor / 2)
    names = [one.name.removeprefix("layer ") for one in shown]
    many = len(shown) > (20 if across() >= NARROW else 10)
    axes.set_xticks(list(places), names, rotation=90 if many else 0)
    axes.set_xlabel("layer (0: input of the first block), then outputs")
    axes.set_ylabel("relative difference")
    name = ended(result.model.name)
    drawing.suptitle(f"{name}: vitcli and {result.library} {result.library_version}")
    axes.legend(**ABOVE, ncols=2)
    if min(one.largest_difference for one in shown) < floor:
        caption(drawing, f"differences below {floor:.0e} are drawn there")
    return drawing
