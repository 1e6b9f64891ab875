"""A sweep: which command, over which space, how often, and what to read from its JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcli.commands.sweep.options import Command, canonical
from vitcli.commands.sweep.space import (
    Choice,
    CurveSection,
    PrunerSection,
    RandomSection,
    Range,
    SearchSection,
    SweepSection,
    draw,
    read_space,
)
from vitcli.config.load import Layers, nearest, validate
from vitcli.config.yaml import Document, leaves, read_yaml
from vitcli.errors import VitcliError

Value = Any
"""A YAML scalar, or a list of them for an option that takes several."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that is known to make sense, every key under its one name.

    `repeat` holds the seeds under the name of the seed option; `metrics` maps a column's name to a
    dotted path into the result JSON.
    """

    name: str
    question: str
    command: str
    base: Mapping[str, Value]
    grid: Mapping[str, list[Value]]
    zip: Mapping[str, list[Value]]
    random: RandomSection | None
    search: SearchSection | None
    space: Mapping[str, Choice | Range]
    repeat: Mapping[str, list[Value]]
    metrics: Mapping[str, str]
    curve: CurveSection | None
    jobs: int
    timeout: float | None
    max_failures_in_row: int | None
    storage: str | None
    source: str

    @property
    def axes(self) -> list[str]:
        """What varies from trial to trial, seeds apart."""
        return [*self.zip, *self.grid, *self.space]

    @property
    def objective(self) -> str:
        """Name of the metric that a search improves; of any other sweep, of the first."""
        if self.search is None:
            return next(iter(self.metrics), "")
        wanted = self.search.metric
        return next(name for name, path in self.metrics.items() if wanted in (name, path))


def load_sweep(path: str | Path, commands: Mapping[str, Command] | None = None) -> Sweep:
    """Read and check a sweep file.

    Args:
        commands: what the commands of this program accept; None skips the check of option names,
            which a report does not need.

    Raises:
        VitcliError: with file, line and key: unknown keys and options, lists of unequal length, an
            axis given twice, a search beside a grid.
    """
    return read_sweep(read_yaml(path), commands)


def read_sweep(document: Document, commands: Mapping[str, Command] | None = None) -> Sweep:
    """Like `load_sweep`, from a parsed document."""
    layers = Layers()
    layers.add(document)
    for path, line in document.lines.items():  # sections, beside the values in them
        layers.sources.setdefault(path, (layers.count, f"{document.source}:{line}"))
    section = validate(SweepSection, layers)
    return _Reader(document, section, commands).sweep()


@dataclass(frozen=True)
class _Reader:
    document: Document
    section: SweepSection
    commands: Mapping[str, Command] | None

    def fail(self, path: tuple[str, ...], text: str, hint: str) -> VitcliError:
        """An error at the line of `path`, or of the closest key above it."""
        line = next(
            (self.document.lines[p] for p in _above(path) if p in self.document.lines), None
        )
        where = self.document.source + (f":{line}" if line else "")
        return VitcliError(f"{where}: {'.'.join(path)}: {text}", hint)

    def sweep(self) -> Sweep:
        section = self.section
        command = self._command()
        base = self._names(("base",), section.base, command)
        grid = self._lists("grid", command)
        zipped = self._lists("zip", command)
        if len({len(values) for values in zipped.values()}) > 1:
            lengths = ", ".join(f"{key} {len(values)}" for key, values in zipped.items())
            raise self.fail(("zip",), f"lists of unequal length: {lengths}", "zip goes in step")
        drawn = "search" if section.search else "random"
        space: dict[str, Choice | Range] = {}
        if source := section.search or section.random:
            for key, value in source.space.items():
                try:
                    space[canonical(key)] = read_space(value)
                except ValueError as error:
                    hint = "a list, or {low: 1e-4, high: 1e-1, log: true}"
                    raise self.fail((drawn, "space", key), str(error), hint) from error
                self._known((drawn, "space", key), key, command)
            if not space:
                raise self.fail((drawn, "space"), "nothing varies", "name an option and its range")
        if section.search and (grid or zipped or section.random):
            raise self.fail(
                ("search",), "stands alone: it cannot be crossed with grid, zip or random",
                "list the other values as choices in search.space",
            )  # fmt: skip
        if section.search and section.search.pruner:
            self._check_pruner(section.search.pruner, base)
        repeat = self._repeat(command)
        parts = {"base": base, "grid": grid, "zip": zipped, f"{drawn}.space": space}
        self._once({**parts, "repeat": repeat}, command.stands_for if command else {})
        metrics = self._metrics()
        return Sweep(
            name=section.name or Path(self.document.source).stem,
            question=section.question,
            command=section.command,
            base=base,
            grid=grid,
            zip=zipped,
            random=section.random,
            search=section.search,
            space=space,
            repeat=repeat,
            metrics=metrics,
            curve=section.curve,
            jobs=section.jobs,
            timeout=section.timeout,
            max_failures_in_row=section.max_failures_in_row,
            storage=section.storage,
            source=self.document.source,
        )

    def _check_pruner(self, pruner: PrunerSection, base: Mapping[str, Value]) -> None:
        if "{trial}" not in pruner.file:
            raise self.fail(
                ("search", "pruner", "file"), "is not in the trial's directory", "{trial}/…"
            )
        if not any("{trial}" in str(value) for value in base.values()):
            text = f"nothing tells the command to write {pruner.file}"
            raise self.fail(("search", "pruner"), text, 'base: {out: "{trial}/run"}')

    def _command(self) -> Command | None:
        if self.commands is None:
            return None
        name = self.section.command
        if name not in self.commands:
            hint = nearest(name, sorted(self.commands))
            raise self.fail(("command",), f"there is no command `vitcli {name}`", hint)
        return self.commands[name]

    def _known(self, path: tuple[str, ...], key: str, command: Command | None) -> None:
        if command and not command.knows(canonical(key)):
            text = f"`vitcli {command.name}` has no such option and its config no such key"
            raise self.fail(path, text, nearest(key, command.names()))

    def _names(
        self, path: tuple[str, ...], values: Mapping[str, Any], command: Command | None
    ) -> dict[str, Value]:
        named: dict[str, Value] = {}
        for where, value in leaves(values):
            key = ".".join(where)
            self._known((*path, *where), key, command)
            if canonical(key) in named:
                raise self.fail((*path, *where), "is given twice", "keep one of the two")
            named[canonical(key)] = value
        return named

    def _lists(self, part: str, command: Command | None) -> dict[str, list[Value]]:
        lists = self._names((part,), getattr(self.section, part), command)
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                hint = f"{key}: [first, second]"
                raise self.fail((part, key), f"expected a list of values, got {values!r}", hint)
        return lists

    def _repeat(self, command: Command | None) -> dict[str, list[Value]]:
        repeat = self.section.repeat
        if repeat == 1:
            return {}
        if isinstance(repeat, int):
            repeat = {"seed": repeat}
        if len(repeat) != 1:
            raise self.fail(("repeat",), "expected one option", "repeat: 3, or {seed: [0, 1, 2]}")
        ((key, seeds),) = repeat.items()
        self._known(("repeat", key), key, command)
        if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
            seeds = list(range(seeds))
        if not isinstance(seeds, list) or not seeds:
            raise self.fail(("repeat", key), f"expected a count or a list, got {seeds!r}", "3")
        return {canonical(key): seeds}

    def _once(self, parts: Mapping[str, Mapping[str, Any]], stands_for: Mapping[str, str]) -> None:
        seen: dict[str, str] = {}
        for part, values in parts.items():
            for key in values:
                if key in seen:
                    text = f"is also in {seen[key]}"
                    raise self.fail((*part.split("."), key), text, "keep one of the two")
                seen[key] = part
        for option, key in stands_for.items():
            if option in seen and key in seen:
                text = f"is also {key} in {seen[key]}, which would win"
                raise self.fail((*seen[option].split("."), option), text, "keep one of the two")
        for key, part in seen.items():
            above = next((".".join(a) for a in _above(tuple(key.split("."))[:-1])
                          if ".".join(a) in seen), None)  # fmt: skip
            if above:
                text = f"is also part of {above} in {seen[above]}"
                raise self.fail((*part.split("."), key), text, "keep one of the two")

    def _metrics(self) -> dict[str, str]:
        metrics = self.section.metrics
        if isinstance(metrics, list):
            short = [path.rsplit(".", 1)[-1] for path in metrics]
            clash = len(set(short)) < len(short)
            metrics = {(p if clash else s): p for s, p in zip(short, metrics, strict=True)}
        search = self.section.search
        if search and search.metric not in {*metrics, *metrics.values()}:
            metrics = {search.metric.rsplit(".", 1)[-1]: search.metric, **metrics}
        return metrics


def _above(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for end in range(len(path), 0, -1):
        yield path[:end]


@dataclass(frozen=True)
class Trial:
    """One run of the command: every option and config key it is given."""

    id: str
    params: Mapping[str, Any]


def trial_id(command: str, params: Mapping[str, Any]) -> str:
    """Twelve hex digits of the SHA-256 of command and parameters.

    Neither the order of the keys nor the spelling of a number (1, 1.0, 1e0) matters.
    """
    same = {"command": command, "params": _one_spelling(params)}
    plain = json.dumps(same, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(plain.encode()).hexdigest()[:12]


def expand(sweep: Sweep) -> list[Trial]:
    """Every trial that is known in advance: zip x grid x random, then the seeds.

    The seeds are the outermost loop, so that a sweep that is cut off has covered the whole space
    with the first seed. A `search` has none: Optuna draws its trials one after the other.
    """
    if sweep.search:
        return []
    zipped = [
        dict(zip(sweep.zip, row, strict=True)) for row in zip(*sweep.zip.values(), strict=True)
    ] or [{}]
    cells = [
        dict(zip(sweep.grid, row, strict=True)) for row in itertools.product(*sweep.grid.values())
    ]
    drawn: list[dict[str, Any]] = [{}]
    if sweep.random:
        drawn = draw(sweep.space, sweep.random.trials, sweep.random.seed)
    found: dict[str, Trial] = {}
    for seed in _seeds(sweep):
        for one, two, three in itertools.product(zipped, cells, drawn):
            trial = _trial(sweep, {**one, **two, **three, **seed})
            found.setdefault(trial.id, trial)
    return list(found.values())


def repeats(sweep: Sweep, point: Mapping[str, Any]) -> list[Trial]:
    """The trials of one point of a search, one a seed."""
    return [_trial(sweep, {**point, **seed}) for seed in _seeds(sweep)]


def belongs(sweep: Sweep, params: Mapping[str, Any]) -> bool:
    """Whether a trial found on disk is one that this search could have drawn."""
    free = {*sweep.space, *sweep.repeat}
    fixed = {key: value for key, value in params.items() if key not in free}
    return (
        fixed == dict(sweep.base)
        and all(key in params and axis.holds(params[key]) for key, axis in sweep.space.items())
        and all(params.get(key) in seeds for key, seeds in sweep.repeat.items())
    )


def check_arguments(sweep: Sweep, command: Command) -> None:
    """Have the command's own parser read every value of every option before any trial is run.

    Raises:
        VitcliError: with the arguments it refuses.
    """
    trials = expand(sweep)
    if sweep.search:
        trials = repeats(sweep, draw(sweep.space, 1, 0)[0])
    read: set[tuple[str, str]] = set()
    for trial in trials:
        values = {(key, repr(value)) for key, value in trial.params.items()}
        if read and values <= read:
            continue
        read |= values
        shown = command.name
        try:
            arguments = command.arguments(trial.params)
            shown = " ".join(arguments)
            command.check(arguments[1:])
        except VitcliError as error:
            raise VitcliError(
                f"{sweep.source}: `vitcli {shown}`: {error.message}", error.hint
            ) from error


def _one_spelling(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _one_spelling(item) for key, item in value.items()}
    return [_one_spelling(item) for item in value] if isinstance(value, list) else value


def _seeds(sweep: Sweep) -> Iterator[dict[str, Any]]:
    if not sweep.repeat:
        yield {}
    for key, seeds in sweep.repeat.items():
        yield from ({key: seed} for seed in seeds)


def _trial(sweep: Sweep, varied: Mapping[str, Any]) -> Trial:
    params = {**sweep.base, **varied}
    return Trial(trial_id(sweep.command, params), params)
