"""vitcli compare, vitcli verify"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from vitcli.commands.compare.result import EXAMPLES
from vitcli.config.request import (
    ModelRequest,
    checkpoint_of,
    is_architecture,
    preset_names,
    read_tensors,
    split_library,
    split_source,
)
from vitcli.config.settings import nearest, parse_setting
from vitcli.errors import VitcliError, check_choice
from vitcli.ui.completion import complete_names
from vitcli.ui.console import progress
from vitcli.ui.figures import Plot, check_figure_file, finish
from vitcli.ui.options import (
    BackgroundOption,
    EveryOption,
    ImagesArgument,
    Output,
    PrefixesOption,
    PrefixOption,
    SharedModelOptions,
    WhichesOption,
    WhichOption,
    Without,
    grouped,
    load_all,
    model_option,
    option,
    parse_color,
)

SET_ONE = "Set a config key of {} only; encoder.image_size is its input size. Repeatable."


@grouped
def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A preset, a YAML config, a [PRESET=]checkpoint, or timm:ARCHITECTURE.",
            autocompletion=complete_names(preset_names),
        ),
    ],
    b: Annotated[
        str,
        typer.Argument(
            metavar="B",
            help="The second encoder, named in the same way.",
            autocompletion=complete_names(preset_names),
        ),
    ],
    images: ImagesArgument = None,
    *,
    which: WhichesOption = None,
    prefix: PrefixesOption = None,
    model: SharedModelOptions,
    set_a: Annotated[list[str] | None, option("--set-a", "KEY=VALUE", SET_ONE.format("A"))] = None,
    set_b: Annotated[list[str] | None, option("--set-b", "KEY=VALUE", SET_ONE.format("B"))] = None,
    examples: Annotated[
        str,
        option(
            "--examples",
            "auto|images|patches",
            "Examples of CKA (default: auto, which is images from 16 images on, else patches).",
        ),
    ] = "auto",
    tolerance: Annotated[
        float | None,
        option(
            "--tolerance",
            "REL",
            "Relative difference up to which layers are equal (default: 1e-6 in float32, "
            "1e-12 in float64).",
        ),
    ] = None,
    every: EveryOption = 1,
    background: BackgroundOption = "white",
    output: Output,
    plot: Plot,
) -> None:
    """Compare two encoders, or two sources of one encoder, layer by layer.

    A value that is not finite is reported first (exit code 1). If A and B crop an image
    differently, CKA across patches pairs the patches of the common region. The most similar layers
    are named only if the difference is significant (jackknife over images, 95% interval).

    \b
    Examples:
      vitcli compare facebook/dinov2-small ./my-port photo.jpg --dtype float64
      vitcli compare vit-b16 vit-b16 --set-b encoder.norm_eps=1e-5
      vitcli compare best.pth best.pth --which ema --which raw
      vitcli compare A B images/*.jpg --plot cka.png
    """

    check_figure_file(plot)
    check_choice("--examples", examples, EXAMPLES)
    requests = [to_request(a, model, set_a), to_request(b, model, set_b)]
    sources = [i for i, request in enumerate(requests) if request.weights is not None]
    for i, tensors in zip(sources, read_tensors(which, prefix, len(sources)), strict=True):
        requests[i] = dataclasses.replace(requests[i], **tensors)
    color = parse_color(background)
    loaded = load_all(requests, by_library=True)
    with progress("comparing") as bar:
        from vitcli.commands.compare.analysis import compare as analysis

        result = analysis(
            loaded[0],
            loaded[1],
            images or [],
            examples=examples,
            tolerance=tolerance,
            background=color,
            progress=bar,
        )
    finish(result, output.form, plot, failed=result.failed, wrong=bool(result.holes), every=every)


def to_request(
    text: str, options: SharedModelOptions, settings: list[str] | None = None
) -> ModelRequest:
    """A preset's name, a YAML file, or anything else as a source of weights.

    `encoder.image_size` among `settings` is what this encoder reads, as --image-size for one side.
    """
    parsed = [parse_setting(setting) for setting in settings or []]
    sizes = [str(s.value) for s in parsed if s.path == ("encoder", "image_size")]
    if sizes:
        size = "x".join(part.strip() for part in sizes[-1].strip("[]").split(","))
        options = dataclasses.replace(options, image_size=size)
    kept = [s for s in parsed if s.path != ("encoder", "image_size")]
    if text in preset_names() or is_architecture(text):
        request = options.request(preset=text)
    elif Path(text).suffix in (".yaml", ".yml"):
        request = options.request(config_file=Path(text))
    elif not (split_library(text)[0] or "/" in text or "=" in text or Path(text).exists()):
        raise VitcliError(
            f"{text}: is not a preset, a YAML file or a checkpoint",
            nearest(text, preset_names(), "run `vitcli presets` for the list"),
        )
    else:
        request = options.request(**split_source(text))
    # What is set for one side is more specific than what is set for both.
    return dataclasses.replace(request, settings=(*request.settings, *kept))


@grouped
def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="Checkpoint directory or hub owner/name; with LIBRARY: before it, that library.",
        ),
    ],
    images: ImagesArgument = None,
    *,
    preset: Annotated[
        str | None, model_option("--preset", "NAME", "Preset for settings that the source lacks.")
    ] = None,
    which: WhichOption = None,
    prefix: PrefixOption = None,
    model: Annotated[SharedModelOptions, Without(("fit",))],  # the library's own decides
    every: EveryOption = 1,
    plot: Plot,
    output: Output,
) -> None:
    """Compare vitcli's numbers for a checkpoint with those of its own library.

    SOURCE is loaded by vitcli and by the library that wrote it (transformers, timm or open_clip).
    Each preprocesses the images; then pixels, every layer and the outputs are compared.
    Exit code 0: equal up to rounding; 1: not equal; 2: could not be compared.
    Needs the extra `reference`.

    \b
    Examples:
      vitcli verify facebook/dinov2-small photo.jpg
      vitcli verify ./my-finetuned-siglip --dtype float64
      vitcli verify ./clip --set encoder.norm_eps=1e-6 --plot layers.png
    """

    check_figure_file(plot)
    library, own = checkpoint_of(source)
    request = model.request(weights=own, preset=preset, which=which, prefix=prefix)
    (loaded,) = load_all([request])
    with progress("comparing") as bar:
        from vitcli.commands.compare.verify import verify_model

        result = verify_model(loaded, images or [], library=library, progress=bar)
    finish(result, output.form, plot, failed=result.failed, wrong=not result.equal, every=every)
