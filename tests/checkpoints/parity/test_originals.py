"""Checkpoints as their authors publish them give the numbers of timm and transformers twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import transformers as T
from torch import nn

from tests.checkpoints.parity import originals
from tests.checkpoints.parity.compare import (
    EXACT,
    FLOAT32_PARTS,
    assert_close,
    images,
    ours,
    randomized,
)
from tests.checkpoints.parity.hf import SMALL, plain
from tests.checkpoints.parity.originals import at_size
from tests.checkpoints.parity.timm_models import ANY_SIZE, Case, outputs
from tests.checkpoints.sources import sparse
from vitcli.checkpoints.weights import load_weights, plan_weights
from vitcli.config.settings import Setting
from vitcli.errors import VitcliError

HEADS = {"heads": 2}
ALL = {
    **HEADS,
    "norm_eps": 1e-6,
    "activation": "gelu",
    "pooling": "cls",
    "position": "learned",
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def load(file: Path, told: dict[str, Any]) -> Any:
    settings = [Setting(("encoder", key), value, "--set") for key, value in told.items()]
    return load_weights(str(file), overrides=settings, dtype=torch.float64)


def compare(
    loaded: Any, case: Case, model: nn.Module, resize: originals.Resize, tolerance: float
) -> None:
    """At the native size exactly, at others within `tolerance`."""
    for size in ANY_SIZE:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(at_size(case, model, size, resize), pixels)
        native = size == ANY_SIZE[0]
        assert_close(theirs, ours(loaded.encoder, pixels), EXACT if native else tolerance)


@pytest.mark.parametrize("wrapper", [None, "teacher"])
def test_dinov2(wrapper: str | None, tmp_path: Path) -> None:
    case = Case("dinov2", "vit_base_patch14_dinov2", {"num_classes": 0})
    model = randomized(case.make())
    state = originals.dinov2(model)
    if wrapper:  # a pre-training checkpoint, its blocks in chunks of one
        state = originals.renamed(state, (r"^", "backbone."), (r"blocks\.(\d)", r"blocks.\1.\1"))
        state["dino_head.last_layer.weight"] = torch.zeros(3, 3)
    torch.save({wrapper: state} if wrapper else state, tmp_path / "dinov2.pth")
    loaded = load(tmp_path / "dinov2.pth", HEADS)
    assert loaded.report.family == case.family
    compare(loaded, case, model, originals.offset_bicubic, FLOAT32_PARTS)


def test_dinov2_names_with_one_register_are_asked_about(tmp_path: Path) -> None:
    """TIPS v2's largest file has them too, and interpolates its table by another rule."""
    case = Case("dinov2", "vit_giant_patch14_reg1_tipsv2", {"num_classes": 0, "mlp_ratio": 4})
    torch.save(originals.dinov2(randomized(case.make())), tmp_path / "bare.pth")
    with pytest.raises(VitcliError, match=r"position_table\.resize"):
        load(tmp_path / "bare.pth", HEADS)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [("vit_base_patch14_reg4_dinov2", {}), ("vit_giant_patch14_reg4_dinov2", {"mlp_ratio": 4})],
)
def test_dinov2_with_registers(architecture: str, more: dict[str, Any], tmp_path: Path) -> None:
    arguments = {"num_classes": 0, "dynamic_img_size": True, **more}
    model = randomized(Case("dinov2", architecture, arguments).make())
    torch.save(originals.dinov2(model), tmp_path / "dinov2.pth")
    loaded = load(tmp_path / "dinov2.pth", HEADS)
    assert loaded.report.family == "dinov2"
    assert loaded.config.encoder.position_table.prefix_rows is None  # CLS, not the registers
    for size in ANY_SIZE:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(model, pixels)  # timm resizes as DINOv2 with registers does
        native = size == ANY_SIZE[0]
        assert_close(theirs, ours(loaded.encoder, pixels), EXACT if native else FLOAT32_PARTS)


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("vit_base_patch16_dinov3", {}),
        ("vit_base_patch16_dinov3_qkvb", {}),
        ("vit_huge_plus_patch16_dinov3_qkvb", {"mlp_ratio": 3}),
    ],
)
def test_dinov3(architecture: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Nothing has to be told, and the stored periods count, here rounded as published.

    Heads of 16: the first period that bfloat16 cannot hold is 100^(1/4).
    """
    arguments = {"num_classes": 0, "global_pool": "token", "embed_dim": 32, **more}
    model = randomized(Case("dinov3", architecture, arguments).make())
    model.rope.periods.copy_(model.rope.periods.bfloat16())
    torch.save(originals.dinov3(model), tmp_path / "dinov3.pth")
    loaded = load(tmp_path / "dinov3.pth", {})
    assert loaded.report.family == "dinov3"
    for size in ANY_SIZE:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(model, pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), FLOAT32_PARTS)


def as_deit(state: originals.State) -> dict[str, Any]:
    return {"model": state}


def as_deit3(state: originals.State) -> dict[str, Any]:
    return {"model": originals.renamed(state, (r"ls(\d)\.gamma", r"gamma_\1"))}


def as_mae(state: originals.State) -> dict[str, Any]:
    decoder = {"mask_token": torch.zeros(1, 1, 8), "decoder_embed.weight": torch.zeros(8, 16)}
    return {"model": state | decoder}


def as_ijepa(state: originals.State) -> dict[str, Any]:
    return {"encoder": originals.renamed(state, (r"^", "module.")), "predictor": {}, "epoch": 3}


@pytest.mark.parametrize(
    ("wrap", "architecture", "more", "told"),
    [
        (as_deit, "deit_base_patch16_224", {}, ALL),
        (as_deit, "deit_base_distilled_patch16_224", {}, {**ALL, "pooling": "none"}),
        (as_deit3, "deit3_base_patch16_224", {}, ALL),
        (as_mae, "vit_base_patch16_224", {"num_classes": 0}, ALL),
        (as_deit, "vit_base_patch16_224", {"global_pool": "avg"}, {**ALL, "pooling": "mean"}),
        (
            as_ijepa,
            "vit_base_patch16_siglip_gap_224",
            {"num_classes": 0},
            {**ALL, "pooling": "mean"},
        ),
    ],
    ids=["deit", "deit distilled", "deit3", "mae", "mae fine-tuned", "ijepa"],
)
def test_vit_originals(
    wrap: Any, architecture: str, more: dict[str, Any], told: dict[str, Any], tmp_path: Path
) -> None:
    case = Case("original-vit", architecture, more)
    model = randomized(case.make())
    torch.save(wrap(model.state_dict()), tmp_path / "original.pth")
    loaded = load(tmp_path / "original.pth", told)
    assert loaded.report.family == case.family
    compare(loaded, case, model, originals.plain_bicubic, EXACT)


@pytest.mark.parametrize("style", ["300M", "6B"])
@pytest.mark.parametrize("inside", [False, True])
def test_internvit(style: str, inside: bool, tmp_path: Path) -> None:
    keys = (
        {"attention_bias": True}
        if style == "300M"
        else {"use_qk_norm": True, "norm_type": "rms_norm"}
    )
    model = randomized(T.InternVLVisionModel(T.InternVLVisionConfig(**SMALL, **keys)))
    state = originals.internvit(model)
    config: dict[str, Any] = {
        **SMALL,
        "model_type": "intern_vit_6b",
        "architectures": ["InternVisionModel"],
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "norm_type": "layer_norm" if style == "300M" else "rms_norm",
        "qkv_bias": style == "300M",
        "qk_normalization": style == "6B",
        "use_flash_attn": True,
        "initializer_factor": 0.1,
        "drop_path_rate": 0.1,
    }
    if inside:
        state = originals.renamed(state, (r"^", "vision_model."))
        state["language_model.norm.weight"] = torch.zeros(3)
        config = {"model_type": "internvl_chat", "vision_config": config}
    torch.save(state, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(tmp_path, {})
    assert loaded.report.family == "internvit"
    for size in ((32, 32), (48, 24)):
        pixels = images(*size)
        with torch.no_grad():
            theirs = plain(tokens="last_hidden_state")(model, pixels)
        theirs.pooled = theirs.tokens[:, 0]
        exact = style == "300M" and size == (32, 32)
        assert_close(theirs, ours(loaded.encoder, pixels), EXACT if exact else FLOAT32_PARTS)


@pytest.mark.parametrize("style", ["old", "new", "stacked"])
@pytest.mark.parametrize(
    ("architecture", "more", "prefix"),
    [
        ("vit_base_patch16_224", {}, ""),
        ("vit_base_patch16_224", {"num_classes": 0}, "opt/target/"),
        ("flexivit_base", {}, "params/"),  # big_vision adds positions before CLS
        ("vit_base_patch16_siglip_224", {"num_classes": 0}, "params/img/"),
        ("vit_base_patch16_siglip_gap_224", {}, "params/"),
    ],
    ids=["head", "no head", "no CLS row", "MAP", "mean"],
)
def test_google(
    style: str, architecture: str, more: dict[str, Any], prefix: str, tmp_path: Path
) -> None:
    """The activation is JAX's default: the tanh approximation."""
    case = Case("google-vit", architecture, {"act_layer": "gelu_tanh", **more})
    model = randomized(case.make())
    arrays = {prefix + k: v for k, v in originals.flax(model, 2, style).items()}
    if "img/" in prefix:
        arrays |= {"params/t": np.zeros(1), "params/txt/head/bias": np.zeros(2)}
    (np.savez_compressed if style == "new" else np.savez)(tmp_path / "vit.npz", **arrays)
    loaded = load(tmp_path / "vit.npz", {})
    assert loaded.report.family == case.family
    compare(loaded, case, model, originals.zoomed, EXACT)


def test_google_with_pre_logits_and_bfloat16(tmp_path: Path) -> None:
    """The ImageNet-21k ViTs of 2020: a tanh layer between CLS and the classifier."""
    model = randomized(Case("", "vit_base_patch16_224", {"act_layer": "gelu_tanh"}).make())
    layer = randomized(nn.Linear(16, 16), seed=5)
    arrays = originals.flax(model, 2, "old")
    arrays["pre_logits/kernel"] = layer.weight.detach().numpy().T
    arrays["pre_logits/bias"] = layer.bias.detach().numpy()
    np.savez(tmp_path / "vit.npz", **arrays)
    loaded = load(tmp_path / "vit.npz", {})
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = outputs(model, pixels)
        theirs.output = model.head(layer(theirs.pooled).tanh())
    assert_close(theirs, ours(loaded.encoder, pixels), EXACT)
    # JAX's bfloat16 is two raw bytes to NumPy.
    half = {k: torch.from_numpy(v.copy()).bfloat16() for k, v in arrays.items()}
    raw = {k: v.view(torch.int16).numpy().view("V2") for k, v in half.items()}
    np.savez(tmp_path / "half.npz", **raw)
    again = load(tmp_path / "half.npz", {})
    assert again.report.stored_dtypes == ("bfloat16",)
    head = again.encoder.head.linear.weight
    assert torch.equal(head, half["head/kernel"].T.double())


PERCEPTION = {
    "vit_pe_core_base_patch16_224": {"num_classes": 6, "attn_pool_num_heads": 8},
    "vit_pe_core_gigantic_patch14_448": {"num_classes": 6, "attn_pool_num_heads": 8},
    "vit_pe_lang_large_patch14_448": {"num_classes": 0},
    "vit_pe_spatial_gigantic_patch14_448": {"num_classes": 0, "init_values": 0.1},
}


def _of_size(name: str, model: nn.Module | None, size: tuple[int, int]) -> nn.Module:
    """timm's model whose rotations count patches, as the original's do at any size."""
    grid = (size[0] // 8, size[1] // 8)
    given = {"img_size": size, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
    made = timm.create_model(name, **given, ref_feat_shape=grid, **PERCEPTION[name]).double()
    if model is None:
        return made
    state, table = model.state_dict(), model.pos_embed
    cls = table.shape[1] - 16
    patches = table[:, cls:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    patches = nn.functional.interpolate(patches, grid, mode="bilinear").flatten(2).mT
    made.load_state_dict(state | {"pos_embed": torch.cat([table[:, :cls], patches], 1)})
    return made.eval()


@pytest.mark.parametrize("before", ["visual.", ""])
@pytest.mark.parametrize("name", PERCEPTION)
def test_facebooks_perception_encoder(name: str, before: str, tmp_path: Path) -> None:
    model = randomized(_of_size(name, None, (32, 32)))
    if isinstance(model.head, nn.Linear):
        nn.init.zeros_(model.head.bias)  # the original's projection has none
    state = {before + key: t for key, t in originals.perception(model).items()}
    if before:
        state |= {"transformer.resblocks.0.ln_1.weight": torch.ones(8)}
        state |= {"positional_embedding": torch.ones(7, 8), "logit_scale": torch.ones(())}
    torch.save({"weights": state}, tmp_path / "PE.pt")
    core, told = "core" in name, dict(HEADS)
    if not core:  # the names alone are a CLIP's
        with pytest.raises(VitcliError) as caught:
            load(tmp_path / "PE.pt", told)
        assert "encoder.position=" in caught.value.hint
        told["position"] = "learned+rope2d"
    loaded = load(tmp_path / "PE.pt", told)
    assert loaded.report.library == "facebookresearch perception_models"
    for size in ANY_SIZE:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(_of_size(name, model, size), pixels)
        if not core:
            theirs.tokens = theirs.pooled = theirs.output = None  # timm's mean, not the original's
        assert_close(theirs, ours(loaded.encoder, pixels), FLOAT32_PARTS)


@pytest.mark.parametrize("size", ["tiny", "small", "base", "large", "gigantic"])
def test_the_heads_of_facebooks_released_models(size: str, tmp_path: Path) -> None:
    name = next(n for n in timm.list_models() if n.startswith(f"vit_pe_core_{size}"))
    with torch.device("meta"):
        model = timm.create_model(name, num_classes=512)
    folder = sparse(tmp_path, originals.perception(model))
    plan = plan_weights(str(folder / "model.safetensors"))
    assert plan.config.encoder.heads == model.blocks[0].attn.num_heads
    assert plan.config.encoder.pool_heads == model.attn_pool.num_heads
    assert plan.config.preprocess.resize == "squash"


def test_a_clip_whose_last_norm_is_lost_is_no_perception_encoder(tmp_path: Path) -> None:
    case = Case("", "vit_pe_core_base_patch16_224", PERCEPTION["vit_pe_core_base_patch16_224"])
    state = originals.perception(randomized(case.make(num_heads=2)))
    kept = {key: t for key, t in state.items() if not key.startswith(("ln_post", "attn_pool"))}
    torch.save(kept, tmp_path / "lost.pt")
    with pytest.raises(VitcliError, match="open-clip-tower have the same tensor names"):
        load(tmp_path / "lost.pt", HEADS)
