"""Which encoder a command is asked for: preset, then file, then settings, then weights.

Errors name the layer that is wrong.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from vitcli.config.attention_variants import POSITIONS
from vitcli.config.schema import FOLLOWS_IMAGE, EncoderConfig, ModelConfig, PreprocessConfig
from vitcli.config.settings import Layers, Setting, nearest, shortened, validate
from vitcli.config.variants import HEADS
from vitcli.config.yaml import Document, dump_yaml, parse_yaml, read_yaml
from vitcli.errors import VitcliError, check_choice

Config = TypeVar("Config", bound=ModelConfig)
DEFAULT_PRESET = "vit-b16"
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


def checkpoint_of(source: str) -> tuple[str | None, str]:
    """(the library named before a checkpoint or None, the checkpoint).

    Raises:
        VitcliError: an architecture, which has no weights.
    """
    if is_architecture(source):
        raise VitcliError(
            f"{source}: is an architecture with random weights (expected a checkpoint)",
            "name a directory or hub id",
        )
    return split_library(source)


def preset_names() -> list[str]:
    """The presets that ship with the package, sorted."""
    folder = resources.files("vitcli.config") / "presets"
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".yaml"))


def preset_layers(name: str, source: str = "") -> list[Document]:
    """The preset's YAML after those it is based on; `source` is the file and line that names it."""
    if name not in preset_names():
        named = f"{source}: " if source else ""
        if split_library(name)[0]:
            raise VitcliError(
                f"{named}{shortened(name)} is run by its own library, which is not possible here",
                f"vitcli encode --preset {name}",
            )
        hint = nearest(name[:100], preset_names(), "run `vitcli presets` for the list")
        raise VitcliError(f"{named}{shortened(name)} is not a preset", hint)
    file = resources.files("vitcli.config") / "presets" / f"{name}.yaml"
    document = parse_yaml(file.read_text(encoding="utf-8"), f"preset {name}")
    base = document.data.pop("preset", None)
    return [*(preset_layers(base) if base else []), document]


def read_saved_config(path: str | Path) -> Document:
    """A config.yaml that vitcli wrote beside weights or into a run, by any release.

    The first release wrote every key, `encoder.head_dim` among them, and counted blocks and heads
    from 0; what it wrote is brought to today's names and counts.
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
    """The config whose preprocessing gives images of this (height, width) in pixels."""
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
    covers `size` and crops it; rules whose result follows the image become `squash`, in a
    `square` of the image's longer side where there is a `square`.
    """
    crop, resize = config.crop_size, config.resize_size
    changes: dict[str, Any]
    if config.resize in (*FOLLOWS_IMAGE, "closest") and crop is None:
        changes = {"resize": "squash", "resize_size": size, "fill": None}
        changes |= {"square": 0} if config.square else {}
    elif config.resize in ("squash", "tile", "canvas") and crop is None:
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
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Types of weights, and the bytes of a value."""


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
        check_choice("--dtype", self.dtype, DTYPES)
        check_choice("--which", self.which, COPIES)
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


def read_tensors(
    which: Sequence[str] | None, prefix: Sequence[str] | None, checkpoints: int
) -> list[dict[str, Any]]:
    """The fields of a request that say which tensors are read, for each of several checkpoints."""
    given = {name: v for name, v in (("which", which), ("prefix", prefix)) if v}
    for name, values in given.items():
        if len(values) not in (1, checkpoints) or not checkpoints:
            raise VitcliError(
                f"--{name}: got {len(values)} values for {checkpoints} checkpoints (expected one, "
                "or one for each)",
                f"--{name} {values[0]}" if checkpoints else f"leave out --{name}",
            )
    return [
        {name: values[i % len(values)] for name, values in given.items()}
        for i in range(checkpoints)
    ]


def registers_setting(count: int) -> Setting:
    return Setting(("encoder", "registers"), count, f"--registers {count}")


def split_source(text: str) -> dict[str, str]:
    """`SOURCE` or `PRESET=SOURCE` as the fields of a request."""
    preset, equals, source = text.partition("=")
    if equals and preset in preset_names():
        return {"preset": preset, "weights": source}
    return {"weights": text}
