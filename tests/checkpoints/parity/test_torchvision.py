"""torchvision's VisionTransformer, from its state dicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from tests.checkpoints.parity.compare import EXACT, Outputs, assert_close, images, ours, randomized
from vitcli.checkpoints.weights import load_weights
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting
from vitcli.errors import VitcliError

HEADS = [Setting(("encoder", "heads"), 2, "--set")]
OLD_NAMES = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


def make(image_size: int = 32, **more: Any) -> nn.Module:
    return VisionTransformer(
        image_size, 8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=40, num_classes=5, **more
    )


def outputs(model: nn.Module, pixels: Tensor) -> Outputs:
    seen: list[Tensor] = []
    blocks = model.encoder.layers
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        *(b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in blocks),
    ]
    output = model(pixels)
    for hook in hooks:
        hook.remove()
    tokens = model.encoder.ln(seen[-1])
    return Outputs(seen, seen[-1], tokens, tokens[:, 0], output)


@pytest.mark.parametrize("representation", [None, 16])
@pytest.mark.parametrize("old_names", [False, True])
def test_equals_torchvision(representation: int | None, old_names: bool, tmp_path: Path) -> None:
    model = randomized(make(representation_size=representation))
    state = dict(model.state_dict())
    for new, old in OLD_NAMES.items() if old_names else ():
        state = {name.replace(new, old): tensor for name, tensor in state.items()}
    torch.save(state, tmp_path / "vit.pth")
    loaded = load_weights(str(tmp_path / "vit.pth"), overrides=HEADS, dtype=torch.float64)
    for size in (32, 48):
        other = make(size, representation_size=representation).double().eval()
        other.load_state_dict(interpolate_embeddings(size, 8, dict(model.state_dict())))
        pixels = images(size, size)
        with torch.no_grad():
            theirs = outputs(other, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), EXACT)


def test_heads_are_asked_for_and_a_preset_brings_the_preprocessing(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = VisionTransformer(224, 16, 12, 12, 768, 3072).bfloat16()
    torch.save(model.to_empty(device="cpu").state_dict(), tmp_path / "vit_b_16.pth")
    with pytest.raises(VitcliError) as error:
        load_weights(str(tmp_path / "vit_b_16.pth"))
    assert "--set encoder.heads=VALUE" in error.value.hint
    preset = load_config(ModelConfig, "vit-b16-torchvision")
    loaded = load_weights(str(tmp_path / "vit_b_16.pth"), preset=preset, dtype=torch.bfloat16)
    assert loaded.config.encoder.heads == 12
    assert loaded.report.preprocess_by == "preset vit-b16-torchvision"
    assert loaded.config.preprocess.resize_size == (256, 256)


@pytest.mark.parametrize(
    ("preset", "weights"),
    [
        ("vit-b16-torchvision", models.ViT_B_16_Weights.IMAGENET1K_V1),
        ("vit-b16-torchvision-swag", models.ViT_B_16_Weights.IMAGENET1K_SWAG_E2E_V1),
        ("vit-b16-torchvision-swag-linear", models.ViT_B_16_Weights.IMAGENET1K_SWAG_LINEAR_V1),
        ("vit-b32-torchvision", models.ViT_B_32_Weights.IMAGENET1K_V1),
        ("vit-l16-torchvision", models.ViT_L_16_Weights.IMAGENET1K_V1),
        ("vit-l16-torchvision-swag", models.ViT_L_16_Weights.IMAGENET1K_SWAG_E2E_V1),
        ("vit-l16-torchvision-swag-linear", models.ViT_L_16_Weights.IMAGENET1K_SWAG_LINEAR_V1),
        ("vit-l32-torchvision", models.ViT_L_32_Weights.IMAGENET1K_V1),
        ("vit-h14-518", models.ViT_H_14_Weights.IMAGENET1K_SWAG_E2E_V1),
        ("vit-h14-torchvision-swag-linear", models.ViT_H_14_Weights.IMAGENET1K_SWAG_LINEAR_V1),
    ],
)
def test_presets_prepare_images_as_the_weights_ask(preset: str, weights: Any) -> None:
    mine, theirs = load_config(ModelConfig, preset).preprocess, weights.transforms()
    assert mine.resize == "shortest"
    assert [mine.resize_size] == [(side, side) for side in theirs.resize_size]
    assert [mine.crop_size] == [(side, side) for side in theirs.crop_size]
    assert mine.filter == theirs.interpolation.value
    assert (list(mine.mean), list(mine.std)) == (theirs.mean, theirs.std)
    assert mine.crop_rounding == "round"
