from __future__ import annotations

import pytest

from vitcli.commands.train.result import step_facts
from vitcli.commands.train.view import live


def test_all_figures_of_the_live_progress_stand_in_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    entry = {"loss": 12.3456, "accuracy": 0.41, "lr": 2.45e-05, "grad_norm": 123.456}
    with live() as progress:
        for step in (1, 40_000):
            progress(step, 50_000, step_facts(entry, 12_345.0))
    shown = capsys.readouterr().err
    assert "40000/50000" in shown and "0:" in shown and "…" not in shown
    assert "loss 12.346 acc 0.41 lr 2.4e-05 grad 123 12345 img/s" in shown
