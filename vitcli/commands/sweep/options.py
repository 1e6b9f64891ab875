"""What a command accepts, and how an option's or a config key's value becomes arguments."""

from __future__ import annotations

import contextlib
import io
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from vitcli.commands import COMMANDS, command_function
from vitcli.config.load import Setting, known_keys, load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.training import ImagesRun, ShapesRun
from vitcli.config.yaml import parse_value
from vitcli.errors import VitcliError

OWN = frozenset({"json", "help"})
"""Options a sweep gives itself."""


def canonical(key: str) -> str:
    """One name for an option: `image-size` is `image_size`; a dotted config key is itself."""
    return key if "." in key else key.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Option:
    """One option or argument of a command; `flag` is empty for an argument."""

    name: str
    flag: str
    off_flag: str = ""
    is_switch: bool = False
    repeatable: bool = False


@dataclass(frozen=True)
class Command:
    """A command as the sweep sees it.

    `keys` are the dotted keys that `--set` reaches; `check` raises VitcliError for parameters that
    the command or its config refuses.
    """

    name: str
    options: Mapping[str, Option]
    keys: frozenset[str] = frozenset()
    check: Callable[[Mapping[str, Any]], None] = lambda params: None
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """Options that are shorthands, and their config keys: beside its key, one has no effect."""

    @property
    def writes(self) -> frozenset[str]:
        """The options and arguments that name a file or folder to be written."""
        return WRITES & self.options.keys()

    def knows(self, key: str) -> bool:
        return key in self.keys or (key in self.options and key not in OWN)

    def names(self) -> list[str]:
        return sorted({*self.keys, *(self.options.keys() - OWN)})

    def arguments(self, params: Mapping[str, Any]) -> list[str]:
        """The command line after `vitcli`: options by name, then `--set` keys, then arguments.

        Raises:
            VitcliError: a switch that is given a value other than true or false.
        """
        options: list[str] = []
        settings: list[str] = []
        positional: list[str] = []
        for key in sorted(params):
            value = params[key]
            option = self.options.get(key)
            if option is None:
                settings += ["--set", f"{key}={setting_text(value)}"]
            elif not option.flag:
                positional += _several(value)
            else:
                options += _option(option, value)
        end = ["--", *positional] if any(p.startswith("-") for p in positional) else positional
        return [self.name, *options, *settings, "--json", *end]


def setting_text(value: Any) -> str:
    """A value as `--set` reads it back: YAML on one line."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        plain = parse_value(value, "") == value
    except VitcliError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)


def _option(option: Option, value: Any) -> list[str]:
    if value is None:  # the command's own default
        return []
    if option.is_switch:
        if not isinstance(value, bool):
            raise VitcliError(
                f"{option.name} is on or off, not {value!r}", f"{option.name}: true or false"
            )
        chosen = option.flag if value else option.off_flag
        return [chosen] if chosen else []
    if option.repeatable:
        return [part for item in _several(value) for part in (option.flag, item)]
    return [option.flag, ",".join(_several(value))]


def _several(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in values]


WRITES = frozenset(
    {"out", "plot", "confusion", "map", "overlay", "trace", "show_data", "csv", "parquet"}
)
"""Options and arguments that name a file or folder to be written, of whatever command."""
CONFIGS: dict[str, type[ModelConfig]] = {"train-shapes": ShapesRun, "train": ImagesRun}
"""What `--set` reaches; every other command that has it sets a ModelConfig."""


OF_EACH = frozenset({"image_size", "registers"})
"""What some commands read as a list or as the size of the input, not of the position table."""
SHORTHANDS = {
    "norm": "encoder.norm_placement",
    "position": "encoder.position",
    "pool": "encoder.pooling",
    "pos_resize": "encoder.position_table.resize",
    "image_size": "encoder.image_size",
    "registers": "encoder.registers",
    "init": "encoder.init",
    "difficulty": "data.difficulty",
    "lr": "train.lr",
    "warmup": "train.warmup",
    "epochs": "train.epochs",
    "batch": "train.batch",
    "seed": "train.seed",
    "dtype": "train.dtype",
    "lora_rank": "train.lora.rank",
}
"""Options whose config key, set beside them, wins."""


def known_commands() -> dict[str, Command]:
    """What a sweep can run: every command that prints JSON but itself, by name."""
    app = typer.Typer()
    for name in COMMANDS:
        app.command(name)(command_function(name))
    group: Any = typer.main.get_command(app)
    commands = {name: _command(name, command) for name, command in group.commands.items()}
    return {name: c for name, c in commands.items() if "json" in c.options and name != "sweep"}


def _command(name: str, command: Any) -> Command:
    options: dict[str, Option] = {}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            option = Option(parameter.name, "")
        else:
            flag = max(parameter.opts, key=len)
            off = max(parameter.secondary_opts, key=len, default="")
            switch = bool(parameter.is_flag)
            option = Option(canonical(flag), flag, off, switch, bool(parameter.multiple))
        options[option.name] = option

    def check(params: Mapping[str, Any]) -> None:
        made = Command(name, options, keys, stands_for=short)
        drawn = {key: value for key, value in params.items() if key not in WRITES - {"out"}}
        words = made.arguments(drawn)[1:]
        try:
            command.make_context(name, list(words))
            if name in CONFIGS:  # the command itself says whether its config is good
                with contextlib.redirect_stdout(io.StringIO()):
                    command.main(["--print-config", *words], name, standalone_mode=False)
            elif keys and not params.get("weights"):
                _check_model(params, short)
        except VitcliError:
            raise
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's usage errors have one
                raise
            raise VitcliError(error.format_message(), f"`vitcli {name} --help`") from error

    config = CONFIGS.get(name, ModelConfig)
    keys = frozenset(known_keys(config)) if "set" in options else frozenset()
    short = {option: key for option, key in SHORTHANDS.items() if option in options and key in keys}
    return Command(name, options, keys, check, short)


def _check_model(params: Mapping[str, Any], short: Mapping[str, str]) -> None:
    """Resolve the config of a command that runs one or several models."""
    settings = [
        Setting(tuple(short.get(key, key).split(".")), value, f"{key}: {value}")
        for key, value in params.items()
        if (key in short or "." in key) and key not in OF_EACH and value is not None
    ]
    presets, files = params.get("preset"), params.get("config")
    several = [*_several(presets or []), *([] if presets else [None])]
    for preset in several:
        for file in _several(files or []) or [""]:
            load_config(ModelConfig, preset, Path(file) if file else None, settings)
