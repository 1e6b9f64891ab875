"""The comparisons bite: each small mistake is larger than the tolerance it is compared at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoints.parity.compare import Outputs, differences, images, ours, randomized
from tests.checkpoints.parity.hf import CASES
from vitcli.checkpoints.weights import load_weights
from vitcli.config.settings import Setting
from vitcli.nn.encoder import VisionEncoder

pytestmark = pytest.mark.filterwarnings("ignore")


def swap_q_and_k(encoder: VisionEncoder) -> None:
    for block in encoder.vit.blocks:
        q, k, v = block.attention.qkv.weight.chunk(3)
        block.attention.qkv.weight = nn.Parameter(torch.cat([k, q, v]))


def drop_one_bias(encoder: VisionEncoder) -> None:
    encoder.vit.blocks[-1].attention.proj.bias.data.zero_()


def reverse_registers(encoder: VisionEncoder) -> None:
    encoder.front_end.prefix["registers"].data = encoder.front_end.prefix["registers"].data.flip(0)


def swap_gate_and_up(encoder: VisionEncoder) -> None:
    fc1 = encoder.vit.blocks[0].feed_forward.fc1
    gate, up = fc1.weight.data.chunk(2)
    fc1.weight.data = torch.cat([up, gate])


def transpose_grid(encoder: VisionEncoder) -> None:
    table = encoder.front_end.position.table.data
    rows, columns = encoder.front_end.position.grid
    patches = table[-rows * columns :].unflatten(0, (rows, columns)).transpose(0, 1).flatten(0, 1)
    encoder.front_end.position.table.data = torch.cat([table[: -rows * columns], patches])


def forget_scale(encoder: VisionEncoder) -> None:
    encoder.vit.blocks[0].scale2.gamma.data.fill_(1.0)


def key_bias(encoder: VisionEncoder) -> None:
    """The k bias read as v's: a slip of one third in a fused bias."""
    bias = encoder.vit.blocks[0].attention.qkv.bias.data
    q, k, v = bias.chunk(3)
    encoder.vit.blocks[0].attention.qkv.bias.data = torch.cat([q, v, k])


WEIGHTS: dict[str, tuple[str, Callable[[VisionEncoder], None]]] = {
    "q and k swapped": ("vit", swap_q_and_k),
    "q and k swapped under RoPE": ("dinov3", swap_q_and_k),
    "a bias dropped": ("siglip vision", drop_one_bias),
    "registers reversed": ("dinov2 registers", reverse_registers),
    "gate and up swapped": ("dinov2 gated", swap_gate_and_up),
    "the table's axes swapped": ("vit", transpose_grid),
    "LayerScale forgotten": ("internvl 300M", forget_scale),
    "biases out of order": ("clip vision", key_bias),
}

SETTINGS = {
    "eps 1e-6 for 1e-12": ("vit", "norm_eps", 1e-6),
    "eps 1e-5 for 1e-6": ("siglip vision", "norm_eps", 1e-5),
    "eps of RMSNorm": ("qwen2.5-vl", "norm_eps", 1e-5),
    "exact for tanh GELU": ("siglip vision", "activation", "gelu"),
    "tanh for exact GELU": ("deit", "activation", "gelu_tanh"),
    "exact for quick GELU": ("clip vision", "activation", "gelu"),
    "heads": ("vit", "heads", 4),
    "antialias in the resize": ("dinov2", "position_table.resize", "bicubic_antialias"),
    "no antialias in the resize": ("dinov2 registers", "position_table.resize", "bicubic"),
    "the original's offset": ("dinov2", "position_table.resize", "bicubic_offset"),
    "align corners": ("clip vision", "position_table.resize", "bicubic_align_corners"),
    "another theta": ("dinov3", "rope.theta", 101.0),
    "no window": ("qwen2.5-vl", "attention.full_blocks", [1, 2, 3]),
    "another window": ("qwen2.5-vl", "attention.window", 4),
}


def outputs(name: str, tmp_path: Path) -> tuple[Path, Outputs, torch.Tensor]:
    case = CASES[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    pixels = images(*case.sizes[2])
    with torch.no_grad():
        return tmp_path, case.outputs(model, pixels), pixels


@pytest.mark.parametrize("mistake", WEIGHTS)
def test_a_mistake_in_the_weights_is_seen(mistake: str, tmp_path: Path) -> None:
    name, spoil = WEIGHTS[mistake]
    folder, theirs, pixels = outputs(name, tmp_path)
    encoder = load_weights(str(folder), dtype=torch.float64).encoder
    assert max(differences(theirs, ours(encoder, pixels)).values()) <= CASES[name].tolerance
    spoil(encoder)
    apart = max(differences(theirs, ours(encoder, pixels)).values())
    assert apart > 10 * CASES[name].tolerance


@pytest.mark.parametrize("mistake", SETTINGS)
def test_a_mistake_in_a_setting_is_seen(mistake: str, tmp_path: Path) -> None:
    name, key, wrong = SETTINGS[mistake]
    folder, theirs, pixels = outputs(name, tmp_path)
    setting = Setting(("encoder", *key.split(".")), wrong, f"--set encoder.{key}")
    loaded = load_weights(str(folder), overrides=[setting], dtype=torch.float64)
    apart = max(differences(theirs, ours(loaded.encoder, pixels)).values())
    assert apart > 2 * CASES[name].tolerance
