"""What the file listing promises: few files, each short enough to be read at once."""

from __future__ import annotations

from pathlib import Path

import vitcli

FILES = sorted(Path(vitcli.__file__).parent.rglob("*.py"))
MOST_FILES = 150
MOST_LINES = 500


def test_the_package_has_few_files() -> None:
    assert len(FILES) <= MOST_FILES


def test_each_file_is_read_at_once() -> None:
    lengths = {path: path.read_text(encoding="utf-8").count("\n") for path in FILES}
    assert {path.name: n for path, n in lengths.items() if n > MOST_LINES} == {}
