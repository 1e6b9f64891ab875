"""The public names, and what every result can do."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import vitcli
from vitcli.cli import app


def test_load_gives_an_encoder_that_runs() -> None:
    model = vitcli.load("vit-ti16", set={"encoder.depth": 2}, image_size=(32, 48), dtype="float64")
    output = model.encoder(torch.zeros(1, 3, 32, 48, dtype=torch.float64))
    assert output.tokens.shape == (1, 1 + 2 * 3, 192)
    assert model.input_size == (32, 48)
    result, vectors = vitcli.encode(model, tokens=["cls", "patch"])
    assert vectors["patch"].shape == (1, 6, 192)
    assert result.images[0].output_shape == (1, 7, 192)


def test_errors_say_what_was_set() -> None:
    with pytest.raises(vitcli.VitcliError, match=r"encoder\.dpth: unknown key") as caught:
        vitcli.load(set={"encoder.dpth": 2})
    assert caught.value.hint == "did you mean encoder.depth?"


def test_import_loads_no_torch() -> None:
    script = "import sys, vitcli; vitcli.__version__; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_every_public_name_is_there() -> None:
    assert set(vitcli.__all__) == {*vitcli.FUNCTIONS, "VitcliError", "__version__"}
    assert dir(vitcli) == sorted(vitcli.__all__)
    for name in vitcli.__all__:
        assert getattr(vitcli, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        vitcli.no_such_name  # noqa: B018


def test_a_result_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # what a pipe gets is not cut to a terminal
    result = vitcli.presets("vit-s")
    printed = CliRunner().invoke(app, ["presets", "vit-s", "--json"])
    assert result.to_json() + "\n" == printed.stdout
    assert result.to_dict() == json.loads(printed.stdout)
    tables = CliRunner().invoke(app, ["presets", "vit-s"]).stdout
    assert [line.rstrip() for line in tables.rstrip().splitlines()] == str(result).splitlines()
    assert "vit-s16" in result._repr_html_() and "<pre" in result._repr_html_()


def test_a_result_without_a_figure_says_so() -> None:
    with pytest.raises(vitcli.VitcliError, match="PresetsResult: this result has no figure"):
        vitcli.presets("vit-s").figure()
