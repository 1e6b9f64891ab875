"""A file that lost any one tensor is refused: none passes for a model without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from timm.models._hub import save_config_for_hf

from tests.checkpoints.parity import hf, open_clip_models, originals, test_torchvision, timm_models
from tests.checkpoints.parity.timm_models import Case
from vitcli.checkpoints.weights import load_weights, plan_weights, save_snapshot
from vitcli.config.settings import Setting
from vitcli.errors import VitcliError

Checkpoint = tuple[Path, Mapping[str, Any], Callable[[Mapping[str, Any]], None], dict[str, Any]]
"""A source, what it holds, how it is written with less, and what the user has to tell."""


def saved(file: Path, state: Mapping[str, Any], told: dict[str, Any] | None = None) -> Checkpoint:
    return file, state, lambda less: torch.save(dict(less), file), told or {}


def timm_directory(name: str) -> Callable[[Path], Checkpoint]:
    def make(folder: Path) -> Checkpoint:
        model = timm_models.CASES[name].make()
        save_config_for_hf(model, folder / "config.json")
        return saved(folder / "pytorch_model.bin", model.state_dict())

    return make


def open_clip_directory(name: str) -> Callable[[Path], Checkpoint]:
    def make(folder: Path) -> Checkpoint:
        case = open_clip_models.CASES[name]
        model = case.make()
        case.save(model, folder)
        (folder / "open_clip_model.safetensors").unlink()
        state = {k: v for k, v in model.state_dict().items() if k.startswith("visual.")}
        return saved(folder / "open_clip_pytorch_model.bin", state)

    return make


def torchvision_file(folder: Path) -> Checkpoint:
    return saved(folder / "vit.pth", test_torchvision.make().state_dict(), {"heads": 2})


def dinov3_file(folder: Path) -> Checkpoint:
    """Registers are the authors' option, and the other two belong to training."""
    model = Case("", "vit_base_patch16_dinov3_qkvb", {"num_classes": 0}).make()
    state = originals.dinov3(model)
    unseen = ("storage_tokens", "mask_token", "local_cls_norm.weight", "local_cls_norm.bias")
    kept = {name: tensor for name, tensor in state.items() if name not in unseen}
    return saved(folder / "dinov3.pth", kept)


def hf_directory(name: str) -> Callable[[Path], Checkpoint]:
    def make(folder: Path) -> Checkpoint:
        hf.CASES[name].make().save_pretrained(folder)
        file = folder / "model.safetensors"
        unseen = ("text_model.", "text_projection.", "logit_", "embeddings.mask_token")
        state = {k: v for k, v in load_file(file).items() if not k.startswith(unseen[:2])}
        must = {k: v for k, v in state.items() if not k.startswith(unseen)}
        kept = {k: v for k, v in state.items() if k not in must}
        write = functools.partial(_save_with, kept, file)
        return folder, must, write, {}

    return make


def _save_with(kept: Mapping[str, Any], file: Path, less: Mapping[str, Any]) -> None:
    save_file({**kept, **less}, file, metadata={"format": "pt"})


def google_file(folder: Path) -> Checkpoint:
    model = Case("", "vit_base_patch16_siglip_224", {"num_classes": 0}).make()
    arrays = originals.flax(model.requires_grad_(False), 2, "old")
    file = folder / "vit.npz"
    return file, arrays, lambda less: np.savez(file, **less), {}


CHECKPOINTS = {
    "timm": timm_directory("vit_base_patch16_224 dynamic_img_size"),
    "timm DINOv2": timm_directory("vit_base_patch14_reg4_dinov2 dynamic_img_size num_classes"),
    "timm CLIP": timm_directory("vit_base_patch16_clip_224 dynamic_img_size"),
    "timm DINOv3": timm_directory("vit_base_patch16_dinov3_qkvb"),
    "OpenCLIP": open_clip_directory("GELU"),
    "OpenCLIP SigLIP": open_clip_directory("timm SigLIP"),
    "OpenCLIP, linear": open_clip_directory("timm CLIP, linear"),
    "torchvision": torchvision_file,
    "DINOv3": dinov3_file,
    "Google": google_file,
    **{
        f"HF {name}": hf_directory(name)
        for name in (
            *("vit", "deit", "clip whole", "clip with projection", "siglip vision"),
            *("dinov2 registers", "dinov3", "internvl 6B", "qwen2.5-vl"),
        )
    },
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_lost_tensor_is_missed(name: str, tmp_path: Path) -> None:
    source, state, write, told = CHECKPOINTS[name](tmp_path)
    settings = [Setting(("encoder", key), value, "--set") for key, value in told.items()]
    write(state)
    plan_weights(str(source), overrides=settings)
    for lost in state:
        write({key: value for key, value in state.items() if key != lost})
        with pytest.raises(VitcliError):
            plan_weights(str(source), overrides=settings)
            pytest.fail(f"{lost} is not missed")


@pytest.mark.parametrize("make", [dinov3_file, google_file])
def test_a_snapshot_keeps_every_bit(make: Callable[[Path], Checkpoint], tmp_path: Path) -> None:
    """Stored periods too, which only the config holds."""
    source, state, write, _ = make(tmp_path)
    write(state)
    first = load_weights(str(source))
    save_snapshot(tmp_path / "snapshot", first.config, first.encoder)
    second = load_weights(str(tmp_path / "snapshot"))
    assert second.config.encoder == first.config.encoder
    for key, value in first.encoder.state_dict().items():
        assert torch.equal(value, second.encoder.state_dict()[key]), key
