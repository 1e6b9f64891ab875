"""Tiny runs on shapes: 8 steps of 8 images in a fraction of a second."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from vitcli.commands.train import analysis as train
from vitcli.commands.train.result import TrainResult
from vitcli.config.settings import Setting
from vitcli.config.training import TrainRequest

TINY: dict[str, Any] = {
    "encoder.image_size": 16,
    "encoder.hidden": 16,
    "encoder.depth": 2,
    "encoder.heads": 2,
    "encoder.mlp_hidden": 32,
    "data.train_size": 64,
    "data.val_size": 64,
    "train.batch": 8,
    "train.snapshot_every": 3,
    "train.snapshot_seconds": 1e9,  # no snapshot follows from how fast a machine is
}


def request(out: Path | None = None, resume: bool = False, **keys: Any) -> TrainRequest:
    """Keys are dotted, with `__` for the dot: `train__lr=0.1`."""
    values = TINY | {key.replace("__", "."): value for key, value in keys.items()}
    settings = tuple(Setting(tuple(key.split(".")), v, key) for key, v in values.items())
    return TrainRequest(settings=settings, device="cpu", out=out, resume=resume)


def run(out: Path | None = None, resume: bool = False, **keys: Any) -> TrainResult:
    asked = request(out, resume, **keys)
    source = train.source_of(asked)
    return train.run_shapes(asked, train.shapes_config(asked, source), source)


def command(*arguments: str, processes: int = 1, **keys: Any) -> list[str]:
    """The same run as a command line, under torchrun if it is for several processes."""
    values = TINY | {key.replace("__", "."): value for key, value in keys.items()}
    sets = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    torchrun = [
        *("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"),
        *("-m", "vitcli"),
    ]
    start = torchrun if processes > 1 else ["-m", "vitcli"]
    return [sys.executable, *start, "train-shapes", "--device", "cpu", *sets, *arguments]


def shell(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        check=False,
    )
