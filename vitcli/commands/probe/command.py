"""vitcli probe"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.errors import VitcliError
from vitcli.ui.options import ModelOptions, Output, grouped
from vitcli.ui.tables import show


@grouped
@grouped
def probe(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Vectors of `vitcli encode`, or images: a folder for each class, or the files of "
            "Fashion-MNIST, MNIST or CIFAR.",
        ),
    ],
    *,
    model: ModelOptions,
    k: Annotated[int, typer.Option("--k", min=1, metavar="N", help="Nearest neighbors.")] = 20,
    folds: Annotated[
        int, typer.Option("--folds", min=2, metavar="N", help="Of the cross-validation.")
    ] = 5,
    limit: Annotated[
        int | None,
        typer.Option("--limit", min=1, metavar="N", help="Images of each half of a published set."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Keep the vectors of a folder here.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="KIND", help="pooled, output, cls or dist.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, metavar="N", help="Decoding processes.")
    ] = None,
    output: Output,
) -> None:
    """Whether an encoder is any good on your images: k nearest neighbors and a linear probe.

    \b
    Examples:
      vitcli probe vectors/
      vitcli probe photos/ --weights facebook/dinov2-small
      vitcli probe data/fashion-mnist --preset vit-ti16 --limit 2000
    """
    from vitcli.commands.embed.job import MANIFEST
    from vitcli.commands.embed.view import watch_job
    from vitcli.ui.console import note, status, warn

    if encoded := (folder / MANIFEST).is_file():
        given = [name for name, value in (("--limit", limit), ("--out", out)) if value is not None]
        given += [name for name, value in (("--tokens", tokens), ("--workers", workers)) if value]
        if given or model != ModelOptions():
            raise VitcliError(
                f"{folder} holds vectors: {', '.join(given) or 'a model'} cannot change them",
                f"vitcli probe {folder}",
            )
    with status("loading torch and scikit-learn"):
        from vitcli.commands.embed.result import FolderOptions
        from vitcli.commands.probe import analysis
        from vitcli.model import load_model

    if encoded:
        data = analysis.from_vectors(folder)
    else:
        request = model.to_request()
        loaded = load_model(request)
        if loaded.fresh:
            note("fresh weights: the accuracy is that of random features")
        options = FolderOptions(kind=tokens or "pooled", format="npy", workers=workers)
        with watch_job("encoding") as watch:
            data = analysis.from_images(request, loaded, folder, out, options, watch, limit)
    if data.failed:
        warn(f"images without a vector: {data.failed:,}")
    with status("learning"):
        result = analysis.probe(folder, data, k, folds)
    from vitcli.commands.probe.view import tables

    show(result, output.form, tables)
