"""`vitcli encode` as tables and a figure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from vitcli.commands.encode.result import EncodedImage, EncodeResult, FeatureSheet, LayerNorms
from vitcli.ui.console import plural, short, table
from vitcli.ui.figures import (
    PAGE,
    abreast,
    across,
    bare,
    covered,
    ended,
    faded,
    lay,
    new_figure,
    outline,
    scaled,
    series,
    shrunk,
    side_by_side,
    styled,
)

MOST_NAMED = 8
"""Images that the figure shows and its legend names."""


def shape(sizes: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(str, sizes)) + ")"


def tables(result: EncodeResult, every: int = 1) -> Iterator[str | Table]:
    """The encoder; for each image its preprocessing, shapes and layers."""
    model = result.model
    if result.not_finite_from is not None:
        yield f"[bold red]values are not finite from {result.not_finite_from} on[/]"
    depth = plural(model.depth, "block" if model.heads else "layer")
    heads = f", {model.heads} heads" if model.heads else ""
    yield f"[bold]{escape(model.name)}[/]  weights: {escape(model.weights)}"
    yield (
        f"{short(model.parameters)} parameters ({model.parameters:,}), {depth}, "
        f"{model.hidden} hidden{heads}; {result.engine} engine, {model.dtype} on {model.device}"
    )
    for image in result.images:
        yield from _image(image, every)


def _image(image: EncodedImage, every: int) -> Iterator[str | Table]:
    yield ""
    size = f"{image.width}x{image.height} {image.mode}"
    yield f"[bold]{escape(image.path)}[/]  {size}; {image.preparation}"
    yield f"input {shape(image.input_shape)} -> tokens {shape(image.output_shape)}"
    rows = thinned(image.layers, every)
    with_cls = image.layers[0].cls_norm is not None
    patches = (">patch mean", ">patch max")
    headers = (">CLS norm", *patches, ">cosine of CLS to previous layer") if with_cls else patches
    grid = table(None, "layer", *headers)
    for row in rows:
        cells = [f"{row.patch_norm_mean:.3f}", f"{row.patch_norm_max:.3f}"]
        if with_cls:
            cosine = "" if row.cls_cosine_prev is None else f"{row.cls_cosine_prev:.4f}"
            cells = [f"{row.cls_norm:.3f}", *cells, cosine]
        grid.add_row(row.name, *cells)
    yield grid
    if image.pooled_norm is not None:
        yield f"pooled vector: L2 norm {image.pooled_norm:.3f}"
    if image.head_shape is not None:
        yield f"head output: {shape(image.head_shape)}"


def thinned(layers: tuple[LayerNorms, ...], every: int) -> list[LayerNorms]:
    """Every n-th block, and always the first and the last rows."""
    blocks = [row.layer for row in layers if row.name.startswith("block")]
    return [
        row
        for row in layers
        if row.layer not in blocks[:-1] or row.layer % every == 0  # a net's stages are all shown
    ]


@styled
def figure(result: EncodeResult, seen: Sequence[Any] = ()) -> Any:
    """Norms and CLS cosine against depth, a line per image; `seen` is what the encoder read of
    the first images, (height, width, 3) in [0, 1]."""
    drawing = new_figure(2.7 + 1.7 * bool(len(seen)), panels=3)
    below = drawing
    if len(seen):
        ratios = (1.7, 2.7 * 3 / abreast(3))
        above, below = drawing.subfigures(2, 1, height_ratios=ratios)
        for axes, image, pixels in zip(
            above.subplots(1, len(seen), squeeze=False)[0], result.images, seen, strict=False
        ):
            axes.imshow(pixels)
            height, width = pixels.shape[:2]
            name = ended(Path(image.path).name, 84 // len(seen))
            facts = f"{image.width}x{image.height} px\nread as {width}x{height}"
            bare(axes, f"{name}\n{facts}")
    panels = side_by_side(below, 3)
    fields = {
        "L2 norm of CLS": "cls_norm",
        "mean L2 norm of a patch": "patch_norm_mean",
        "cosine of CLS to layer before": "cls_cosine_prev",
    }
    for axes, (title, field) in zip(panels, fields.items(), strict=True):
        for place, image in enumerate(result.images):
            points = [
                (row.layer, getattr(row, field))
                for row in image.layers
                if getattr(row, field) is not None
            ]
            if points:
                name = ended(Path(image.path).name)
                axes.plot(*zip(*points, strict=True), label=name, **series(place))
        axes.set_ylabel(title)
        axes.set_xlabel("block")
        name_layers(axes, result.images)
        axes.grid()
        if not axes.lines:
            axes.text(0.5, 0.5, "no CLS token", ha="center", transform=axes.transAxes)
    images = len(result.images)
    if images <= MOST_NAMED:
        lines = panels[1].lines
        names = [line.get_label() for line in lines]
        columns = min(images, 2)
        below.legend(
            lines, names, loc="outside lower center", ncols=abreast(columns), frameon=False
        )
    drawing.suptitle(
        f"{ended(result.model.name)}, weights: {ended(result.model.weights)}"
        + (f"; {images} images" if images > MOST_NAMED else "")
    )
    return drawing


def name_layers(axes: Any, images: Sequence[EncodedImage]) -> None:
    """Ticks at the first block's input, at a few blocks by number, and at the final norm."""
    layers = images[0].layers if images else ()
    named = {row.layer: row.name for row in layers if not row.name.startswith("block")}
    blocks = [row.layer for row in layers if row.layer not in named]
    step = -(-len(blocks) // 4)
    shown = [*named, *(layer for layer in blocks[step - 1 :: step or 1] if layer + 1 not in named)]
    axes.set_xticks(shown, [named.get(layer, str(layer)) for layer in shown])


@styled
def map_figure(sheets: Sequence[FeatureSheet], pictures: Sequence[Any]) -> Any:
    """A row per image: the picture, its principal components as colors, the cosines if any."""
    columns = 2 + any(sheet.cosines is not None for sheet in sheets)
    panel = across() / abreast(columns) - 0.2
    lines = columns // abreast(columns)  # of panels, for each image
    heights = [
        pictures[s.image].height / pictures[s.image].width * panel + 0.45
        for s in sheets
        for _ in range(lines)
    ]
    bar = 0.5 * (columns == 3)  # inches for the color bar
    drawing = new_figure((sum(heights) + bar) * PAGE / max(across(), PAGE))
    rows = drawing.subplots(
        len(heights), abreast(columns), squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for sheet, axes in zip(sheets, rows.reshape(len(sheets), columns), strict=True):
        image = _draw(sheet, axes, pictures[sheet.image])
    if image is not None:
        place = {"location": "bottom", "aspect": 40, "fraction": 0.3 / sum(heights), "pad": 0.01}
        drawing.colorbar(image, ax=rows, label="cosine to the chosen patch", **place)
    return drawing


def _draw(sheet: FeatureSheet, axes: Sequence[Any], picture: Any) -> Any:
    """The panels of one image; the map of cosines, if there is one."""
    image = None
    shown = shrunk(picture)
    box = scaled(sheet.box, picture, shown)
    size = shown.shape[:2]
    axes[0].imshow(shown)
    outline(axes[0], box)
    bare(
        axes[0],
        f"{ended(sheet.title, 40)}\nmap covers {covered(sheet.box, picture.height, picture.width)}",
    )
    colors = lay(sheet.colors, box, *size)
    axes[1].imshow(np.where(np.isnan(colors), faded(shown), colors))
    bare(axes[1], "first three principal components")
    if sheet.cosines is not None:
        axes[2].imshow(faded(shown))
        image = axes[2].imshow(lay(sheet.cosines, box, *size), vmin=-1, vmax=1, cmap="RdBu_r")
        bare(axes[2], "cosine to the chosen patch of the first image")
    if sheet.query_box is not None:
        for place in axes:
            outline(place, scaled(sheet.query_box, picture, shown), "white")
    return image
