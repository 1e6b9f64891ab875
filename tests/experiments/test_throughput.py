"""experiments/throughput.py at toy size, and its arithmetic."""

from __future__ import annotations

import sys

import pytest

from experiments import throughput


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
    title, _, *rows, main = capsys.readouterr().out.splitlines()
    assert "3 JPEGs of 40x30" in title
    assert [row.split()[0] for row in rows] == ["1", "2"]
    for row in rows:
        _, decode, encode, null, of, both, share, _ = map(float, row.split())
        assert share == pytest.approx(both / min(decode, encode), abs=0.011)
        assert of == pytest.approx(null / decode, abs=0.011)
    assert main.startswith("main process: ")
