"""A sweep: which command, over which space, how often, and what to read from its JSON."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcli.commands.sweep.space import (
    Choice,
    Command,
    CurveSection,
    MetricSection,
    PrunerSection,
    RandomSection,
    Range,
    SearchSection,
    SweepSection,
    canonical,
    draw,
    read_space,
)
from vitcli.config.settings import Layers, nearest, validate
from vitcli.config.yaml import Document, leaves, read_yaml
from vitcli.errors import VitcliError

Value = Any
"""A YAML scalar, or a list of them for an option that takes several."""
MOST_TRIALS = 100_000
"""More are counted, not listed."""
HIGHER, LOWER = frozenset({"accuracy", "acc"}), frozenset({"loss", "error"})
"""Words in a metric's name that say which end is better."""


@dataclass(frozen=True)
class Sweep:
    """A sweep that is known to make sense, every key under its one name.

    `repeat` holds the seeds under the name of the seed option; `metrics` maps a column's name to
    the dotted path into the result JSON and what figures and sentences say of it.
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
    repeat: Mapping[str, Sequence[Value]]
    metrics: Mapping[str, MetricSection]
    labels: Mapping[str, str]
    configs: Mapping[str, Mapping[str, Value]]
    """Config keys and their values by the name that `config` may have in place of a file."""
    needs: Mapping[str, str]
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
        return next(name for name, m in self.metrics.items() if wanted in (name, m.path))

    @property
    def size(self) -> int:
        """How many combinations a grid has, seeds included; of a search, how many trials it draws.

        Combinations that are equal are counted as often as they occur.
        """
        seeds = math.prod(map(len, self.repeat.values()))
        if self.search:
            return self.search.trials * seeds
        rows = max(map(len, self.zip.values()), default=1)
        drawn = self.random.trials if self.random else 1
        return math.prod(map(len, self.grid.values())) * rows * drawn * seeds

    @property
    def shape(self) -> str:
        """`lr 5 x norm 2 x seed 3`: where the size comes from."""
        parts = [f"{key} {len(values)}" for key, values in self.grid.items()]
        parts += [f"{', '.join(self.zip)} {len(next(iter(self.zip.values())))}"] if self.zip else []
        parts += [f"{self.random.trials} draws"] if self.random else []
        parts += [f"{key} {len(seeds)}" for key, seeds in self.repeat.items()]
        return " x ".join(parts)

    def spelled_out(self, params: Mapping[str, Value]) -> Mapping[str, Value]:
        """The parameters with the keys of a config in place of its name."""
        keys = self.configs.get(str(params.get("config")))
        if keys is None:
            return params
        return {**keys, **{key: value for key, value in params.items() if key != "config"}}

    def notes(self) -> list[str]:
        """What the file asks for that its space cannot give, in words."""
        said = [
            f"{key}: high {axis.written:g} is not a whole number of steps of {axis.step:g} from "
            f"{axis.low:g}; the last value is {axis.high:g}"
            for key, axis in self.space.items()
            if isinstance(axis, Range) and axis.written is not None
        ]
        source = self.search or self.random
        points = math.prod(axis.size for axis in self.space.values())
        if source and source.trials > points:
            text = f"{source.trials:,} draws from a space of {points:,} points: some repeat"
            said.append(text)
        return said


SHIPPED = Path(__file__).parent / "shipped"
"""The sweeps of experiments/README.md."""


def shipped_sweeps() -> list[str]:
    """The names of the sweeps that come with the package, sorted."""
    return sorted(file.stem for file in SHIPPED.glob("*.yaml"))


def sweep_path(given: str | Path, or_directory: bool = False) -> Path:
    """The file that a path or the name of a shipped sweep means; a directory as it is.

    Args:
        or_directory: a directory of trials could be meant too, as where results are read.

    Raises:
        VitcliError: there is neither, or there are both.
    """
    path, name = Path(given), str(given)
    names = shipped_sweeps()
    if name in names and isinstance(given, str):
        if path.is_file() or (or_directory and path.exists()):
            raise VitcliError(
                f"{name}: is a shipped sweep and also a {'directory' if path.is_dir() else 'file'} "
                "in this directory",
                f"./{name} for the latter; run the shipped one from another directory",
            )
        return SHIPPED / f"{name}.yaml"
    if not path.exists() and path.name == name and not path.suffix:
        hint = nearest(name[:100], names, f"shipped sweeps: {', '.join(names)}")
        raise VitcliError(f"{name}: is neither a file nor a shipped sweep", hint)
    return path


def load_sweep(path: str | Path, commands: Mapping[str, Command] | None = None) -> Sweep:
    """Read and check a sweep file, or a shipped sweep by its name.

    Args:
        commands: what the commands of this program accept; None skips the check of option names,
            which a report does not need.

    Raises:
        VitcliError: with file, line and key: unknown keys and options, lists of unequal length, an
            axis given twice, a search beside a grid.
    """
    return read_sweep(read_yaml(sweep_path(path)), commands)


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
                ("search",), "cannot be combined with grid, zip or random",
                "list the other values as choices in search.space",
            )  # fmt: skip
        if section.search and section.search.pruner:
            self._check_pruner(section.search.pruner, base)
        if command and section.storage and not section.search:
            raise self.fail(
                ("storage",), "is for a search",
                "leave --storage out; machines share a grid by --out on a shared disk",
            )  # fmt: skip
        repeat = self._repeat(command)
        parts = {"base": base, "grid": grid, "zip": zipped, f"{drawn}.space": space}
        parts["repeat"] = repeat
        configs = self._configs(command, parts)
        for one in [{f"configs.{name}": keys} for name, keys in configs.items()] or [{}]:
            self._once({**parts, **one}, command.stands_for if command else {})
        if command:
            self._check_writes(command, parts)
        metrics = self._metrics()
        labels = {canonical(key): label for key, label in section.labels.items()}
        return Sweep(
            name=self._name(),
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
            labels=labels,
            configs=configs,
            needs=section.needs,
            curve=section.curve,
            jobs=section.jobs,
            timeout=section.timeout,
            max_failures_in_row=section.max_failures_in_row,
            storage=section.storage,
            source=self.document.source,
        )

    def _name(self) -> str:
        """The name, which is also that of the directory below runs/."""
        given = self.section.name
        name = given or Path(self.document.source).stem
        if name in (".", "..") or not name.isprintable() or set(name) & {"/", "\\"}:
            text = f"is not the name of a directory (got {name!r})"
            hint = "write `name: my-sweep`; --out DIR chooses another place"
            raise self.fail(("name",), text, hint)
        if len(name) > 100:
            raise self.fail(("name",), f"is too long ({len(name)} characters)", "at most 100")
        return name

    def _check_writes(self, command: Command, parts: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuse values that write outside the trial's directory: --out alone decides where."""
        for part, values in parts.items():
            for key in values.keys() & command.writes:
                for value in _listed(values[key]):
                    place = str(value)
                    outside = not place.startswith("{trial}/") or ".." in place.split("/")
                    if value is not None and (outside or "\\" in place):
                        raise self.fail(
                            (*part.split("."), key),
                            f"writes outside the trial's directory (got {place})",
                            f'{key}: "{{trial}}/{key}…"',
                        )

    def _check_pruner(self, pruner: PrunerSection, base: Mapping[str, Value]) -> None:
        if "{trial}" not in pruner.file:
            raise self.fail(
                ("search", "pruner", "file"), "is not in the trial's directory", "{trial}/…"
            )
        if not any("{trial}" in str(value) for value in base.values()):
            text = f"no option makes the command write {pruner.file}"
            raise self.fail(("search", "pruner"), text, 'base: {out: "{trial}/run"}')

    def _command(self) -> Command | None:
        if self.commands is None:
            return None
        name = self.section.command
        if name not in self.commands:
            hint = nearest(name, sorted(self.commands))
            raise self.fail(("command",), f"`vitcli {name}` is not a command", hint)
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

    def _configs(
        self, command: Command | None, parts: Mapping[str, Mapping[str, Any]]
    ) -> dict[str, dict[str, Value]]:
        """The file's configs, each of which some value of `config` names."""
        found: dict[str, dict[str, Value]] = {}
        used = [name for values in parts.values() for name in _listed(values.get("config"))]
        for name, keys in self.section.configs.items():
            if name not in used:
                raise self.fail(("configs", name), "is not used", f"grid: {{config: [{name}, …]}}")
            found[name] = self._names(("configs", name), keys, command)
            if option := next((key for key in found[name] if "." not in key), None):
                text = "is an option (expected a key of a config)"
                raise self.fail(("configs", name, option), text, "move it to base or grid")
        return found

    def _repeat(self, command: Command | None) -> dict[str, Sequence[Value]]:
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
            return {canonical(key): range(seeds)}
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

    def _metrics(self) -> dict[str, MetricSection]:
        given = self.section.metrics
        if isinstance(given, list):
            short = [path.rsplit(".", 1)[-1] for path in given]
            clash = len(set(short)) < len(short)
            given = {(p if clash else s): p for s, p in zip(short, given, strict=True)}
        metrics = {
            name: MetricSection(path=metric) if isinstance(metric, str) else metric
            for name, metric in given.items()
        }
        search = self.section.search
        if search and search.metric not in {*metrics, *(m.path for m in metrics.values())}:
            wanted = MetricSection(path=search.metric)
            metrics = {search.metric.rsplit(".", 1)[-1]: wanted, **metrics}
        for name, metric in metrics.items():
            if metric.better is None:
                words = set(name.lower().replace(".", "_").split("_"))
                better = "higher" if words & HIGHER else "lower" if words & LOWER else None
                metrics[name] = metric.model_copy(update={"better": better})
        return metrics


def _listed(value: Any) -> Sequence[Any]:
    """The values of an axis, or the one of `base`."""
    value = value.values if isinstance(value, Choice) else value
    return value if isinstance(value, list | tuple | range) else [value]


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

    Raises:
        VitcliError: more than MOST_TRIALS.
    """
    known = sweep.size // (sweep.search.trials if sweep.search else 1)
    if known > MOST_TRIALS:
        raise VitcliError(
            f"{sweep.source}: {known:,} trials ({sweep.shape}) are too many to list "
            f"(at most {MOST_TRIALS:,})",
            "draw some of them: `random: {trials: 100, space: …}`",
        )
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
    for seed in seeds_of(sweep):
        for one, two, three in itertools.product(zipped, cells, drawn):
            trial = trial_of(sweep, {**one, **two, **three, **seed})
            found.setdefault(trial.id, trial)
    return list(found.values())


def repeats(sweep: Sweep, point: Mapping[str, Any]) -> list[Trial]:
    """The trials of one point of a search, one a seed."""
    return [trial_of(sweep, {**point, **seed}) for seed in seeds_of(sweep)]


def _one_spelling(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _one_spelling(item) for key, item in value.items()}
    return [_one_spelling(item) for item in value] if isinstance(value, list) else value


def seeds_of(sweep: Sweep) -> Iterator[dict[str, Any]]:
    if not sweep.repeat:
        yield {}
    for key, seeds in sweep.repeat.items():
        yield from ({key: seed} for seed in seeds)


def trial_of(sweep: Sweep, varied: Mapping[str, Any]) -> Trial:
    params = {**sweep.base, **varied}
    return Trial(trial_id(sweep.command, sweep.spelled_out(params)), params)
