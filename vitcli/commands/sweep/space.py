"""Distributions: what `random` and `search` draw from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vitcli.config.schema import Section

if TYPE_CHECKING:
    import optuna
    from numpy.random import RandomState

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
    def size(self) -> float:
        """How many different values there are; infinite for real numbers without a step."""
        step = self.step or (1 if self.whole else 0)
        if self.low == self.high:
            return 1
        return round((self.high - self.low) / step) + 1 if step else math.inf

    def suggest(self, trial: optuna.Trial, name: str) -> None:
        if self.whole:
            step = int(self.step or 1)
            trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        else:
            trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def sample(self, generator: RandomState) -> int | float:
        """Uniform over the values, or over their logarithms.

        With a step, half a step is added at both ends so that the outer values are as likely as
        the others. The same generator gives what Optuna's RandomSampler draws from it.
        """
        if self.low == self.high:
            return self.low
        step = self.step or (1 if self.whole else 0)
        if self.log:
            ends = math.log(self.low - step / 2), math.log(self.high + step / 2)
            drawn = math.exp(generator.uniform(*ends))
            drawn = round(drawn) if self.whole else drawn
        elif step:
            place = generator.uniform(self.low - step / 2, self.high + step / 2)
            steps = (place - self.low) / step
            count = math.floor(steps + 0.5) if self.whole else round(steps)
            drawn = count * step + self.low
        else:
            drawn = generator.uniform(self.low, self.high)
        last = self.high if self.whole or step else math.nextafter(self.high, self.low)
        drawn = min(max(drawn, self.low), last)
        return int(drawn) if self.whole else float(drawn)

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high

    def ends(self) -> tuple[Scalar, ...]:
        """What a check must look at to know that every value is good."""
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


class MetricSection(Section):
    """A column: where its value stands in the result, and how figures and sentences name it."""

    path: str
    label: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None


class CurveSection(Section):
    """Dotted paths of two lists of equal length in the result, drawn as one curve per trial."""

    x: str
    y: str


class SweepSection(Section):
    """The whole file."""

    name: str = ""
    question: str = ""
    command: str
    base: dict[str, Any] = Field(default_factory=dict)
    grid: dict[str, Any] = Field(default_factory=dict)
    zip: dict[str, Any] = Field(default_factory=dict)
    random: RandomSection | None = None
    search: SearchSection | None = None
    repeat: PositiveInt | dict[str, Any] = 1
    labels: dict[str, str] = Field(default_factory=dict)
    """How figures name an option or a config key; by default its last word."""
    metrics: list[str] | dict[str, str | MetricSection] = Field(default_factory=dict)
    curve: CurveSection | None = None
    jobs: PositiveInt = 1
    timeout: PositiveFloat | None = None
    """Seconds a trial may take."""
    max_failures_in_row: PositiveInt | None = 5
    storage: str | None = None
