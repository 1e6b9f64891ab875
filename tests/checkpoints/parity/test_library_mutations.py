"""A wrong switch that would stay silent is seen by the comparisons with timm, open_clip and kin."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from tests.checkpoints.parity import open_clip_models, originals, timm_models
from tests.checkpoints.parity.compare import (
    EXACT,
    FLOAT32_PARTS,
    Outputs,
    differences,
    images,
    ours,
    randomized,
)
from tests.checkpoints.parity.timm_models import Case
from vitcli.checkpoints.weights import load_weights
from vitcli.config.settings import Setting
from vitcli.nn.encoder import VisionEncoder

Written = tuple[Path, Outputs, Tensor]
"""A checkpoint, what its library gives, and for which images."""
NATIVE, OTHER = (32, 32), (48, 24)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def run(model: nn.Module, size: tuple[int, int]) -> tuple[Outputs, Tensor]:
    pixels = images(*size)
    with torch.no_grad():
        return timm_models.outputs(model, pixels), pixels


def timm_files(name: str, size: tuple[int, int] = NATIVE) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        model = randomized(timm_models.CASES[name].make())
        save_for_hf(model, folder)
        return folder, *run(model, size)

    return write


def open_clip_files(name: str, size: tuple[int, int] = NATIVE) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        case = open_clip_models.CASES[name]
        model = randomized(case.make())
        case.save(model, folder)
        pixels = images(*size)
        with torch.no_grad():
            other = open_clip_models.at_size(case, model, size)
            return folder, open_clip_models.outputs(other, pixels), pixels

    return write


def dinov2_file(folder: Path) -> Written:
    arguments = {"num_classes": 0, "dynamic_img_size": True, "mlp_ratio": 4}
    model = randomized(Case("", "vit_giant_patch14_reg4_dinov2", arguments).make())
    torch.save(originals.dinov2(model), folder / "dinov2.pth")
    return folder / "dinov2.pth", *run(model, NATIVE)


def dinov2_file_resized(folder: Path) -> Written:
    case = Case("", "vit_base_patch14_dinov2", {"num_classes": 0})
    model = randomized(case.make())
    torch.save(originals.dinov2(model), folder / "dinov2.pth")
    other = originals.at_size(case, model, OTHER, originals.offset_bicubic)
    return folder / "dinov2.pth", *run(other, OTHER)


def dinov3_file(folder: Path) -> Written:
    arguments = {"num_classes": 0, "global_pool": "token", "embed_dim": 32}
    model = randomized(Case("", "vit_base_patch16_dinov3_qkvb", arguments).make())
    model.rope.periods.copy_(model.rope.periods.bfloat16())
    torch.save(originals.dinov3(model), folder / "dinov3.pth")
    return folder / "dinov3.pth", *run(model, OTHER)


def google_file(folder: Path) -> Written:
    case = Case("", "vit_base_patch16_224", {"act_layer": "gelu_tanh"})
    model = randomized(case.make())
    np.savez(folder / "vit.npz", **originals.flax(model, 2, "old"))
    other = originals.at_size(case, model, OTHER, originals.zoomed)
    return folder / "vit.npz", *run(other, OTHER)


def one_norm_for_the_other(encoder: VisionEncoder) -> None:
    """The norm after pooling before it, or the other way round."""
    encoder.vit.norm, encoder.pool_norm = encoder.pool_norm, encoder.vit.norm


def no_positions_on_registers(encoder: VisionEncoder) -> None:
    encoder.front_end.position.table.data[: encoder.prefix_tokens] = 0


def no_position_on_cls(encoder: VisionEncoder) -> None:
    encoder.front_end.position.table.data[0] = 0


def prefix_reversed(encoder: VisionEncoder) -> None:
    tokens = encoder.front_end.prefix["registers"]
    tokens.data = tokens.data.flip(0)


def q_norm_forgotten(encoder: VisionEncoder) -> None:
    encoder.vit.blocks[0].attention.q_norm = nn.Identity()


def qk_norms_swapped(encoder: VisionEncoder) -> None:
    attention = encoder.vit.blocks[0].attention
    attention.q_norm, attention.k_norm = attention.k_norm, attention.q_norm


def gate_and_up_swapped(encoder: VisionEncoder) -> None:
    fc1 = encoder.vit.blocks[0].feed_forward.fc1
    fc1.weight.data = torch.cat(fc1.weight.data.chunk(2)[::-1])


def projection_transposed(encoder: VisionEncoder) -> None:
    linear = encoder.head.linear
    linear.weight.data = linear.weight.data.T.reshape(linear.weight.shape)


def values_biased_by_keys(encoder: VisionEncoder) -> None:
    qkv = encoder.vit.blocks[0].attention.qkv
    qkv.v_bias.data = qkv.q_bias.data


def periods_of_theta(encoder: VisionEncoder) -> None:
    encoder.front_end.position.periods = None


QK_NORM = "vit_base_patch16_clip_224 dynamic_img_size qk_norm fc_norm"
FC_NORM = "vit_base_patch16_224 dynamic_img_size num_classes global_pool"
REGISTERS = "vit_so150m_patch16_reg4_gap_256 dynamic_img_size"
FOLDED = "vit_base_patch14_reg4_dinov2 dynamic_img_size num_classes"
ROPE = "vit_base_patch16_dinov3_qkvb"
REFERENCE = "vit_base_patch16_rope_reg1_gap_256 dynamic_img_size"
PE = "vit_pe_core_base_patch16_224 dynamic_img_size num_heads embed_dim ref_feat_shape"
CLIP = "vit_base_patch16_clip_quickgelu_224 dynamic_img_size"

SPOILT: dict[str, tuple[Callable[[Path], Written], float, Callable[[VisionEncoder], None]]] = {
    "fc_norm before pooling": (timm_files(FC_NORM), EXACT, one_norm_for_the_other),
    "CLIPA's norm before pooling": (open_clip_files("CLIPA"), EXACT, one_norm_for_the_other),
    "norm after pooling": (
        open_clip_files("mean of normed patches, LayerScale"),
        EXACT,
        one_norm_for_the_other,
    ),
    "registers without positions": (timm_files(REGISTERS), EXACT, no_positions_on_registers),
    "the CLS row not unfolded": (dinov2_file, EXACT, no_position_on_cls),
    "registers reversed": (timm_files(FOLDED), EXACT, prefix_reversed),
    "q norm forgotten": (timm_files(QK_NORM), EXACT, q_norm_forgotten),
    "q and k norms swapped": (timm_files(QK_NORM), EXACT, qk_norms_swapped),
    "gate and up swapped": (dinov2_file, EXACT, gate_and_up_swapped),
    "proj not transposed": (open_clip_files("GELU"), EXACT, projection_transposed),
    "a bias of the wrong third": (dinov3_file, FLOAT32_PARTS, values_biased_by_keys),
    "periods made anew": (dinov3_file, FLOAT32_PARTS, periods_of_theta),
}
SET: dict[str, tuple[Callable[[Path], Written], float, dict[str, Any]]] = {
    "exact for quick GELU, timm": (timm_files(CLIP), EXACT, {"activation": "gelu"}),
    "exact for quick GELU": (open_clip_files("QuickGELU"), EXACT, {"activation": "gelu"}),
    "quick for exact GELU": (open_clip_files("GELU"), EXACT, {"activation": "quick_gelu"}),
    "exact for tanh GELU": (google_file, EXACT, {"activation": "gelu"}),
    "eps of the q and k norms": (timm_files(QK_NORM), EXACT, {"attention.qk_norm_eps": 1e-6}),
    "eps 1e-6 for 1e-5": (open_clip_files("GELU"), EXACT, {"norm_eps": 1e-6}),
    "heads": (timm_files(FC_NORM), EXACT, {"heads": 4}),
    "CLS for the mean": (timm_files(FC_NORM), EXACT, {"pooling": "cls"}),
    "halves for pairs": (timm_files(REFERENCE), FLOAT32_PARTS, {"rope.layout": "half"}),
    "pairs for halves": (timm_files(ROPE), FLOAT32_PARTS, {"rope.layout": "interleaved"}),
    "indices for centers": (timm_files(ROPE), FLOAT32_PARTS, {"rope.coordinates": "index"}),
    "another reference": (
        timm_files(REFERENCE),
        FLOAT32_PARTS,
        {"rope.reference_grid": (14, 14)},
    ),
    "no antialias, timm": (
        timm_files(FC_NORM, OTHER),
        FLOAT32_PARTS,
        {"position_table.resize": "bicubic"},
    ),
    "no antialias, open_clip": (
        open_clip_files("GELU", OTHER),
        EXACT,
        {"position_table.resize": "bicubic"},
    ),
    "MAP without CLS": (timm_files(PE), FLOAT32_PARTS, {"pool_prefix": False}),
    "MAP of the blocks' heads": (timm_files(PE), FLOAT32_PARTS, {"pool_heads": None}),
    "no offset": (dinov2_file_resized, FLOAT32_PARTS, {"position_table.resize": "bicubic"}),
    "bicubic zoom": (google_file, EXACT, {"position_table.resize": "bicubic_align_corners"}),
}


@pytest.mark.parametrize("mistake", SPOILT)
def test_a_mistake_in_the_weights_is_seen(mistake: str, tmp_path: Path) -> None:
    write, tolerance, spoil = SPOILT[mistake]
    source, theirs, pixels = write(tmp_path)
    encoder = load_weights(str(source), overrides=heads(source), dtype=torch.float64).encoder
    assert max(differences(theirs, ours(encoder, pixels)).values()) <= tolerance
    spoil(encoder)
    assert max(differences(theirs, ours(encoder, pixels)).values()) > 10 * tolerance


@pytest.mark.parametrize("mistake", SET)
def test_a_mistake_in_a_setting_is_seen(mistake: str, tmp_path: Path) -> None:
    write, tolerance, wrong = SET[mistake]
    source, theirs, pixels = write(tmp_path)
    right = load_weights(str(source), overrides=heads(source), dtype=torch.float64)
    assert max(differences(theirs, ours(right.encoder, pixels)).values()) <= tolerance
    settings = [
        *heads(source),
        *(Setting(("encoder", *key.split(".")), value, "--set") for key, value in wrong.items()),
    ]
    spoilt = load_weights(str(source), overrides=settings, dtype=torch.float64)
    assert max(differences(theirs, ours(spoilt.encoder, pixels)).values()) > 2 * tolerance


def heads(source: Path) -> list[Setting]:
    """DINOv2's own files do not tell them."""
    told = [Setting(("encoder", "heads"), 2, "--set encoder.heads")]
    return told if source.name == "dinov2.pth" else []
