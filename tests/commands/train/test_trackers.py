from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.train.runs import run
from vitcli.errors import VitcliError


def test_event_files_hold_what_the_metrics_hold(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    result = run(tmp_path, train__tensorboard=True)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(row.step, row.loss) for row in result.history if row.loss is not None]
    (last,) = events.Scalars("val/accuracy")
    assert last.step == 8 and last.value == pytest.approx(result.result.val_accuracy)


def test_event_files_need_a_run_directory() -> None:
    with pytest.raises(VitcliError, match="run directory"):
        run(train__tensorboard=True)
