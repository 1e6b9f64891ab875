"""What a sweep leaves on disk, and who may run what: DIR/sweep.yaml and a directory per trial.

A trial's directory is also its claim: who holds the lock in it may run it, and the kernel frees the
lock when its holder dies, however that happens. So any number of processes, on any machine that
sees the directory, share one sweep, and a trial that says it runs while nobody holds its lock was
cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitcli.commands.sweep.result import Counts, State, Status, TrialConfig
from vitcli.commands.sweep.spec import Sweep, Trial, expand
from vitcli.commands.sweep.storage import masked_url
from vitcli.config.yaml import checked, dump_yaml, parse_yaml, read_json, read_yaml
from vitcli.errors import VitcliError
from vitcli.files import Lock, atomic_write, is_held, lock, try_lock

if TYPE_CHECKING:
    import optuna


LARGEST = 2**1000
"""Numbers of a result beyond it are infinite for all that is done with them here."""


@dataclass(frozen=True)
class TrialDir:
    """One trial's directory."""

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
        """Its status; a trial that says it runs although nobody holds its lock was cut off.

        Raises:
            VitcliError: the file is damaged.
        """
        path = self.path / "status"
        return read_json(path, Status, self._again) if path.exists() else Status("pending")

    def write_status(self, status: Status) -> None:
        text = json.dumps(dataclasses.asdict(status), indent=1)
        _write(self.path / "status", text)

    def write_config(self, command: str, trial: Trial, argv: Sequence[str], shown: str) -> None:
        """config.yaml: the resolved config, and the command line that reproduces the trial."""
        config = {
            "command": command,
            "params": dict(trial.params),
            "run": shown,
            "argv": list(argv),
            "cwd": str(Path.cwd()),
        }
        _write(self.path / "config.yaml", dump_yaml(config))

    def config(self) -> TrialConfig | None:
        """config.yaml as it was written, or None where the trial never started.

        Raises:
            VitcliError: the file is damaged.
        """
        path = self.path / "config.yaml"
        if not path.exists():
            return None
        return checked(read_yaml(path).data, str(path), TrialConfig, self._again)

    def result(self) -> dict[str, Any] | None:
        """The trial's JSON, or None where it has not finished.

        Raises:
            VitcliError: the file is damaged.
        """
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
        if self.root.is_dir() and not self.sweep_file.exists() and self._foreign():
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
        """Whether it holds what a sweep killed in its first moment cannot have left."""
        first = ("trials", "claim.lock")
        names = (path.name for path in self.root.iterdir())
        return any(n not in first and not n.startswith(".sweep.yaml.") for n in names)

    @property
    def id(self) -> str:
        """Which directory this is, from whatever machine it is seen."""
        return (self.root / "id").read_text().strip()

    @contextlib.contextmanager
    def claiming(self) -> Iterator[None]:
        """One process at a time decides which trial is next."""
        with lock(self.root / "claim.lock"):
            yield

    def trial(self, id: str) -> TrialDir:
        return TrialDir(self.root / "trials" / id)

    def trials(self) -> Iterator[TrialDir]:
        """Those that were ever started, by id."""
        folder = self.root / "trials"
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if (path / "config.yaml").exists():
                yield TrialDir(path)


def place(value: Any, directory: Path) -> Any:
    """A value with `{trial}` replaced by the trial's directory."""
    if isinstance(value, str):
        return value.replace("{trial}", str(directory))
    return [place(item, directory) for item in value] if isinstance(value, list) else value


def placed(params: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    return {key: place(value, directory) for key, value in params.items()}


def shown_command(program: Sequence[str] | None, arguments: Sequence[str]) -> str:
    """The command line for people: `vitcli …`, or the program in its place."""
    return shlex.join([*(program or ["vitcli"]), *arguments])


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


# -- who runs what -------------------------------------------------------------------------------
@dataclass
class Claim:
    """Trials this process alone may run: one, or the seeds of one point of a search."""

    id: str
    trials: list[tuple[Trial, TrialDir, Lock]]
    """Each with its directory and its lock."""
    number: int = 0
    key: int = 0
    """Of a search: the storage's own key of the entry."""
    live: optuna.Trial | None = None
    """The entry as a search reports to it."""

    def release(self) -> None:
        for _, _, held in self.trials:
            held.close()
        self.trials = []


@dataclass
class Planned:
    """The trials of a grid, a list or of random draws, claimed by the locks in their directories.

    `claim` gives out each trial that has not ended and that nobody else runs. What has ended is
    read from the directories alone, so nothing needs to be entered anywhere when a trial ends.
    """

    sweep: Sweep
    results: Results
    retry_failed: bool = False
    planned: list[Trial] = field(init=False)
    _ended: dict[str, State] = field(init=False, default_factory=dict)
    """Trials that are known to be over."""
    _given_up: set[str] = field(init=False, default_factory=set)
    """Trials that something killed while this process ran them: for the next call to try."""
    _retry: dict[str, int] = field(init=False, default_factory=dict)
    """Trials that had failed when this call began, and after how many attempts."""

    def __post_init__(self) -> None:
        self.planned = expand(self.sweep)
        if self.retry_failed:
            for trial in self.planned:
                status = self.results.trial(trial.id).status()
                if status.state == "failed":
                    self._retry[trial.id] = status.attempts

    def claim(self) -> Claim | None:
        """The next trial for this process, or None where all have ended or are claimed."""
        for trial in self.planned:
            if trial.id in self._ended or trial.id in self._given_up:
                continue
            place = self.results.trial(trial.id)
            held = None if place.is_held() else place.try_lock()
            if held is None:
                continue
            try:
                state = self._outcome(trial.id, place.as_left(), place)
            except BaseException:
                held.close()
                raise
            if state is None:
                return Claim(trial.id, [(trial, place, held)])
            self._ended[trial.id] = state
            held.close()
        return None

    def _outcome(self, id: str, status: Status, place: TrialDir) -> State | None:
        """How a trial has ended, if it has and is not to be run again."""
        if status.state == "done":
            return "done" if place.has_result() else None
        if status.state == "failed" and self._retry.get(id) == status.attempts:
            return None
        return status.state if status.state in ("failed", "pruned") else None

    def finish(self, claim: Claim, results: Sequence[Mapping[str, Any]]) -> str:
        return self._end(claim, "done")

    def fail(self, claim: Claim, error: str) -> None:
        self._end(claim, "failed")

    def prune(self, claim: Claim) -> None:
        self._end(claim, "pruned")

    def _end(self, claim: Claim, state: State) -> str:
        self._ended[claim.id] = state
        claim.release()
        return ""

    def give_up(self, claim: Claim, *, again: bool) -> None:
        """Let go of a claim that came to nothing: others may run it, and `again` this process."""
        if not again:
            self._given_up.add(claim.id)
        claim.release()

    def beat(self, claims: Sequence[Claim]) -> None:
        """Nothing: a lock that is held says that its holder lives."""

    def counts(self) -> Counts:
        """The state of the whole sweep, in every process that runs it."""
        states: list[State] = list(self._ended.values())
        folder = self.results.root / "trials"
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        for trial in self.planned:
            if trial.id in there and trial.id not in self._ended:
                states += self._standing(trial.id)
        return Counts(
            done=states.count("done"),
            running=states.count("running"),
            failed=states.count("failed"),
            pruned=states.count("pruned"),
            total=len(self.planned),
        )

    def _standing(self, id: str) -> list[State]:
        place = self.results.trial(id)
        status = place.status()
        if status.state == "running":
            return ["running"] if place.is_held() else []
        state = self._outcome(id, status, place)
        if state is None:
            return []
        self._ended[id] = state  # read once: what has ended stays
        return [state]


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
