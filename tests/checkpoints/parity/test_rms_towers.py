"""Pixtral, AIMv2 and Ovis2 as they are published: old configs, processors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

from tests.checkpoints.parity.compare import randomized
from tests.checkpoints.parity.rms_towers import RMS_TOWERS
from tests.checkpoints.sources import reconfigured, sparse
from vitcli.checkpoints.weights import load_weights, plan_weights
from vitcli.commands.params.analysis import model_costs
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")


def written(folder: Path, name: str, value: dict[str, Any]) -> None:
    (folder / name).write_text(json.dumps(value))


def test_pixtral_of_transformers_4(tmp_path: Path) -> None:
    """A nested config that holds what differs from the class, over the real shapes."""
    vision = {
        "head_dim": 64,
        "hidden_act": "silu",
        "image_size": 1024,
        "is_composition": True,
        "model_type": "pixtral",
        "patch_size": 16,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    written(tmp_path, "config.json", {"model_type": "llava", "vision_config": vision})
    written(
        tmp_path,
        "preprocessor_config.json",
        {
            "do_convert_rgb": True,
            "do_normalize": True,
            "do_rescale": True,
            "do_resize": True,
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "PixtralImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "patch_size": {"height": 16, "width": 16},
            "resample": 3,
            "rescale_factor": 0.00392156862745098,
            "size": {"longest_edge": 1024},
        },
    )
    with torch.device("meta"):
        model = T.PixtralVisionModel(T.PixtralVisionConfig(**vision))
    plan = plan_weights(str(sparse(tmp_path, model, "vision_tower.")))
    preset = load_config(ModelConfig, "pixtral-12b")
    assert plan.config.encoder == preset.encoder
    assert plan.config.preprocess == preset.preprocess
    assert "vision tower under vision_tower." in plan.notes
    assert model_costs(plan.config).total == sum(p.numel() for p in model.parameters())


def test_a_processor_that_merges_patches_pads_up_to_the_merged(tmp_path: Path) -> None:
    """Mistral 3's PixtralProcessor gives its image processor patches of 14 x 2 px."""
    randomized(RMS_TOWERS["mistral 3 whole"].make()).float().save_pretrained(tmp_path)
    processor = T.PixtralImageProcessorPil(size={"longest_edge": 64}, patch_size=8)
    processor.save_pretrained(tmp_path)
    assert load_weights(str(tmp_path)).config.preprocess.multiple == 8
    written(tmp_path, "processor_config.json", {"patch_size": 8, "spatial_merge_size": 2})
    loaded = load_weights(str(tmp_path))
    assert loaded.config.preprocess.multiple == 16
    assert "sides up to multiples of 8 x 2 px (processor_config.json)" in loaded.report.notes


def test_aimv2_is_the_preset(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = T.Aimv2VisionModel(T.Aimv2VisionConfig(use_head=False))
    written(tmp_path, "config.json", model.config.to_dict())
    T.CLIPImageProcessorPil().save_pretrained(tmp_path)
    plan = plan_weights(str(sparse(tmp_path, model)))
    preset = load_config(ModelConfig, "aimv2-l14")
    assert plan.config.encoder.has_final_norm and preset.encoder.has_final_norm
    assert plan.config.encoder.model_copy(update={"final_norm": None}) == preset.encoder
    assert plan.config.preprocess == preset.preprocess


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("aimv2 at 32", {"is_native": True}, "is_native = True"),
        ("aimv2 at 32", {"qkv_bias": True}, "missing"),
        ("aimv2 at 32", {"use_head": False}, "pooling = none"),
        ("aimv2 without head", {"use_head": True}, "missing: pooling.probe"),
        ("aimv2 with biases", {"mlp_bias": False}, "unexpected"),
        ("pixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "axial"),
    ],
)
def test_a_config_of_another_tower_is_refused(
    name: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    randomized(RMS_TOWERS[name].make()).float().save_pretrained(tmp_path)
    with pytest.raises(VitcliError, match=told):
        load_weights(str(reconfigured(tmp_path, **changes)))


def test_norms_and_maps_that_a_file_has_lost_are_missed(tmp_path: Path) -> None:
    randomized(RMS_TOWERS["aimv2 at 32"].make()).float().save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    for lost in ("embeddings.rms_norm", "rms_norm2", "out_proj", "head.k_proj", "ffn.up_proj"):
        rest = {name: tensor for name, tensor in whole.items() if lost not in name}
        assert len(rest) < len(whole)
        save_file(rest, tmp_path / "model.safetensors")
        with pytest.raises(VitcliError):
            load_weights(str(tmp_path))


def test_what_ovis2_does_with_its_tokens_is_said(tmp_path: Path) -> None:
    randomized(RMS_TOWERS["ovis2 whole"].make()).float().save_pretrained(tmp_path)
    notes = load_weights(str(tmp_path)).report.notes
    assert "the visual tokenizer (head_linear, head_norm) is not applied" in notes


def test_llama_4_at_its_real_shapes(tmp_path: Path) -> None:
    """The encoder's parameters are the library's without the adapter's."""
    vision = T.Llama4VisionConfig(hidden_size=1408, image_size=336)
    with torch.device("meta"):
        model = T.Llama4VisionModel(vision)
    written(tmp_path, "config.json", {"model_type": "llama4", "vision_config": vision.to_dict()})
    plan = plan_weights(str(sparse(tmp_path, model, "vision_model.")))
    adapter = sum(p.numel() for p in model.vision_adapter.parameters())
    whole = sum(p.numel() for p in model.parameters())
    assert model_costs(plan.config).total == whole - adapter
    assert plan.config.encoder.grid == (24, 24) and plan.config.encoder.head_dim == 88
    assert "the adapter (pixel shuffle and MLP) is not applied" in plan.notes


def test_llama_4s_processor_is_what_prepares_images(tmp_path: Path) -> None:
    randomized(RMS_TOWERS["llama4 whole"].make()).float().save_pretrained(tmp_path)
    assert load_weights(str(tmp_path)).report.preprocess_by is None
    written(tmp_path, "preprocessor_config.json", {"image_processor_type": "Llama4ImageProcessor"})
    assert load_weights(str(tmp_path)).report.preprocess_by is not None


def test_glm_4v_at_its_real_shapes(tmp_path: Path) -> None:
    """The encoder's parameters are the library's without what joins patches and a frame's slot."""
    config = T.Glm4vConfig().vision_config
    with torch.device("meta"):
        model = T.Glm4vVisionModel(config)
    written(tmp_path, "config.json", {"model_type": "glm4v", "vision_config": config.to_dict()})
    T.Glm4vImageProcessorPil().save_pretrained(tmp_path)
    plan = plan_weights(str(sparse(tmp_path, model, "model.visual.")))
    joins = sum(p.numel() for m in (model.merger, model.downsample) for p in m.parameters())
    slot = model.patch_embed.proj.weight[:, :, 0].numel()
    whole = sum(p.numel() for p in model.parameters())
    assert model_costs(plan.config).total == whole - joins - slot
    assert plan.config.encoder.mlp_hidden == 4096
    assert plan.config.preprocess.max_pixels == 28 * 28 * 7500
    assert "what joins 2x2 patches (downsample, merger) is not applied" in plan.notes
