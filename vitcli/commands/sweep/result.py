"""The results of `vitcli sweep`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import FiniteFloat

from vitcli.results import Result

State = Literal["pending", "running", "done", "failed", "pruned", "killed", "interrupted"]
"""killed: something else ended the trial (kill -9, out of memory); interrupted: the sweep ended.
Both are run again by the next call; failed and pruned are kept."""


@dataclass(frozen=True)
class Status:
    """The file `status` of a trial."""

    state: State
    started: FiniteFloat | None = None
    """Seconds since the epoch."""
    wall_s: FiniteFloat | None = None
    exit_code: int | None = None
    error: str = ""
    host: str = ""
    pid: int | None = None
    threads: int | None = None
    attempts: int = 0
    drawn: int = 0
    """How often a search drew this point."""
    last_value: FiniteFloat | None = None
    """Of a pruned trial: the value at which it was ended."""


@dataclass(frozen=True)
class TrialConfig:
    """The file `config.yaml`: what a trial was given, and the command line that reproduces it."""

    command: str
    params: dict[str, Any]
    run: str
    argv: list[str]
    cwd: str


@dataclass(frozen=True)
class Curve:
    """One list of a trial's result against another."""

    x: tuple[float, ...]
    y: tuple[float | None, ...]


@dataclass(frozen=True)
class SweepTrial(Result):
    """One trial: what it was given, its status, what it measured, how to run it again."""

    view_prefix: ClassVar[str] = "trial_"

    id: str
    state: str
    """pending, running, done, failed, pruned, killed or interrupted."""
    params: Mapping[str, Any]
    metrics: Mapping[str, Any]
    wall_s: FiniteFloat | None
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
    last_value: float | None = None
    """Of a pruned trial: the value at which it was ended."""


NOT_STARTED: Mapping[str, Any] = {
    "metrics": {},
    "wall_s": None,
    "attempts": 0,
    **dict.fromkeys(("error", "command", "cwd", "directory", "host"), ""),
}
"""The fields of a `SweepTrial` of which nothing is known but what it is given."""


@dataclass(frozen=True)
class Spread:
    """A metric over the trials of a group; `std` is the sample standard deviation (n - 1).

    `n` counts the trials that have a number there.
    """

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
    """Mean seconds per trial."""
    states: Mapping[str, int] = field(default_factory=dict)
    """How many trials of the group, finished or not, have which status."""
    diverged: int = 0
    """Finished trials without a number where other trials of the sweep have one."""

    @property
    def incomplete(self) -> bool:
        """Whether a mean of this group leaves out one of its trials."""
        return self.diverged > 0 or any(state != "done" for state in self.states)


@dataclass(frozen=True)
class Comparison:
    """Two levels of an axis, at equal values of the other axes: the mean of `a` minus that of `b`.

    `low` and `high` are its 95% interval; `p_holm` is Student's p adjusted over all `pairs` of the
    axis. Both are None, and the interval a point, where nothing varies.
    """

    metric: str
    axis: str
    """Its key; keys that vary together, joined by commas."""
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    at: Mapping[str, Any]
    """Values of the other keys of the grouping."""
    n: int
    """Pairs of trials (seeds), or trials of the smaller level where there are no pairs."""
    paired: bool
    difference: float
    low: float
    high: float
    p: float | None
    p_holm: float | None = None
    pairs: int = 0
    seeds_needed: int | None = None
    """With `--power D`: seeds per level that would detect a difference of D."""
    left_out: int = 0
    """Trials of both levels without a number, of which the difference knows nothing."""


@dataclass(frozen=True)
class SweepReport(Result):
    """The state of a sweep and what it measured so far."""

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
    """How many trials have which status, before `--where`."""
    objective: str
    """The metric a search improves, with its direction; empty without."""
    curve_names: tuple[str, ...]
    """Paths of x and y of the trials' curves; empty without."""
    trials: tuple[SweepTrial, ...]
    groups: tuple[SweepGroup, ...]
    comparisons: tuple[Comparison, ...] = ()
    """Every pair of levels, by metric and axis; empty without scipy."""
    better: Mapping[str, str] = field(default_factory=dict)
    """Metrics of which it is known which end is better: higher or lower."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """How figures name a key or a metric, with its unit."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """What guessing has of a metric."""
    drawn: int = 0
    """Points drawn by `random` or `search`; 0 without."""
    distinct: int = 0
    """How many of them are different."""
    power_for: float | None = None
    """The difference that `seeds_needed` is about."""


@dataclass(frozen=True)
class PlannedTrial:
    id: str
    state: str
    params: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class SweepPlan(Result):
    """What a run would do: trials known in advance, and draws still to come."""

    rows_at: ClassVar[str] = "trials"

    view_prefix: ClassVar[str] = "plan_"

    name: str
    axes: tuple[str, ...]
    trials: tuple[PlannedTrial, ...]
    to_run: int
    draws: int
    """Points a search will draw, each for `seeds_each` seeds."""
    seeds_each: int
    total: int = 0
    """How many trials are known in advance."""
    shape: str = ""
    """Where the total comes from: `lr 5 x norm 2 x seed 3`."""
    notes: tuple[str, ...] = ()
    """What the file asks for that its space cannot give."""


@dataclass(frozen=True)
class Counts:
    """Trials of a sweep by status."""

    done: int
    running: int
    failed: int
    pruned: int
    total: int

    @classmethod
    def of(cls, states: Iterable[str | None], total: int) -> Counts:
        """From the state of each trial; those that are left have another, or none."""
        found = Counter(states)
        return cls(found["done"], found["running"], found["failed"], found["pruned"], total)

    @property
    def left(self) -> int:
        return max(0, self.total - self.done - self.failed - self.pruned)


@dataclass(frozen=True)
class Event:
    """The state of the sweep; `text` says what has just happened, if anything.

    Not a `results.Progress`, whose words would lose the counts that `on_event` of the API promises.
    """

    counts: Counts
    seconds_left: float | None
    text: str = ""


@dataclass(frozen=True)
class Outcome:
    """What one call did. `stopped` says why it ended early, if it did."""

    ran: int
    """Trials that this call brought to an end, good or bad."""
    killed: int
    counts: Counts
    """The state of the whole sweep."""
    stopped: str = ""


def last_word(key: str) -> str:
    """How tables and figures call a dotted key, which is whole in the file and in the JSON."""
    return key.rsplit(".", 1)[-1]
