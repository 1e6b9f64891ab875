"""vitcli embed: its options and tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from vitcli.commands.embed.result import FolderOptions, FolderResult
from vitcli.config.settings import parse_layers
from vitcli.engines import AUTO
from vitcli.errors import VitcliError
from vitcli.files import atomic_write, data_size, filled_page, printable
from vitcli.stats import MOST_POINTS, Plane, check_projection
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
    table,
)
from vitcli.ui.figures import (
    ABOVE,
    COLORS,
    MARKERS,
    NARROW,
    PAGES,
    Plot,
    across,
    caption,
    check_figure_file,
    draw,
    ended,
    new_figure,
    styled,
)
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
    option,
    parse_color,
)

Defaults = FolderOptions


_job: Any = partial(option, rich_help_panel="Job")
_vectors: Any = partial(option, rich_help_panel="Vectors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How the job is done and what it writes, named as the arguments of `analysis.embed`."""

    tokens: Annotated[
        str,
        _vectors(
            "--tokens",
            "KINDS",
            "Any of pooled, output, cls, dist, register, patch, deepstack (Qwen3-VL), separated "
            "by commas.",
        ),
    ] = Defaults.kind
    layers: Annotated[
        str | None,
        typer.Option(
            "--layers",
            "--layer",
            metavar="N,...",
            help="0 is the input of the first block, i the output of block i, -1 the last.",
            show_default="the end of the encoder, after the final norm",
            rich_help_panel="Vectors",
        ),
    ] = None
    format: Annotated[
        str,
        _vectors(
            "--format",
            "parquet|npy|safetensors",
            "Files of the vectors; npy has a csv of names beside it.",
        ),
    ] = Defaults.format
    vector_dtype: Annotated[str, _vectors("--vector-dtype", "TYPE", "float32 or float16.")] = (
        Defaults.vector_dtype
    )
    norms: Annotated[
        bool, _vectors("--norms", help="Also write the norms of each layer's tokens.")
    ] = Defaults.norms
    part_rows: Annotated[
        int,
        _job("--part-rows", "N", "Rows per part; fewer where a part would exceed 256 MiB.", min=1),
    ] = Defaults.part_rows
    batch: Annotated[int, _job("--batch", "N", "Images per forward pass.", min=1)] = Defaults.batch
    workers: Annotated[
        int | None,
        _job("--workers", "N", "Number of decoding processes.", min=1, show_default="one per core"),
    ] = Defaults.workers
    timeout_s: Annotated[
        float, _job("--timeout", "S", "Time limit per image, in seconds.", min=0.001)
    ] = Defaults.timeout_s
    memory: Annotated[
        float, _job("--memory", "GIB", "Memory of each decoding process.", min=0.25)
    ] = Defaults.memory_bytes / 2**30
    max_pixels: Annotated[int, _job("--max-pixels", "N", "Images of more pixels fail.", min=1)] = (
        Defaults.max_pixels
    )
    min_side: Annotated[int, _job("--min-side", "N", "Images with a shorter side fail.", min=1)] = (
        Defaults.min_side
    )
    any_suffix: Annotated[
        bool, _job("--any-suffix", help="Read every file of a folder, whatever its suffix.")
    ] = False
    shard: Annotated[str, _job("--shard", "I/N", "Write only every N-th part, from the I-th.")] = (
        "/".join(map(str, Defaults.shard))
    )
    retry_failed: Annotated[
        bool, _job("--retry-failed", help="Try the failed rows of finished parts again.")
    ] = Defaults.retry_failed
    fail_fast: Annotated[bool, _job("--fail-fast", help="Stop at the first failure.")] = (
        Defaults.fail_fast
    )
    cluster: Annotated[
        str | None, _job("--cluster", "ray", "Run on a Ray cluster (extra ray).")
    ] = None
    address: Annotated[
        str | None,
        _job("--address", "HOST:PORT", "Address of a running cluster; auto finds it."),
    ] = None

    def arguments(self) -> dict[str, Any]:
        """As `analysis.embed` takes them."""
        given: dict[str, Any] = {**vars(self)}
        given["layers"] = () if self.layers is None else parse_layers(self.layers)
        given["memory_bytes"] = int(given.pop("memory") * 2**30)
        return given


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
    out: Annotated[str, option("--out", "DIR", "Folder of the vectors.")],
    job: JobOptions,
    engine: EngineOption = None,
    background: BackgroundOption = "white",
    output: Annotated[Output, Without(("format",))],  # --format is that of the parts
    result_format: Annotated[
        str,
        option(
            "--result-format",
            "|".join(FORMATS),
            "Format of the printed result, as --format of other commands.",
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
        if not {kind.strip() for kind in job.tokens.split(",")} - {"patch", "register"}:
            raise VitcliError(
                f"--plot: one vector per image is drawn (got --tokens {job.tokens})",
                "--tokens pooled",
            )
    color = parse_color(background)
    arguments = job.arguments()
    request = dataclasses.replace(model.to_request(), engine=known_engine(engine))
    (loaded,) = load_all([request], by_library=True, print_config=print_config)
    from vitcli.commands.embed import analysis
    from vitcli.commands.embed.job import thumbnails, vectors_in_plane

    if engine == AUTO:
        with status("measuring the engines"):
            choice = loaded.choose_engine(job.batch)
        note(choice)
    if loaded.faster_way:
        note(loaded.faster_way)
    with progress("encoding", timed=False, unit="img/s", lines="seconds") as bar:
        result = analysis.embed(loaded, inputs, out, background=color, progress=bar, **arguments)
    if result.skipped_files:
        first = result.skipped_files[:5]
        kinds = ", ".join(f"{s.count:,} {s.code or 'without suffix'}" for s in first)
        more = " and more" if len(result.skipped_files) > len(first) else ""
        note(f"left out: {kinds}{more}; --any-suffix reads every file that is not hidden")
    if result.duplicates:
        note(f"{result.duplicates:,} repeated inputs: each has one row")
    if result.failed and not result.rows_encoded:
        note("every part was there already; --retry-failed tries the images that failed again")
    if plot and result.ok:
        folder = Path(result.out)
        draw_plane(vectors_in_plane(folder, projection), plot, partial(thumbnails, folder))
    note(summary(result))
    show(result, form)
    if result.failed:
        raise typer.Exit(1)


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
    counts = table(None, "status", ">images")
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


MOST_NAMED = 21
"""Classes that a legend names."""


def draw_plane(plane: Plane, plot: Plot, pictures: Callable[[Sequence[str]], list[str]]) -> None:
    """The vectors in two dimensions in the file asked for, a figure or a page (.html).

    Args:
        pictures: the images of these names as data URLs, "" where there is none; for a page.
    """
    file = plot.plot
    if file is None or file.suffix.lower() not in PAGES:
        draw(lambda: plane_figure(plane), plot)
        return
    with status("reading the images"):
        page = plane_page(plane, pictures(plane.names))
    with atomic_write(file) as out:
        out.write(page)
    note(f"wrote {data_size(len(page))} to {file}")


def _marks(plane: Plane) -> tuple[dict[str | None, int], Sequence[float]]:
    """The number of each class, and the numbers of the images where all have one."""
    from vitcli.images.folders import class_order

    numbers = [label for label in plane.labels if isinstance(label, float)]
    classes = class_order(label for label in plane.labels if isinstance(label, str))
    all_numbers = len(numbers) == len(plane.labels)
    return {name: i for i, name in enumerate(classes)}, numbers if all_numbers else ()


def _marker(place: int) -> int:
    """Of class `place`: classes of one color have different markers."""
    return (place + place // 7) % 7


def _words(plane: Plane, most: int) -> tuple[str, list[str], str]:
    """Title, names of the axes, caption; `most` letters of a name."""
    count = len(plane.points)
    said = f"{count:,} images"
    if count < plane.images:
        spaced = ", evenly spaced" * (plane.images > MOST_POINTS)
        said = f"{count:,} of {plane.images:,} images{spaced}"
    shares = [f" ({share:.1%} of the variance)" for share in plane.explained or ()] or ["", ""]
    kind = "principal component" if plane.by == "pca" else "UMAP axis"
    axes = [f"{kind} {number}{share}" for number, share in enumerate(shares, start=1)]
    if plane.by == "umap":
        said += "; distances between groups mean nothing"
    return f"{ended(plane.model, most)}, weights: {ended(plane.weights, most)}", axes, said


def plane_page(plane: Plane, pictures: Sequence[str]) -> bytes:
    """The vectors as a page that shows the image under the pointer; one file, no network."""
    from matplotlib import colormaps
    from matplotlib.colors import Normalize, to_hex

    classes, numbers = _marks(plane)
    title, axes, said = _words(plane, 200)
    places = [classes.get(label) for label in plane.labels]  # type: ignore[arg-type]
    colors = ["#999999" if place is None else COLORS[place % 7] for place in places]
    if numbers:
        shades: Any = colormaps["viridis"](Normalize()(numbers))
        colors = [to_hex(shade) for shade in shades]
    spans = [(min(v), (max(v) - min(v)) or 1.0) for v in zip(*plane.points, strict=True)]
    shown = sum(map(bool, pictures))
    data = {
        "title": title,
        "axes": axes,
        "caption": f"{said}; {shown:,} with a picture",
        "points": [
            [round((v - low) / wide, 5) for v, (low, wide) in zip(point, spans, strict=True)]
            for point in plane.points
        ],
        "places": [[f"{value:.4g}" for value in point] for point in plane.points],
        "names": list(map(printable, plane.names)),
        "labels": [printable(one) if isinstance(one, str) else one for one in plane.labels],
        "colors": colors,
        "markers": [0 if place is None else _marker(place) for place in places],
        "classes": [(printable(name or ""), COLORS[i % 7]) for name, i in classes.items()],
        "pictures": pictures,
    }
    return filled_page("vitcli.commands.embed", "plane.html", data)


@styled
def plane_figure(plane: Plane) -> Any:
    """Vectors of images as points in two dimensions, colored by class or by number."""
    narrow = across() < NARROW
    drawing = new_figure(4.6 if narrow else 4.2)
    axes = drawing.subplots()
    x, y = zip(*plane.points, strict=True)
    size = {"s": max(3.0, min(16.0, 6000 / len(x))), "linewidths": 0}
    classes, numbers = _marks(plane)
    title, names, said = _words(plane, 44)
    if numbers:
        shown = axes.scatter(x, y, c=numbers, cmap="viridis", **size)
        drawing.colorbar(shown, ax=axes, label="number of --targets")
    for name in () if numbers else (*classes, None):
        chosen = [i for i, label in enumerate(plane.labels) if label == name]
        if not chosen:
            continue
        how = {"color": "0.6", "marker": ".", "label": "no class"}
        if name is not None:
            place = classes[name]
            how = {"color": COLORS[place % 7], "marker": MARKERS[_marker(place)]}
            how |= {"label": ended(name, 28)}
        axes.scatter([x[i] for i in chosen], [y[i] for i in chosen], **how, **size)
    if 0 < len(classes) <= MOST_NAMED and narrow:
        axes.legend(**ABOVE, ncols=2, markerscale=1.5)
    elif 0 < len(classes) <= MOST_NAMED:
        drawing.legend(loc="outside right upper", frameon=False, markerscale=1.5)
    elif classes:
        said += f"; {len(classes)} classes, whose colors and markers repeat"
    axes.set_xlabel(names[0])
    axes.set_ylabel(names[1])
    if plane.by == "umap":
        axes.set(xticks=[], yticks=[])  # only nearness means something
    axes.grid()
    drawing.suptitle(title)
    caption(drawing, said)
    return drawing
