"""The space of a sweep: which keys a command has, and the distributions their values come from.

A value of an option or of a config key becomes the arguments of a trial's process here.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer
from pydantic import Field, PositiveInt

from vitcli.commands import COMMANDS, command_function
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting, known_keys
from vitcli.config.training import ImagesRun, ShapesRun
from vitcli.config.yaml import Section, parse_value
from vitcli.errors import VitcliError

if TYPE_CHECKING:
    import optuna
    from numpy.random import RandomState

OWN = frozenset({"json", "help"})
"""Options a sweep gives itself."""


def canonical(key: str) -> str:
    """One name for an option: `image-size` is `image_size`; a dotted config key is itself."""
    return key if "." in key else key.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Command:
    """A command as the sweep sees it."""

    name: str
    parser: Any
    """typer's command."""
    keys: frozenset[str] = frozenset()
    """The dotted keys that `--set` reaches."""

    @functools.cached_property
    def options(self) -> Mapping[str, Any]:
        """typer's options and arguments by their names in a sweep's file."""
        return {canonical(max(option.opts, key=len)): option for option in self.parser.params}

    @functools.cached_property
    def names(self) -> frozenset[str]:
        """The options and keys that a sweep may give."""
        return self.keys | (self.options.keys() - OWN)

    @property
    def stands_for(self) -> Mapping[str, str]:
        """Options that are shorthands, and their config keys: beside its key, one has no effect."""
        return {o: key for o, key in SHORTHANDS.items() if o in self.options and key in self.keys}

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
            elif option.param_type_name == "argument":
                positional += _several(value)
            else:
                options += _option(key, option, value)
        end = ["--", *positional] if any(p.startswith("-") for p in positional) else positional
        return [self.name, *options, *settings, "--json", *end]

    def check(self, params: Mapping[str, Any]) -> None:
        """Have the command, and the config that it makes of them, read these parameters.

        Raises:
            VitcliError: what either refuses.
        """
        read = {key: value for key, value in params.items() if key not in WRITES - {"out"}}
        words = self.arguments(read)[1:]
        try:
            self.parser.make_context(self.name, list(words))
            if self.name in CONFIGS:  # the command itself says whether its config is good
                with contextlib.redirect_stdout(io.StringIO()):
                    self.parser.main(["--print-config", *words], self.name, standalone_mode=False)
            elif self.keys and not params.get("weights"):
                _check_model(params, self.stands_for)
        except VitcliError:
            raise
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's usage errors have one
                raise
            raise VitcliError(error.format_message(), f"`vitcli {self.name} --help`") from error


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


def _option(name: str, option: Any, value: Any) -> list[str]:
    """How a command line gives one of typer's options a value."""
    flag = max(option.opts, key=len)
    if value is None:  # the command's own default
        return []
    if option.is_flag:
        if not isinstance(value, bool):
            raise VitcliError(
                f"{name}: is a flag (got {value!r}, expected true or false)", f"{name}: true"
            )
        chosen = flag if value else max(option.secondary_opts, key=len, default="")
        return [chosen] if chosen else []
    if option.multiple:
        return [part for item in _several(value) for part in (flag, item)]
    return [flag, ",".join(_several(value))]


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
    "pool": "encoder.pooling",
    **{name: f"encoder.{name}" for name in ("position", "image_size", "registers", "init")},
    "pos_resize": "encoder.position_table.resize",
    "fit": "preprocess.fit",
    "difficulty": "data.difficulty",
    **{name: f"train.{name}" for name in ("lr", "warmup", "epochs", "batch", "seed", "dtype")},
    "lora_rank": "train.lora.rank",
}
"""Options whose config key, set beside them, wins."""


def known_commands() -> dict[str, Command]:
    """What a sweep can run: every command that prints JSON but itself, by name."""
    app = typer.Typer()
    for name in COMMANDS:
        app.command(name)(command_function(name))
    group: Any = typer.main.get_command(app)
    found: dict[str, Command] = {}
    for name, parser in group.commands.items():
        options = Command(name, parser).options
        if "json" in options and name != "sweep":
            keys = known_keys(CONFIGS.get(name, ModelConfig)) if "set" in options else ()
            found[name] = Command(name, parser, frozenset(keys))
    return found


def _check_model(params: Mapping[str, Any], short: Mapping[str, str]) -> None:
    """Resolve the config of a command that runs one or several models."""
    settings = [
        Setting(tuple(short.get(key, key).split(".")), value, f"{key}: {value}")
        for key, value in params.items()
        if (key in short or "." in key) and key not in OF_EACH and value is not None
    ]
    for preset in _several(params.get("preset") or "") or [""]:
        for file in _several(params.get("config") or "") or [""]:
            load_config(ModelConfig, preset or None, Path(file) if file else None, settings)


Scalar = bool | int | float | str | None
LARGEST = 2**62


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Scalar, ...]

    @property
    def size(self) -> float:
        """How many different values there are."""
        return len({repr(value) for value in self.values})

    def suggest(self, trial: optuna.Trial, name: str) -> None:
        trial.suggest_categorical(name, self.values)

    def sample(self, generator: RandomState) -> Scalar:
        if len(self.values) == 1:
            return self.values[0]
        return self.values[int(generator.uniform(size=len(self.values)).argmax())]

    def holds(self, value: Any) -> bool:
        return value in self.values

    def ends(self) -> tuple[Scalar, ...]:
        """What a check must look at to know that every value is good."""
        return self.values


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers where both are written as integers.

    `high` is the last number that steps from `low` reach; `written` is what the file says.
    """

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None
    written: int | float | None = field(default=None, compare=False)

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def stride(self) -> int | float:
        """From one value to the next; 0 for real numbers without a step."""
        return self.step or (1 if self.whole else 0)

    @property
    def size(self) -> float:
        if self.low == self.high:
            return 1
        return round((self.high - self.low) / self.stride) + 1 if self.stride else math.inf

    def suggest(self, trial: optuna.Trial, name: str) -> None:
        if self.whole:
            low, high, step = int(self.low), int(self.high), int(self.stride)
            trial.suggest_int(name, low, high, step=step, log=self.log)
        else:
            trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def sample(self, generator: RandomState) -> int | float:
        """Uniform over the values, or over their logarithms.

        With a step, half a step is added at both ends so that the outer values are as likely as
        the others. The same generator gives what Optuna's RandomSampler draws from it.
        """
        if self.low == self.high:
            return self.low
        low, high = self.low - self.stride / 2, self.high + self.stride / 2
        if self.log:
            drawn = math.exp(generator.uniform(math.log(low), math.log(high)))
            drawn = round(drawn) if self.whole else drawn
        else:
            drawn = generator.uniform(low, high)
            if self.stride:
                steps = (drawn - self.low) / self.stride
                count = math.floor(steps + 0.5) if self.whole else round(steps)
                drawn = count * self.stride + self.low
        last = self.high if self.stride else math.nextafter(self.high, self.low)
        drawn = min(max(drawn, self.low), last)
        return int(drawn) if self.whole else float(drawn)

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def ends(self) -> tuple[Scalar, ...]:
        return (self.low, self.high)


def read_space(value: Any) -> Choice | Range:
    """A list of choices, or `{low, high}` with `log` or `step`.

    Raises:
        ValueError: anything else, or a range that holds nothing.
    """
    if isinstance(value, list):
        if not value or any(isinstance(item, list | dict) for item in value):
            raise ValueError("choices are a list of at least one scalar")
        return Choice(tuple(value))
    if not isinstance(value, dict):
        raise ValueError(f"expected choices or a range, got {value!r}")
    unknown = value.keys() - {"low", "high", "log", "step"}
    if unknown:
        raise ValueError(f"unknown key {min(unknown)!r} (known: low, high, log, step)")
    low, high, step = (value.get(key) for key in ("low", "high", "step"))
    for name, number in (("low", low), ("high", high), ("step", step if "step" in value else 1)):
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{name} must be a number, got {number!r}")
        if abs(number) > LARGEST or number != number:
            raise ValueError(f"{name} must be a finite number, got {number:.3g}")
    log = value.get("log", False)
    if not isinstance(log, bool):
        raise ValueError(f"log must be true or false, got {log!r}")
    assert isinstance(low, int | float) and isinstance(high, int | float)
    if low > high:
        raise ValueError(f"low {low} is above high {high}")
    if log and (low <= 0 or step is not None):
        raise ValueError("log needs low above zero and no step")
    if step is not None and step <= 0:
        raise ValueError(f"step must be above zero, got {step}")
    found = Range(low, high, log, step)
    if found.whole and isinstance(step, float):
        raise ValueError("a range of integers needs an integer step")
    last = _last_step(low, high, step) if step else high
    return found if last == high else Range(low, last, log, step, written=high)


def _last_step(low: int | float, high: int | float, step: int | float) -> int | float:
    """The last number at or below `high` that steps from `low` reach, in decimal arithmetic."""
    start, stride = Decimal(str(low)), Decimal(str(step))
    last = start + (Decimal(str(high)) - start) // stride * stride
    return int(last) if isinstance(low, int) and isinstance(high, int) else float(last)


def draw(space: Mapping[str, Choice | Range], trials: int, seed: int) -> list[dict[str, Any]]:
    """`trials` independent points; more trials continue the same sequence.

    The axes are drawn in the order of their names, so that the order in the file does not matter.
    """
    from numpy.random import RandomState

    generator = RandomState(seed)
    return [{key: space[key].sample(generator) for key in sorted(space)} for _ in range(trials)]


class RandomSection(Section):
    """Points drawn at once, independently, from `space`; the same seed draws the same points."""

    trials: PositiveInt
    seed: int = Field(default=0, ge=0, lt=2**32)
    space: dict[str, Any]


class PrunerSection(Section):
    """Ends a trial whose best value so far is worse than the finished trials' median at the step.

    The intermediate values are read from a JSON-lines file that the trial itself writes.
    """

    kind: Literal["median"] = "median"
    file: str = "{trial}/run/metrics.jsonl"
    step: str = "step"
    value: str
    startup_trials: int = Field(default=5, ge=0)
    warmup_steps: int = Field(default=0, ge=0)


class SearchSection(Section):
    """Points drawn one after the other by an Optuna sampler that learns from those before."""

    trials: PositiveInt
    metric: str
    direction: Literal["maximize", "minimize"]
    sampler: Literal["tpe", "random"] = "tpe"
    seed: int | None = Field(default=None, ge=0, lt=2**31)
    pruner: PrunerSection | None = None
    space: dict[str, Any]
