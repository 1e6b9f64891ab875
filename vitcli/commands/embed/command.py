"""vitcli embed: its options and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from vitcli.commands.embed.result import FolderOptions, FolderResult
from vitcli.engines import AUTO
from vitcli.errors import VitcliError
from vitcli.files import printable
from vitcli.measures import check_projection
from vitcli.ui.console import (
    FORMATS,
    chosen_form,
    duration,
    note,
    plural,
    progress,
    short,
    show,
    status,
    stream,
    table,
)
from vitcli.ui.figures import PAGES, Plot, check_figure_file, draw_plane, plane_figure
from vitcli.ui.options import (
    BackgroundOption,
    EngineOption,
    ModelOptions,
    Output,
    PrintConfigOption,
    ProjectionOption,
    Without,
    grouped,
    known_engine,
    load_all,
    parse_color,
)

Defaults = FolderOptions


def _job(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Job", **how)


def _vectors(*names: str, **how: Any) -> Any:
    return typer.Option(*names, rich_help_panel="Vectors", **how)


@grouped
def embed(
    inputs: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="Folders, files, globs, lists (@list.txt, - for stdin), webdataset tar shards.",
        ),
    ],
    *,
    model: ModelOptions,
    out: Annotated[str, typer.Option("--out", metavar="DIR", help="Folder of the vectors.")],
    tokens: Annotated[
        str,
        _vectors(
            "--tokens",
            metavar="KINDS",
            help="Any of pooled, output, cls, dist, register, patch, deepstack (Qwen3-VL), "
            "separated by commas.",
        ),
    ] = Defaults.kind,
    layers: Annotated[
        str | None,
        _vectors(
            "--layers",
            "--layer",
            metavar="N,...",
            help="0 is the input of the first block, i the output of block i, -1 the last.",
            show_default="the end of the encoder, after the final norm",
        ),
    ] = None,
    format: Annotated[
        str,
        _vectors(
            "--format",
            metavar="parquet|npy|safetensors",
            help="Files of the vectors; npy has a csv of names beside it.",
        ),
    ] = Defaults.format,
    vector_dtype: Annotated[
        str, _vectors("--vector-dtype", metavar="TYPE", help="float32 or float16.")
    ] = Defaults.vector_dtype,
    norms: Annotated[
        bool, _vectors("--norms", help="Also write the norms of each layer's tokens.")
    ] = Defaults.norms,
    part_rows: Annotated[
        int,
        _job(
            "--part-rows",
            metavar="N",
            min=1,
            help="Rows per part; fewer where a part would exceed 256 MiB.",
        ),
    ] = Defaults.part_rows,
    batch: Annotated[
        int, _job("--batch", metavar="N", min=1, help="Images per forward pass.")
    ] = Defaults.batch,
    workers: Annotated[
        int | None,
        _job(
            "--workers",
            metavar="N",
            min=1,
            help="Number of decoding processes.",
            show_default="one per core",
        ),
    ] = Defaults.workers,
    timeout: Annotated[
        float, _job("--timeout", metavar="S", min=0.001, help="Time limit per image, in seconds.")
    ] = Defaults.timeout_s,
    memory: Annotated[
        float,
        _job("--memory", metavar="GIB", min=0.25, help="Memory of each decoding process."),
    ] = Defaults.memory_bytes / 2**30,
    max_pixels: Annotated[
        int, _job("--max-pixels", metavar="N", min=1, help="Images of more pixels fail.")
    ] = Defaults.max_pixels,
    min_side: Annotated[
        int, _job("--min-side", metavar="N", min=1, help="Images with a shorter side fail.")
    ] = Defaults.min_side,
    any_suffix: Annotated[
        bool, _job("--any-suffix", help="Read every file of a folder, whatever its suffix.")
    ] = False,
    shard: Annotated[
        str, _job("--shard", metavar="I/N", help="Write only every N-th part, from the I-th.")
    ] = "/".join(map(str, Defaults.shard)),
    retry_failed: Annotated[
        bool, _job("--retry-failed", help="Try the failed rows of finished parts again.")
    ] = Defaults.retry_failed,
    fail_fast: Annotated[
        bool, _job("--fail-fast", help="Stop at the first failure.")
    ] = Defaults.fail_fast,
    cluster: Annotated[
        str | None,
        _job("--cluster", metavar="ray", help="Run on a Ray cluster (extra ray)."),
    ] = None,
    address: Annotated[
        str | None,
        _job("--address", metavar="HOST:PORT", help="Address of a running cluster; auto finds it."),
    ] = None,
    engine: EngineOption = None,
    background: BackgroundOption = "white",
    output: Annotated[Output, Without(("format",))],  # --format is that of the parts
    result_format: Annotated[
        str,
        typer.Option(
            "--result-format",
            metavar="|".join(FORMATS),
            help="Format of the printed result, as --format of other commands.",
        ),
    ] = "table",
    plot: Plot,
    projection: ProjectionOption = "pca",
    print_config: PrintConfigOption = False,
) -> None:
    """Turn a folder of images into embeddings, one row per image.

    Run the same command again to continue an interrupted job. An image that cannot be read
    becomes a row with its status, and the exit code is 1. Hidden folders are skipped.

    \b
    Examples:
      vitcli embed photos/ --weights facebook/dinov2-small --out vectors/
      vitcli embed 'shards/*.tar' --preset clip-b16 --out vectors/ --tokens cls,pooled
      vitcli embed photos/ --weights facebook/dinov2-small --out layers/ --layers 3,6,9,12
      vitcli embed photos/ --out grids/ --tokens patch --vector-dtype float16
      vitcli embed photos/ --weights facebook/dinov2-small --out vectors/ --plot vectors.png

    --plot shows the vectors in two dimensions, colored by the folders' classes; as .html with the
    images under the pointer.
    """
    form = chosen_form("--result-format", result_format, output.json)
    check_figure_file(plot, *PAGES)
    if plot:
        check_projection(projection)
        if not {kind.strip() for kind in tokens.split(",")} - {"patch", "register"}:
            raise VitcliError(
                f"--plot: one vector per image is drawn (got --tokens {tokens})", "--tokens pooled"
            )
    color = parse_color(background)
    wanted = parse_layers(layers)
    request = dataclasses.replace(model.to_request(), engine=known_engine(engine))
    (loaded,) = load_all([request], by_library=True, print_config=print_config)
    from vitcli.commands.embed import analysis, job

    if engine == AUTO:
        with status("measuring the engines"):
            choice = loaded.choose_engine(batch)
        note(choice)
    if loaded.faster_way:
        note(loaded.faster_way)
    with progress("encoding", timed=False, unit="img/s", lines="seconds") as bar:
        result = analysis.embed(
            loaded,
            inputs,
            out,
            tokens=tokens,
            layers=wanted,
            format=format,
            vector_dtype=vector_dtype,
            norms=norms,
            part_rows=part_rows,
            batch=batch,
            background=color,
            max_pixels=max_pixels,
            min_side=min_side,
            any_suffix=any_suffix,
            workers=workers,
            timeout_s=timeout,
            memory_bytes=int(memory * 2**30),
            shard=shard,
            retry_failed=retry_failed,
            fail_fast=fail_fast,
            cluster=cluster,
            address=address,
            progress=bar,
        )
    if result.skipped_files:
        first = result.skipped_files[:5]
        kinds = ", ".join(f"{s.count:,} {s.code or 'without suffix'}" for s in first)
        more = " and more" if len(result.skipped_files) > len(first) else ""
        note(f"left out: {kinds}{more}; --any-suffix reads every file that is not hidden")
    if result.duplicates:
        note(f"{result.duplicates:,} repeated inputs: each has one row")
    if plot and result.ok:
        folder = Path(result.out)
        read = partial(job.thumbnails, folder)
        draw_plane(job.vectors_in_plane(folder, projection), plot, read)
    stream(stderr=True).print(summary(result), markup=False)
    show(result, form)
    if result.failed:
        raise typer.Exit(1)


def parse_layers(text: str | None) -> tuple[int, ...]:
    """`6,12` or `-1` as numbers.

    Raises:
        VitcliError: anything else.
    """
    try:
        return () if text is None else tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise VitcliError(
            f"--layers {text}: is not a list of layers (expected numbers with commas)",
            "--layers 6,12",
        ) from error


def figure(result: FolderResult) -> Any:
    """The vectors of the folder in two dimensions, colored by class."""
    from vitcli.commands.embed.job import vectors_in_plane

    return plane_figure(vectors_in_plane(Path(result.out)))


def summary(result: FolderResult) -> str:
    """The one line of a shard."""
    rate = "" if result.images_per_s is None else f", {result.images_per_s:.1f} img/s"
    there = result.rows - result.rows_encoded
    return (
        f"shard {result.shard}: {plural(result.rows, 'row')} in {plural(result.parts, 'part')} "
        f"read back from {printable(result.out)}, {result.ok:,} ok, {result.failed:,} failed; "
        f"{result.rows_encoded:,} in this run{f', {there:,} from before' if there else ''}, "
        f"{duration(result.wall_s)}{rate}"
    )


def tables(result: FolderResult) -> Iterator[Any]:
    """What was encoded with what, and the failures by kind."""
    model = result.model
    yield (
        f"[bold]{escape(model.name)}[/]  {short(model.parameters)} parameters, weights: "
        f"{escape(model.weights)}; {result.engine} engine, {model.dtype} on {model.device}; "
        f"{result.kind} vectors of {result.width}"
    )
    counts = table()
    counts.add_column("status")
    counts.add_column("images", justify="right")
    counts.add_row("ok", f"{result.ok:,}")
    for failure in result.failures:
        counts.add_row(failure.code, f"{failure.count:,}")
    counts.add_section()
    counts.add_row("all", f"{result.rows:,}")
    yield counts
    for example in result.examples:
        yield f"{escape(printable(example.path))}: {example.code}: {escape(example.error)}"
    if result.failed > len(result.examples):
        yield f"... and {result.failed - len(result.examples):,} more: rows whose status is not ok"
