"""`vitcli encode --map`: pictures beside their patch features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitcli.images.patches import FeatureSheet
from vitcli.ui.patches import bare, covered, lay, outline, scaled, shrunk


def figure(sheets: Sequence[FeatureSheet], pictures: Sequence[Any]) -> Any:
    """A row an image: the picture, its principal components as colours, the cosines if any."""
    from matplotlib.figure import Figure

    heights = [pictures[s.image].height / pictures[s.image].width * 3.2 + 0.45 for s in sheets]
    columns = 2 + any(sheet.cosines is not None for sheet in sheets)
    drawing = Figure(figsize=(3.4 * columns, sum(heights)), layout="constrained")
    rows = drawing.subplots(
        len(sheets), columns, squeeze=False, gridspec_kw={"height_ratios": heights}
    )
    for sheet, axes in zip(sheets, rows, strict=True):
        _draw(sheet, axes, pictures[sheet.image])
    return drawing


def _draw(sheet: FeatureSheet, axes: Sequence[Any], picture: Any) -> None:
    shown = shrunk(picture)
    box = scaled(sheet.box, picture, shown)
    size = shown.shape[:2]
    axes[0].imshow(shown)
    outline(axes[0], box)
    bare(axes[0], f"{sheet.title}\nmap covers {covered(sheet.box, picture.height, picture.width)}")
    colours = lay(sheet.colours, box, *size)
    axes[1].imshow(np.where(np.isnan(colours), 1.0, colours))
    bare(axes[1], "first three principal components")
    if sheet.cosines is not None:
        image = axes[2].imshow(lay(sheet.cosines, box, *size), vmin=-1, vmax=1, cmap="RdBu_r")
        axes[2].figure.colorbar(image, ax=axes[2], shrink=0.7)
        bare(axes[2], "cosine to the chosen patch of the first image")
    if sheet.query_box is not None:
        for place in axes:
            outline(place, scaled(sheet.query_box, picture, shown), "lime")
