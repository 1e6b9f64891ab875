"""One setting of a config is changed at a time: vitcli follows the library, or refuses."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import save_for_hf
from torch import nn

from tests.checkpoints.parity import timm_models
from tests.checkpoints.parity.compare import Outputs, differences, images, ours, randomized
from tests.checkpoints.parity.hf import CASES, Case
from tests.checkpoints.parity.towers import TOWERS
from tests.checkpoints.sources import changed
from vitcli.checkpoints.weights import load_weights
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")
BOOKKEEPING = {
    *("architectures", "dtype", "torch_dtype", "model_type", "transformers_version"),
    *("id2label", "label2id", "_name_or_path", "return_dict", "problem_type", "num_labels"),
    *("output_hidden_states", "output_attentions", "is_encoder_decoder", "use_cache"),
    *("chunk_size_feed_forward", "torchscript", "auto_map"),
}
"""What changes how the library answers, and not what an encoder computes."""
HF = (
    *("vit", "deit teacher", "ijepa", "dinov2", "dinov2 registers", "dinov3", "beit", "data2vec"),
    *("clip with projection", "siglip vision", "siglip 2 naflex", "idefics3", "internvl 6B"),
    *("qwen2-vl", "qwen2.5-vl", "qwen3-vl", "pixtral", "aimv2 at 32", "ovis2 at 32"),
    *("llama4 at 32", "glm4v", "tipsv2", "radio", "kimi"),
)
TIMM = (
    "vit_base_patch16_224 dynamic_img_size",
    "vit_base_patch16_clip_224 dynamic_img_size qk_norm fc_norm",
    "vit_so150m_patch16_reg4_map_256 dynamic_img_size",
    "vit_base_patch16_dinov3_qkvb",
    "vit_base_patch16_rope_ape_224 dynamic_img_size",
    "vit_small_patch16_rope_mixed_224 dynamic_img_size",
    "vit_pe_core_base_patch16_224 dynamic_img_size num_heads embed_dim ref_feat_shape",
    "eva_giant_patch14_224 dynamic_img_size",
    "eva02_base_patch16_clip_224 dynamic_img_size",
    "beit_base_patch16_224",
    "vit_relpos_medium_patch16_cls_224 rel_pos_type qk_norm",
    "qwen3_vit_88m_enc out_features mlp_ratio pos_embed_grid_size",
)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def silently_wrong(
    folder: Path,
    config: dict[str, Any],
    section: Callable[[dict[str, Any]], dict[str, Any]],
    known: dict[str, Any],
    rebuilt: Callable[[dict[str, Any]], nn.Module],
    outputs: Callable[[nn.Module], Outputs],
    pixels: torch.Tensor,
    tolerance: float,
) -> dict[str, float | str]:
    """Each changed setting that is neither refused nor followed, and how far off it is."""
    found: dict[str, float | str] = {}
    compared = 0
    for key in known:
        for other in () if key in BOOKKEEPING else changed(known[key]):
            spoilt = json.loads(json.dumps(config))
            section(spoilt)[key] = other
            (folder / "config.json").write_text(json.dumps(spoilt))
            try:
                mine = ours(load_weights(str(folder), dtype=torch.float64).encoder, pixels)
            except VitcliError:
                continue
            try:
                with torch.no_grad():
                    theirs = outputs(rebuilt(spoilt))
            except Exception:  # whatever the library raises: it has no numbers to equal
                continue
            compared += 1
            try:
                apart = max(differences(theirs, mine).values())
            except AssertionError as error:
                found[f"{key} = {other}"] = f"other outputs: {error}"
                continue
            if not apart <= tolerance:
                found[f"{key} = {other}"] = apart
    assert compared, "every change was refused"
    return found


@pytest.mark.parametrize("name", HF)
def test_settings_of_transformers(name: str, tmp_path: Path) -> None:
    case: Case = {**CASES, **TOWERS}[name]
    model = randomized(case.make())
    model.save_pretrained(tmp_path)
    pixels = images(*case.sizes[-1])

    def rebuilt(config: dict[str, Any]) -> nn.Module:
        twin = type(model)(type(model.config).from_dict(config))
        twin.load_state_dict(model.state_dict())
        return twin.double().eval()

    told = json.loads((tmp_path / "config.json").read_text())
    wrong = silently_wrong(
        tmp_path,
        told,
        lambda config: config,
        model.config.to_dict(),
        rebuilt,
        lambda twin: case.outputs(twin, pixels),
        pixels,
        case.tolerance,
    )
    assert wrong == {}


def defaults(cls: type) -> dict[str, Any]:
    """The plain arguments of a class and what it takes where they are left out."""
    given = {key: p.default for key, p in inspect.signature(cls).parameters.items()}
    return {key: v for key, v in given.items() if v is None or isinstance(v, int | float | str)}


@pytest.mark.parametrize("name", TIMM)
def test_settings_of_timm(name: str, tmp_path: Path) -> None:
    case = timm_models.CASES[name]
    model = randomized(case.make())
    arguments = timm_models.SMALL | case.arguments
    if not hasattr(model, "head"):
        arguments["num_classes"] = 0
    save_for_hf(model, tmp_path, model_args=arguments)
    pixels = images(*case.sizes[-1])

    def rebuilt(config: dict[str, Any]) -> nn.Module:
        twin = timm_models.Case(case.family, case.architecture, config["model_args"]).make()
        twin.load_state_dict(model.state_dict())
        return twin.double().eval()

    wrong = silently_wrong(
        tmp_path,
        json.loads((tmp_path / "config.json").read_text()),
        lambda config: config["model_args"],
        defaults(type(model)) | arguments,
        rebuilt,
        lambda twin: timm_models.outputs(twin, pixels),
        pixels,
        case.tolerance,
    )
    assert wrong == {}
