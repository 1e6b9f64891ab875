"""What this program's own commands accept, for those who write their command lines."""

from __future__ import annotations

from typing import Any

import typer

from vitcli.commands import COMMANDS, command_function
from vitcli.commands.sweep.options import Command, Option, canonical
from vitcli.config.load import known_keys
from vitcli.config.schema import ModelConfig
from vitcli.config.training import ImagesRun, ShapesRun
from vitcli.errors import VitcliError

CONFIGS: dict[str, type[ModelConfig]] = {"train-shapes": ShapesRun, "train": ImagesRun}
"""What `--set` reaches; every other command that has it sets a ModelConfig."""


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

    def check(arguments: list[str]) -> None:
        try:
            command.make_context(name, list(arguments))
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
