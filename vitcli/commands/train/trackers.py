"""Experiment trackers: the metrics of a run once more, as other programs read them."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from vitcli.config.training import TrainConfig
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError, install_extra

Entry = dict[str, Any]
"""A line of metrics.jsonl."""
Write = Callable[[int, Mapping[str, float]], None]
"""Takes a step and its values, by tag."""
TAGS = {
    "loss": "train/loss",
    "accuracy": "train/accuracy",
    "lr": "train/lr",
    "grad_norm": "train/grad_norm",
    "val_loss": "val/loss",
    "val_accuracy": "val/accuracy",
}
"""Tag of each value of metrics.jsonl."""


@contextmanager
def _tensorboard(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    from torch.utils.tensorboard import SummaryWriter

    writer: Any = SummaryWriter(str(folder))

    def write(step: int, values: Mapping[str, float]) -> None:
        for tag, value in values.items():
            writer.add_scalar(tag, value, step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    """An offline run: nothing is sent until somebody types `wandb sync`."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    quiet = wandb.Settings(silent=True, console="off", disable_git=True, save_code=False)
    run = wandb.init(
        mode="offline",
        project="vitcli",
        name=name,
        dir=str(folder.parent),  # the library adds the folder `wandb`
        config=dict(config),
        settings=quiet,
        reinit="create_new",
    )
    code = 1
    try:
        yield lambda step, values: run.log(dict(values), step=step)
        code = 0
    finally:
        run.finish(exit_code=code)


@contextmanager
def _mlflow(folder: Path, name: str, config: Mapping[str, Any]) -> Iterator[Write]:
    """A file store, which MLflow reads where MLFLOW_ALLOW_FILE_STORE is true, and migrates."""
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=folder.absolute().as_uri())
    run = client.create_run(client.create_experiment("vitcli"), run_name=name).info.run_id
    values = dotted(config)
    for at in range(0, len(values), 100):  # the most that a call takes
        some = list(values.items())[at : at + 100]
        client.log_batch(run, params=[Param(key, str(value)[:500]) for key, value in some])

    def write(step: int, values: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        client.log_batch(run, metrics=[Metric(tag, v, now, step) for tag, v in values.items()])

    status = "FAILED"
    try:
        yield write
        status = "FINISHED"
    finally:
        client.set_terminated(run, status)


Tracker = Callable[[Path, str, Mapping[str, Any]], AbstractContextManager[Write]]
TRACKERS: dict[str, Tracker] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
"""By key of `train`, extra and folder in the run directory."""


def trackers(train: TrainConfig) -> list[str]:
    """Those that the config turns on."""
    return [name for name in TRACKERS if getattr(train, name)]


@contextmanager
def tracked(
    names: Sequence[str], run: Path, config: Mapping[str, Any], history: Iterable[Entry]
) -> Iterator[list[Callable[[Entry], None]]]:
    """Functions that take each new line of metrics, one per tracker; `history` is written first.

    A tracker's folder is made anew, so that a resumed run has each step once.

    Args:
        names: keys of TRACKERS.
        run: the run directory; each tracker writes into the folder of its name there.

    Raises:
        VitcliError: the library is not installed, or the folder is a link.
    """
    with ExitStack() as stack:
        writers = []
        for name in names:
            folder = run / name
            if folder.is_symlink():
                raise VitcliError(
                    f"{folder}: is a link (expected a folder of this run)", f"rm {folder}"
                )
            for old in folder.glob("[!.]*"):  # MLflow expects its .trash again
                shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()
            try:
                write = stack.enter_context(TRACKERS[name](folder, run.absolute().name, config))
            except ImportError as error:
                raise VitcliError(
                    f"train.{name}: {name} is not installed", install_extra(name)
                ) from error
            writers.append(_of_entries(write))
        for entry in history:
            for log in writers:
                log(entry)
        yield writers


def _of_entries(write: Write) -> Callable[[Entry], None]:
    def log(entry: Entry) -> None:
        values = {tag: entry[key] for key, tag in TAGS.items() if entry.get(key) is not None}
        write(entry["step"], values)

    return log
