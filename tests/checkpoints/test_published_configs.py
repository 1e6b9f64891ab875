"""Configs in the forms that published repositories have and transformers no longer writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.checkpoints.parity import originals
from tests.checkpoints.parity.compare import assert_close, images, ours, randomized
from tests.checkpoints.parity.hf import CASES, Case
from vitcli.checkpoints.weights import load_weights
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")

# What transformers 4 wrote into a nested config: everything a config could have.
OLD_DUMP: dict[str, Any] = {
    "_name_or_path": "",
    "add_cross_attention": False,
    "architectures": None,
    "bad_words_ids": None,
    "bos_token_id": None,
    "chunk_size_feed_forward": 0,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "dropout": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "finetuning_task": None,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "initializer_factor": 1.0,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_attentions": False,
    "pruned_heads": {},
    "remove_invalid_values": False,
    "repetition_penalty": 1.0,
    "return_dict": True,
    "temperature": 1.0,
    "tie_word_embeddings": True,
    "tokenizer_class": None,
    "top_k": 50,
    "top_p": 1.0,
    "torch_dtype": None,
    "torchscript": False,
    "transformers_version": "4.16.0.dev0",
    "typical_p": 1.0,
    "use_bfloat16": False,
}


def published(name: str, folder: Path, **top: Any) -> tuple[Case, torch.nn.Module]:
    """A case saved with a `vision_config` as published; `top` replaces the rest of the config."""
    case = CASES[name]
    model = randomized(case.make())
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(top))
    return case, model


def compare(case: Case, model: torch.nn.Module, folder: Path) -> None:
    loaded = load_weights(str(folder), dtype=torch.float64)
    pixels = images(*case.sizes[0])
    with torch.no_grad():
        theirs = case.outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


# What every InternVL2 and InternVL3 has in its vision_config: an idle mixture of experts.
INTERNVL_DUMP: dict[str, Any] = {
    "capacity_factor": 1.2,
    "eval_capacity_factor": 1.4,
    "laux_allreduce": "all_nodes",
    "moe_coeff_ratio": 0.5,
    "moe_intermediate_size": 768,
    "moe_output_scale": 4.0,
    "noisy_gate_policy": "RSample_before",
    "num_experts": 8,
    "num_routed_experts": 4,
    "num_shared_experts": 4,
    "shared_expert_intermediate_size": 3072,
    "use_bfloat16": True,
    "use_flash_attn": True,
    "use_moe": False,
    "use_residual": True,
    "use_rts": False,
    "use_weighted_residual": False,
}


@pytest.mark.parametrize("size", ["300M", "6B"])
def test_internvl_with_an_idle_mixture_of_experts(size: str, tmp_path: Path) -> None:
    case = CASES[f"internvl {size}"]
    model: Any = randomized(case.make())
    told = model.config
    vision = INTERNVL_DUMP | {
        "architectures": ["InternVisionModel"],
        "attention_dropout": 0.0,
        "drop_path_rate": 0.1,
        "dropout": 0.0,
        "hidden_act": told.hidden_act,
        "hidden_size": told.hidden_size,
        "image_size": 32,
        "initializer_factor": 0.1,
        "initializer_range": 1e-10,
        "intermediate_size": told.intermediate_size,
        "layer_norm_eps": told.layer_norm_eps,
        "model_type": "intern_vit_6b",
        "norm_type": told.norm_type,
        "num_attention_heads": told.num_attention_heads,
        "num_channels": 3,
        "num_hidden_layers": told.num_hidden_layers,
        "patch_size": 8,
        "qk_normalization": told.use_qk_norm,
        "qkv_bias": told.attention_bias,
        "torch_dtype": "bfloat16",
    }
    tensors = {f"vision_model.{name}": t for name, t in originals.internvit(model).items()}
    tensors |= {"language_model.model.norm.weight": torch.ones(4), "mlp1.0.weight": torch.ones(4)}
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")

    def written(**changes: Any) -> Path:
        config = {"model_type": "internvl_chat", "vision_config": vision | changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return tmp_path

    loaded = load_weights(str(written()), dtype=torch.float64)
    pixels = images(*case.sizes[0])
    with torch.no_grad():
        theirs = case.outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)
    with pytest.raises(VitcliError, match="use_moe = True"):
        load_weights(str(written(use_moe=True)))


def test_siglip_nests_only_what_differs_from_the_defaults(tmp_path: Path) -> None:
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 8,
    }
    case, model = published(
        "siglip whole",
        tmp_path,
        model_type="siglip",
        initializer_factor=1.0,
        text_config={"model_type": "siglip_text_model"},
        vision_config=vision,
    )
    compare(case, model, tmp_path)
    by = {s.key: s.by for s in load_weights(str(tmp_path)).report.settled}
    assert by["activation"] == "the default that transformers has for hidden_act"
    assert by["heads"] == "config.json: num_attention_heads"


def test_clip_with_an_old_dump_and_a_second_copy(tmp_path: Path) -> None:
    vision = OLD_DUMP | {
        "model_type": "clip_vision_model",
        "attention_dropout": 0.0,
        "hidden_act": "quick_gelu",
        "hidden_size": 16,
        "image_size": 32,
        "intermediate_size": 40,
        "layer_norm_eps": 1e-05,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "patch_size": 8,
        "projection_dim": 12,
    }
    case, model = published(
        "clip whole",
        tmp_path,
        model_type="clip",
        logit_scale_init_value=2.6592,
        projection_dim=12,
        text_config={},
        text_config_dict=None,
        vision_config=vision,
        vision_config_dict={"hidden_act": "gelu", "patch_size": 8},
    )
    compare(case, model, tmp_path)


def test_qwen2_vl_of_transformers_4(tmp_path: Path) -> None:
    vision = {
        "depth": 2,
        "embed_dim": 16,
        "hidden_size": 24,
        "in_chans": 3,
        "mlp_ratio": 2,
        "model_type": "qwen2_vl",
        "num_heads": 2,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "spatial_patch_size": 8,
        "temporal_patch_size": 2,
    }
    case, model = published(
        "qwen2-vl whole",
        tmp_path,
        model_type="qwen2_vl",
        hidden_size=16,
        rope_theta=1000000.0,
        vision_config=vision,
    )
    compare(case, model, tmp_path)


def test_qwen2_5_vl_of_transformers_4(tmp_path: Path) -> None:
    vision = {
        "depth": 3,
        "fullatt_block_indexes": [1],
        "hidden_act": "silu",
        "hidden_size": 16,
        "in_chans": 3,
        "intermediate_size": 40,
        "model_type": "qwen2_5_vl",
        "num_heads": 2,
        "out_hidden_size": 24,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "spatial_patch_size": 8,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 64,
    }
    case, model = published(
        "qwen2.5-vl whole", tmp_path, model_type="qwen2_5_vl", vision_config=vision
    )
    compare(case, model, tmp_path)
