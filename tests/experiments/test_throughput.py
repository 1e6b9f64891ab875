"""The scripts that time jobs and training at toy size, and their arithmetic."""

from __future__ import annotations

import subprocess
import sys

import pytest

from experiments import embedding, throughput
from tests.experiments.sources import ENVIRONMENT, ROOT


def test_a_stage_with_its_own_core_may_run_at_full_speed() -> None:
    assert throughput.allowed(7.0, 30.0, workers=1, threads=1, cores=2) == 7.0


def test_stages_that_share_the_cores_share_their_time() -> None:
    """Two processes at 10 img/s in all: 0.2 s of a core; one thread at 20: 0.05 s; two cores."""
    rate = throughput.allowed(10.0, 20.0, workers=2, threads=1, cores=2)
    assert rate == pytest.approx(2 / 0.25)


def test_every_stage_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["throughput.py", "--images", "3", "--size", "40x30", "--rounds", "1"]
    words += ["--workers", "1", "2"]
    monkeypatch.setattr(sys, "argv", words)
    throughput.main()
    title, _, *rows, main, prepared = capsys.readouterr().out.splitlines()
    assert "3 JPEGs of 40x30" in title
    assert [row.split()[0] for row in rows] == ["1", "2"]
    for row in rows:
        _, decode, encode, null, of, both, share, _ = map(float, row.split())
        assert share == pytest.approx(both / min(decode, encode), abs=0.011)
        assert of == pytest.approx(null / decode, abs=0.011)
    assert main.startswith("main process: ")
    assert prepared.startswith("transform: ") and "of Pillow's open" in prepared


def test_embed_is_compared_with_the_best_script_and_with_itself(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rounds: 2 and 4 s against scripts of 6 and 5, 6 and 8 s, and one worker of 3 s."""
    times = iter([2.0, 3.0, 6.0, 5.0, 4.0, 3.0, 6.0, 8.0])
    commands: list[list[str]] = []
    monkeypatch.setattr(
        embedding, "seconds", lambda command, _: (commands.append(command), (next(times), 1.0))[1]
    )
    words = ["embedding.py", "--images", "2", "--size", "8x8", "--rounds", "2"]
    monkeypatch.setattr(sys, "argv", [*words, "--loader-workers", "0", "1", "--own-workers", "1"])
    embedding.main()
    out = capsys.readouterr().out
    assert "2.00 times as fast as the best script (1.50 to 2.50 over rounds)" in out
    assert "1.12 times as fast as its best --workers and threads (0.75 to 1.50" in out
    assert commands[1][-2:] == ["--workers", "1"] and len(commands) == 8


def test_a_training_step_is_compared() -> None:
    words = ["--toy", "--batch", "4", "--rounds", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / "training.py"), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=True,
    )
    names = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert names[1:4] == ["vitcli train", "plain loop", "timm"]
    for line, what in zip(names[4:], ("its images drawn", "alone"), strict=True):
        assert line.startswith(f"vitcli's step, {what}, is ")
        assert "times as fast as the better of the two" in line
