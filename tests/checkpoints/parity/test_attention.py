"""Entropies and CLS rows equal those of transformers' `output_attentions` with eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.parity.compare import images, randomized
from tests.checkpoints.parity.hf import CASES
from vitcli.checkpoints.weights import load_weights
from vitcli.commands.attention.reducers import FIELDS, attention_maps, observe_attention

pytestmark = pytest.mark.filterwarnings("ignore")

FLOAT32_SOFTMAX = 1e-6
"""Most eager paths take the softmax in float32, some rotate or normalize in it."""
INTERPOLATED = {"interpolate_pos_encoding": True}

TWINS: dict[str, tuple[float, dict[str, Any]]] = {
    "vit": (FLOAT32_SOFTMAX, INTERPOLATED),
    "deit": (FLOAT32_SOFTMAX, INTERPOLATED),
    "mae": (FLOAT32_SOFTMAX, INTERPOLATED | {"noise": torch.arange(35).expand(2, -1)}),
    "ijepa": (FLOAT32_SOFTMAX, INTERPOLATED),
    "clip vision": (FLOAT32_SOFTMAX, INTERPOLATED),
    "siglip vision": (FLOAT32_SOFTMAX, INTERPOLATED),
    "dinov2": (1e-13, {}),
    "dinov2 registers": (1e-13, {}),
    "dinov3": (FLOAT32_SOFTMAX, {}),
    "internvl 300M": (1e-13, {}),
    "internvl 6B": (FLOAT32_SOFTMAX, {}),
}


@pytest.mark.parametrize("name", TWINS)
def test_entropies_equal_those_of_the_twin(name: str, tmp_path: Path) -> None:
    tolerance, arguments = TWINS[name]
    case = CASES[name]
    model: Any = case.make()
    model.set_attn_implementation("eager")
    randomized(model)
    model.save_pretrained(tmp_path)
    encoder = load_weights(str(tmp_path), dtype=torch.float64).encoder
    pixels = images(40, 56)
    with torch.no_grad():
        rows = torch.stack(model(pixels, output_attentions=True, **arguments).attentions)
    entropy = torch.special.entr(rows).sum(-1)  # (L, B, H, N)
    seen = observe_attention(encoder, pixels)
    prefix = encoder.prefix_tokens
    expected = {
        "entropy": entropy.mean(-1),
        "entropy_patches": entropy[..., prefix:].mean(-1),
    }
    if "cls" in encoder.front_end.prefix:
        expected["entropy_cls"] = entropy[..., 0]
        expected["cls_on_cls"] = rows[..., 0, 0]
        expected["cls_on_patches"] = rows[..., 0, prefix:].sum(-1)
    if "registers" in encoder.front_end.prefix:
        expected["entropy_registers"] = entropy[..., 1:prefix].mean(-1)
        expected["cls_on_registers"] = rows[..., 0, 1:prefix].sum(-1)
    for field, value in expected.items():
        got = seen.heads[..., FIELDS.index(field)]
        assert (got - value).abs().max() < tolerance, field

    maps = attention_maps(encoder, pixels, (2,))
    query = rows[1, :, :, :1] if "cls" in encoder.front_end.prefix else rows[1, :, :, prefix:]
    theirs = query.mean(-2)[..., prefix:].unflatten(-1, (5, 7))
    assert (maps.heads[0] - theirs).abs().max() < tolerance
