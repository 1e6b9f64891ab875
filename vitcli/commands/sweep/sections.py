"""The sections of a sweep's YAML, as they are written."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vitcli.config.schema import Section


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
