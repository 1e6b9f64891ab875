"""`vitcli params` as tables and a figure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitcli.commands.params.analysis import (
    BLOCK_COMPONENTS,
    COMPONENTS,
    FRONT_COMPONENTS,
    LAST_COMPONENTS,
    OTHER,
    Component,
    ModelCosts,
    ParamsResult,
)
from vitcli.ui.console import TIGHT, exact, percent, plural, short, table
from vitcli.ui.figures import (
    NARROW,
    POINTS,
    across,
    fill,
    label_bar,
    merge_small,
    new_figure,
    side_by_side,
    styled,
)

ROOM_FOR_EXACT = 120
"""Columns of a terminal from which a model's table shows every digit."""
GAP = 2
"""Columns between cells: a space of padding and one of the table."""
SHARE = 5
"""Width of a share, `24.8%`."""
NOTE = (
    "",
    "MACs: multiply-accumulates of matrix products, Q K^T and A V included.",
    "FLOPs are twice as many.",
)


def tables(result: ParamsResult, width: int = 120) -> Iterator[str | Table]:
    """One model in full, several side by side; `width` is the terminal's, in columns."""
    if len(result.models) == 1:
        yield from _single(result.models[0], width >= ROOM_FOR_EXACT)
    else:
        yield from _side_by_side(result.models, width)
    yield from NOTE
    for model in result.models:
        if by_library(model):
            yield escape(f"{model.name}: counted {model.counted}.")


def by_library(model: ModelCosts) -> bool:
    """Whether its components are the layers of another library's module."""
    return model.mlp_hidden is None


def size(image: tuple[int, int]) -> str:
    """Height x width."""
    return f"{image[0]}x{image[1]}"


def sizes(image: tuple[int, int], native: tuple[int, int]) -> str:
    """The input's size, and the native one of the position table where it differs."""
    return size(image) + (f" (native {size(native)})" if native != image else "")


def _present(names: Sequence[str], models: Sequence[ModelCosts]) -> list[str]:
    """The components that at least one of the models has."""
    there = {c.name for m in models for c in m.components if c.parameters or c.macs}
    return [name for name in names if name in there]


def _single(model: ModelCosts, wide: bool) -> Iterator[str | Table]:
    registers = f" with {model.registers} registers" if model.registers else ""
    yield (
        f"[bold]{escape(model.name)}[/]  {model.total:,} parameters, "
        f"{short(model.macs_per_image, 'KMGT')} MACs per image"
    )
    heads = f", {model.heads} heads" if model.heads else ""
    depth = plural(model.depth, "layer" if by_library(model) else "block")
    yield (
        f"{depth}, {model.hidden} hidden{heads}, {model.patch_size} px per token"
        if by_library(model)
        else f"{depth}, {model.hidden} hidden{heads}, MLP {model.mlp_hidden}, "
        f"patch {model.patch_size}"
    )
    yield (
        f"input {sizes(model.image_size, model.native_size)}, {model.tokens} tokens{registers}; "
        f"{model.bytes / 2**20:,.1f} MiB in {model.dtype}"
    )
    yield ""
    count = exact if wide else short
    grid = table(**TIGHT)
    grid.add_column("component", no_wrap=True)
    headings = (
        *("", "weights\nper copy", "with\nbiases", "total"),
        *("share", "bytes" if wide else "MiB", "MACs", "share"),
    )
    for heading in headings:
        grid.add_column(Text(heading), justify="right", no_wrap=True)

    def row(name: str, copies: int, one: int, biases: int, whole: tuple[Any, ...]) -> None:
        parameters, share, size_bytes, macs, macs_share = whole
        grid.add_row(
            name,
            f"x{copies}" if copies > 1 else "",
            count(one - biases),
            count(one),
            count(parameters),
            percent(share),
            exact(size_bytes) if wide else f"{size_bytes / 2**20:.1f}" if size_bytes else "",
            exact(macs) if wide else short(macs, "KMGT"),
            percent(macs_share),
        )

    parts = {c.name: c for c in model.components}
    groups: Sequence[Sequence[str]] = (FRONT_COMPONENTS, BLOCK_COMPONENTS, LAST_COMPONENTS)
    for names in (list(parts),) if by_library(model) else groups:
        for name in _present(names, [model]):
            c = parts[name]
            whole = (c.parameters, c.share, c.bytes, c.macs, c.macs_share)
            row(c.name, c.copies, c.parameters_per_copy, c.biases_per_copy, whole)
        if names is BLOCK_COMPONENTS:
            whole = _sums([parts[name] for name in BLOCK_COMPONENTS])
            grid.add_section()
            one = round(model.block_parameters), round(model.block_biases)
            row("one block", model.depth, *one, whole)
        grid.add_section()
    totals = (model.total, 1.0, model.bytes, model.macs_per_image, 1.0)
    row("total", 1, model.total, model.biases, totals)
    yield grid


def _sums(parts: Sequence[Component]) -> tuple[Any, ...]:
    fields = ("parameters", "share", "bytes", "macs", "macs_share")
    return tuple(sum(getattr(part, field) for part in parts) for field in fields)


def _side_by_side(models: Sequence[ModelCosts], width: int) -> Iterator[Table]:
    """As many models in a table as fit; short numbers if that puts all in one table."""
    labels = _rows(models, models[0], exact, exact)
    room = width - max(len(label) for label, _ in labels)

    def column(model: ModelCosts, wide: bool) -> list[str]:
        if wide:
            rows = _rows(models, model, exact, exact)
        else:
            rows = _rows(models, model, short, lambda macs: short(macs, "KMGT"))
        return [model.name, *(cell for _, cell in rows)]

    def needs(column: Sequence[str]) -> int:
        return GAP + max(map(len, column))

    columns = [column(model, wide=True) for model in models]
    if sum(map(needs, columns)) > room:
        columns = [column(model, wide=False) for model in models]
    while columns:
        fit = 1
        while fit < len(columns) and sum(map(needs, columns[: fit + 1])) <= room:
            fit += 1
        yield _columns([label for label, _ in labels], columns[:fit])
        columns = columns[fit:]


def _columns(labels: Sequence[str], columns: Sequence[Sequence[str]]) -> Table:
    grid = table(**TIGHT)
    grid.add_column("", no_wrap=True)
    for name, *_ in columns:
        grid.add_column(escape(name), justify="right", overflow="fold")
    for label, *cells in zip(labels, *(cells for _, *cells in columns), strict=True):
        if label.startswith("["):
            grid.add_section()
        grid.add_row(label, *cells)
    return grid


def _rows(
    models: Sequence[ModelCosts],
    model: ModelCosts,
    parameters: Callable[[int], str],
    operations: Callable[[int], str],
) -> list[tuple[str, str]]:
    """(label, cell) of one model's column, the same labels for all; `[bold]` opens a section."""
    parts = {c.name: c for c in model.components}

    def with_share(number: str, share: float) -> str:
        return f"{number} {percent(share):>{SHARE}}" if number else ""

    def components(
        field: str, share: str, count: Callable[[int], str]
    ) -> Iterator[tuple[str, str]]:
        for names in (FRONT_COMPONENTS, BLOCK_COMPONENTS, LAST_COMPONENTS):
            for name in _present(names, models):
                c = parts.get(name)
                if any(getattr(p, field) for m in models for p in m.components if p.name == name):
                    cell = with_share(count(getattr(c, field)), getattr(c, share)) if c else ""
                    yield f"  {name}", cell

    if by_library(model):
        count, macs = round(model.block_parameters * model.depth), sum(model.blocks_macs)
        blocks: tuple[Any, ...] = (count, count / model.total, 0, macs, macs / model.macs_per_image)
    else:
        blocks = _sums([parts[name] for name in BLOCK_COMPONENTS])
    differ = any(m.native_size != m.image_size for m in models)
    blank = " " * (SHARE + 1)
    return [
        ("hidden", str(model.hidden)),
        ("blocks", str(model.depth)),
        ("heads", str(model.heads or "")),
        ("MLP", str(model.mlp_hidden or "")),
        ("patch", str(model.patch_size)),
        ("input", size(model.image_size)),
        *([("native", size(model.native_size))] if differ else []),
        ("registers", str(model.registers)),
        ("tokens", str(model.tokens)),
        ("[bold]parameters[/]", with_share(parameters(model.total), 1.0)),
        *components("parameters", "share", parameters),
        ("  all blocks", with_share(parameters(blocks[0]), blocks[1])),
        ("  one block", parameters(round(model.block_parameters)) + blank),
        ("  without biases", parameters(model.total - model.biases) + blank),
        (f"  MiB in {model.dtype}", f"{model.bytes / 2**20:,.1f}" + blank),
        ("[bold]MACs per image[/]", with_share(operations(model.macs_per_image), 1.0)),
        *components("macs", "macs_share", operations),
        ("  all blocks", with_share(operations(blocks[3]), blocks[4])),
        ("  one block", operations(round(model.block_macs)) + blank),
    ]


@styled
def figure(result: ParamsResult) -> Any:
    """Two panels, parameters and operations: a bar per model, stacked by component.

    Components below 1% are one segment, `other`, and so are the layers of another library;
    segments carry their share, bars their total.
    """
    models = result.models
    drawing = new_figure(1.3 + 0.38 * len(models), panels=2)
    panels = side_by_side(drawing, 2, sharey=True)
    fills = component_fills()
    named: dict[str, Any] = {}
    for axes, (field, unit, title) in zip(
        panels,
        [("parameters", 1e6, "parameters (millions)"), ("macs", 1e9, "MACs per image (billions)")],
        strict=True,
    ):
        totals = [sum(getattr(c, field) for c in model.components) / unit for model in models]
        for row, (model, total) in enumerate(zip(models, totals, strict=True)):
            parts = [(c.name, getattr(c, field) / unit) for c in model.components]
            left = 0.0
            for name, value in [("other", total)] if by_library(model) else merge_small(parts):
                bars = axes.barh(row, value, left=left, label=name, linewidth=0, **fills[name])
                named.setdefault(name, bars)
                if value >= 0.08 * max(totals):  # else there is no room for the figure
                    label_bar(axes, left + value / 2, row, value / total)
                left += value
            axes.text(left, row, f" {total:.4g}", va="center", fontsize=POINTS - 1)
        axes.set_xlabel(title)
        axes.set_xlim(0, (1.15 if across() >= NARROW else 1.25) * max(totals))
        axes.grid(axis="x")
        axes.set_axisbelow(True)
    panels[0].set_yticks(range(len(models)), [f"{m.name}\n{size(m.image_size)}" for m in models])
    panels[0].set_ylim(len(models) - 0.5, -0.5)
    names = [name for name in fills if name in named]
    handles = [named[name] for name in names]
    drawing.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    return drawing


def component_fills() -> dict[str, dict[str, Any]]:
    """Color and hatch of each component of an encoder, the same in every figure."""
    # Beside each other, and different for every kind of color vision.
    plain = ("qkv", "FFN", "output projection", "patch embedding", "attention products", "norms")
    names = (*plain, *(name for name in COMPONENTS if name not in plain))
    fills = {name: fill(index + (index > 5)) for index, name in enumerate(names)}  # no plain black
    rest = {OTHER: {"color": "0.5", "hatch": "....", "edgecolor": "white"}}
    return {name: fills[name] for name in COMPONENTS} | rest | {"other": {"color": "0.75"}}
