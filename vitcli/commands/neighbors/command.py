"""vitcli neighbors"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.ui.console import show
from vitcli.ui.figures import Plot, draw
from vitcli.ui.options import Output, grouped


@grouped
def neighbors(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Vectors that `vitcli embed` wrote.")
    ],
    image: Annotated[
        str,
        typer.Argument(metavar="IMAGE", help="An image of DIR, by path, or another image file."),
    ],
    count: Annotated[
        int, typer.Option("--count", "-k", min=1, metavar="N", help="Number of neighbors.")
    ] = 10,
    device: Annotated[
        str,
        typer.Option(
            "--device", metavar="NAME", help="Device on which to encode another image file."
        ),
    ] = "auto",
    *,
    output: Output,
    plot: Plot,
) -> None:
    """Find the images nearest to one image by cosine similarity of their vectors.

    \b
    Examples:
      vitcli neighbors vectors/ cats/001.jpg
      vitcli neighbors vectors/ another.jpg --plot nearest.png
    """
    from vitcli.ui.console import status
    from vitcli.ui.figures import check_figure_file

    check_figure_file(plot)
    with status("comparing"):
        from vitcli.commands.neighbors import analysis

        result = analysis.neighbors(folder, image, count, device)
    if plot:
        from vitcli.commands.neighbors.view import figure

        draw(figure(result), plot)
    from vitcli.commands.neighbors.view import tables

    show(result, output.form, tables)
