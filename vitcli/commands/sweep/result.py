"""What `vitcli sweep` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from vitcli.results import Result


@dataclass(frozen=True)
class Curve:
    """One list of a trial's result against another."""

    x: tuple[float, ...]
    y: tuple[float | None, ...]


@dataclass(frozen=True)
class SweepTrial(Result):
    """One trial: what it was given, how it stands, what it measured, how to run it again."""

    view_prefix: ClassVar[str] = "trial_"

    id: str
    state: str
    """pending, running, done, failed, pruned, killed or interrupted."""
    params: Mapping[str, Any]
    metrics: Mapping[str, Any]
    wall_s: float | None
    attempts: int
    error: str
    command: str
    """The command line that reproduces it, to be run in `cwd`; empty before its first start."""
    cwd: str
    directory: str
    """Where its files are; empty when another machine has them."""
    host: str
    curve: Curve | None = None
    threads: int | None = None
    """What OMP_NUM_THREADS was: with another number, sums are rounded and clocks run otherwise."""


@dataclass(frozen=True)
class Spread:
    """A metric over the trials of a group; `std` is the sample standard deviation (n - 1)."""

    n: int
    mean: float
    std: float | None
    min: float
    max: float


@dataclass(frozen=True)
class SweepGroup:
    """Trials that agree in the keys of the grouping: seeds of one point.

    `metrics` covers numbers, `words` counts how often a metric said each word.
    """

    params: Mapping[str, Any]
    trials: tuple[str, ...]
    """Ids of the finished trials, whose commands are in the report's list of trials."""
    metrics: Mapping[str, Spread]
    words: Mapping[str, Mapping[str, int]]
    wall_s: float | None
    """Mean seconds a trial."""


@dataclass(frozen=True)
class SweepReport(Result):
    """The answer of `vitcli sweep`."""

    rows_at: ClassVar[str] = "trials"

    name: str
    question: str
    command: str
    directory: str
    axes: tuple[str, ...]
    """What varies, seeds apart."""
    seeds: str
    """The option that `repeat` varies; empty without."""
    grouped_by: tuple[str, ...]
    metrics: tuple[str, ...]
    states: Mapping[str, int]
    """How many trials stand how, before `--where`."""
    objective: str
    """The metric a search improves, with its direction; empty without."""
    curve_names: tuple[str, ...]
    """Paths of x and y of the trials' curves; empty without."""
    trials: tuple[SweepTrial, ...]
    groups: tuple[SweepGroup, ...]


@dataclass(frozen=True)
class PlannedTrial:
    id: str
    state: str
    params: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class SweepPlan(Result):
    """The answer of `vitcli sweep --dry-run`: trials known in advance, and draws still to come."""

    rows_at: ClassVar[str] = "trials"

    view_prefix: ClassVar[str] = "plan_"

    name: str
    axes: tuple[str, ...]
    trials: tuple[PlannedTrial, ...]
    to_run: int
    draws: int
    """Points a search will draw, each for `seeds_each` seeds."""
    seeds_each: int
