from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import vitcli


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


def test_its_names_are_listed_before_they_are_loaded() -> None:
    assert {"load", "encode", "VitcliError"} <= set(dir(vitcli))
