"""Tiny random vision towers of 2023 to 2026 by transformers, alone and in their whole models."""

from __future__ import annotations

from typing import Any

import transformers as T
from torch import Tensor, nn
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel

from tests.checkpoints.parity.compare import FLOAT32_PARTS, Outputs
from tests.checkpoints.parity.hf import ANY_SIZE, QWEN_SIZES, TEXT, Case, inner, qwen_outputs
from tests.checkpoints.parity.timm_models import outputs as timm_outputs

QWEN3_5: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 8,
    "num_position_embeddings": 16,
}
QWEN3 = QWEN3_5 | {"deepstack_visual_indexes": [0, 1]}
QWEN3_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN3_TEXT = TEXT | {"head_dim": 8, "rope_parameters": QWEN3_ROPE}


def _qwen(make: Any, where: str = "") -> Case:
    run = inner(where, qwen_outputs) if where else qwen_outputs
    return Case("hf-qwen3-vl", make, run, FLOAT32_PARTS, QWEN_SIZES)


def perception(model: nn.Module, pixels: Tensor) -> Outputs:
    """The tower of Perception LM, which transformers runs by timm without its pooling."""
    found = timm_outputs(model.get_submodule("model.vision_tower").timm_model, pixels)
    return Outputs(found.blocks, found.before_norm, found.tokens)


PERCEPTION: dict[str, Any] = {
    "model_type": "timm_wrapper",
    "architecture": "vit_pe_lang_large_patch14_448",
    "do_pooling": True,
    "global_pool": "map",
    "num_labels": 0,
    "model_args": {
        "embed_dim": 32,
        "depth": 2,
        "num_heads": 2,
        "img_size": [32, 32],
        "patch_size": 8,
        "global_pool": "",
        "init_values": 0.1,
        "ref_feat_shape": [4, 4],
        "use_post_transformer_norm": False,
        "dynamic_img_size": True,
    },
}
TOWERS: dict[str, Case] = {
    "qwen3-vl": _qwen(lambda: T.Qwen3VLVisionModel(Qwen3VLVisionConfig(**QWEN3))),
    "qwen3-vl-moe": _qwen(lambda: Qwen3VLMoeVisionModel(Qwen3VLMoeVisionConfig(**QWEN3))),
    "qwen3.5": _qwen(lambda: Qwen3_5VisionModel(Qwen3_5VisionConfig(**QWEN3_5))),
    "qwen3-omni": _qwen(
        lambda: Qwen3OmniMoeVisionEncoder(Qwen3OmniMoeVisionEncoderConfig(**QWEN3))
    ),
    "qwen3-vl whole": _qwen(
        lambda: T.Qwen3VLForConditionalGeneration(
            T.Qwen3VLConfig(text_config=QWEN3_TEXT, vision_config=QWEN3)
        ),
        "model.visual",
    ),
    "perception_lm whole": Case(
        "timm-pe",
        lambda: T.PerceptionLMForConditionalGeneration(
            T.PerceptionLMConfig(
                text_config=TEXT | {"model_type": "llama"}, vision_config=dict(PERCEPTION)
            )
        ),
        perception,
        FLOAT32_PARTS,
        ANY_SIZE[:3],
    ),
}
