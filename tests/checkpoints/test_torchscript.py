"""TorchScript archives give the state dict that torch.jit.load gives, and run nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from vitcli.checkpoints.readers import read_tensors

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(nn.Module):
    """Parts that CLIP's files have: nested modules, bare parameters, scalar buffers, views."""

    def __init__(self) -> None:
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5))
        self.positional_embedding = nn.Parameter(torch.randn(3, 5))
        self.strided = nn.Parameter(torch.randn(6, 4)[::2])
        self.register_buffer("input_resolution", torch.tensor(224))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.visual(x) @ self.positional_embedding.T


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("scripted", [False, True])
def test_equals_torch_jit_load(half: bool, scripted: bool, tmp_path: Path) -> None:
    model = Model().eval()
    program = torch.jit.script(model) if scripted else torch.jit.trace(model, torch.randn(2, 4))
    if half:
        program = program.half()
    program.save(str(tmp_path / "clip.pt"))
    wanted = torch.jit.load(str(tmp_path / "clip.pt"), map_location="cpu").state_dict()
    found = read_tensors(tmp_path / "clip.pt")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].shape == tuple(tensor.shape)
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].read(), tensor), name
