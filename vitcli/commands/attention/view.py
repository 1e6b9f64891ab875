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
    MapSheet,
)
from vitcli.images.preprocess import Box
from vitcli.ui.console import TIGHT, fitted, plural, table
from vitcli.ui.figures import (
    PAGE,
    abreast,
    across,
    bare,
    caption,
    count_along_x,
    ended,
    lay,
    new_figure,
    outline,
    series,
    shrunk,
    side_by_side,
    styled,
)

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
    count = f"{model.tokens} tokens" if model.tokens else "tokens vary by image"
    limit = f", log N = {math.log(model.tokens):.3f} nats" if model.tokens else ""
    yield (
        f"[bold]{escape(model.name)}[/]  weights: {escape(model.weights)}; {count} "
        f"({plural(model.registers, 'register')}){limit}; {plural(len(model.images), 'image')}; "
        f"entropy of {queries.get(result.query, f'patch query {result.query}')}"
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
    yield "share: entropy divided by the log of the number of tokens that a query can attend to"
    yield f"outl.: patch tokens with a norm {result.outlier_rule}"
    yield ""
    last = model.layers[-1]
    yield f"block {last.layer} by head"
    heads = _columns("head", model, kinds)
    for head in last.heads:
        heads.add_row(*_cells(head.head, head, kinds))
    yield heads


def _kinds(model: EncoderAttention) -> list[str]:
    """Kinds of tokens in the column of CLS attention; none without CLS."""
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
    grid = table(None, f">{first}", ">nats", ">share", **TIGHT)
    grid.add_column("", min_width=BAR, max_width=BAR)
    there = {"CLS": bool(kinds), "patch": True, "reg": model.registers > 0, "px": True}
    for name in (name for name, shown in there.items() if shown):
        grid.add_column(name, justify="right")
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
    by_seed = (">± seeds",) if any(len(model.seeds) > 1 for model in models) else ()
    numbers = (">reg.", ">tokens", ">share", ">± heads", ">± images", *by_seed, ">px", ">outl.")
    grid = table(None, "last block", "weights", *numbers, **TIGHT)
    for model in models:
        last = model.layers[-1]
        spreads = (last.head_spread, last.image_spread, *[last.seed_spread for _ in by_seed])
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
    return fitted(grid, "± images", "± heads", "outl.")


@styled
def figure(result: AttentionResult) -> Any:
    """Entropy, attention distance and outliers against depth; entropy by layer and head below."""
    import numpy as np

    models = result.models
    columns = min(3, len(models))
    rows = -(-len(models) // columns)
    drawing = new_figure(2.7 + 1.7 * rows, panels=3)
    top, bottom = drawing.subfigures(2, 1, height_ratios=[2.7 * 3 / abreast(3), 1.7 * rows])
    entropy, distance, outliers = side_by_side(top, 3)
    for place, model in enumerate(models):
        x = [layer.layer for layer in model.layers]
        y = np.array([layer.entropy_normalised for layer in model.layers])
        spread = np.array([layer.head_spread or 0.0 for layer in model.layers])
        how = series(place) | {"clip_on": False}  # a marker at 0 or 1 is whole
        entropy.plot(x, y, label=_label(model), **how)
        low, high = (y - spread).clip(0, 1), (y + spread).clip(0, 1)
        entropy.fill_between(x, low, high, alpha=0.2, color=how["color"], linewidth=0)
        distance.plot(x, [layer.attention_distance_px for layer in model.layers], **how)
        outliers.plot(x, [100 * layer.outlier_share for layer in model.layers], **how)
    labels = {
        entropy: "entropy (1: uniform)",
        distance: "attention distance (px)",
        outliers: "outlier patch tokens (%)",
    }
    for axes, label in labels.items():
        axes.set_ylabel(label)
        axes.set_xlabel("block")
        count_along_x(axes)
        axes.grid()
    entropy.set_ylim(0, 1)
    for axes, least in ((distance, 0.0), (outliers, 1.0)):
        peak = max(float(np.max(line.get_ydata())) for line in axes.lines)
        axes.set_ylim(0, 1.1 * max(peak, least))
    top.legend(loc="outside upper center", ncols=abreast(min(2, len(models))))
    panels = bottom.subplots(rows, columns, squeeze=False).flatten()
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(panels, models, strict=False):
        shown = _by_head(axes, model)
    bottom.colorbar(shown, ax=list(panels), label="entropy (1: uniform)", shrink=0.9)
    count = plural(max(len(model.images) for model in models), "image")
    repeats = max(len(model.seeds) for model in models)
    count += f" and {repeats} seeds" if repeats > 1 else ""
    caption(drawing, f"band: ± standard deviation over heads; means over {count}")
    return drawing


def _by_head(axes: Any, model: EncoderAttention) -> Any:
    """The entropy of each head (across) of each layer (down) from 0 to 1."""
    values = [[head.entropy_normalised for head in layer.heads] for layer in model.layers]
    image = axes.imshow(values, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    blocks, heads = [layer.layer for layer in model.layers], len(values[0])
    for axis, names in ((axes.yaxis, blocks), (axes.xaxis, list(range(1, heads + 1)))):
        step = -(-len(names) // 8)
        axis.set_ticks(range(0, len(names), step), [str(name) for name in names[::step]])
    axes.set_xlabel("head")
    axes.set_ylabel("block")
    axes.set_title(f"{ended(model.name)}, {plural(model.registers, 'register')}")
    return image


def _label(model: EncoderAttention) -> str:
    registers = plural(model.registers, "register")
    return f"{ended(model.name)}, {registers}, {ended(model.weights)}"


MOST_COLUMNS = 6
"""Panels side by side in a sheet."""
LEAST_TOP = 2.0
"""The color scale reaches at least twice uniform, so that a uniform map does not look bright."""
SHOWN_QUANTILE = 0.995
"""A shared scale ends here, so that one patch that takes all does not leave the rest dark."""


@styled
def overlay_figure(
    sheets: Sequence[MapSheet], pictures: Sequence[Any], scale: str = "shared"
) -> Any:
    """A sheet for each image and block: what the encoder saw, then each panel's map on it.

    `pictures` are the Pillow images that `MapSheet.image` counts. Values are attention in times
    uniform; the picture is light gray, and the color covers it more where attention is stronger.
    One color scale for all panels, or with `scale` panel one for each, that ends at its maximum.
    """
    import numpy as np

    most = 1 + max(len(sheet.panels) for sheet in sheets)
    columns = math.ceil(most / math.ceil(most / MOST_COLUMNS))  # rows of equal length
    panel = across() / columns
    heights = []
    for sheet in sheets:
        rows = math.ceil((len(sheet.panels) + 1) / columns)
        crop = cropped(pictures[sheet.image], sheet)
        heights.append(rows * (min(crop.height / crop.width, 2.0) * panel * 0.95 + 0.2) + 0.3)
    heights[-1] += 0.55  # for the color bar, or the caption
    drawing = new_figure(sum(heights) * PAGE / max(across(), PAGE))
    parts = drawing.subfigures(len(sheets), 1, height_ratios=heights, squeeze=False)[:, 0]
    every = np.concatenate([np.ravel(p.values) for sheet in sheets for p in sheet.panels])
    top = max(LEAST_TOP, float(np.quantile(every, SHOWN_QUANTILE)))
    axes: list[Any] = []
    for sheet, part in zip(sheets, parts, strict=True):
        axes += _draw_sheet(part, sheet, pictures[sheet.image], columns, top, scale)
    if scale == "shared":
        _color_bar(drawing, parts, top, float(every.max()) > top)
    else:
        caption(drawing, "each panel: 0 (gray) to its own maximum, in times uniform (x)")
    return drawing


def _color_bar(drawing: Any, parts: Any, top: float, cut: bool) -> None:
    """The colors as they are laid on a picture of medium gray."""
    import numpy as np
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize

    share = np.linspace(0, 1, 256)
    gray = np.full((256, 3), 1 - LIGHT / 2)
    mappable = ScalarMappable(Normalize(0, top), ListedColormap(laid_over(gray, share)))
    last = parts[-1]
    last.colorbar(
        mappable,
        ax=last.axes,
        location="bottom",
        extend="max" if cut else "neither",
        label="attention, times uniform (1: uniform)",
        fraction=0.06,
        aspect=40,
    )


MAP = "viridis_r"
"""Perceptually uniform, light where there is little attention, as the picture under it is."""
LIGHT = 0.45
"""How much of its contrast to white the gray picture keeps."""


def laid_over(gray: Any, share: Any) -> Any:
    """Colors (..., 3) of attention `share` (...) from 0 to 1 over a gray picture (..., 3)."""
    from matplotlib import colormaps

    return gray * (1 - share[..., None]) + colormaps[MAP](share)[..., :3] * share[..., None]


def cropped(picture: Any, sheet: MapSheet) -> Any:
    """What the encoder saw of a Pillow picture, with the margin that it saw."""
    from PIL import Image

    left, top, right, bottom = (round(side) for side in sheet.box)
    seen = Image.new("RGB", (max(right - left, 1), max(bottom - top, 1)), sheet.margin)
    seen.paste(picture.convert("RGB"), (-left, -top))
    return seen


def _draw_sheet(
    part: Any, sheet: MapSheet, picture: Any, columns: int, top: float, scale: str
) -> list[Any]:
    import numpy as np

    seen = cropped(picture, sheet)
    shown = shrunk(seen)
    height, width = shown.shape[:2]
    rows = math.ceil((len(sheet.panels) + 1) / columns)
    axes = list(part.subplots(rows, columns, squeeze=False).flat)
    part.suptitle(sheet.title)
    for place in axes:
        bare(place)
    axes[0].imshow(shown)
    bare(axes[0], "what the encoder saw")
    light = np.repeat(1 - (1 - shown.mean(axis=2, keepdims=True) / 255) * LIGHT, 3, 2)
    for place, panel in zip(axes[1:], sheet.panels, strict=False):
        peak = max(max(row) for row in panel.values)
        end = top if scale == "shared" else (peak or 1.0)
        laid = lay(panel.values, (0, 0, width, height), height, width)
        place.imshow(laid_over(light, (laid / end).clip(0, 1)))
        bare(place, f"{panel.title}, max {peak:.1f}x")
    if sheet.query_box is not None:
        box = _within(sheet.query_box, sheet.box, width, height)
        for place in axes[: len(sheet.panels) + 1]:
            outline(place, box, "#D55E00")
    return axes


def _within(box: Box, crop: Box, width: int, height: int) -> Box:
    """A box of the picture in the pixels of its crop, drawn as width x height."""
    across, down = width / (crop[2] - crop[0]), height / (crop[3] - crop[1])
    return (
        (box[0] - crop[0]) * across,
        (box[1] - crop[1]) * down,
        (box[2] - crop[0]) * across,
        (box[3] - crop[1]) * down,
    )
