"""A sweep: which command, over which space, how often, and what to read from its JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from vitcli.commands.sweep.result import last_word
from vitcli.commands.sweep.space import (
    WRITES,
    Choice,
    Command,
    PrunerSection,
    RandomSection,
    Range,
    SearchSection,
    canonical,
    read_space,
)
from vitcli.config.settings import Layers, nearest, validate
from vitcli.config.yaml import Document, KeyPath, Section, leaves, read_yaml
from vitcli.errors import VitcliError

Value = Any
"""A YAML scalar, or a list of them for an option that takes several."""
Parts = dict[str, Mapping[str, Any]]
"""The parts of a file that give keys, by name."""
FOR_A_SEARCH = (
    "is for a search",
    "leave --storage out; machines share a grid by --out on a shared disk",
)
HIGHER, LOWER = frozenset({"accuracy", "acc"}), frozenset({"loss", "error"})
"""Words in a metric's name that say which end is better."""


class MetricSection(Section):
    """A column: where its value is in the result, and how figures and sentences name it."""

    path: str
    label: str = ""
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    chance: float | None = None
    """What guessing has; a line of figures."""


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
    needs: dict[str, str] = Field(default_factory=dict)
    """Paths that must exist before a trial runs, and the command that makes each."""
    configs: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Configs by name, written out: a value of `config` is one of these names, or a file."""
    labels: dict[str, str] = Field(default_factory=dict)
    """How figures name an option or a config key; by default its last word."""
    metrics: list[str] | Mapping[str, str | MetricSection] = Field(default_factory=dict)
    curve: CurveSection | None = None
    jobs: PositiveInt = 1
    timeout: PositiveFloat | None = None
    """Time limit per trial, in seconds."""
    max_failures_in_row: PositiveInt | None = 5
    storage: str | None = None


class Sweep(SweepSection):
    """A sweep's file that is known to make sense, every key under its one name."""

    space: dict[str, Choice | Range]
    """What `random` or `search` draws from."""
    repeat: dict[str, Sequence[Value]]
    """The seeds, under the name of the seed option."""
    metrics: dict[str, MetricSection]
    """By a column's name: the path into the result, and what figures and sentences say of it."""
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
            said.append(f"{source.trials:,} draws from a space of {points:,} points: some repeat")
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
    lines = {path: (1, f"{document.source}:{line}") for path, line in document.lines.items()}
    section = validate(SweepSection, Layers(document.data, lines, 1))
    reader = _Reader(document, section, (commands or {}).get(section.command))
    if commands is not None and reader.command is None:
        text = f"`vitcli {section.command}` is not a command"
        raise reader.fail(("command",), text, nearest(section.command, sorted(commands)))
    return reader.sweep()


@dataclass(frozen=True)
class _Reader:
    """From a file's section to a sweep; without a command its option names are not checked."""

    document: Document
    section: SweepSection
    command: Command | None

    def fail(self, path: KeyPath, text: str, hint: str) -> VitcliError:
        """An error at the line of `path`, or of the closest key above it."""
        line = next((self.document.lines[p] for p in _up(path) if p in self.document.lines), None)
        where = self.document.source + (f":{line}" if line else "")
        return VitcliError(f"{where}: {'.'.join(path)}: {text}", hint)

    def sweep(self) -> Sweep:
        section = self.section
        base = self._names(("base",), section.base)
        grid, zipped = self._lists("grid"), self._lists("zip")
        if len({len(values) for values in zipped.values()}) > 1:
            lengths = ", ".join(f"{key} {len(values)}" for key, values in zipped.items())
            raise self.fail(("zip",), f"lists of unequal length: {lengths}", "zip goes in step")
        drawn = "search" if section.search else "random"
        space = self._space(drawn)
        if section.search and (grid or zipped or section.random):
            raise self.fail(
                ("search",), "cannot be combined with grid, zip or random",
                "list the other values as choices in search.space",
            )  # fmt: skip
        if section.search and section.search.pruner:
            self._check_pruner(section.search.pruner, base)
        if self.command and section.storage and not section.search:
            raise self.fail(("storage",), *FOR_A_SEARCH)
        repeat = self._repeat()
        parts: Parts = {"base": base, "grid": grid, "zip": zipped, f"{drawn}.space": space,
                        "repeat": repeat}  # fmt: skip
        configs = self._configs(parts)
        for one in [{f"configs.{name}": keys} for name, keys in configs.items()] or [{}]:
            self._check_once({**parts, **one})
        self._check_writes(parts)
        given = {
            "name": self._name(),
            "base": base,
            "grid": grid,
            "zip": zipped,
            "space": space,
            "repeat": repeat,
            "configs": configs,
            "metrics": self._metrics(),
            "labels": {canonical(key): label for key, label in section.labels.items()},
            "source": self.document.source,
        }
        return Sweep.model_construct(**{**dict(section), **given})

    def _name(self) -> str:
        """The name, which is also that of the directory below runs/."""
        name = self.section.name or Path(self.document.source).stem
        if name in (".", "..") or not name.isprintable() or set(name) & {"/", "\\"}:
            text = f"is not the name of a directory (got {name!r})"
            hint = "write `name: my-sweep`; --out DIR chooses another place"
            raise self.fail(("name",), text, hint)
        if len(name) > 100:
            raise self.fail(("name",), f"is too long ({len(name)} characters)", "at most 100")
        return name

    def _known(self, path: KeyPath, key: str) -> None:
        if self.command and canonical(key) not in self.command.names:
            text = f"`vitcli {self.command.name}` has no such option and its config no such key"
            raise self.fail(path, text, nearest(key, sorted(self.command.names)))

    def _names(self, path: KeyPath, values: Mapping[str, Any]) -> dict[str, Value]:
        named: dict[str, Value] = {}
        for where, value in leaves(values):
            key = ".".join(where)
            self._known((*path, *where), key)
            if canonical(key) in named:
                raise self.fail((*path, *where), "is given twice", "keep one of the two")
            named[canonical(key)] = value
        return named

    def _lists(self, part: str) -> dict[str, list[Value]]:
        given = getattr(self.section, part)
        for key, value in given.items():
            if isinstance(value, dict) and "low" in value:
                hint = f"{key}: [first, second], or random: {{trials: 9, space: {{{key}: …}}}}"
                raise self.fail((part, key), "is a range (expected a list of values)", hint)
        lists = self._names((part,), given)
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                hint = f"{key}: [first, second]"
                raise self.fail((part, key), f"expected a list of values, got {values!r}", hint)
        return lists

    def _space(self, drawn: str) -> dict[str, Choice | Range]:
        space: dict[str, Choice | Range] = {}
        source = self.section.search or self.section.random
        for key, value in source.space.items() if source else ():
            try:
                space[canonical(key)] = read_space(value)
            except ValueError as error:
                hint = "a list, or {low: 1e-4, high: 1e-1, log: true}"
                raise self.fail((drawn, "space", key), str(error), hint) from error
            self._known((drawn, "space", key), key)
        if source and not space:
            raise self.fail((drawn, "space"), "nothing varies", "name an option and its range")
        return space

    def _repeat(self) -> dict[str, Sequence[Value]]:
        repeat = self.section.repeat
        if repeat == 1:
            return {}
        if isinstance(repeat, int):
            repeat = {"seed": repeat}
        if len(repeat) != 1:
            raise self.fail(("repeat",), "expected one option", "repeat: 3, or {seed: [0, 1, 2]}")
        ((key, seeds),) = repeat.items()
        self._known(("repeat", key), key)
        if isinstance(seeds, int) and not isinstance(seeds, bool) and seeds > 0:
            return {canonical(key): range(seeds)}
        if not isinstance(seeds, list) or not seeds:
            raise self.fail(("repeat", key), f"expected a count or a list, got {seeds!r}", "3")
        return {canonical(key): seeds}

    def _configs(self, parts: Parts) -> dict[str, dict[str, Value]]:
        """The file's configs, each of which some value of `config` names."""
        found: dict[str, dict[str, Value]] = {}
        used = [name for values in parts.values() for name in _listed(values.get("config"))]
        for name, keys in self.section.configs.items():
            if name not in used:
                raise self.fail(("configs", name), "is not used", f"grid: {{config: [{name}, …]}}")
            found[name] = self._names(("configs", name), keys)
            if option := next((key for key in found[name] if "." not in key), None):
                text = "is an option (expected a key of a config)"
                raise self.fail(("configs", name, option), text, "move it to base or grid")
        return found

    def _metrics(self) -> dict[str, MetricSection]:
        given = self.section.metrics
        if isinstance(given, list):
            short = [last_word(path) for path in given]
            clash = len(set(short)) < len(short)
            given = {(p if clash else s): p for s, p in zip(short, given, strict=True)}
        metrics = {
            name: MetricSection(path=metric) if isinstance(metric, str) else metric
            for name, metric in given.items()
        }
        search = self.section.search
        if search and search.metric not in {*metrics, *(m.path for m in metrics.values())}:
            wanted = MetricSection(path=search.metric)
            metrics = {last_word(search.metric): wanted, **metrics}
        for name, metric in metrics.items():
            if metric.better is None:
                words = set(name.lower().replace(".", "_").split("_"))
                better = "higher" if words & HIGHER else "lower" if words & LOWER else None
                metrics[name] = metric.model_copy(update={"better": better})
        return metrics

    def _check_pruner(self, pruner: PrunerSection, base: Mapping[str, Value]) -> None:
        if "{trial}" not in pruner.file:
            raise self.fail(
                ("search", "pruner", "file"), "is not in the trial's directory", "{trial}/…"
            )
        if not any("{trial}" in str(value) for value in base.values()):
            text = f"no option makes the command write {pruner.file}"
            raise self.fail(("search", "pruner"), text, 'base: {out: "{trial}/run"}')

    def _check_once(self, parts: Parts) -> None:
        """Refuse a key that two parts give, as itself, by a shorthand or in a section above it."""
        seen: dict[str, str] = {}

        def twice(key: str, how: str) -> VitcliError:
            return self.fail((*seen[key].split("."), key), f"is also {how}", "keep one of the two")

        for part, values in parts.items():
            for key in values:
                before = seen.get(key)
                seen[key] = part
                if before:
                    raise twice(key, f"in {before}")
        for option, key in (self.command.stands_for if self.command else {}).items():
            if option in seen and key in seen:
                raise twice(option, f"{key} in {seen[key]}, which would win")
        for key in seen:
            for above in map(".".join, _up(tuple(key.split("."))[:-1])):
                if above in seen:
                    raise twice(key, f"part of {above} in {seen[above]}")

    def _check_writes(self, parts: Parts) -> None:
        """Refuse values that write outside the trial's directory: --out alone decides where."""
        writes = WRITES & self.command.options.keys() if self.command else frozenset()
        for part, values in parts.items():
            for key in values.keys() & writes:
                for value in _listed(values[key]):
                    place = str(value)
                    outside = not place.startswith("{trial}/") or ".." in place.split("/")
                    if value is not None and (outside or "\\" in place):
                        raise self.fail(
                            (*part.split("."), key),
                            f"writes outside the trial's directory (got {place})",
                            f'{key}: "{{trial}}/{key}…"',
                        )


def _listed(value: Any) -> Sequence[Any]:
    """The values of an axis, or the one of `base`."""
    value = value.values if isinstance(value, Choice) else value
    return value if isinstance(value, list | tuple | range) else [value]


def _up(path: KeyPath) -> Iterator[KeyPath]:
    """The path, then each section above it."""
    for end in range(len(path), 0, -1):
        yield path[:end]
