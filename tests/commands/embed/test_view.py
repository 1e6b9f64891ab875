"""A job's progress on a terminal."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest

from vitcli.commands.embed.view import watch_job


def test_a_million_images_are_counted_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("TERM", "xterm"), ("COLUMNS", "80")):
        monkeypatch.setenv(name, value)
    clock = iter((0.0, 0.0, 3.0))
    monkeypatch.setattr(
        "vitcli.commands.embed.view.time", SimpleNamespace(monotonic=clock.__next__)
    )
    with watch_job("encoding") as watch:
        watch(800_000, 1_000_000, Counter())
        watch(800_050, 1_000_000, Counter(corrupt=123_456))
    shown = re.sub(r"\x1b\[[?\d;]*\w", "", capsys.readouterr().err)
    assert "800050/1000000 16.7 img/s, 3 h 20 min left, 123,456 failed" in shown
