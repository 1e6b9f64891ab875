"""Nothing is silently wrong: what tensors and configs do not prove is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers as T
from timm.layers import SwiGLUPacked
from torch import nn

from tests.checkpoints.parity.compare import EXACT, images, ours, randomized
from tests.checkpoints.parity.hf import SMALL
from tests.checkpoints.sources import same_weights, vit_folder
from vitcli.checkpoints.weights import load_weights, report_line
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")


def refusal(source: Path, *settings: str) -> VitcliError:
    with pytest.raises(VitcliError) as caught:
        load_weights(str(source), overrides=[parse_setting(text) for text in settings])
    return caught.value


def saved(model: nn.Module, folder: Path, config: dict[str, Any] | None) -> Path:
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def relative(model: nn.Module, folder: Path, *settings: str) -> float:
    """How far our tokens are from timm's."""
    overrides = [parse_setting(text) for text in settings]
    loaded = load_weights(str(folder), overrides=overrides, dtype=torch.float64)
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = model.forward_features(pixels)
    mine = ours(loaded.encoder, pixels).tokens
    assert mine is not None
    return float((theirs - mine).abs().max() / theirs.abs().max())


GATED = ("encoder.mlp=gated", "encoder.activation=silu")


def virchow() -> nn.Module:
    """SwiGLU and SiLU are passed in code, as on its model card."""
    model = timm.create_model(
        "vit_huge_patch14_224",
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=16,
        num_classes=0,
        mlp_ratio=4.0,
        reg_tokens=4,
        mlp_layer=SwiGLUPacked,
        act_layer=torch.nn.SiLU,
    )
    return randomized(model)


def test_gated_tensors_under_a_plain_architecture_name(tmp_path: Path) -> None:
    arguments = {"img_size": 32, "patch_size": 8, "reg_tokens": 4, "num_classes": 0}
    config = {"architecture": "vit_huge_patch14_224", "model_args": arguments}
    model = virchow()
    saved(model, tmp_path, config)
    error = refusal(tmp_path)
    assert "timm-vit: neither the tensors nor a config give activation, mlp" in error.message
    assert "--set encoder.activation=VALUE --set encoder.mlp=VALUE" in error.hint
    assert "activation" in refusal(tmp_path, "encoder.mlp=gated").message
    assert "mlp" in refusal(tmp_path, "encoder.activation=silu").message
    assert "mlp = plain" in refusal(tmp_path, "encoder.mlp=plain", GATED[1]).message
    assert relative(model, tmp_path, *GATED) < EXACT


def test_gated_tensors_without_a_config(tmp_path: Path) -> None:
    model = virchow()
    saved(model, tmp_path, None)
    rest = ("encoder.heads=16", "encoder.norm_eps=1e-6", "encoder.pooling=cls")
    rest += ("encoder.position=learned",)
    assert "activation, mlp" in refusal(tmp_path, *rest).message
    assert relative(model, tmp_path, *rest, *GATED) < EXACT


def test_a_perception_encoder_without_config_is_asked_for_its_positions(tmp_path: Path) -> None:
    """Its rotary positions are in no tensor: 0.10 off where a plain table is taken for granted."""
    model = timm.create_model(
        "vit_pe_core_base_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        num_classes=0,
        attn_pool_num_heads=2,
    )
    saved(randomized(model), tmp_path, None)
    error = refusal(tmp_path)
    assert "timm-pe and timm-vit have the same tensor names" in error.message
    rotated = "encoder.position=learned+rope2d"
    assert f"--set {rotated} (timm-pe)" in error.hint
    missing = refusal(tmp_path, rotated)
    told = ("heads=2", "norm_eps=1e-5", "pooling=map", "pool_heads=2", "rope.theta=10000.0")
    told += ("rope.coordinates=reference", "rope.layout=interleaved", "rope.first_axis=columns")
    told += ("rope.offset=1.0", "rope.reference_grid=[14,14]")
    for setting in told:
        key = setting.partition("=")[0]
        assert (f"--set encoder.{key}=VALUE" in missing.hint) == (key != "pooling")
    assert relative(model, tmp_path, rotated, *(f"encoder.{s}" for s in told)) < 1e-6


def test_a_bare_tower_of_siglips_names_is_asked_how_its_table_is_resized(tmp_path: Path) -> None:
    """Idefics 3's tower has the same names and other positions; with a head it is SigLIP's."""
    rest = ("encoder.heads=2", "encoder.norm_eps=1e-6", "encoder.activation=gelu_tanh")
    for head, known in ((True, True), (False, False)):
        config = T.SiglipVisionConfig(**SMALL, vision_use_head=head)
        saved(randomized(T.SiglipVisionModel(config)), tmp_path, None)
        if known:
            overrides = [parse_setting(text) for text in rest]
            assert load_weights(str(tmp_path), overrides=overrides).report.family == "hf-siglip"
        else:
            assert "position_table.resize" in refusal(tmp_path, *rest).message


@pytest.mark.parametrize("kind", ["clip", "siglip", "bert", "dinov2"])
def test_families_without_a_model_type_never_claim_configs_of_others(
    kind: str, tmp_path: Path
) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, embed_dim=48, depth=2)
    saved(model, tmp_path, {"model_type": kind})
    error = refusal(tmp_path)
    assert kind in error.message and "architecture" not in error.message
    assert "timm-vit" in error.message or "is not supported" in error.message


@pytest.mark.parametrize("key", ["state_dict_ema", "model_ema"])
def test_an_averaged_copy_is_read_as_timm_reads_it(key: str, tmp_path: Path) -> None:
    raw = vit_folder(tmp_path)
    wanted = load_weights(str(raw))
    tensors = torch.load(_as_bin(raw), weights_only=True)
    twice = {name: t * 2 for name, t in tensors.items()}
    wrapper = {"state_dict_ema": "state_dict", "model_ema": "model"}[key]
    torch.save({wrapper: twice, key: tensors, "epoch": 3}, raw / "pytorch_model.bin")
    loaded = load_weights(str(raw))
    assert same_weights(wanted.encoder, loaded.encoder)
    assert f"averaged weights ({key}); --which raw reads the others" in loaded.report.notes
    assert f"averaged weights ({key})" in report_line(loaded.report)
    assert same_weights(wanted.encoder, load_weights(str(raw), which="ema").encoder)
    other = load_weights(str(raw), which="raw")
    assert not same_weights(wanted.encoder, other.encoder)
    assert f"raw weights; {key} has the average of them" in other.report.notes


@pytest.mark.parametrize("key", ["ema", "ema_state_dict"])
def test_an_average_under_another_key_is_read_where_it_is_asked_for(
    key: str, tmp_path: Path
) -> None:
    raw = vit_folder(tmp_path)
    wanted = load_weights(str(raw)).encoder
    tensors = torch.load(_as_bin(raw), weights_only=True)
    twice = {name: t * 2 for name, t in tensors.items()}
    torch.save({"model": tensors, key: twice}, raw / "pytorch_model.bin")
    loaded = load_weights(str(raw))
    assert same_weights(wanted, loaded.encoder)
    assert f"raw weights; {key} has the average of them (--which ema)" in loaded.report.notes
    assert not same_weights(wanted, load_weights(str(raw), which="ema").encoder)
    torch.save({key: tensors}, raw / "pytorch_model.bin")
    assert same_weights(wanted, load_weights(str(raw)).encoder)
    torch.save({"model": tensors, key: {"decay": 0.9}}, raw / "pytorch_model.bin")
    assert load_weights(str(raw)).report.notes == ()


def test_an_average_that_is_asked_for_must_be_there(tmp_path: Path) -> None:
    folder = vit_folder(tmp_path)
    for _ in range(2):
        with pytest.raises(VitcliError, match="no averaged copy"):
            load_weights(str(folder), which="ema")
        assert load_weights(str(folder), which="raw").report.notes == ()
        if (folder / "model.safetensors").exists():
            _as_bin(folder)


def _as_bin(folder: Path) -> Path:
    from safetensors.torch import load_file

    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"
