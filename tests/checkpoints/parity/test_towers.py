"""The towers of today's vision-language models give their library's numbers, at three sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.checkpoints.parity.compare import assert_close, images, ours, randomized
from tests.checkpoints.parity.towers import TOWERS
from vitcli.checkpoints.load import load_weights

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", TOWERS)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    case = TOWERS[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert loaded.report.family == case.family
    for size in case.sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = case.outputs(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


@pytest.mark.parametrize("name", [n for n in TOWERS if "whole" not in n])
def test_a_bare_state_dict_needs_no_more_than_a_preset(name: str, tmp_path: Path) -> None:
    model = randomized(TOWERS[name].make())
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    known = load_weights(str(tmp_path)).config
    (tmp_path / "config.json").unlink()
    loaded = load_weights(str(tmp_path), preset=known)
    assert loaded.report.family == TOWERS[name].family
    assert loaded.config.encoder == known.encoder
