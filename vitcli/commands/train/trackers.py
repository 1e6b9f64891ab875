"""Event files for TensorBoard (the extra `tensorboard`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitcli.errors import VitcliError, install_extra

NAMES = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
}
"""Tag of each value of metrics.jsonl."""


def event_writer(folder: Path, resumed_at: int) -> Callable[[dict[str, Any]], None]:
    """Takes lines of metrics; events after step `resumed_at`, of a run that was cut, are purged.

    Raises:
        VitcliError: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise VitcliError(
            "train.tensorboard needs tensorboard", install_extra("tensorboard")
        ) from error
    writer: Any = SummaryWriter(str(folder), purge_step=resumed_at + 1)

    def write(entry: dict[str, Any]) -> None:
        for key, tag in NAMES.items():
            if entry.get(key) is not None:
                writer.add_scalar(tag, entry[key], entry["step"])
        writer.flush()

    return write
