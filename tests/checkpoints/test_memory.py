"""Loading never holds a model twice. A fresh process is measured, by its own high-water mark."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as T
from safetensors.torch import load_file

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc"),
]
PROGRAM = """
import sys
import torch
from vitcli.checkpoints.weights import load_weights
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(l.split()[1]) * 1024 for l in lines if l.startswith("VmHWM"))
before = peak()
encoder = load_weights(sys.argv[1]).encoder
print(peak() - before, sum(p.nbytes for p in encoder.parameters()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """57 M parameters, 227 MB in float32."""
    where = tmp_path_factory.mktemp("large")
    config = T.ViTConfig(
        hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16
    )
    with torch.device("meta"):
        model = T.ViTModel(config, add_pooling_layer=False)
    model.to_empty(device="cpu").bfloat16().save_pretrained(where)
    return where


@pytest.mark.parametrize("form", ["bfloat16 safetensors", "bfloat16 bin"])
def test_the_peak_is_at_most_1_3_times_the_model(form: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    if form == "bfloat16 bin":
        torch.save(load_file(folder / "model.safetensors"), tmp_path / "pytorch_model.bin")
    else:
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    used, model = map(int, done.stdout.split())
    assert model > 200e6
    assert used <= 1.3 * model
