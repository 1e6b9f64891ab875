"""A run directory: what a killed run leaves is whole, and --resume continues from it.

config.yaml           the model and the run
metrics.jsonl         one line for each logged step and each validation
inputs.jsonl          the images, with the side and class of each
snapshots/step-N/     weights, EMA, optimizer; the directory appears in one rename
model.safetensors     the weights that were validated, for every --weights
adapter.safetensors   the low-rank adapters alone, where there are any; adapter_model.safetensors
                      and adapter_config.json are the same in PEFT's form
result.json           once the run is over
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitcli.commands.train.result import is_count, metrics_entry
from vitcli.config.request import config_yaml, load_config, read_saved_config
from vitcli.config.schema import ModelConfig
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError
from vitcli.files import as_new, atomic_write, sha256, sync, try_lock
from vitcli.results import to_plain

Tensors = Mapping[str, Tensor]
Run = TypeVar("Run", bound=ModelConfig)
PLAIN_FILE = sum(getattr(os, f"O_{name}", 0) for name in ("CLOEXEC", "NOFOLLOW", "NONBLOCK"))
"""Flags against following a link and waiting for a pipe, where the system has them."""
KEPT = 2
"""Snapshots in a run directory, the newest."""
OTHER_SNAPSHOT = "remove this snapshot; --resume then continues from the one before"


@dataclass(frozen=True)
class Snapshot:
    """A run after `step` updates."""

    step: int
    weights: Tensors
    ema: Tensors | None
    optimizer: dict[str, Any]
    metrics_bytes: int
    """Length of metrics.jsonl then; what is beyond it was never vouched for."""
    folder: Path
    unreadable: dict[str, str] = field(default_factory=dict)
    """Path -> reason of the images that were left out until then."""

    def fit(self, weights: Tensors, ema: bool, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The optimizer's state dict, once every tensor is known to have its place in the run.

        A fused optimizer reads as many elements as its parameter has, whatever the state has.
        """
        own = optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        try:
            same_tensors("weights.safetensors", self.weights, weights)
            if ema != (self.ema is not None):
                raise ValueError(f"ema.safetensors is {'missing' if ema else 'unexpected'}")
            if self.ema is not None:
                same_tensors("ema.safetensors", self.ema, weights)
            state = self.optimizer.get("state") if isinstance(self.optimizer, dict) else None
            if not isinstance(state, dict) or (self.step > 0 and not state):
                raise ValueError("trainer.pt has no state of the optimizer")
            for index, moments in state.items():
                if not (is_count(index) and index < len(parameters)):
                    raise ValueError(f"trainer.pt has a state for parameter {index!r}")
                if not isinstance(moments, dict):
                    raise ValueError(f"trainer.pt: the state of parameter {index} is not a table")
                like = parameters[index]
                same_tensors(
                    f"trainer.pt, parameter {index}",
                    moments,
                    {"step": torch.zeros(()), "exp_avg": like, "exp_avg_sq": like},
                )
                if not 1 <= float(moments["step"]) <= self.step:
                    raise ValueError(f"trainer.pt: parameter {index} has another step")
        except ValueError as error:
            raise VitcliError(
                f"{self.folder}: does not fit the run: {error}", OTHER_SNAPSHOT, exit_code=1
            ) from error
        # The groups are the config's: only what the steps made is taken from the file.
        return {"state": state, "param_groups": own["param_groups"]}


def same_tensors(what: str, given: Mapping[Any, Any], own: Tensors) -> None:
    """Raises ValueError unless both have the same names, shapes and types, dense."""
    if odd := sorted(map(repr, given.keys() ^ own.keys())):
        side = "is missing" if odd[0] in map(repr, own) else "is unexpected"
        raise ValueError(f"{what}: {odd[0]} {side}")
    for name, like in own.items():
        tensor = given[name]
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{what}: {name} is not a dense tensor")
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{what}: {name} differs (got {tuple(tensor.shape)} {tensor.dtype}, "
                f"expected {tuple(like.shape)} {like.dtype})"
            )


def names_reasons(value: Any) -> bool:
    return isinstance(value, dict) and all(type(x) is str for pair in value.items() for x in pair)


def read_state(path: Path) -> dict[str, Any]:
    """A torch file of tensors and plain containers, never code, with every checksum read.

    Raises:
        ValueError: it is damaged or of another kind.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if any(m.file_size > m.compress_size for m in members):
                raise ValueError("is compressed, which a snapshot never is")
            if damaged := archive.testzip():
                raise ValueError(f"{path.name}: {damaged} is damaged")
        state = torch.load(path, weights_only=True, map_location="cpu")
    except (OSError, ValueError):
        raise
    except Exception as error:  # the unpickler raises whatever the bytes lead it to
        raise ValueError(f"{path.name}: {type(error).__name__}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path.name} is not a snapshot")
    return state


def check_sums(folder: Path, sums: Any) -> None:
    """Raises ValueError where a file is not the one whose sum was written; none is of old runs."""
    if not names_reasons(sums):
        raise ValueError("trainer.pt has no checksums")
    for name, written in sums.items():
        if Path(name).name != name or sha256(folder / name) != written:
            raise ValueError(f"{name} is damaged")


class RunDirectory:
    """Writes a run as it goes; rank 0 alone holds one that writes.

    A write that fails (a full disk) is a VitcliError with exit code 1, and leaves the last
    snapshot as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.inputs_file = path / "inputs.jsonl"
        self.snapshots = path / "snapshots"

    @contextmanager
    def held(self) -> Iterator[None]:
        """This process alone writes here, until the block ends or the process does."""
        with self._making():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = try_lock(self.path / ".lock")
        if lock is None:
            raise VitcliError(
                f"{self.path}: another process is training in this directory",
                "wait until it has ended, or choose another --out",
            )
        with lock:
            yield

    @contextmanager
    def _making(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise VitcliError(
                f"{self.path}: cannot be written: {error.strerror}",
                "choose another --out",
                exit_code=1,
            ) from error

    def start(self, config: ModelConfig) -> None:
        """Make the directory of a new run."""
        if self.config_file.exists():
            raise VitcliError(
                f"{self.path}: there is a run in this directory",
                "--resume continues it; or choose another --out",
            )
        with self._making():
            self.snapshots.mkdir(parents=True, exist_ok=True)
            with self._metrics(os.O_RDWR | os.O_CREAT) as file:
                if os.fstat(file).st_size:  # a run's config is written after an empty one
                    raise VitcliError(
                        f"{self.metrics_file}: is not of a run of this directory",
                        "move it away, or choose another --out",
                    )
        self.write_config(config)

    @contextmanager
    def _metrics(self, flags: int) -> Iterator[int]:
        """A descriptor of metrics.jsonl itself: a link or a device there is refused."""
        try:
            file = os.open(self.metrics_file, flags | PLAIN_FILE, 0o666)
        except OSError as error:
            if not self.metrics_file.is_symlink():
                raise
            raise self._not_ours("is a link") from error
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise self._not_ours("is not a regular file")
            yield file
        finally:
            os.close(file)

    def _not_ours(self, what: str) -> VitcliError:
        return VitcliError(
            f"{self.metrics_file}: {what}", f"remove {self.path} and start the run again"
        )

    def written_config(self, kind: type[Run]) -> Run:
        """The config of the run that is here."""
        return load_config(kind, start=read_saved_config(self.config_file))

    def write_config(self, config: ModelConfig) -> None:
        with atomic_write(self.config_file) as file:
            file.write(config_yaml(config).encode())

    def check_config(self, written: Run, config: Run, may_change: Collection[str]) -> None:
        """Refuse to continue another run than the one that is here.

        `may_change` are dotted keys whose change the caller allows.
        """
        there = dotted(written.model_dump(mode="python"))
        asked = dotted(config.model_dump(mode="python"))
        # Names that were not stored, as by earlier releases, are no others now.
        unknown = [key for key in ("classes", "train.output_names") if there.get(key) is None]
        free = {*may_change, *unknown}
        changed = (key for key in {**there, **asked} if there.get(key) != asked.get(key))
        if keys := [key for key in changed if key not in free]:
            shown = "; ".join(
                f"{key} is {there.get(key, 'absent')} in the run, {asked.get(key, 'absent')} now"
                for key in keys
            )
            longer = asked["train.epochs"] > there["train.epochs"]
            raise VitcliError(
                f"{self.path}: the config differs: {shown}",
                "add --extend: the rest of the cosine is stretched over the new epochs"
                if keys == ["train.epochs"] and longer
                else "resume without these options, or start another run with another --out",
            )

    def latest(self) -> Snapshot | None:
        """The last whole snapshot, or none; `Snapshot.fit` says whether a model can take it."""
        if not (steps := self._steps()):
            return None
        folder = self._folder(steps[-1])
        try:
            ema = folder / "ema.safetensors"
            state = read_state(folder / "trainer.pt")
            found = Snapshot(
                step=state.pop("step"),
                weights=load_file(folder / "weights.safetensors"),
                ema=load_file(ema) if ema.exists() else None,
                optimizer=state.pop("optimiser"),
                metrics_bytes=state.pop("metrics_bytes"),
                folder=folder,
                unreadable=state.get("unreadable", {}),
            )
            check_sums(folder, state.get("sha256", {}))
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise VitcliError(
                f"{folder}: cannot be read: {reason}", OTHER_SNAPSHOT, exit_code=1
            ) from error
        whole = is_count(found.step) and is_count(found.metrics_bytes)
        if not (whole and found.step == steps[-1] and names_reasons(found.unreadable)):
            raise VitcliError(
                f"{folder}: is not the snapshot of step {steps[-1]}", OTHER_SNAPSHOT, exit_code=1
            )
        return found

    def rewind_metrics(self, length: int, step: int, cut: bool = True) -> list[dict[str, Any]]:
        """The lines of metrics.jsonl that the snapshot of `step` vouches for.

        `cut` removes what is beyond them, once they are known to be this run's.

        Raises:
            VitcliError: they are not, and then the file is left as it is.
        """
        wrong = self._not_ours(f"is not what the run wrote up to step {step}")
        try:
            with self._metrics(os.O_RDWR if cut else os.O_RDONLY) as file:
                size = os.fstat(file).st_size
                with os.fdopen(os.dup(file), "rb") as reader:
                    lines = reader.read(length).split(b"\n") if 0 < length <= size else [b""]
                if size < length or lines.pop():
                    raise wrong
                history = [metrics_entry(line, step) for line in lines]
                if None in history:
                    raise wrong
                if cut:
                    os.ftruncate(file, length)
        except FileNotFoundError:
            if length:
                raise self._not_ours("is missing") from None
            if cut:
                with self._making(), self._metrics(os.O_RDWR | os.O_CREAT | os.O_EXCL):
                    pass
            return []
        except OSError as error:
            raise self._not_ours(f"cannot be read: {error.strerror}") from error
        return [entry for entry in history if entry is not None]

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line; NaN and infinities are null, as JSON has none."""
        line = json.dumps(to_plain(dict(entry))).encode() + b"\n"
        with self._writing(), self._metrics(os.O_WRONLY | os.O_APPEND) as file:
            while line:
                line = line[os.write(file, line) :]

    def save(
        self,
        step: int,
        weights: Tensors,
        ema: Tensors | None,
        optimizer: dict[str, Any],
        exported: Mapping[str, Tensors],
        unreadable: Mapping[str, str],
    ) -> None:
        """Write `exported` (file name -> tensors), the snapshot of `step`, and drop old ones.

        Whenever this is interrupted, the directory holds the last snapshot or this one, whole.
        """
        part, final = self.snapshots / f".step-{step:09d}.part", self._folder(step)
        with self._writing():
            # First, as a run whose last snapshot is there has no step left to write them after.
            for name, tensors in exported.items():
                self._export(name, tensors)
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir(parents=True)
                sync(self.metrics_file)
                length = self.metrics_file.stat().st_size
                save_file(plain_tensors(weights), part / "weights.safetensors")
                if ema is not None:
                    save_file(plain_tensors(ema), part / "ema.safetensors")
                state = {
                    "step": step,
                    "optimiser": optimizer,
                    "metrics_bytes": length,
                    "unreadable": dict(unreadable),
                    "sha256": {file.name: sha256(file) for file in sorted(part.iterdir())},
                }
                torch.save(state, part / "trainer.pt")
                for file in part.iterdir():
                    as_new(file)
                    sync(file)
                sync(part)
                shutil.rmtree(final, ignore_errors=True)
                part.rename(final)
                sync(self.snapshots)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            for old in self._steps()[:-KEPT]:
                shutil.rmtree(self._folder(old), ignore_errors=True)

    def _export(self, name: str, tensors: Tensors) -> None:
        part = self.path / f".{name}.part"
        try:
            save_file(plain_tensors(tensors), part, metadata={"format": "pt"})
            as_new(part)
            sync(part)
            part.replace(self.path / name)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def _folder(self, step: int) -> Path:
        return self.snapshots / f"step-{step:09d}"

    def _steps(self) -> list[int]:
        names = self.snapshots.glob("step-*") if self.snapshots.is_dir() else []
        return sorted(int(path.name[5:]) for path in names if path.name[5:].isdecimal())

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError, RuntimeError) as error:
            steps = self._steps()
            good = f"the snapshot of step {steps[-1]} is whole" if steps else "no snapshot yet"
            reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
            raise VitcliError(
                f"cannot write {self.path}: {reason}; {good}",
                "free some space, then run the same command with --resume",
                exit_code=1,
            ) from error


def plain_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """On the CPU and contiguous, each with storage of its own, as safetensors wants them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
