"""Options that several commands share, each written once.

A command takes a group of them as one parameter, `model: ModelOptions`, under `@grouped`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

from vitcli.config import yaml
from vitcli.config.request import (
    REFERENCE,
    ModelRequest,
    config_yaml,
    read_tensors,
    registers_setting,
    split_source,
)
from vitcli.config.schema import FitKind, NormPlacement, PoolingKind, PositionKind
from vitcli.config.settings import Setting, parse_counts, parse_setting
from vitcli.engines import AUTO, ENGINES
from vitcli.errors import VitcliError, check_choice
from vitcli.files import printable
from vitcli.results import RANDOM_WEIGHTS
from vitcli.ui.completion import complete, with_completion
from vitcli.ui.console import FORMATS, answer_text, chosen_form, note, status

if TYPE_CHECKING:
    from vitcli.model import Model


def option(name: str, metavar: str | None = None, help: str | None = None, **how: Any) -> Any:
    """A typer option as its line of the help: `--name METAVAR  help`."""
    return typer.Option(name, metavar=metavar, help=help, **how)


Function = TypeVar("Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Without:
    """In the annotation of a group: the options of it that a command does not take."""

    names: tuple[str, ...]


def _group(hint: Any) -> tuple[Any, set[str]]:
    """The type of a parameter, and the options left out if it is a group."""
    if get_origin(hint) is not Annotated:
        return hint, set()
    kind, *notes = get_args(hint)
    return kind, {name for note in notes if isinstance(note, Without) for name in note.names}


def grouped(function: Function) -> Function:
    """Lets a command take option groups (dataclasses of annotated options) as parameters."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, tuple[type, list[str]]] = {}
    for parameter in inspect.signature(function).parameters.values():
        kind, without = _group(hints[parameter.name])
        if not dataclasses.is_dataclass(kind):
            parameters.append(parameter.replace(annotation=hints[parameter.name]))
            continue
        assert isinstance(kind, type)
        annotations = get_type_hints(kind, include_extras=True)
        fields = [f for f in dataclasses.fields(kind) if f.name not in without]
        names = [f.name for f in fields]
        groups[parameter.name] = (kind, names)
        parameters += [
            inspect.Parameter(
                f.name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=annotations[f.name],
                default=f.default,
            )
            for f in fields
        ]

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        built = {
            name: kind(**{key: values.pop(key) for key in names})
            for name, (kind, names) in groups.items()
        }
        return function(**values, **built)

    for parameter in parameters:
        with_completion(parameter.annotation)
    flat = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    command.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in flat}
    return command  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """How an answer is printed."""

    json: Annotated[
        bool, option("--json", help="Print JSON instead of tables (--format json).")
    ] = False
    format: Annotated[
        str,
        option(
            "--format",
            "|".join(FORMATS),
            "JSON and CSV are unrounded; LaTeX needs booktabs.",
            autocompletion=complete(FORMATS),
        ),
    ] = "table"

    def __post_init__(self) -> None:
        _ = self.form

    @property
    def form(self) -> str:
        """One of `ui.console.FORMATS`."""
        return chosen_form("--format", self.format, self.json)


ImagesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="IMAGE", help="Image files (default: a built-in image)."),
]
EveryOption = Annotated[int, option("--every", "N", "Show every N-th block in the table.", min=1)]
BackgroundOption = Annotated[
    str, option("--background", "COLOR", "Color behind transparent pixels.")
]
PrintConfigOption = Annotated[
    bool, option("--print-config", help="Print the resolved config as YAML and stop.")
]


def parse_size(text: str) -> tuple[int, int]:
    """`518` or `384x512` (height x width) as (height, width).

    Raises:
        VitcliError: anything else.
    """
    size = yaml.parse_size(text)
    if size is None:
        raise VitcliError(f"--image-size {text}: expected 518 or 384x512 (height x width)")
    return size


def choices(kind: Any, between: str = "|") -> str:
    """The values of a literal of the schema, as the help shows them."""
    return between.join(get_args(kind))


def model_option(name: str, metavar: str | None = None, help: str | None = None, **how: Any) -> Any:
    """An option in the help's panel about the model."""
    return option(name, metavar, help, rich_help_panel="Model", **how)


AdapterOption = Annotated[
    str | None,
    model_option(
        "--adapter", "FILE", "LoRA adapters to add: a run's adapter.safetensors, or a PEFT adapter."
    ),
]
WhichOption = Annotated[
    str | None,
    model_option(
        "--which",
        "ema|raw",
        "The averaged or the raw weights of a file that has both (default: ema).",
    ),
]
PrefixOption = Annotated[
    str | None,
    model_option(
        "--prefix", "P", "What precedes the vision tower's tensor names, e.g. model.vision_tower."
    ),
]
EACH = "Once for all checkpoints, or once for each in order."
WhichesOption = Annotated[
    list[str] | None,
    model_option("--which", "ema|raw", f"Averaged (default) or raw weights. {EACH}"),
]
PrefixesOption = Annotated[
    list[str] | None, model_option("--prefix", "P", f"Prefix of the vision tower's tensors. {EACH}")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SharedModelOptions:
    """What every command that runs a model takes, however many models it takes."""

    set: Annotated[
        list[str] | None,
        model_option("--set", "KEY=VALUE", "Set a config key, e.g. encoder.depth=6. Repeatable."),
    ] = None
    norm: Annotated[
        str | None, model_option("--norm", choices(NormPlacement), "Norm placement.")
    ] = None
    position: Annotated[
        str | None, model_option("--position", "KIND", f"{choices(PositionKind, ', ')}.")
    ] = None
    pool: Annotated[str | None, model_option("--pool", "KIND", f"{choices(PoolingKind)}.")] = None
    image_size: Annotated[
        str | None, model_option("--image-size", "N|HxW", "Input size in pixels.")
    ] = None
    pos_resize: Annotated[
        str | None,
        model_option(
            "--pos-resize",
            "RULE",
            "How to interpolate trained position embeddings (encoder.position_table.resize).",
        ),
    ] = None
    fit: Annotated[
        str | None,
        model_option(
            "--fit",
            choices(FitKind),
            "Images of another aspect ratio than the input: the largest centered part, all of "
            "it with a margin, or all of it at another ratio (preprocess.fit).",
            show_default="as the model's own processor",
        ),
    ] = None
    seed: Annotated[int, model_option("--seed", help="Seed of random weights.")] = 0
    device: Annotated[
        str,
        model_option("--device", "auto|cpu|cuda|mps", "Device to run on."),
    ] = "auto"
    dtype: Annotated[
        str, model_option("--dtype", "TYPE", "float32, bfloat16, float16 or float64.")
    ] = "float32"

    def shared_settings(self) -> tuple[Setting, ...]:
        """`--set` in the order given, after the shorthands, so that the exact key wins."""
        short = {
            "encoder.norm_placement": ("--norm", self.norm),
            "encoder.position": ("--position", self.position),
            "encoder.pooling": ("--pool", self.pool),
            "encoder.position_table.resize": ("--pos-resize", self.pos_resize),
            "preprocess.fit": ("--fit", self.fit),
        }
        named = [
            Setting(tuple(key.split(".")), value, f"{option} {value}")
            for key, (option, value) in short.items()
            if value is not None
        ]
        return (*named, *(parse_setting(text) for text in self.set or ()))

    def request(self, **named: Any) -> ModelRequest:
        """One model's request; `named` says which (preset, config_file, weights, more settings)."""
        settings = (*named.pop("settings", ()), *self.shared_settings())
        return ModelRequest(
            settings=settings,
            seed=self.seed,
            image_size=parse_size(self.image_size) if self.image_size else None,
            device=self.device,
            dtype=self.dtype,
            **named,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions:
    """The options that name one model."""

    preset: Annotated[
        str | None,
        model_option("--preset", "NAME", "A preset (`vitcli presets`), or timm:ARCHITECTURE."),
    ] = None
    config: Annotated[Path | None, model_option("--config", "FILE", "A YAML config.")] = None
    weights: Annotated[
        str | None,
        model_option("--weights", "SOURCE", "Checkpoint file, directory or hub owner/name."),
    ] = None
    adapter: AdapterOption = None
    which: WhichOption = None
    prefix: PrefixOption = None
    registers: Annotated[
        int | None, model_option("--registers", "N", "Number of register tokens.")
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(SharedModelOptions, SourceOptions):
    """One model; the last base's options come first in the help."""

    def to_request(self) -> ModelRequest:
        named = () if self.registers is None else (registers_setting(self.registers),)
        return self.request(
            preset=self.preset,
            config_file=self.config,
            weights=self.weights,
            adapter=self.adapter,
            which=self.which,
            prefix=self.prefix,
            settings=named,
        )


ProjectionOption = Annotated[
    str,
    option(
        "--projection",
        "pca|umap",
        "How vectors are shown in two dimensions: principal components, or UMAP (extra umap).",
    ),
]
EngineOption = Annotated[
    str | None,
    option(
        "--engine",
        "|".join([*ENGINES, AUTO]),
        "How to run the encoder: plain torch, torch's oneDNN kernels, torch.compile, ONNX "
        "Runtime (extra onnx), OpenVINO (extra openvino), the checkpoint's own library (extra "
        "reference); auto measures and remembers.",
        show_default="onednn if available, else eager",
    ),
]
LibraryOption = Annotated[
    str | None,
    option(
        "--engine",
        "reference",
        "Run the checkpoint by its own library (extra reference). timm:, transformers: or "
        "open_clip: before its name does so too.",
    ),
]


def known_engine(name: str | None) -> str | None:
    """The name itself; VitcliError for an unknown engine."""
    if name != AUTO:
        check_choice("--engine", name, ENGINES)
    return name


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourcesOptions:
    """The options that name several encoders: each preset, config and source is one of its own."""

    preset: Annotated[
        list[str] | None,
        model_option("--preset", "NAME", "A preset, or timm:ARCHITECTURE. Repeatable."),
    ] = None
    config: Annotated[
        list[Path] | None, model_option("--config", "FILE", "A YAML config. Repeatable.")
    ] = None
    weights: Annotated[
        list[str] | None,
        model_option(
            "--weights",
            "[PRESET=]SOURCE",
            "Checkpoint file, directory or hub owner/name; a bare state dict may need its "
            "preset before it. Repeatable.",
        ),
    ] = None
    adapter: AdapterOption = None
    which: WhichesOption = None
    prefix: PrefixesOption = None
    registers: Annotated[
        str | None,
        model_option("--registers", "N[,M...]", "Each encoder with each number of registers."),
    ] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodersOptions(SharedModelOptions, SourcesOptions):
    """Several encoders; the last base's options come first in the help."""

    def to_requests(self, engine: str | None = None) -> list[ModelRequest]:
        """Presets, then configs, then sources, each in the order given.

        Args:
            engine: `reference` or None.
        """
        if engine not in (None, REFERENCE):
            raise VitcliError(
                f"--engine {engine}: is not possible here (expected reference)",
                "leave out --engine",
            )
        counts = parse_counts(self.registers)
        if self.weights and counts:
            raise VitcliError(
                "--registers: a checkpoint has the registers it was trained with",
                "compare fresh encoders by --preset or --config",
            )
        fresh: list[dict[str, Any]] = [
            *({"preset": name} for name in self.preset or []),
            *({"config_file": file} for file in self.config or []),
        ]
        if not fresh and not self.weights:
            fresh = [{}]
        settings: list[tuple[Setting, ...]] = [(registers_setting(n),) for n in counts] or [()]
        sources = [split_source(text) for text in self.weights or []]
        tensors = read_tensors(self.which, self.prefix, len(sources))
        named: list[dict[str, Any]] = [
            *(one | {"settings": more} for one, more in itertools.product(fresh, settings)),
            *(source | which for source, which in zip(sources, tensors, strict=True)),
        ]
        requests = [self.request(**one, adapter=self.adapter, engine=engine) for one in named]
        if self.adapter and len(requests) > 1:
            raise VitcliError(
                f"--adapter: is for one encoder (got {len(requests)})",
                "leave out the other encoders",
            )
        return requests


def load_all(
    requests: Sequence[ModelRequest], by_library: bool = False, print_config: bool = False
) -> list[Model]:
    """The models asked for, with a note on each checkpoint and on random weights.

    Args:
        by_library: the command can do with an encoder that its own library runs.
        print_config: print the config of the one model and end the command.

    Raises:
        VitcliError: as `vitcli.load`.
    """
    for request in requests:
        if request.weights is None and not request.by_library:
            config = request.fresh_config()  # a bad config is an error before torch is loaded
            if print_config:
                answer_text(config_yaml(config))
                raise typer.Exit()
    with status(f"loading torch and the {'encoder' if len(requests) == 1 else 'encoders'}"):
        from vitcli.checkpoints.weights import report_line
        from vitcli.loading import load_model

        loaded = [load_model(request, by_library) for request in requests]
    for one in loaded:
        if one.report:
            note(report_line(one.report))
    if print_config:
        answer_text(config_yaml(loaded[0].config))
        raise typer.Exit()
    if any(one.fresh for one in loaded):
        note(RANDOM_WEIGHTS)
    return loaded


def parse_color(text: str) -> tuple[int, int, int]:
    """Red, green, blue from a name (`white`), `#rrggbb`, `rgb(0, 0, 0)` or three numbers `0,0,0`.

    Raises VitcliError for anything else, transparency included.
    """
    if text == "white":  # the default, without Pillow
        return (255, 255, 255)
    from PIL import ImageColor

    numbers = text.count(",") == 2 and "(" not in text
    with contextlib.suppress(ValueError):
        color = ImageColor.getrgb(f"rgb({text})" if numbers else text.strip())
        if len(color) == 3 and all(0 <= channel <= 255 for channel in color):
            return color
    raise VitcliError(
        f"{printable(text)} is not a color",
        "write a name, #rrggbb, or three numbers such as 255,255,255",
    )
