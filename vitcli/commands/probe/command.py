"""vitcli probe"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitcli.commands.embed.command import draw_plane
from vitcli.config.request import REFERENCE, ModelRequest
from vitcli.errors import VitcliError
from vitcli.stats import check_projection
from vitcli.ui.console import note, progress, status, warn
from vitcli.ui.figures import PAGES, Plot, check_figure_file, draw, finish
from vitcli.ui.options import (
    EncodersOptions,
    EngineOption,
    Output,
    ProjectionOption,
    grouped,
    known_engine,
    load_all,
    option,
)

if TYPE_CHECKING:
    from vitcli.model import Model


@grouped
def probe(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="Vectors of `vitcli embed`, or images: a folder per class, or the files of "
            "Fashion-MNIST, MNIST or CIFAR.",
        ),
    ],
    *,
    models: EncodersOptions,
    k: Annotated[
        int,
        option(
            "--k",
            "N",
            "Nearest neighbors; at most the number of training images of the smallest class.",
            min=1,
        ),
    ] = 20,
    folds: Annotated[int, option("--folds", "N", "Folds of the cross-validation.", min=2)] = 5,
    seeds: Annotated[
        int | None,
        option(
            "--seeds",
            "N",
            "Split seeds of the cross-validation (default: 5, or 2 above 5,000 images).",
            min=1,
        ),
    ] = None,
    groups: Annotated[
        str | None,
        option(
            "--groups",
            "FILE|parent",
            "Keep images of one group on one side of every split: a CSV of path and group, "
            "or parent, the folder of each image.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        option(
            "--layers",
            "LIST|all",
            "Layers to probe, of those that the vectors hold: 0 is the input of the first "
            "block, i the output of block i, -1 the last.",
        ),
    ] = None,
    targets: Annotated[
        Path | None,
        option(
            "--targets",
            "FILE",
            "Predict numbers instead of classes, by ridge regression: a CSV of path and number.",
        ),
    ] = None,
    unlabeled: Annotated[
        bool,
        option(
            "--unlabeled",
            help="Rank encoders without labels by their agreement about nearest neighbors. This "
            "is not accuracy.",
        ),
    ] = False,
    confusion: Annotated[
        Path | None,
        option(
            "--confusion",
            "FILE",
            "Write the confusion matrix of the linear probe (of the best encoder): .csv, "
            ".png, .svg or .pdf.",
        ),
    ] = None,
    map_file: Annotated[
        Path | None,
        option(
            "--map",
            "FILE",
            "Draw the vectors (of the best encoder) in two dimensions, colored by class; as "
            ".html with the images under the pointer.",
        ),
    ] = None,
    projection: ProjectionOption = "pca",
    test: Annotated[
        bool,
        option(
            "--test",
            help="Where the folders give train, val and test: test on test in place of val.",
        ),
    ] = False,
    limit: Annotated[
        int | None,
        option("--limit", "N", "Images of each half of a published set.", min=1),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "--out",
            "DIR",
            "Folder in which to keep the vectors of images (default: for several encoders the "
            "user's cache, for one encoder none).",
        ),
    ] = None,
    tokens: Annotated[
        str | None,
        option(
            "--tokens", "KIND", "Vectors of images: pooled, output, cls or dist (default: pooled)."
        ),
    ] = None,
    workers: Annotated[int | None, option("--workers", "N", "Decoding processes.", min=1)] = None,
    engine: EngineOption = None,
    output: Output,
    plot: Plot,
) -> None:
    """Measure how well classes can be predicted from vectors, for one encoder or several.

    k nearest neighbors and a linear probe, tested on images that they were not trained on. Images
    with identical vectors stay on one side of every split. Folders called train, val and test are
    a split, of which test stays unseen without --test. Without one, cross-validation splits; its
    95% interval is the corrected resampled one (Nadeau and Bengio 2003). Several encoders (repeat
    --weights and --preset) are compared on the same images: one is called best only if a paired
    test is significant. --pool cls,mean compares the poolings of each encoder too.

    \b
    Examples:
      vitcli probe vectors/
      vitcli probe photos/ --weights facebook/dinov2-small
      vitcli probe photos/ --weights A --weights timm:B --preset timm:resnet50 --plot tower.png
      vitcli probe photos/ --weights A --pool cls,mean
      vitcli probe data/fashion-mnist --preset vit-ti16 --limit 2000
    """
    from vitcli.commands.embed.result import MANIFEST
    from vitcli.commands.probe.result import check_options

    check_figure_file(plot)
    check_figure_file(map_file, *PAGES)
    if map_file:
        check_projection(projection)
    if confusion and confusion.suffix.lower() != ".csv":
        check_figure_file(confusion)
    encoded = (folder / MANIFEST).is_file()
    check_options(
        folder if encoded else None,
        targets is not None,
        unlabeled,
        for_classes={"--confusion": confusion, "--test": test},
        for_labels={"--groups": groups, "--seeds": seeds},
        for_images={
            "--limit": limit,
            "--out": out,
            "--tokens": tokens,
            "--workers": workers,
            "--engine": engine,
            "a model": models != EncodersOptions(),
        },
    )
    if not encoded and not folder.is_dir():
        raise VitcliError(
            f"{folder}: the folder is missing", "name a folder of images or of vectors"
        )
    pools = (models.pool or "").split(",")
    requests = [] if encoded else _requests(models, pools)
    requests = [dataclasses.replace(one, engine=_engine(one, engine)) for one in requests]
    with status("loading torch and scikit-learn"):
        from vitcli.commands.embed.job import thumbnails
        from vitcli.commands.probe import analysis, evaluate, view
        from vitcli.commands.probe.result import AgreementResult

        evaluate.sklearn()
    loaded = load_all(requests, by_library=True)
    if len(pools) > 1:  # one encoder is several: each is named by its pooling
        loaded = [_named(one, f"{one.name}, {one.config.encoder.pooling}") for one in loaded]
    with progress("encoding", timed=False, unit="img/s", lines="seconds") as bar:
        result = analysis.probe(
            folder,
            loaded or None,
            k=k,
            folds=folds,
            seeds=seeds,
            layers=layers,
            groups=groups,
            targets=targets,
            unlabeled=unlabeled,
            confusion=confusion is not None,
            projection=projection if map_file else None,
            limit=limit,
            test=test,
            out=out,
            tokens=tokens or "pooled",
            workers=workers,
            progress=bar,
        )
    if result.failed:
        warn(f"images without a vector: {result.failed:,}")
    if plot:
        draw(result.figure, plot)
    if map_file and result.plane:
        draw_plane(result.plane, plot.at(map_file), partial(thumbnails, folder))
    if confusion is not None and not isinstance(result, AgreementResult):
        if confusion.suffix.lower() == ".csv":
            from vitcli.files import atomic_write

            with atomic_write(confusion) as file:
                file.write(view.confusion_csv(result).encode())
            note(f"wrote {confusion}")
        else:
            draw(lambda: view.confusion_figure(result), plot.at(confusion))
    finish(result, output.form)


def _requests(models: EncodersOptions, pools: Sequence[str]) -> list[ModelRequest]:
    """Each encoder, with each pooling where several are named (`--pool cls,mean`)."""
    variants = [dataclasses.replace(models, pool=pool or None).to_requests() for pool in pools]
    return [request for same in zip(*variants, strict=True) for request in same]


def _named(model: Model, name: str) -> Model:
    config = model.config.model_copy(update={"name": name})
    return dataclasses.replace(model, config=config)


def _engine(request: ModelRequest, engine: str | None) -> str | None:
    """The engine of one of the encoders; `reference` is for those that are not vitcli's presets."""
    if request.by_library or (engine == REFERENCE and request.weights is None):
        return request.engine
    return known_engine(engine)
