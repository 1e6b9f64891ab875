"""Tiny random vision towers of 2023 to 2026 by transformers, alone and in their whole models."""

from __future__ import annotations

from typing import Any

import torch
import transformers as T
from torch import Tensor, nn
from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25VisionModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5VisionConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeVisionConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import (
    Qwen3OmniMoeVisionEncoderConfig,
)
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeVisionEncoder
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeVisionConfig
from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeVisionModel
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpVisionConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpVisionModel
from transformers.models.tipsv2.modeling_tipsv2 import Tipsv2VisionModel

from tests.checkpoints.parity.compare import FLOAT32_PARTS, Outputs
from tests.checkpoints.parity.hf import ANY_SIZE, QWEN_SIZES, SMALL, TEXT, Case, inner, qwen_outputs
from tests.checkpoints.parity.hf import DINO as DINO_OUTPUTS
from tests.checkpoints.parity.rms_towers import RMS_TOWERS
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


def _headless(model: nn.Module, pixels: Tensor) -> Outputs:
    found = model(pixels, output_hidden_states=True)
    return Outputs(list(found.hidden_states), None, found.last_hidden_state)


def _beit(model: nn.Module, pixels: Tensor) -> Outputs:
    found = getattr(model, "beit", getattr(model, "data2vec_vision", model))(
        pixels, output_hidden_states=True
    )
    hidden = list(found.hidden_states)
    output = getattr(model(pixels), "logits", None)
    return Outputs(hidden, hidden[-1], found.last_hidden_state, found.pooler_output, output)


def _masked(model: nn.Module, pixels: Tensor) -> Outputs:
    found = _beit(model.beit, pixels)
    return Outputs(found.blocks, found.before_norm, model.layernorm(found.tokens))


DINO = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
TIPS_V2 = DINO | {"num_register_tokens": 2}
RADIO = DINO | {"max_img_size": 32, "num_cls_tokens": 2, "num_registers": 3}
KIMI = {k: v for k, v in SMALL.items() if k != "image_size"}
KIMI |= {"pos_emb_height": 4, "pos_emb_width": 4}
DEEPSEEK = TEXT | {"model_type": "deepseek_v3", "n_routed_experts": 2, "num_experts_per_tok": 1}
DEEPSEEK |= {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 8}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
DEEPSEEK |= {"v_head_dim": 4}


def radio(model: nn.Module, pixels: Tensor) -> Outputs:
    """Without the normalization within, which belongs to the preprocessing here."""
    model.make_preprocessor_external()
    found = model(pixels, output_hidden_states=True)
    pooled = found.summary if len(model.config.summary_idxs) == 1 else None
    tokens = found.last_hidden_state
    return Outputs(list(found.hidden_states), tokens, tokens, pooled)


def kimi(model: nn.Module, pixels: Tensor) -> Outputs:
    """Image by image; the library's tokens are row by row."""
    patch = model.config.patch_size
    images = []
    for image in pixels:
        p = image.unfold(1, patch, patch).unfold(2, patch, patch)  # (C, rows, columns, p, p)
        grid = torch.tensor([[1, *p.shape[1:3]]])
        seen: list[Tensor] = []
        hooks = [
            model.layers[0].register_forward_pre_hook(lambda _, given, s=seen: s.append(given[0])),
            *(
                m.register_forward_hook(lambda _, __, out, s=seen: s.append(out))
                for m in model.layers
            ),
        ]
        found = model(p.flatten(1, 2).transpose(0, 1), grid)
        for hook in hooks:
            hook.remove()
        images.append([*seen, found.last_hidden_state])
    *blocks, tokens = [torch.stack(layer) for layer in zip(*images, strict=True)]
    return Outputs(blocks, blocks[-1], tokens)


def _kimi(make: Any, where: str = "") -> Case:
    run = inner(where, kimi) if where else kimi
    return Case("hf-kimi", make, run, FLOAT32_PARTS, QWEN_SIZES)


BEIT = SMALL | {"use_relative_position_bias": True, "layer_scale_init_value": 0.2}
TEXT_TOWER = {k: v for k, v in SMALL.items() if k not in ("image_size", "patch_size")}
TEXT_TOWER |= {"vocab_size": 24}
SMOL = TEXT | {"model_type": "llama"}
IDEFICS_SIZES = (*ANY_SIZE[:3], (72, 88))
TOWERS: dict[str, Case] = {
    **RMS_TOWERS,
    "idefics2": Case(
        "hf-idefics2",
        lambda: Idefics2VisionTransformer(Idefics2VisionConfig(**SMALL)),
        _headless,
        sizes=IDEFICS_SIZES,
    ),
    "idefics3": Case(
        "hf-idefics3",
        lambda: T.Idefics3VisionTransformer(T.Idefics3VisionConfig(**SMALL)),
        _headless,
        sizes=IDEFICS_SIZES,
    ),
    "idefics2 whole": Case(
        "hf-idefics2",
        lambda: T.Idefics2ForConditionalGeneration(
            T.Idefics2Config(
                text_config=TEXT | {"model_type": "mistral"},
                vision_config=SMALL | {"model_type": "idefics2_vision"},
                perceiver_config={
                    "hidden_size": 16,
                    "resampler_n_latents": 2,
                    "resampler_depth": 1,
                    "resampler_n_heads": 2,
                    "resampler_head_dim": 8,
                    "num_key_value_heads": 2,
                },
            )
        ),
        inner("model.vision_model", _headless),
        sizes=IDEFICS_SIZES,
    ),
    "idefics3 whole": Case(
        "hf-idefics3",
        lambda: T.Idefics3ForConditionalGeneration(
            T.Idefics3Config(text_config=SMOL, vision_config=SMALL, scale_factor=2)
        ),
        inner("model.vision_model", _headless),
        sizes=IDEFICS_SIZES,
    ),
    "smolvlm whole": Case(
        "hf-idefics3",
        lambda: T.SmolVLMForConditionalGeneration(
            T.SmolVLMConfig(text_config=SMOL, vision_config=SMALL, scale_factor=2)
        ),
        inner("model.vision_model", _headless),
        sizes=IDEFICS_SIZES,
    ),
    "beit": Case("hf-beit", lambda: T.BeitModel(T.BeitConfig(**BEIT)), _beit, sizes=ANY_SIZE[:3]),
    "beit CLS": Case(
        "hf-beit",
        lambda: T.BeitModel(T.BeitConfig(**BEIT, use_mean_pooling=False)),
        _beit,
        sizes=ANY_SIZE[:3],
    ),
    "beit classifier": Case(
        "hf-beit",
        lambda: T.BeitForImageClassification(T.BeitConfig(**BEIT, num_labels=5)),
        _beit,
        sizes=ANY_SIZE[:3],
    ),
    "beit with a table": Case(
        "hf-beit",
        lambda: T.BeitForMaskedImageModeling(
            T.BeitConfig(
                **SMALL, use_absolute_position_embeddings=True, use_mask_token=True, vocab_size=9
            )
        ),
        _masked,
        sizes=ANY_SIZE[:3],
    ),
    "data2vec": Case(
        "hf-beit",
        lambda: T.Data2VecVisionModel(T.Data2VecVisionConfig(**BEIT)),
        _beit,
        sizes=ANY_SIZE[:3],
    ),
    "data2vec classifier": Case(
        "hf-beit",
        lambda: T.Data2VecVisionForImageClassification(
            T.Data2VecVisionConfig(**BEIT, num_labels=5)
        ),
        _beit,
        sizes=ANY_SIZE[:3],
    ),
    "qwen3-vl": _qwen(lambda: T.Qwen3VLVisionModel(Qwen3VLVisionConfig(**QWEN3))),
    "qwen3-vl-moe": _qwen(lambda: Qwen3VLMoeVisionModel(Qwen3VLMoeVisionConfig(**QWEN3))),
    "qwen3.5": _qwen(lambda: Qwen3_5VisionModel(Qwen3_5VisionConfig(**QWEN3_5))),
    "qwen3.5-moe": _qwen(lambda: Qwen3_5MoeVisionModel(Qwen3_5MoeVisionConfig(**QWEN3_5))),
    "qwen4-exp": _qwen(lambda: Qwen4ExpVisionModel(Qwen4ExpVisionConfig(**QWEN3_5))),
    "qwen3-omni": _qwen(
        lambda: Qwen3OmniMoeVisionEncoder(Qwen3OmniMoeVisionEncoderConfig(**QWEN3))
    ),
    "cosmos3 whole, its tower without a prefix": _qwen(
        lambda: T.Cosmos3OmniForConditionalGeneration(
            T.Cosmos3OmniConfig(text_config=QWEN3_TEXT, vision_config=QWEN3)
        ),
        "model.visual",
    ),
    "qwen3-vl whole": _qwen(
        lambda: T.Qwen3VLForConditionalGeneration(
            T.Qwen3VLConfig(text_config=QWEN3_TEXT, vision_config=QWEN3)
        ),
        "model.visual",
    ),
    **{
        f"tipsv2{name}": Case(
            "hf-tipsv2",
            lambda more=more: Tipsv2VisionModel(T.Tipsv2VisionConfig(**TIPS_V2, **more)),
            DINO_OUTPUTS,
            FLOAT32_PARTS,
        )
        for name, more in {"": {}, " gated": {"use_swiglu_ffn": True}}.items()
    },
    "tipsv2 whole": Case(
        "hf-tipsv2",
        lambda: T.Tipsv2Model(T.Tipsv2Config(vision_config=TIPS_V2, text_config=TEXT_TOWER)),
        inner("vision_model", DINO_OUTPUTS),
        FLOAT32_PARTS,
    ),
    **{
        f"radio{name}": Case(
            "hf-radio",
            lambda more=more: T.RadioModel(T.RadioConfig(**RADIO, **more)),
            radio,
            FLOAT32_PARTS,
            ANY_SIZE[:3],
        )
        for name, more in {
            "": {},
            " gated": {"use_swiglu_ffn": True, "qkv_bias": False},
            " of one CLS": {"summary_idxs": [0]},
        }.items()
    },
    "kimi": _kimi(lambda: Kimi_K25VisionModel(T.Kimi_K25VisionConfig(**KIMI))),
    "kimi whole": _kimi(
        lambda: T.Kimi_K25ForConditionalGeneration(
            T.Kimi_K25Config(vision_config=KIMI, text_config=DEEPSEEK, projection_hidden_size=16)
        ),
        "model.vision_tower",
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
