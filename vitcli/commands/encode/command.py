"""vitcli encode"""

from __future__ import annotations

import dataclasses
import glob
import os
import shlex
from pathlib import Path
from typing import Annotated

import typer

from vitcli.config.request import REFERENCE
from vitcli.engines import AUTO, check_engine
from vitcli.errors import VitcliError
from vitcli.files import is_folder
from vitcli.ui.console import note, plural, progress, status, warn
from vitcli.ui.figures import Plot, check_figure_file, draw, finish
from vitcli.ui.options import (
    BackgroundOption,
    EngineOption,
    EveryOption,
    ModelOptions,
    Output,
    PrintConfigOption,
    grouped,
    known_engine,
    load_all,
    option,
    parse_color,
)


@grouped
def encode(
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PATH",
            help="Image files (default: a built-in image). For folders use `vitcli embed`.",
        ),
    ] = None,
    *,
    model: ModelOptions,
    every: EveryOption = 1,
    out: Annotated[
        str | None, option("--out", "FILE", "Write vectors to a file (.npz, .npy, .safetensors).")
    ] = None,
    tokens: Annotated[
        str | None,
        option(
            "--tokens",
            "KINDS",
            "Vectors that --out holds, with commas: cls, dist, register, patch, pooled, output, "
            "deepstack (Qwen3-VL) (default: pooled, or patch without pooling).",
        ),
    ] = None,
    engine: EngineOption = None,
    background: BackgroundOption = "white",
    map_file: Annotated[
        Path | None,
        option(
            "--map",
            "FILE",
            "Draw patch features as colors: the first three principal components over all images.",
        ),
    ] = None,
    map_query: Annotated[
        str | None,
        option(
            "--map-query",
            "ROW,COL",
            "Add to --map the cosine of every patch to this patch of the first image.",
        ),
    ] = None,
    layer: Annotated[
        int | None,
        option(
            "--layer",
            "N",
            "Layer of --map: 0 is the input of the first block, i the output of block i, -1 the "
            "last.",
            show_default="after the final norm",
        ),
    ] = None,
    output: Output,
    plot: Plot,
    print_config: PrintConfigOption = False,
) -> None:
    """Run an encoder on a few images and print its tokens' norms after every block.

    \b
    Examples:
      vitcli encode
      vitcli encode photo.jpg --weights facebook/dinov2-small --every 2
      vitcli encode *.jpg --weights facebook/dinov2-small --map features.png
      vitcli encode *.jpg --preset clip-b16 --out vectors.npz --tokens cls,patch
    """
    from vitcli.commands.encode.result import check_tokens, check_vector_file, write_vectors

    check_few(images or [], out, model)
    check_figure_file(plot)
    check_figure_file(map_file)
    if map_file is None and (map_query is not None or layer is not None):
        raise VitcliError(
            f"{'--layer' if map_query is None else '--map-query'}: --map is missing",
            "--map features.png",
        )
    if map_file and engine == AUTO:
        raise VitcliError("--engine auto: does not support --map", "--engine eager")
    if tokens and not out:
        raise VitcliError("--tokens: --out is missing", "--out vectors.npz")
    kinds = [kind.strip() for kind in tokens.split(",")] if tokens else []
    if out:
        check_vector_file(Path(out), kinds)
    request = dataclasses.replace(model.to_request(), engine=known_engine(engine))
    if map_file and (engine or request.by_library):
        check_engine(REFERENCE if request.by_library else str(engine), hooks="--map")
    fresh = request.weights is None and not request.by_library
    if fresh and not print_config:  # an error before torch is loaded
        check_tokens(request.fresh_config(), kinds)
    color = parse_color(background)
    (loaded,) = load_all([request], by_library=True, print_config=print_config)
    from vitcli.commands.encode import analysis
    from vitcli.commands.encode.analysis import FeatureCollector
    from vitcli.model import AT_ONCE

    if engine == AUTO:
        with status("measuring the engines"):
            choice = loaded.choose_engine(min(AT_ONCE, len(images or "1")))
        note(choice)
    if out and not kinds:
        kinds = ["pooled" if loaded.config.encoder.pooling != "none" else "patch"]
    features = FeatureCollector(layer, map_query)
    with progress("encoding") as bar:
        result, vectors = analysis.encode(
            loaded,
            images or [],
            kinds,
            background=color,
            progress=bar,
            around=features if map_file else analysis.no_context,
        )
    hole = result.not_finite_from
    if hole is not None:
        problem = analysis.not_finite(loaded, hole)
        warn(f"{problem.message}; {problem.hint}")
    if loaded.faster_way:
        note(loaded.faster_way)
    if out and result.images:
        paths = [image.path for image in result.images]
        written = write_vectors(Path(out), vectors, paths, result.failed)
        files = " and ".join(map(str, written))
        note(f"wrote {', '.join(kinds)} of {plural(len(result.images), 'image')} to {files}")
    if map_file and result.images and hole is None:
        from vitcli.commands.encode.view import map_figure

        what = f"the features of {plural(len(features.pictures), 'image')}"
        draw(lambda: map_figure(features.sheets(), features.pictures), plot.at(map_file), what)
        if features.left_out:
            note(f"{features.left_out} more images are not drawn (too many for one figure)")
    if plot and result.images:
        from vitcli.commands.encode.view import figure

        seen = analysis.seen(loaded, images or [], color)
        draw(lambda: figure(result, seen), plot)
    finish(
        result,
        output.form,
        failed=result.failed,
        wrong=hole is not None,
        empty=not result.images,
        every=every,
    )


def check_few(images: list[str], out: str | None, model: ModelOptions) -> None:
    """Refuse what is a job over many images: a folder, glob, list or shard, or a folder for `out`.

    Raises:
        VitcliError: with the command to type.
    """
    many = next((text for text in images if _is_many(text)), None)
    folder = out is not None and (is_folder(out) or out.endswith("/") or not Path(out).suffix)
    if many is None and not folder:
        return
    named = {"--preset": model.preset, "--config": model.config, "--weights": model.weights}
    words = [many or (images[0] if len(images) == 1 else "PATH..."), "--out"]
    words.append(out if out and folder else "vectors/")
    words += [word for key, value in named.items() if value for word in (key, str(value))]
    what = (
        f"{many}: is not one image (expected image files)"
        if many
        else f"--out {out}: is a folder (expected a file)"
    )
    raise VitcliError(what, f"vitcli embed {' '.join(map(shlex.quote, words))}")


def _is_many(text: str) -> bool:
    if text == "-" or is_folder(text) or text.lower().endswith(".tar"):
        return True
    return not os.path.lexists(text) and (text.startswith("@") or glob.has_magic(text))
