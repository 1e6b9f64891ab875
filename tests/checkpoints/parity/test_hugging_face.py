"""Each Hugging Face family gives transformers' own numbers, from its files and its memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoints.parity.compare import assert_close, images, ours, randomized
from tests.checkpoints.parity.hf import CASES, Case
from vitcli.checkpoints.weights import load_weights

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def save_memory(model: nn.Module, folder: Path) -> None:
    """The names that state_dict() has, which are not those of transformers' files."""
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(model.config.to_dict()))


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, tmp_path: Path) -> None:
    case: Case = CASES[name]
    model = randomized(case.make())
    on_disk, in_memory = tmp_path / "disk", tmp_path / "memory"
    in_memory.mkdir()
    model.save_pretrained(on_disk)
    save_memory(model, in_memory)
    loaded = load_weights(str(on_disk), dtype=torch.float64)
    assert loaded.report.family == case.family
    for size in case.sizes:
        pixels = images(*size)
        with torch.no_grad():
            theirs = case.outputs(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)
    again = load_weights(str(in_memory), dtype=torch.float64)
    assert again.report.family == case.family
    assert again.config.encoder == loaded.config.encoder
    for key, value in loaded.encoder.state_dict().items():
        assert torch.equal(value, again.encoder.state_dict()[key]), key


# Without a config these have the names of SigLIP, whose patch embedding is another tensor.
TWINS = ("siglip 2 naflex", "siglip 2 naflex whole")


@pytest.mark.parametrize("name", [n for n in CASES if n not in TWINS])
def test_a_bare_state_dict_needs_no_more_than_a_preset(name: str, tmp_path: Path) -> None:
    model = randomized(CASES[name].make())
    save_memory(model, tmp_path)
    known = load_weights(str(tmp_path)).config
    (tmp_path / "config.json").unlink()
    loaded = load_weights(str(tmp_path), preset=known)
    assert loaded.report.family == CASES[name].family
    assert loaded.config.encoder == known.encoder
