"""A run directory: what a killed run leaves is whole, and where it goes on from.

config.yaml           the model and the run
metrics.jsonl         one line for each logged step and each validation
snapshots/step-N/     weights, EMA, optimizer; the directory appears in one rename
model.safetensors     the weights that were validated, for every --weights
adapter.safetensors   the low-rank adapters alone, where there are any
result.json           once the run is over
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitcli.config.load import config_yaml, load_config, read_saved_config
from vitcli.config.schema import ModelConfig
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError
from vitcli.files import as_new, atomic_write, sync

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Snapshot:
    """A run after `step` updates."""

    step: int
    weights: Tensors
    ema: Tensors | None
    optimizer: dict[str, Any]
    metrics_bytes: int
    """Length of metrics.jsonl then; what is beyond it was never vouched for."""


class RunDirectory:
    """Writes a run as it goes; rank 0 alone holds one that writes.

    A write that fails (a full disk) is a VitcliError with exit code 1, and leaves the last
    snapshot as it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.snapshots = path / "snapshots"

    def start(self, config: ModelConfig) -> None:
        """Make the directory of a new run.

        Raises:
            VitcliError: there is a run in it, or it cannot be made.
        """
        if self.config_file.exists():
            raise VitcliError(
                f"{self.path}: there is a run in this directory",
                "--resume continues it; or give another --out",
            )
        try:
            self.snapshots.mkdir(parents=True, exist_ok=True)
            self.metrics_file.write_bytes(b"")
        except OSError as error:
            raise VitcliError(
                f"cannot make {self.path}: {error.strerror}", "another --out", exit_code=1
            ) from error
        with atomic_write(self.config_file) as file:
            file.write(config_yaml(config).encode())

    def check_config(self, config: ModelConfig) -> None:
        """Refuse to continue another run than this one.

        Raises:
            VitcliError: the configs differ; the message shows where.
        """
        saved = load_config(type(config), start=read_saved_config(self.config_file))
        there = dotted(saved.model_dump(mode="python"))
        asked = dotted(config.model_dump(mode="python"))
        keys = [key for key in {**there, **asked} if there.get(key) != asked.get(key)]
        if keys:
            shown = "; ".join(
                f"{key} is {there.get(key, 'absent')} in the run, {asked.get(key, 'absent')} now"
                for key in keys
            )
            raise VitcliError(
                f"{self.path}: the config differs: {shown}",
                "resume without these options, or start another run with another --out",
            )

    def latest(self) -> Snapshot | None:
        """The last whole snapshot, or none.

        Raises:
            VitcliError: it cannot be read.
        """
        steps = self._steps()
        if not steps:
            return None
        folder = self._folder(steps[-1])
        try:
            # weights_only: tensors and plain containers, never code.
            state = torch.load(folder / "trainer.pt", weights_only=True, map_location="cpu")
            ema = folder / "ema.safetensors"
            return Snapshot(
                step=state["step"],
                weights=load_file(folder / "weights.safetensors"),
                ema=load_file(ema) if ema.exists() else None,
                optimizer=state["optimiser"],
                metrics_bytes=state["metrics_bytes"],
            )
        except (OSError, SafetensorError, RuntimeError, KeyError, EOFError) as error:
            raise VitcliError(
                f"{folder}: cannot be read: {error}",
                "remove this snapshot; --resume then goes on from the one before",
                exit_code=1,
            ) from error

    def rewind_metrics(self, length: int) -> list[dict[str, Any]]:
        """Cut metrics.jsonl to what the snapshot vouches for; its lines."""
        if self.metrics_file.exists():
            os.truncate(self.metrics_file, length)
        elif length:
            raise VitcliError(f"{self.metrics_file} is gone", "start the run again", exit_code=1)
        else:
            self.metrics_file.write_bytes(b"")
        return [json.loads(line) for line in self.metrics_file.read_text().splitlines()]

    def log(self, entry: Mapping[str, Any]) -> None:
        """Append one line; NaN and infinities are null, as JSON has none."""
        plain = {
            key: None if isinstance(value, float) and value - value != 0 else value
            for key, value in entry.items()
        }
        with self._writing(), self.metrics_file.open("ab") as file:
            file.write(json.dumps(plain).encode() + b"\n")

    def save(
        self,
        step: int,
        weights: Tensors,
        ema: Tensors | None,
        optimizer: dict[str, Any],
        exported: Mapping[str, Tensors],
        keep: int = 2,
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
                part.mkdir()
                sync(self.metrics_file)
                length = self.metrics_file.stat().st_size
                save_file(plain_tensors(weights), part / "weights.safetensors")
                if ema is not None:
                    save_file(plain_tensors(ema), part / "ema.safetensors")
                with (part / "trainer.pt").open("wb") as file:
                    torch.save(
                        {"step": step, "optimiser": optimizer, "metrics_bytes": length}, file
                    )
                for written in part.iterdir():
                    as_new(written)
                    sync(written)
                sync(part)
                shutil.rmtree(final, ignore_errors=True)
                part.rename(final)
                sync(self.snapshots)
            except BaseException:
                shutil.rmtree(part, ignore_errors=True)
                raise
            for old in self._steps()[:-keep]:
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
                "make room, then the same command with --resume",
                exit_code=1,
            ) from error


def plain_tensors(tensors: Tensors) -> dict[str, Tensor]:
    """On the CPU and contiguous, each with storage of its own, as safetensors wants them."""
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
