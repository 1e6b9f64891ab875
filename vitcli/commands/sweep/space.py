"""Distributions: what `random` and `search` draw from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vitcli.config.schema import Section

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

Scalar = bool | int | float | str | None


@dataclass(frozen=True)
class Choice:
    """One of a few values."""

    values: tuple[Scalar, ...]

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import CategoricalDistribution

        return CategoricalDistribution(self.values)

    def suggest(self, trial: optuna.Trial, name: str) -> None:
        trial.suggest_categorical(name, self.values)

    def holds(self, value: Any) -> bool:
        return value in self.values


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included; integers where both are written as integers."""

    low: int | float
    high: int | float
    log: bool = False
    step: int | float | None = None

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def distribution(self) -> BaseDistribution:
        from optuna.distributions import FloatDistribution, IntDistribution

        if self.whole:
            return IntDistribution(int(self.low), int(self.high), self.log, int(self.step or 1))
        return FloatDistribution(float(self.low), float(self.high), self.log, self.step)

    def suggest(self, trial: optuna.Trial, name: str) -> None:
        if self.whole:
            step = int(self.step or 1)
            trial.suggest_int(name, int(self.low), int(self.high), step=step, log=self.log)
        else:
            trial.suggest_float(name, self.low, self.high, step=self.step, log=self.log)

    def holds(self, value: Any) -> bool:
        return isinstance(value, int | float) and self.low <= value <= self.high


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
    return found


def draw(space: Mapping[str, Choice | Range], trials: int, seed: int) -> list[dict[str, Any]]:
    """`trials` independent points; more trials continue the same sequence.

    The axes are drawn in the order of their names, so that the order in the file does not matter.
    """
    import optuna

    quiet()
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
    distributions = {key: space[key].distribution() for key in sorted(space)}
    return [dict(study.ask(distributions).params) for _ in range(trials)]


def quiet() -> None:
    """Optuna logs every trial; the sweep's own progress says it once."""
    import warnings

    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", message="Heartbeat of storage is supposed")


class RandomSection(Section):
    """Points drawn at once, independently, from `space`; the same seed draws the same points."""

    trials: PositiveInt
    seed: int = 0
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
    seed: int | None = None
    pruner: PrunerSection | None = None
    space: dict[str, Any]


class CurveSection(Section):
    """Dotted paths of two lists of equal length in the result, drawn as one curve a trial."""

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
    metrics: list[str] | dict[str, str] = Field(default_factory=dict)
    curve: CurveSection | None = None
    jobs: PositiveInt = 1
    timeout: PositiveFloat | None = None
    """Seconds a trial may take."""
    max_failures_in_row: PositiveInt | None = 5
    storage: str | None = None
