"""`vitcli attn-entropy` as tables and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from vitcli.commands.attention.result import (
    AttentionResult,
    ClsMass,
    EncoderAttention,
    HeadAttention,
    LayerAttention,
)
from vitcli.images.patches import MapSheet
from vitcli.ui.console import table
from vitcli.ui.figures import count_along_x
from vitcli.ui.patches import bare, covered, lay, outline, scaled, shrunk

BAR = 6
"""Cells of a full bar."""


def bar(share: float) -> str:
    """A share of 1 as a bar of BAR cells, to an eighth of a cell; nothing for NaN."""
    if math.isnan(share):
        return ""
    eighths = round(min(max(share, 0.0), 1.0) * BAR * 8)
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def tables(result: AttentionResult, every: int = 1) -> Iterator[str | Table]:
    """For each encoder its layers and the heads of the last one; the comparison; the verdict."""
    for model in result.models:
        yield from _encoder(model, result, every)
        yield ""
    if len(result.models) > 1:
        yield _comparison(result.models)
        yield ""
    yield escape(result.verdict)


def _encoder(model: EncoderAttention, result: AttentionResult, every: int) -> Iterator[str | Table]:
    queries = {"all": "all queries", "cls": "the CLS query", "patch": "patch queries"}
    count = f"{model.tokens} tokens" if model.tokens else "tokens by image"
    limit = f", log N = {math.log(model.tokens):.3f} nats" if model.tokens else ""
    yield (
        f"[bold]{escape(model.name)}[/]  weights: {escape(model.weights)}; {count} "
        f"({model.registers} registers){limit}; {len(model.images)} "
        f"image{'s' if len(model.images) != 1 else ''}; entropy of "
        f"{queries.get(result.query, f'patch query {result.query}')}"
    )
    kinds = _kinds(model)
    grid = _columns("block", model, kinds)
    grid.add_column("outl.", justify="right")
    shown = [layer for layer in model.layers if layer.layer % every == 0]
    if model.layers[-1] not in shown:
        shown.append(model.layers[-1])
    for layer in shown:
        grid.add_row(*_cells(layer.layer, layer, kinds), f"{layer.outlier_share:.1%}")
    yield grid
    yield "share: entropy divided by the log of the tokens that a query can see (1 is uniform)"
    yield f"outl.: patch tokens with a norm {result.outlier_rule}"
    yield ""
    last = model.layers[-1]
    yield f"block {last.layer} by head"
    heads = _columns("head", model, kinds)
    for head in last.heads:
        heads.add_row(*_cells(head.head, head, kinds))
    yield heads


def _kinds(model: EncoderAttention) -> list[str]:
    """The kinds of tokens on which a CLS query's attention is told, none without CLS."""
    mass = model.layers[-1].cls_mass
    if mass is None:
        return []
    present = {
        "cls": True,
        "distillation": mass.distillation > 0,
        "registers": model.registers > 0,
        "patches": True,
    }
    return [kind for kind, there in present.items() if there]


def _columns(first: str, model: EncoderAttention, kinds: Sequence[str]) -> Table:
    grid = table(padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    grid.add_column(first, justify="right")
    grid.add_column("nats", justify="right")
    grid.add_column("share", justify="right")
    grid.add_column("", min_width=BAR, max_width=BAR)
    if kinds:
        grid.add_column("CLS", justify="right")
    grid.add_column("patch", justify="right")
    if model.registers:
        grid.add_column("reg", justify="right")
    grid.add_column("px", justify="right")
    if kinds:
        short = {"cls": "self", "distillation": "dist", "registers": "reg", "patches": "patch"}
        names = "/".join(short[kind] for kind in kinds)
        grid.add_column(Text(f"CLS on, %:\n{names}"), justify="right")
    return grid


def _cells(number: int, row: LayerAttention | HeadAttention, kinds: Sequence[str]) -> Iterator[str]:
    yield str(number)
    yield f"{row.entropy:.3f}"
    yield "" if math.isnan(row.entropy_normalised) else f"{row.entropy_normalised:.4f}"
    yield bar(row.entropy_normalised)
    if row.entropy_cls is not None:
        yield f"{row.entropy_cls:.3f}"
    yield f"{row.entropy_patches:.3f}"
    if row.entropy_registers is not None:
        yield f"{row.entropy_registers:.3f}"
    yield f"{row.attention_distance_px:.1f}"
    if row.cls_mass is not None:
        yield _mass(row.cls_mass, kinds)


def _mass(mass: ClsMass, kinds: Sequence[str]) -> str:
    return "/".join(f"{100 * getattr(mass, kind):.1f}" for kind in kinds)


def _comparison(models: Sequence[EncoderAttention]) -> Table:
    grid = table(padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    for name in ("last block", "weights"):
        grid.add_column(name)
    for name in ("reg.", "tokens", "share", "± heads", "± images", "px", "outl."):
        grid.add_column(name, justify="right")
    for model in models:
        last = model.layers[-1]
        spreads = (last.head_spread, last.image_spread)
        grid.add_row(
            escape(model.name),
            escape(model.weights),
            str(model.registers),
            str(model.tokens or "varies"),
            f"{last.entropy_normalised:.4f}",
            *("" if spread is None else f"{spread:.4f}" for spread in spreads),
            f"{last.attention_distance_px:.1f}",
            f"{last.outlier_share:.1%}",
        )
    return grid


def figure(result: AttentionResult) -> Any:
    """Entropy with its spread over heads, attention distance and outliers against depth."""
    import numpy as np
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12, 4), layout="constrained")
    entropy, distance, outliers = drawing.subplots(1, 3)
    for model in result.models:
        x = [layer.layer for layer in model.layers]
        y = [layer.entropy_normalised for layer in model.layers]
        spread = [layer.head_spread or 0.0 for layer in model.layers]
        (line,) = entropy.plot(x, y, marker="o", markersize=3, label=_label(model))
        low, high = ([a + sign * b for a, b in zip(y, spread, strict=True)] for sign in (-1, 1))
        entropy.fill_between(x, low, high, alpha=0.2, color=line.get_color(), linewidth=0)
        same = {"marker": "o", "markersize": 3, "color": line.get_color()}
        distance.plot(x, np.array([layer.attention_distance_px for layer in model.layers]), **same)
        outliers.plot(x, np.array([100 * layer.outlier_share for layer in model.layers]), **same)
    titles = {
        entropy: "entropy / uniform, ± standard deviation over heads",
        distance: "mean attention distance, px",
        outliers: "outlier patch tokens, %",
    }
    for axes, title in titles.items():
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("block")
        count_along_x(axes)
        axes.grid(alpha=0.3)
    for axes, least in ((distance, 0.0), (outliers, 1.0)):
        peak = max(float(line.get_ydata().max()) for line in axes.lines)
        axes.set_ylim(0, 1.1 * max(peak, least))
    drawing.legend(loc="outside lower center", fontsize=8, ncols=2)
    return drawing


def _label(model: EncoderAttention) -> str:
    return f"{model.name}, {model.registers} registers, {model.weights}"


MOST_COLUMNS = 8
"""Panels side by side in a sheet."""
DIMMED = 400
"""White of the gray picture under a map, so that 255 is not too bright to see the map on."""


def overlay_figure(sheets: Sequence[MapSheet], pictures: Sequence[Any]) -> Any:
    """A sheet for each image and block: the picture, then each panel's map on its pixels.

    `pictures` are the Pillow images that `MapSheet.image` counts. The color scale of a panel runs
    from 0 to its own largest value.
    """
    from matplotlib.figure import Figure

    most = 1 + max(len(sheet.panels) for sheet in sheets)
    columns = math.ceil(most / math.ceil(most / MOST_COLUMNS))  # rows of equal length
    heights = []
    for sheet in sheets:
        picture = pictures[sheet.image]
        rows = math.ceil((len(sheet.panels) + 1) / columns)
        heights.append(rows * (picture.height / picture.width * 1.6 + 0.25) + 0.45)
    drawing = Figure(figsize=(1.65 * columns, sum(heights)), layout="constrained")
    parts = drawing.subfigures(len(sheets), 1, height_ratios=heights, squeeze=False)[:, 0]
    for sheet, part in zip(sheets, parts, strict=True):
        _draw_sheet(part, sheet, pictures[sheet.image], columns)
    return drawing


def _draw_sheet(part: Any, sheet: MapSheet, picture: Any, columns: int) -> None:
    shown = shrunk(picture)
    box = scaled(sheet.box, picture, shown)
    rows = math.ceil((len(sheet.panels) + 1) / columns)
    axes = list(part.subplots(rows, columns, squeeze=False).flat)
    part.suptitle(
        f"{sheet.title}; map covers {covered(sheet.box, picture.height, picture.width)}", fontsize=8
    )
    for place in axes:
        bare(place)
    axes[0].imshow(shown)
    outline(axes[0], box)
    bare(axes[0], "image")
    for place, panel in zip(axes[1:], sheet.panels, strict=False):
        laid = lay(panel.values, box, *shown.shape[:2])
        peak = max(max(row) for row in panel.values)
        place.imshow(shown.mean(axis=2), cmap="gray", vmin=0, vmax=DIMMED)
        place.imshow(laid, cmap="inferno", vmin=0, vmax=peak or 1.0, alpha=0.65)
        bare(place, f"{panel.title}, max {peak:.2g}")
    if sheet.query_box is not None:
        for place in axes[: len(sheet.panels) + 1]:
            outline(place, scaled(sheet.query_box, picture, shown), "lime")
