"""Writing a matplotlib figure, whole or not at all."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from vitcli.errors import VitcliError
from vitcli.files import atomic_write
from vitcli.ui.console import note

SUFFIXES = (".png", ".svg", ".pdf")


def check_figure_file(path: Path | None) -> None:
    """Refuse a file that cannot be drawn, before anything is computed.

    Raises:
        VitcliError: another suffix than SUFFIXES, or no such folder.
    """
    if path is None:
        return
    if path.suffix.lower() not in SUFFIXES:
        raise VitcliError(f"{path}: cannot draw this format", "one of " + ", ".join(SUFFIXES))
    if not path.parent.is_dir():
        raise VitcliError(f"{path}: there is no folder {path.parent}", "make it first")


def count_along_x(axes: Any) -> None:
    """Ticks at whole numbers; a single point stands in the middle of three."""
    low, high = axes.get_xlim()
    if high - low < 2:
        axes.set_xlim((low + high) / 2 - 1, (low + high) / 2 + 1)
    axes.xaxis.get_major_locator().set_params(integer=True)


def save_figure(drawing: Any, path: Path) -> None:
    """Write a `matplotlib.figure.Figure` to `path`."""
    with atomic_write(path) as file, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box stands in its place
        drawing.savefig(file, format=path.suffix.lower()[1:], dpi=150)


def draw(drawing: Any, file: Path, what: str = "") -> None:
    """Write a figure, and say so."""
    save_figure(drawing, file)
    note(f"drew {what} in {file}" if what else f"drew {file}")
