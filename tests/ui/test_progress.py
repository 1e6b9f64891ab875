"""Progress on a terminal and in a pipe."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from vitcli.commands.train.result import step_facts
from vitcli.ui.console import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns that are drawn on."""
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)


def clock(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
    times = iter(seconds)
    monkeypatch.setattr("vitcli.ui.console.time", SimpleNamespace(monotonic=times.__next__))


@pytest.mark.usefixtures("terminal")
def test_a_million_images_are_counted_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock(monkeypatch, 0.0, 0.0, 3.0)
    with progress("encoding", timed=False, unit="img/s") as bar:
        bar(800_000, 1_000_000)
        bar(800_050, 1_000_000, "failed: 123,456 corrupt")
    shown = re.sub(r"\x1b\[[?\d;]*\w", "", capsys.readouterr().err)
    assert "800050/1000000 16.7 img/s, 3 h 20 min left, failed: 123,456 corrupt" in shown
    assert max(map(len, re.split(r"[\r\n]+", shown))) == 77, "no room for the terminal's own ^C"


@pytest.mark.usefixtures("terminal")
def test_all_figures_of_a_training_step_fit_in_80_columns(
    capsys: pytest.CaptureFixture[str],
) -> None:
    entry = {"loss": 12.3456, "accuracy": 0.41, "lr": 2.45e-05, "grad_norm": 123.456}
    with progress("") as bar:
        for step in (1, 40_000):
            bar(step, 50_000, step_facts(entry, 12_345.0))
    shown = capsys.readouterr().err
    assert "40000/50000" in shown and "0:" in shown and "…" not in shown
    assert "loss 12.346 acc 0.41 lr 2.4e-05 grad 123 12345 img/s" in shown


def test_a_pipe_gets_a_line_per_tenth_or_per_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress("", lines="tenths") as bar:
        for step in range(1, 41):
            bar(step, 40, f"step {step}")
    shown = [line.split(", ")[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["step 1", *(f"step {step}" for step in range(4, 41, 4))]

    clock(monkeypatch, *map(float, range(41)))  # the bar's own start, then a call per second
    with progress("reading", timed=False, lines="seconds") as bar:
        for step in range(1, 41):
            bar(step, 40)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"reading: {step} of 40" for step in (10, 20, 30, 40)]


def test_a_pipe_gets_nothing_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading") as bar:
        bar(1, 1)
    assert capsys.readouterr().err == ""
