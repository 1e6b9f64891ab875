"""Which encoder a command is asked for: preset, then file, then settings, then weights.

Errors name the layer that is wrong.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from vitcli.config.pooling import HEADS
from vitcli.config.schema import FOLLOWS_IMAGE, EncoderConfig, ModelConfig, PreprocessConfig
from vitcli.config.variants import POSITIONS
from vitcli.config.yaml import (
    Document,
    KeyPath,
    dump_yaml,
    leaves,
    parse_value,
    parse_yaml,
    read_yaml,
)
from vitcli.errors import VitcliError

Config = TypeVar("Config", bound=ModelConfig)
Schema = TypeVar("Schema", bound=BaseModel)
DEFAULT_PRESET = "vit-b16"
RENAMED = {"encoder.head_dim": "encoder.head_out"}
"""Keys of earlier releases. `head_dim` was the width of the output head; in the field it is the
width of an attention head."""
RENAMED_HINT = "write encoder.head_out, the width of the head's output"


@dataclass(frozen=True)
class Setting:
    """One value for one dotted key, and what the user wrote to set it."""

    path: KeyPath
    value: Any
    source: str


def parse_setting(text: str) -> Setting:
    """`encoder.depth=6` as a Setting; the value is YAML.

    Raises:
        VitcliError: no `=`, or a value that is not YAML.
    """
    key, equals, value = text.partition("=")
    source = f"--set {text if len(text) <= 80 else text[:79] + '…'}"
    if not equals or not key.strip():
        raise VitcliError(f"{source}: is not KEY=VALUE", "--set encoder.depth=6")
    return Setting(tuple(key.strip().split(".")), parse_value(value, source), source)


LIBRARIES = ("timm", "transformers", "open_clip")
"""Libraries that the reference engine runs; `timm:` before a name or source asks for one."""


def split_library(name: str) -> tuple[str | None, str]:
    """`timm:resnet50` as the library and its own name; None where no library is named."""
    library, colon, rest = name.partition(":")
    return (library, rest) if colon and rest and library in LIBRARIES else (None, name)


def is_architecture(name: str) -> bool:
    """`timm:NAME` of an architecture; with a slash or an existing path it is a checkpoint."""
    library, own = split_library(name)
    return library == "timm" and "/" not in own and not Path(own).exists()


def preset_names() -> list[str]:
    """The presets that ship with the package, sorted."""
    folder = resources.files("vitcli.config") / "presets"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def preset_layers(name: str, source: str = "") -> list[Document]:
    """The preset's YAML, after those it is based on; `source` is the file and line that names it.

    Raises:
        VitcliError: there is no such preset.
    """
    if name not in preset_names():
        named = f"{source}: " if source else ""
        if split_library(name)[0]:
            raise VitcliError(
                f"{named}{_short(name)} is run by its own library, which is not possible here",
                "vitcli encode, embed, neighbors, probe, compare, params and attn-entropy run it",
            )
        hint = nearest(name[:100], preset_names(), "run `vitcli presets` for the list")
        raise VitcliError(f"{named}{_short(name)} is not a preset", hint)
    file = resources.files("vitcli.config") / "presets" / f"{name}.yaml"
    document = parse_yaml(file.read_text(encoding="utf-8"), f"preset {name}")
    base = document.data.pop("preset", None)
    return [*(preset_layers(base) if base else []), document]


def read_saved_config(path: str | Path) -> Document:
    """A config.yaml that vitcli wrote beside weights or into a run, by any release.

    The first release wrote every key, `encoder.head_dim` among them, and counted blocks and heads
    from 0; what it wrote is brought to today's names and counts.

    Raises:
        VitcliError: as `read_yaml`.
    """
    document = read_yaml(path)
    encoder, data = document.data.get("encoder"), document.data.get("data")
    shapes = data.get("classes") if isinstance(data, dict) else None
    if shapes and "classes" not in document.data:  # a run on shapes
        document.data["classes"] = shapes
    if not isinstance(encoder, dict) or "head_dim" not in encoder:
        return document
    encoder["head_out"] = encoder.pop("head_dim")
    attention, train = encoder.get("attention"), document.data.get("train")
    lora = train.get("lora") if isinstance(train, dict) else None
    if isinstance(attention, dict) and isinstance(attention.get("full_blocks"), list):
        attention["full_blocks"] = [
            block + 1 if isinstance(block, int) else block for block in attention["full_blocks"]
        ]
    if isinstance(lora, dict) and isinstance(lora.get("heads"), list):
        lora["heads"] = [_from_one(head) for head in lora["heads"]]
    return document


def _from_one(head: Any) -> Any:
    """`11:2`, counted from 0, as `12:3`."""
    found = re.fullmatch(r"(\d+):(\d+)", str(head))
    return f"{int(found[1]) + 1}:{int(found[2]) + 1}" if found else head


@dataclass
class Layers:
    """Values merged so far, and which layer, from 1, and what in it gave each dotted key."""

    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, tuple[int, str]] = field(default_factory=dict)
    count: int = 0

    def add(self, document: Document) -> None:
        """A layer of many values."""
        self.count += 1
        for path, value in leaves(document.data):
            line = document.lines.get(path)
            self._put(Setting(path, value, document.source + (f":{line}" if line else "")))

    def set(self, setting: Setting) -> None:
        """A layer of one value, or of the values of one section."""
        self.count += 1
        self._put(setting)

    def _put(self, setting: Setting) -> None:
        for path, value in leaves(setting.value, setting.path):
            node = self.data
            for depth, key in enumerate(path[:-1], start=1):
                child = node.setdefault(key, {})
                if not isinstance(child, dict):
                    dotted = ".".join(path[:depth])
                    raise VitcliError(
                        f"{setting.source}: {dotted} is a value, not a section",
                        f"set {dotted} itself",
                    )
                node = child
            node[path[-1]] = value
            self.sources[path] = (self.count, setting.source)

    def source(self, *paths: KeyPath) -> str:
        """Who gave one of these keys, or one above or below it.

        That is the last layer that did; in it the closest key, and the first of `paths`.
        """
        about = [
            (layer, -abs(len(given) - len(path)), -index, source)
            for given, (layer, source) in self.sources.items()
            for index, path in enumerate(paths)
            if given[: len(path)] == path[: len(given)]
        ]
        return max(about)[-1] if about else "config"


def load_config(
    schema: type[Config],
    preset: str | None = None,
    file: Path | None = None,
    settings: Sequence[Setting] = (),
    start: Document | None = None,
) -> Config:
    """The config of a preset, a YAML file and settings, in this order; the later wins.

    `start` is what there is before them if no preset is named. A changed `encoder.image_size`
    takes the preprocessing along, unless more of that than its `fit` is given too.

    Raises:
        VitcliError: unknown keys, wrong types or impossible combinations, with file and line.
    """
    layers = Layers()
    document = read_yaml(file) if file else None
    base = document.data.pop("preset", None) if document else None
    if base is not None and not isinstance(base, str):
        raise VitcliError(f"{file}: preset: is not a name", "run `vitcli presets` for the list")
    if base and preset and base != preset:
        raise VitcliError(
            f"--preset {preset}: {file} has another preset (got {preset}, expected {base})",
            "leave out --preset",
        )
    # A file without a preset starts from the schema's defaults, which are ViT-B/16.
    name = preset or base or (None if document or start else DEFAULT_PRESET)
    if start and not name:
        layers.add(start)
    named_in = "" if preset or not document else f"{file}:{document.lines.get(('preset',), 1)}"
    for layer in preset_layers(name, named_in) if name else []:
        layers.add(layer)
    given = dict(layers.sources)
    if document:
        layers.set(Setting(("name",), Path(document.source).stem, document.source))
        layers.add(document)
    for setting in settings:
        layers.set(setting)
    config = validate(schema, layers)
    changed = {path[:2] for path, source in layers.sources.items() if given.get(path) != source}
    sized = any(path[0] == "preprocess" and path[1:] != ("fit",) for path in changed)
    if ("encoder", "image_size") in changed and not sized:
        return for_input_size(config, config.encoder.image_size)
    return config


def for_input_size(config: Config, size: tuple[int, int]) -> Config:
    """The config whose preprocessing gives images of this (height, width) in pixels.

    Raises:
        VitcliError: a patch does not fit into it, or the cells that the head joins do not.
    """
    check_grid(config.encoder, size)
    return config.model_copy(update={"preprocess": resized_to(config.preprocess, size)})


def check_grid(encoder: EncoderConfig, size: tuple[int, int]) -> tuple[int, int]:
    """(rows, columns) of the patches of an input of `size` (height, width) in pixels.

    Raises:
        VitcliError: a patch does not fit into it, or the cells that the head joins do not.
    """
    patch, cell = encoder.patch_size, HEADS[encoder.head].cell
    rows, columns = encoder.grid_at(size)
    shown = f"an input of {size[0]}x{size[1]} px"
    if not rows * columns:
        raise VitcliError(f"{shown} is smaller than a patch of {patch} px", f"--image-size {patch}")
    if rows % cell or columns % cell:
        raise VitcliError(
            f"{shown} has {rows}x{columns} patches, but the {encoder.head} head joins "
            f"{cell}x{cell} of them",
            f"give an --image-size that is a multiple of {cell * patch}",
        )
    return rows, columns


def validate(schema: type[Schema], layers: Layers) -> Schema:
    """The layers as a `schema`; errors name the source, the dotted key and the nearest key."""
    try:
        return schema.model_validate(layers.data)
    except ValidationError as error:
        raise _explain(schema, layers, error) from error


def _explain(schema: type[BaseModel], layers: Layers, error: ValidationError) -> VitcliError:
    problems = error.errors()
    # A misspelled key comes first: the key that was meant may also be missing.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        source, dotted = layers.source(path), ".".join(path)
        if dotted in RENAMED:
            return VitcliError(f"{source}: {dotted}: is {RENAMED[dotted]} now", RENAMED_HINT)
        return VitcliError(f"{source}: {dotted}: unknown key", nearest(dotted, known_keys(schema)))
    if problem["type"] == "value_error":  # our own checks begin with the keys they are about
        named, _, text = str(problem["ctx"]["error"]).partition(": ")
        paths = [(*path, *key.split(".")) for key in named.split(", ")]
        return VitcliError(
            f"{layers.source(*paths)}: {'.'.join(paths[0])}: {text}",
            "change either key" if len(paths) > 1 else _example(schema),
        )
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], str):
        hint = f"write `{path[-1]}: …`"
        return VitcliError(f"{layers.source(path[:-1])}: {'.'.join(path)}: is missing", hint)
    keys = set(known_keys(schema))
    while path and ".".join(path) not in keys and len(path) > 1:
        path = path[:-1]  # positions inside a list are not keys
    value = problem["input"]
    shown = f", got {_short(value)}" if isinstance(value, str | int | float | bool | None) else ""
    text = problem["msg"][0].lower() + problem["msg"][1:]
    if problem["type"] == "missing":  # of a list
        text = f"too few values, there are {problem['loc'][-1]}"
    hint = {"bool_type": "write true or false"}.get(problem["type"], _example(schema))
    if problem["type"] == "literal_error" and isinstance(value, str):
        words = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        hint = nearest(value, words, hint)
    return VitcliError(f"{layers.source(path)}: {'.'.join(path)}: {text}{shown}", hint)


def _example(schema: type[BaseModel]) -> str:
    """Where valid values of every key are seen."""
    command = {"ModelConfig": "params", "ShapesRun": "train-shapes", "ImagesRun": "train DATA"}
    shown = command.get(schema.__name__)
    return f"run `vitcli {shown} --print-config` for valid values" if shown else "change the value"


def _short(value: Any) -> str:
    """A value as it is written, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:  # too long to print, or to convert
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def known_keys(schema: type[BaseModel], path: KeyPath = ()) -> list[str]:
    """Every dotted key of a schema, sections included."""
    keys: list[str] = []
    for name, info in schema.model_fields.items():
        keys.append(".".join((*path, name)))
        for kind in (info.annotation, *get_args(info.annotation)):  # a section, or one or none
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, (*path, name))
    return keys


def nearest(word: str, known: Sequence[str], otherwise: str = "") -> str:
    """`did you mean …?`, by the whole dotted key first, then by its last word.

    Where nothing is near, `otherwise`, else all that is known.
    """
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not matches:
        tails = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
        last = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.6)
        matches = [tails[last[0]]] if last else difflib.get_close_matches(word, known, 1, 0.4)
    if matches:
        return f"did you mean {matches[0]}?"
    return otherwise or "known: " + ", ".join(known)


def config_yaml(config: ModelConfig) -> str:
    """The whole config as YAML; `load_config` reads it back to an equal config."""
    return dump_yaml(config.model_dump(mode="python"))


def resized_to(config: PreprocessConfig, size: tuple[int, int]) -> PreprocessConfig:
    """The preprocessing for another input size (height, width) of the encoder.

    A center crop becomes `size`, and the resize before it keeps its proportion to the crop as
    timm's `crop_pct` does: floor(side / crop_pct), where crop_pct is the roundest number (in
    steps of 1, 0.1, 0.01, 0.005, 0.001) that gives the present pair. So 256 then 224 (0.875)
    becomes 592 then 518, and 248 then 224 (0.9) becomes 426 then 384. A size that is not square
    makes `shortest` cover both sides. Without a crop: `squash` squashes to `size`; `shortest`
    covers `size` and crops it; `smart`, `patches`, `within` and `none`, whose result follows the
    image, become `squash`.
    """
    crop, resize = config.crop_size, config.resize_size
    changes: dict[str, Any]
    if config.resize in FOLLOWS_IMAGE and crop is None:
        changes = {"resize": "squash", "resize_size": size}
    elif config.resize in ("squash", "tile") and crop is None:
        changes = {"resize_size": size}
    elif crop is None or resize is None:
        changes = {"resize_size": resize and size, "crop_size": size}
    else:
        sides = zip(size, crop, resize, strict=True)
        new = tuple(math.floor(to / _crop_pct(c, r)) for to, c, r in sides)
        changes = {"resize_size": new, "crop_size": size}
    return PreprocessConfig.model_validate({**dict(config), **changes})


def _crop_pct(crop: int, resize: int) -> float:
    for steps in (1, 10, 100, 200, 1000):
        pct = math.floor(crop / resize * steps) / steps
        if pct > 0 and math.floor(crop / pct) == resize:
            return pct
    return crop / resize


NAME_A_PRESET = "--preset NAME (NAME=SOURCE where encoders are compared)"
"""The hint for a checkpoint without config; commands on several encoders take NAME=SOURCE."""
COPIES = ("ema", "raw")
REFERENCE = "reference"
DTYPES = ("float32", "bfloat16", "float16", "float64")


def check_device(name: str) -> None:
    """Refuse an unknown device; `vitcli.loading.pick_device` refuses one that is not available."""
    if not re.fullmatch(r"auto|(cpu|cuda|mps)(:\d+)?", name):
        raise VitcliError(
            f"--device {name}: unknown (expected auto, cpu, cuda, cuda:1 or mps)", "--device auto"
        )


def check_settings(settings: Sequence[Setting], config: ModelConfig) -> None:
    """Refuse what the encoder has nothing for: a rule for resizing a position table that is not
    there, class names for other outputs than it has.

    Raises:
        VitcliError: with the option that asks for it.
    """
    encoder = config.encoder
    for setting in settings:
        if setting.path == ("encoder", "position_table", "resize") and not (
            POSITIONS[encoder.position].resizes
        ):
            raise VitcliError(
                f"{setting.source}: the encoder does not have a position table (position: "
                f"{encoder.position})",
                f"leave out {setting.source.partition(' ')[0]}",
            )
        names = config.classes if setting.path == ("classes",) else None
        if names is not None and len(names) != (encoder.head_out or 0):
            raise VitcliError(
                f"{setting.source}: wrong number of names (got {len(names)}, "
                f"expected {encoder.head_out or 0}, one per output)",
                "leave out classes, or name each output of the head",
            )


def layer_index(layer: int, depth: int, named: str = "--layer") -> int:
    """The number of a layer, 0 to `depth`.

    0 is the input of the first block, i the output of block i, -1 the last, as in transformers'
    `hidden_states`.

    Raises:
        VitcliError: the encoder does not have it; `named` is how the error calls the setting.
    """
    if not -depth - 1 <= layer <= depth:
        raise VitcliError(
            f"{named} {layer}: the encoder does not have this layer (got {layer}, expected 0 to "
            f"{depth}, or -1 for the last)",
            f"{named} {depth}",
        )
    return layer % (depth + 1)


@dataclass(frozen=True)
class ModelRequest:
    """One encoder as the command line names it.

    `weights` is a file, a directory or a hub id; without it weights are random, drawn from
    `seed`. `image_size` is (height, width) in pixels.

    Raises:
        VitcliError: an unknown device or dtype, a seed out of range.
    """

    preset: str | None = None
    config_file: Path | None = None
    settings: tuple[Setting, ...] = ()
    weights: str | None = None
    adapter: str | None = None
    """A file of low-rank adapters, added into the weights."""
    which: str | None = None
    """`ema` or `raw`, where the checkpoint has an averaged copy of its weights."""
    prefix: str | None = None
    """Prefix of the vision tower's tensor names, if it is not found automatically."""
    seed: int = 0
    image_size: tuple[int, int] | None = None
    device: str = "auto"
    dtype: str = "float32"
    engine: str | None = None
    """One of `vitcli.engines.ENGINES`, auto, or None for the fastest without preparation."""

    def __post_init__(self) -> None:
        check_device(self.device)
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise VitcliError(
                f"--dtype {self.dtype}: unknown (expected {known})", "--dtype float32"
            )
        if self.which not in (None, *COPIES):
            raise VitcliError(f"--which {self.which}: unknown (expected ema or raw)", "--which ema")
        for option, value in (("--which", self.which), ("--prefix", self.prefix)):
            if value is not None and self.weights is None:
                raise VitcliError(f"{option} {value}: --weights is missing", "add --weights SOURCE")
        if not 0 <= self.seed < 2**63:
            raise VitcliError(
                f"--seed {self.seed}: is out of range (expected 0 to 2^63 - 1)", "--seed 0"
            )
        if self.by_library:
            self._check_library()

    @property
    def by_library(self) -> bool:
        """Run by the encoder's own library: by `--engine reference`, or by its name."""
        names = (self.preset, self.weights)
        return self.engine == REFERENCE or any(name and split_library(name)[0] for name in names)

    def repeated(self, place: int) -> ModelRequest:
        """The same encoder with the random weights of the seed `place` further on.

        Raises:
            VitcliError: its weights are a checkpoint's.
        """
        if place and self.weights is not None:
            raise VitcliError(
                f"--seeds: repeats random weights (got --weights {self.weights})",
                "leave --seeds out: checkpoints are compared over images",
            )
        return replace(self, seed=self.seed + place)

    def _check_library(self) -> None:
        """Refuse what an encoder that its library runs unchanged cannot follow."""
        named = self.weights or self.preset or "vitcli's own encoder"
        if self.engine not in (None, REFERENCE):
            raise VitcliError(
                f"--engine {self.engine}: {named} is run by its own library", "--engine reference"
            )
        if self.weights and self.preset:
            raise VitcliError(
                f"--preset {self.preset}: {named} is run by its own library, which needs none",
                "leave out --preset",
            )
        if not self.weights and not split_library(self.preset or "")[0]:
            raise VitcliError(
                f"--engine {REFERENCE}: {self.preset or named} is not of another library (expected "
                "a checkpoint or timm:ARCHITECTURE)",
                "--preset timm:resnet50",
            )
        changes = {
            "--config": self.config_file and str(self.config_file),
            "--adapter": self.adapter,
            "--which": self.which,
            "--prefix": self.prefix,
        }
        given = [f"{option} {value}" for option, value in changes.items() if value]
        given += [s.source for s in self.settings if s.path[0] != "preprocess"]
        if given:
            raise VitcliError(
                f"{given[0]}: {named} is run by its own library, unchanged",
                f"leave out {given[0].split()[0]}",
            )

    def fresh_config(self) -> ModelConfig:
        """The config of a model without weights; `image_size` is what it reads, not its table's.

        Raises:
            VitcliError: a bad config, or an encoder of another library, which has none.
        """
        if self.by_library:
            raise VitcliError(
                f"{self.preset}: is run by its own library, so it has no vitcli config",
                "vitcli presets lists the encoders that have one",
            )
        config = load_config(ModelConfig, self.preset, self.config_file, self.settings)
        return for_input_size(config, self.image_size) if self.image_size else config
