"""Tiny whole vision-language models of transformers, and their vision towers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import transformers as T
from torch import Tensor, nn

from tests.checkpoints.parity.compare import EXACT, FLOAT32_PARTS, Outputs
from tests.checkpoints.parity.hf import (
    ANY_SIZE,
    NAFLEX,
    NO_RATIO,
    QWEN2,
    QWEN25,
    QWEN_SIZES,
    SMALL,
    TEXT,
    naflex,
    plain,
    qwen_outputs,
)

Run = Callable[[nn.Module, Tensor], Outputs]


def hidden_states(backbone: nn.Module, pixels: Tensor) -> Outputs:
    return Outputs(blocks=list(backbone(pixels, output_hidden_states=True).hidden_states))


HEADLESS = plain(tokens="last_hidden_state", interpolate="yes")
CLIP = plain(pooled="pooler_output", interpolate="yes")
VISION = {"clip": "clip_vision_model", "siglip": "siglip_vision_model"}
GEMMA = TEXT | {"head_dim": 8}
QWEN_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}


@dataclass(frozen=True)
class Whole:
    """A whole model; `tower` is where its vision tower is in memory, `run` what it gives."""

    family: str
    make: Callable[[], nn.Module]
    tower: str
    run: Run
    tolerance: float = EXACT
    sizes: tuple[tuple[int, int], ...] = ANY_SIZE


def vision(kind: str, **more: Any) -> dict[str, Any]:
    return {**SMALL, "model_type": VISION[kind], **more}


def made(model: str, config: str, text: dict[str, Any], tower: dict[str, Any], **more: Any) -> Any:
    """A model of these classes, from the configs of its two halves."""
    return lambda: getattr(T, model)(
        getattr(T, config)(text_config=dict(text), vision_config=dict(tower), **more)
    )


LLAMA = TEXT | {"model_type": "llama"}
QWEN2_TEXT = TEXT | {"model_type": "qwen2"}
WHOLE: dict[str, Whole] = {
    "llava": Whole(
        "hf-clip",
        made("LlavaForConditionalGeneration", "LlavaConfig", LLAMA, vision("clip")),
        "model.vision_tower",
        CLIP,
    ),
    "llava, SigLIP": Whole(
        "hf-siglip",
        made(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            LLAMA,
            vision("siglip", vision_use_head=False),
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "llava_next": Whole(
        "hf-clip",
        made("LlavaNextForConditionalGeneration", "LlavaNextConfig", LLAMA, vision("clip")),
        "model.vision_tower",
        CLIP,
    ),
    "llava_next_video": Whole(
        "hf-clip",
        made(
            "LlavaNextVideoForConditionalGeneration", "LlavaNextVideoConfig", LLAMA, vision("clip")
        ),
        "model.vision_tower",
        CLIP,
    ),
    "vipllava": Whole(
        "hf-clip",
        made(
            "VipLlavaForConditionalGeneration",
            "VipLlavaConfig",
            LLAMA,
            vision("clip"),
            vision_feature_layers=[-2, -1],
        ),
        "model.vision_tower",
        CLIP,
    ),
    "video_llava": Whole(
        "hf-clip",
        made("VideoLlavaForConditionalGeneration", "VideoLlavaConfig", LLAMA, vision("clip")),
        "model.image_tower",
        CLIP,
    ),
    "llava_onevision": Whole(
        "hf-siglip",
        made(
            "LlavaOnevisionForConditionalGeneration",
            "LlavaOnevisionConfig",
            QWEN2_TEXT,
            vision("siglip", vision_use_head=False),
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "paligemma": Whole(
        "hf-siglip",
        made(
            "PaliGemmaForConditionalGeneration",
            "PaliGemmaConfig",
            GEMMA | {"model_type": "gemma"},
            vision("siglip", vision_use_head=False, vocab_size=24),
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "gemma3": Whole(
        "hf-siglip",
        made(
            "Gemma3ForConditionalGeneration",
            "Gemma3Config",
            GEMMA,
            vision("siglip", vision_use_head=False),
            mm_tokens_per_image=4,
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "shieldgemma2": Whole(
        "hf-siglip",
        made(
            "ShieldGemma2ForImageClassification",
            "ShieldGemma2Config",
            GEMMA | {"model_type": "gemma3_text"},
            vision("siglip", vision_use_head=False),
            mm_tokens_per_image=4,
        ),
        "model.model.vision_tower",
        HEADLESS,
    ),
    "aya_vision": Whole(
        "hf-siglip",
        made(
            "AyaVisionForConditionalGeneration",
            "AyaVisionConfig",
            TEXT | {"model_type": "cohere2"},
            vision("siglip", vision_use_head=False),
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "cohere2_vision": Whole(
        "hf-siglip",
        made(
            "Cohere2VisionForConditionalGeneration",
            "Cohere2VisionConfig",
            TEXT | {"model_type": "cohere2"},
            vision("siglip", vision_use_head=False),
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "deepseek_vl": Whole(
        "hf-siglip",
        made("DeepseekVLForConditionalGeneration", "DeepseekVLConfig", LLAMA, vision("siglip")),
        "model.vision_model",
        plain(tokens="last_hidden_state", pooled="pooler_output", interpolate="yes"),
    ),
    "modernvbert": Whole(
        "hf-siglip",
        made(
            "ModernVBertModel",
            "ModernVBertConfig",
            TEXT | {"model_type": "modernbert"},
            vision("siglip", vision_use_head=False),
        ),
        "vision_model",
        HEADLESS,
    ),
    "lfm2_vl": Whole(
        "hf-siglip2-naflex",
        made(
            "Lfm2VlForConditionalGeneration",
            "Lfm2VlConfig",
            TEXT | {"model_type": "lfm2", "layer_types": ["full_attention"]},
            {**NAFLEX, "model_type": "siglip2_vision_model", "vision_use_head": False},
        ),
        "model.vision_tower",
        naflex,
        FLOAT32_PARTS,
    ),
    "hyperclovax_vision_v2": Whole(
        "hf-qwen2.5-vl",
        made(
            "HyperCLOVAXVisionV2ForConditionalGeneration",
            "HyperCLOVAXVisionV2Config",
            TEXT | {"model_type": "hyperclovax"},
            {**QWEN25, "model_type": "qwen2_5_vl_vision"},
        ),
        "model.vision_model",
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "Qwen2VLModel": Whole(
        "hf-qwen2-vl",
        made("Qwen2VLModel", "Qwen2VLConfig", TEXT | {"rope_parameters": QWEN_ROPE}, QWEN2),
        "visual",
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "Qwen2_5_VLModel": Whole(
        "hf-qwen2.5-vl",
        made("Qwen2_5_VLModel", "Qwen2_5_VLConfig", TEXT | {"rope_parameters": QWEN_ROPE}, QWEN25),
        "visual",
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "InternVLModel": Whole(
        "hf-internvl",
        made("InternVLModel", "InternVLConfig", QWEN2_TEXT, SMALL),
        "vision_tower",
        plain(tokens="last_hidden_state"),
    ),
    "metaclip_2": Whole(
        "hf-clip",
        made("MetaClip2Model", "MetaClip2Config", TEXT, SMALL, projection_dim=12),
        "vision_model",
        CLIP,
    ),
    "chinese_clip": Whole(
        "hf-clip",
        made("ChineseCLIPModel", "ChineseCLIPConfig", TEXT, SMALL, projection_dim=12),
        "vision_model",
        CLIP,
    ),
    "altclip": Whole(
        "hf-clip",
        made("AltCLIPModel", "AltCLIPConfig", TEXT | {"project_dim": 12}, SMALL, projection_dim=12),
        "vision_model",
        CLIP,
    ),
    "clipseg": Whole(
        "hf-clip",
        made(
            "CLIPSegForImageSegmentation",
            "CLIPSegConfig",
            TEXT,
            SMALL,
            projection_dim=12,
            extract_layers=[0, 1],
            reduce_dim=4,
            decoder_num_attention_heads=2,
            decoder_intermediate_size=8,
        ),
        "clip.vision_model",
        CLIP,
    ),
    **{
        kind: Whole(
            f"hf-{kind}", made(*classes, TEXT, SMALL, projection_dim=12), "vision_model", CLIP
        )
        for kind, classes in {
            "owlvit": ("OwlViTModel", "OwlViTConfig"),
            "owlv2": ("Owlv2Model", "Owlv2Config"),
        }.items()
    },
    "kosmos-2": Whole(
        "hf-kosmos-2",
        made(
            "Kosmos2ForConditionalGeneration",
            "Kosmos2Config",
            {"vocab_size": 24, "embed_dim": 16, "layers": 1, "ffn_dim": 16, "attention_heads": 2},
            SMALL,
            latent_query_num=2,
        ),
        "vision_model",
        CLIP,
    ),
    "vision-encoder-decoder": Whole(
        "hf-deit",
        lambda: T.VisionEncoderDecoderModel(
            T.VisionEncoderDecoderConfig.from_encoder_decoder_configs(
                T.DeiTConfig(**SMALL),
                T.GPT2Config(vocab_size=24, n_embd=16, n_layer=1, n_head=2, n_positions=16),
            )
        ),
        "encoder",
        plain(tokens="last_hidden_state", interpolate="yes"),
    ),
    # Its number of heads is the library's default, so the file does not say it.
    "llava, DINOv3": Whole(
        "hf-dinov3",
        made(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            LLAMA,
            SMALL | {"hidden_size": 48, "num_attention_heads": 6, "model_type": "dinov3_vit"},
        ),
        "model.vision_tower",
        plain(tokens="last_hidden_state", pooled="pooler_output"),
        FLOAT32_PARTS,
    ),
    "llava, ViT-MSN": Whole(
        "hf-vit",
        made(
            "LlavaForConditionalGeneration",
            "LlavaConfig",
            LLAMA,
            SMALL | {"model_type": "vit_msn", "layer_norm_eps": 1e-6},
        ),
        "model.vision_tower",
        HEADLESS,
    ),
    "vit_msn": Whole("hf-vit", lambda: T.ViTMSNModel(T.ViTMSNConfig(**SMALL)), "", HEADLESS),
    "vit_msn classifier": Whole(
        "hf-vit",
        lambda: T.ViTMSNForImageClassification(T.ViTMSNConfig(**SMALL, num_labels=5)),
        "",
        plain(output="logits", interpolate="yes"),
    ),
    "depth_anything": Whole(
        "hf-dinov2",
        lambda: T.DepthAnythingForDepthEstimation(
            T.DepthAnythingConfig(
                backbone_config={
                    **NO_RATIO,
                    "model_type": "dinov2",
                    "out_indices": [1, 2],
                    "reshape_hidden_states": False,
                    "apply_layernorm": True,
                },
                reassemble_hidden_size=16,
                reassemble_factors=[1, 0.5],
                neck_hidden_sizes=[8, 8],
                fusion_hidden_size=8,
                head_hidden_size=4,
            )
        ),
        "backbone",
        lambda backbone, pixels: Outputs(
            blocks=list(backbone(pixels, output_hidden_states=True).hidden_states)
        ),
        FLOAT32_PARTS,
    ),
    "qwen2_5_omni": Whole(
        "hf-qwen2.5-vl",
        lambda: T.Qwen2_5OmniThinkerForConditionalGeneration(
            T.Qwen2_5OmniThinkerConfig(
                text_config=TEXT | {"rope_parameters": QWEN_ROPE},
                vision_config=QWEN25,
                audio_config={
                    "d_model": 8,
                    "encoder_layers": 1,
                    "encoder_attention_heads": 2,
                    "encoder_ffn_dim": 8,
                    "output_dim": 16,
                },
            )
        ),
        "model.visual",
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "pi0": Whole(
        "hf-siglip",
        lambda: T.PI0ForConditionalGeneration(
            T.PI0Config(
                vlm_config={
                    "model_type": "paligemma",
                    "text_config": GEMMA | {"model_type": "gemma"},
                    "vision_config": vision("siglip", vision_use_head=False),
                },
                dit_config=GEMMA | {"model_type": "gemma"},
            )
        ),
        "model.vlm.vision_tower",
        HEADLESS,
    ),
    "t5gemma2": Whole(
        "hf-siglip",
        lambda: T.T5Gemma2ForConditionalGeneration(
            T.T5Gemma2Config(
                encoder={
                    "text_config": GEMMA,
                    "vision_config": vision("siglip", vision_use_head=False),
                    "mm_tokens_per_image": 4,
                },
                decoder=GEMMA,
            )
        ),
        "model.encoder.vision_tower",
        HEADLESS,
    ),
}
