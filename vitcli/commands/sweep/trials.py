"""The trials of a sweep, and what they leave on disk: DIR/sweep.yaml and a directory per trial.

A trial's directory is also its claim: who holds the lock in it may run it, and the kernel frees the
lock when its holder dies, however that happens. So any number of processes, on any machine that
sees the directory, share one sweep, and a trial that says it runs while nobody holds its lock was
cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import os
import shlex
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitcli.commands.sweep.result import Curve, Status, SweepTrial, TrialConfig
from vitcli.commands.sweep.space import Command, draw
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.storage import masked_url
from vitcli.config.yaml import checked, dump_yaml, lookup, parse_yaml, read_json, read_yaml
from vitcli.errors import VitcliError
from vitcli.files import Lock, atomic_write, is_held, lock, try_lock
from vitcli.stats import is_number

MOST_TRIALS = 100_000
"""More are counted, not listed."""
LARGEST = 2**1000
"""Numbers of a result beyond it are infinite for all that is done with them here."""


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

    def points(axes: Mapping[str, Any], rows: Iterable[tuple[Any, ...]]) -> list[dict[str, Any]]:
        return [dict(zip(axes, row, strict=True)) for row in rows]

    zipped = points(sweep.zip, zip(*sweep.zip.values(), strict=True)) or [{}]
    cells = points(sweep.grid, itertools.product(*sweep.grid.values()))
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


def seeds_of(sweep: Sweep) -> list[dict[str, Any]]:
    """The seed option with each of its values; one time nothing where there is no `repeat`."""
    return [{key: seed} for key, seeds in sweep.repeat.items() for seed in seeds] or [{}]


def trial_of(sweep: Sweep, varied: Mapping[str, Any]) -> Trial:
    params = {**sweep.base, **varied}
    return Trial(trial_id(sweep.command, sweep.spelled_out(params)), params)


@dataclass(frozen=True)
class TrialDir:
    """One trial's directory. What reads a file of it raises VitcliError where that is damaged."""

    path: Path

    @property
    def stdout(self) -> Path:
        return self.path / "stdout"

    @property
    def stderr(self) -> Path:
        return self.path / "stderr.log"

    @property
    def result_file(self) -> Path:
        return self.path / "result.json"

    @property
    def _again(self) -> str:
        return f"remove {shlex.quote(str(self.path))}; the next run of the sweep makes it again"

    def try_lock(self) -> Lock | None:
        self.path.mkdir(parents=True, exist_ok=True)
        return try_lock(self.path / "lock")

    def is_held(self) -> bool:
        return is_held(self.path / "lock")

    def status(self) -> Status:
        """Its status; a trial that says it runs although nobody holds its lock was cut off."""
        path = self.path / "status"
        return read_json(path, Status, self._again) if path.exists() else Status("pending")

    def write_status(self, status: Status) -> None:
        _write(self.path / "status", json.dumps(dataclasses.asdict(status), indent=1))

    def write_config(self, config: TrialConfig) -> None:
        _write(self.path / "config.yaml", dump_yaml(dataclasses.asdict(config)))

    def config(self) -> TrialConfig | None:
        """config.yaml as it was written, or None where the trial never started."""
        path = self.path / "config.yaml"
        if not path.exists():
            return None
        return checked(read_yaml(path).data, str(path), TrialConfig, self._again)

    def result(self) -> dict[str, Any] | None:
        """The trial's JSON, or None where it has not finished."""
        try:
            return read_result(self.result_file.read_bytes())
        except OSError:
            return None
        except ValueError as error:
            raise VitcliError(
                f"{self.result_file}: is damaged ({error})",
                "remove it; the next run of the sweep runs the trial again",
            ) from error

    def has_result(self) -> bool:
        """Whether there is a whole result; a damaged one counts as none, and is made again."""
        try:
            return self.result() is not None
        except VitcliError:
            return False

    def keep_result(self) -> str:
        """Turn the captured stdout into result.json; otherwise say what is wrong with it."""
        try:
            read_result(self.stdout.read_bytes())
        except OSError:
            return "printed nothing"
        except ValueError as error:
            return str(error)
        os.replace(self.stdout, self.result_file)  # noqa: PTH105
        return ""

    def as_left(self) -> Status:
        """How an earlier call left it: done, too, if only the last word of it is missing."""
        status = self.status()
        if status.state == "running" and (self.has_result() or not self.keep_result()):
            status = dataclasses.replace(status, state="done")
            self.write_status(status)
        return status

    def last_words(self) -> str:
        """The line of stderr that says what went wrong: the last with `error`, or the last."""
        try:
            with self.stderr.open("rb") as file:
                file.seek(max(0, self.stderr.stat().st_size - 8192))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return ""
        lines = [line.strip() for line in lines if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error")]
        return (errors or lines or [""])[-1][:300]


def read_result(text: bytes) -> dict[str, Any]:
    """The one JSON object a command prints; NaN and infinities in it are null.

    Raises:
        ValueError: anything else.
    """
    if not text.strip():
        raise ValueError("printed nothing")
    try:
        value = json.loads(
            text, parse_constant=lambda name: None, parse_float=_finite, parse_int=_bounded
        )
    except (ValueError, RecursionError) as error:
        if str(error).startswith("Extra data"):
            raise ValueError("printed more than one JSON value") from None
        first = text.strip().splitlines()[0][:60].decode("utf-8", "replace")
        raise ValueError(f"printed no JSON but {first!r}") from None
    if not isinstance(value, dict):
        raise ValueError(f"printed JSON that is not an object but a {type(value).__name__}")
    return value


def _finite(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _bounded(text: str) -> int | None:
    value = int(text)
    return value if abs(value) < LARGEST else None


@dataclass(frozen=True)
class Results:
    """The directory of a whole sweep."""

    root: Path

    @property
    def sweep_file(self) -> Path:
        return self.root / "sweep.yaml"

    @property
    def journal(self) -> Path:
        return self.root / "study.journal"

    def create(self, name: str, source: str, storage: str | None = None) -> None:
        """Make the directory and keep the sweep's file in it, with its name and storage.

        Raises:
            VitcliError: it holds another sweep, or something that is no sweep.
        """
        if self.root.exists() and not self.sweep_file.exists() and self._foreign():
            raise VitcliError(
                f"{self.root}: is not a sweep directory and is not empty",
                "name an empty directory with --out",
            )
        (self.root / "trials").mkdir(parents=True, exist_ok=True)
        text = Path(source).read_text(encoding="utf-8")
        with self.claiming():
            if self.sweep_file.exists():
                there = read_yaml(self.sweep_file).data.get("name")
                if there != name:
                    raise VitcliError(
                        f"{self.root}: holds the sweep {there!r} (expected {name!r})",
                        "name another directory with --out",
                    )
            hidden = masked_url(storage) if storage else None
            _write(self.sweep_file, _kept(text, name=name, storage=hidden))
            if not (self.root / "id").exists():
                _write(self.root / "id", uuid.uuid4().hex)

    def _foreign(self) -> bool:
        """Whether it is, or holds, what a sweep killed in its first moment cannot have left."""
        first = ("trials", "claim.lock")
        if not self.root.is_dir():
            return True
        names = (path.name for path in self.root.iterdir())
        return any(n not in first and not n.startswith(".sweep.yaml.") for n in names)

    @property
    def id(self) -> str:
        """Which directory this is, from whatever machine it is seen."""
        return (self.root / "id").read_text().strip()

    def claiming(self) -> Lock:
        """One process at a time decides which trial is next."""
        return lock(self.root / "claim.lock")

    def trial(self, id: str) -> TrialDir:
        return TrialDir(self.root / "trials" / id)

    def trials(self) -> Iterator[TrialDir]:
        """Those that were ever started, by id."""
        folder = self.root / "trials"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (path / "config.yaml").exists():
                yield TrialDir(path)


def arguments_of(sweep: Sweep, command: Command, trial: Trial, place: TrialDir) -> list[str]:
    """The words after `vitcli`, with the trial's directory in place of `{trial}`."""

    def placed(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("{trial}", str(place.path))
        return list(map(placed, value)) if isinstance(value, list) else value

    given = sweep.spelled_out(trial.params)
    return command.arguments({key: placed(value) for key, value in given.items()})


def shown_command(program: Sequence[str] | None, arguments: Sequence[str]) -> str:
    """The command line for people: `vitcli …`, or the program in its place."""
    return shlex.join([*(program or ["vitcli"]), *arguments])


def read_trial(sweep: Sweep, place: TrialDir) -> SweepTrial:
    """What a trial's directory says of it."""
    status, config = place.status(), place.config()
    result = place.result() if status.state == "done" else None
    columns = sweep.metrics.items() if result is not None else ()
    cut_off = status.state == "running" and not place.is_held()
    return SweepTrial(
        id=place.path.name,
        state="interrupted" if cut_off else status.state,
        params=config.params if config else {},
        metrics={name: lookup(result, metric.path) for name, metric in columns},
        wall_s=status.wall_s,
        attempts=status.attempts,
        error=status.error,
        command=config.run if config else "",
        cwd=config.cwd if config else "",
        directory=str(place.path),
        host=status.host,
        curve=_curve(sweep, result),
        threads=status.threads,
        last_value=status.last_value,
    )


def _curve(sweep: Sweep, result: Mapping[str, Any] | None) -> Curve | None:
    """The points of a result's curve that have a number for x."""
    if not sweep.curve or result is None:
        return None
    xs, ys = lookup(result, sweep.curve.x), lookup(result, sweep.curve.y)
    if not (isinstance(xs, list) and isinstance(ys, list) and len(xs) == len(ys)):
        return None
    points = [(x, y if is_number(y) else None) for x, y in zip(xs, ys, strict=True) if is_number(x)]
    return Curve(tuple(x for x, _ in points), tuple(y for _, y in points))


def _kept(text: str, **given: str | None) -> str:
    """The file with what its path and the options say; only its data if that cannot go on top."""
    data = parse_yaml(text, "").data
    given = {key: value for key, value in given.items() if value not in (None, data.get(key))}
    wanted = {**given, **data, **given}
    longer = "".join(f"{key}: {json.dumps(value)}\n" for key, value in given.items()) + text
    try:
        fits = parse_yaml(longer, "").data == wanted
    except VitcliError:  # a flow mapping, a `---`, a byte order mark, a key that is there
        fits = False
    return longer if fits else dump_yaml(wanted)


def _write(path: Path, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def new_values(
    file: Path, start: int, step: str, value: str
) -> tuple[list[tuple[int, float]], int]:
    """The finite (step, value) pairs in the whole lines after byte `start`, and where they end.

    Lines without both are passed over; a file that is not there yet has none.
    """
    try:
        with file.open("rb") as lines:
            lines.seek(start)
            new = lines.read()
    except OSError:
        return [], start
    whole = new[: new.rfind(b"\n") + 1]
    pairs = []
    for line in whole.splitlines():
        with contextlib.suppress(LookupError, TypeError, ValueError, OverflowError, RecursionError):
            entry = json.loads(line)
            pair = int(entry[step]), float(entry[value])
            if math.isfinite(pair[1]):
                pairs.append(pair)
    return pairs, start + len(whole)
