"""Names of people's files and folders are shown as they are: brackets are no markup."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.commands.compare.test_verify import transformers_twin
from vitcli.cli import app

COMMANDS = {
    "encode": ["a[b].png", "--weights", "w[bold]"],
    "attn-entropy": ["a[b].png", "--weights", "w[bold]"],
    "compare": ["w[bold]", "w[bold]", "a[b].png"],
    "verify": ["w[bold]", "a[b].png"],
    "params": ["--weights", "w[bold]"],
    "profile": ["--weights", "w[bold]", "--runs", "1"],
    "convert": ["w[bold]", "o[u]"],
    "export": ["w.onnx", "--weights", "w[bold]"],
    "embed": ["f[i]", "--out", "v[u]", "--weights", "w[bold]", "--format", "npy"],
    "explore": ["a[b].png", "--weights", "w[bold]", "--out", "p[u].html"],
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("marked")
    transformers_twin(place / "w[bold]")
    (place / "f[i]/class[b]").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("a[b].png", "f[i]/class[b]/a[b].png", "f[i]/class[b]/c[b].png"):
        pixels = rng.integers(0, 256, (40, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / name)
    return place


@pytest.mark.parametrize("command", COMMANDS)
def test_brackets_are_shown(command: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = COMMANDS[command]
    done = CliRunner().invoke(app, [command, *arguments])
    assert done.exit_code == 0, done.output
    named = [word for word in arguments if "[" in word]
    shown = [word for word in named if word in done.output]
    assert shown, done.output
    for word in named:
        bare = word[: word.index("[")] + word[word.index("]") + 1 :]  # as markup would leave it
        assert f" {bare} " not in done.output and f"{bare}:" not in done.output, done.output
