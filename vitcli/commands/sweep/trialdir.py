"""What a sweep leaves on disk: DIR/sweep.yaml, DIR/study.journal and a directory a trial."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import shlex
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitcli.commands.sweep.spec import Trial
from vitcli.config.yaml import dump_yaml, parse_yaml, read_yaml
from vitcli.errors import VitcliError
from vitcli.files import Lock, atomic_write, is_held, lock, try_lock

State = Literal["pending", "running", "done", "failed", "pruned", "killed", "interrupted"]
"""killed: something else ended the trial (kill -9, out of memory); interrupted: the sweep ended.
Both are run again by the next call; failed and pruned are kept."""


@dataclass(frozen=True)
class Status:
    """The file `status`: how a trial stands."""

    state: State
    started: float | None = None
    """Seconds since the epoch."""
    wall_s: float | None = None
    exit_code: int | None = None
    error: str = ""
    host: str = ""
    pid: int | None = None
    threads: int | None = None
    attempts: int = 0


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

    def try_lock(self) -> Lock | None:
        self.path.mkdir(parents=True, exist_ok=True)
        return try_lock(self.path / "lock")

    def is_held(self) -> bool:
        return is_held(self.path / "lock")

    def status(self) -> Status:
        """How it stands; a trial that says it runs although nobody holds its lock was cut off."""
        try:
            fields = json.loads((self.path / "status").read_text())
            return Status(**fields)
        except (OSError, ValueError, TypeError):
            return Status("pending")

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

    def config(self) -> dict[str, Any] | None:
        """config.yaml as it was written, or None where the trial never started."""
        if not (self.path / "config.yaml").exists():
            return None
        return read_yaml(self.path / "config.yaml").data

    def result(self) -> dict[str, Any] | None:
        """The trial's JSON, or None where it has not finished."""
        try:
            return read_result(self.result_file.read_bytes())
        except (OSError, ValueError):
            return None

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
        if status.state == "running" and (self.result() is not None or not self.keep_result()):
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
        value = json.loads(text, parse_constant=lambda name: None, parse_float=_finite)
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
            raise VitcliError(f"{self.root} holds something that is no sweep", "an empty --out")
        (self.root / "trials").mkdir(parents=True, exist_ok=True)
        text = Path(source).read_text(encoding="utf-8")
        with self.claiming():
            if self.sweep_file.exists():
                there = read_yaml(self.sweep_file).data.get("name")
                if there != name:
                    raise VitcliError(f"{self.root} holds the sweep {there!r}", "another --out")
            _write(self.sweep_file, _kept(text, name=name, storage=storage))
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
        for path in sorted((self.root / "trials").iterdir()):
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
    """The command line for people: `vitcli …`, or the program that stands in for it."""
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


def lookup(value: Any, path: str) -> Any:
    """What stands at a dotted path: `result.val_accuracy`, `runs.0.wall_s.median`.

    In a list, `-1` is the last item, a word the item of that `name` (`runs.0.components.FFN.share`)
    and `*` every item: `history.*.loss` is a list. None where there is nothing.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part == "*":
            rest = ".".join(parts[index + 1 :])
            items = value if isinstance(value, list) else []
            return [lookup(item, rest) if rest else item for item in items]
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.lstrip("-").isdecimal():
            position = int(part)
            value = value[position] if -len(value) <= position < len(value) else None
        elif isinstance(value, list):
            named = (item for item in value if isinstance(item, dict) and item.get("name") == part)
            value = next(named, None)
        else:
            return None
    return value


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
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            entry = json.loads(line)
            pair = int(entry[step]), float(entry[value])
            if math.isfinite(pair[1]):
                pairs.append(pair)
    return pairs, start + len(whole)
