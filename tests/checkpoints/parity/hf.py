"""Tiny random models of transformers, and what they give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
)
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

from tests.checkpoints.parity.compare import EXACT, FLOAT32_PARTS, Outputs

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 32,
    "patch_size": 8,
}
NO_RATIO = {k: v for k, v in SMALL.items() if k != "intermediate_size"}
TEXT = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

NATIVE = ((32, 32),)
ANY_SIZE = ((32, 32), (40, 40), (48, 24), (37, 51))


@dataclass(frozen=True)
class Case:
    """A reference model; `outputs` runs it on (B, 3, height, width)."""

    family: str
    make: Callable[[], nn.Module]
    outputs: Callable[[nn.Module, Tensor], Outputs]
    tolerance: float = EXACT
    sizes: tuple[tuple[int, int], ...] = ANY_SIZE


def plain(**where: str) -> Callable[[nn.Module, Tensor], Outputs]:
    """Outputs by attribute name: `tokens="last_hidden_state"`, `pooled=…`, `output=…`.

    `interpolate="yes"` asks for a resized position table; `norm="no"` says there is no final norm.
    """

    def run(model: nn.Module, pixels: Tensor) -> Outputs:
        kwargs: dict[str, Any] = {"output_hidden_states": True}
        if where.get("interpolate") == "yes":
            kwargs["interpolate_pos_encoding"] = True
        if isinstance(model, T.ViTMAEModel):
            patches = model.config.patch_size
            count = (pixels.shape[-2] // patches) * (pixels.shape[-1] // patches)
            kwargs["noise"] = torch.arange(count).expand(len(pixels), -1)
        found = model(pixels, **kwargs)
        hidden = list(found.hidden_states or [])
        return Outputs(
            blocks=hidden,
            before_norm=hidden[-1] if hidden else None,
            tokens=getattr(found, where["tokens"]) if "tokens" in where else None,
            pooled=getattr(found, where["pooled"]) if "pooled" in where else None,
            output=getattr(found, where["output"]) if "output" in where else None,
        )

    return run


def inner(path: str, run: Callable[[nn.Module, Tensor], Outputs]) -> Any:
    """The outputs of a part of a larger model."""
    return lambda model, pixels: run(model.get_submodule(path), pixels)


def qwen(model: nn.Module, pixels: Tensor) -> Outputs:
    """Image by image; the library's merge and window order is undone."""
    config = model.config
    patch, hidden = config.patch_size, getattr(config, "embed_dim", config.hidden_size)
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    cells = torch.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2)
    order = cells.transpose(1, 2).flatten()  # raster index of each token in merge order
    merge_order = order.reshape(-1, 4)
    if hasattr(config, "window_size"):
        window = config.window_size // 2 // patch
        at = torch.arange(rows // 2 * (columns // 2)).reshape(rows // 2, columns // 2)
        tiles = [
            at[r : r + window, c : c + window].flatten()
            for r in range(0, rows // 2, window)
            for c in range(0, columns // 2, window)
        ]
        order = merge_order[torch.cat(tiles)].flatten()
    tokens, outputs, blocks, deep = [], [], [], []
    for image in pixels:
        p = image.unfold(1, patch, patch).unfold(2, patch, patch)  # (C, rows, columns, p, p)
        p = p.flatten(1, 2).transpose(0, 1)[merge_order.flatten()]  # (N, C, p, p)
        p = p.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
        seen: list[Tensor] = []
        hooks = [
            model.blocks[0].register_forward_pre_hook(
                lambda _, given, seen=seen: seen.append(given[0])
            ),
            *(
                b.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
                for b in model.blocks
            ),
        ]
        found = model(p, torch.tensor([[1, rows, columns]]))
        for hook in hooks:
            hook.remove()
        raster = torch.empty(rows * columns, hidden, dtype=p.dtype)
        raster[order] = found.last_hidden_state
        tokens.append(raster)
        outputs.append(found.pooler_output)
        deep.append(getattr(found, "deepstack_features", None) or [])
        blocks.append([torch.empty_like(raster).index_copy_(0, order, out) for out in seen])
    stacked = [torch.stack(layer) for layer in zip(*blocks, strict=True)]
    found = Outputs([], None, torch.stack(tokens), None, torch.stack(outputs))
    if deep[0]:
        found.deepstack = torch.stack([torch.stack(features) for features in deep])
    return found, stacked


BASE = plain(tokens="last_hidden_state", interpolate="yes")
BASE_POOLED = plain(tokens="last_hidden_state", output="pooler_output", interpolate="yes")
LOGITS = plain(output="logits", interpolate="yes")
DINO = plain(tokens="last_hidden_state", pooled="pooler_output")
CLIP = plain(pooled="pooler_output", interpolate="yes")


def qwen_outputs(model: nn.Module, pixels: Tensor) -> Outputs:
    out, out.blocks = qwen(model, pixels)
    out.before_norm = out.blocks[-1]
    return out


def clip_whole(model: nn.Module, pixels: Tensor) -> Outputs:
    out = CLIP(model.vision_model, pixels)
    out.output = model.visual_projection(out.pooled)
    return out


def naflex(model: nn.Module, pixels: Tensor) -> Outputs:
    """Images of one size, so that no patch is padding."""
    patch = model.config.patch_size
    p = pixels.unfold(2, patch, patch).unfold(3, patch, patch)  # (B, C, rows, columns, p, p)
    rows, columns = p.shape[2:4]
    flat = p.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # (B, N, p * p * C)
    found = model(
        flat,
        pixel_attention_mask=torch.ones(flat.shape[:2], dtype=torch.int64),
        spatial_shapes=torch.tensor([[rows, columns]] * len(flat)),
        output_hidden_states=True,
    )
    blocks = list(found.hidden_states or [])
    return Outputs(
        blocks,
        blocks[-1] if blocks else None,
        found.last_hidden_state,
        found.pooler_output,
    )


NAFLEX = {k: v for k, v in SMALL.items() if k != "image_size"} | {"num_patches": 16}
QWEN2 = {
    "depth": 2,
    "embed_dim": 16,
    "hidden_size": 24,
    "num_heads": 2,
    "patch_size": 8,
    "mlp_ratio": 2,
}
QWEN25 = {
    "depth": 3,
    "hidden_size": 16,
    "out_hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 8,
    "window_size": 64,
    "fullatt_block_indexes": [1],
}
QWEN_SIZES = ((32, 32), (64, 64), (80, 112), (96, 32))

CASES: dict[str, Case] = {
    "vit": Case("hf-vit", lambda: T.ViTModel(T.ViTConfig(**SMALL)), BASE_POOLED),
    "vit without pooler": Case(
        "hf-vit", lambda: T.ViTModel(T.ViTConfig(**SMALL), add_pooling_layer=False), BASE
    ),
    "vit without qkv bias": Case(
        "hf-vit",
        lambda: T.ViTModel(T.ViTConfig(**SMALL, qkv_bias=False, hidden_act="gelu_new")),
        BASE_POOLED,
    ),
    "vit non-square": Case(
        "hf-vit",
        lambda: T.ViTModel(T.ViTConfig(**(SMALL | {"image_size": [32, 48]}))),
        plain(tokens="last_hidden_state", output="pooler_output"),
        sizes=((32, 48),),
    ),
    "vit classifier": Case(
        "hf-vit",
        lambda: T.ViTForImageClassification(T.ViTConfig(**SMALL, num_labels=5)),
        LOGITS,
    ),
    "deit": Case("hf-deit", lambda: T.DeiTModel(T.DeiTConfig(**SMALL)), BASE_POOLED),
    "deit classifier": Case(
        "hf-deit",
        lambda: T.DeiTForImageClassification(T.DeiTConfig(**SMALL, num_labels=5)),
        LOGITS,
    ),
    "deit teacher": Case(
        "hf-deit",
        lambda: T.DeiTForImageClassificationWithTeacher(T.DeiTConfig(**SMALL, num_labels=5)),
        LOGITS,
    ),
    "mae": Case(
        "hf-mae",
        lambda: T.ViTMAEModel(T.ViTMAEConfig(**SMALL, mask_ratio=0.0)),
        BASE,
    ),
    "mae pre-training": Case(
        "hf-mae",
        lambda: T.ViTMAEForPreTraining(
            T.ViTMAEConfig(
                **SMALL,
                mask_ratio=0.0,
                decoder_hidden_size=16,
                decoder_num_hidden_layers=1,
                decoder_num_attention_heads=2,
                decoder_intermediate_size=32,
            )
        ),
        inner("vit", BASE),
    ),
    "ijepa": Case(
        "hf-ijepa", lambda: T.IJepaModel(T.IJepaConfig(**SMALL, layer_norm_eps=1e-6)), BASE
    ),
    "ijepa classifier": Case(
        "hf-ijepa",
        lambda: T.IJepaForImageClassification(T.IJepaConfig(**SMALL, num_labels=5)),
        LOGITS,
    ),
    "dinov2": Case(
        "hf-dinov2",
        lambda: T.Dinov2Model(T.Dinov2Config(**NO_RATIO, mlp_ratio=2)),
        DINO,
        FLOAT32_PARTS,
    ),
    "dinov2 gated": Case(
        "hf-dinov2",
        lambda: T.Dinov2Model(T.Dinov2Config(**NO_RATIO, use_swiglu_ffn=True)),
        DINO,
        FLOAT32_PARTS,
    ),
    "dinov2 classifier": Case(
        "hf-dinov2",
        lambda: T.Dinov2ForImageClassification(T.Dinov2Config(**NO_RATIO, num_labels=5)),
        plain(output="logits"),
        FLOAT32_PARTS,
    ),
    "dinov2 registers": Case(
        "hf-dinov2-registers",
        lambda: T.Dinov2WithRegistersModel(
            T.Dinov2WithRegistersConfig(**NO_RATIO, num_register_tokens=3)
        ),
        DINO,
        FLOAT32_PARTS,
    ),
    "dinov2 registers gated classifier": Case(
        "hf-dinov2-registers",
        lambda: T.Dinov2WithRegistersForImageClassification(
            T.Dinov2WithRegistersConfig(**NO_RATIO, use_swiglu_ffn=True, num_labels=5)
        ),
        plain(output="logits"),
        FLOAT32_PARTS,
    ),
    "dinov3": Case(
        "hf-dinov3",
        lambda: T.DINOv3ViTModel(T.DINOv3ViTConfig(**SMALL, num_register_tokens=4)),
        DINO,
        FLOAT32_PARTS,
    ),
    "dinov3 gated with key bias": Case(
        "hf-dinov3",
        lambda: T.DINOv3ViTModel(
            T.DINOv3ViTConfig(
                **SMALL,
                num_register_tokens=2,
                use_gated_mlp=True,
                hidden_act="silu",
                key_bias=True,
            )
        ),
        DINO,
        FLOAT32_PARTS,
    ),
    "dinov3 without biases or registers": Case(
        "hf-dinov3",
        lambda: T.DINOv3ViTModel(
            T.DINOv3ViTConfig(
                **SMALL,
                use_gated_mlp=True,
                hidden_act="silu",
                query_bias=False,
                value_bias=False,
            )
        ),
        DINO,
        FLOAT32_PARTS,
    ),
    "clip vision": Case("hf-clip", lambda: T.CLIPVisionModel(T.CLIPVisionConfig(**SMALL)), CLIP),
    "clip with projection": Case(
        "hf-clip",
        lambda: T.CLIPVisionModelWithProjection(T.CLIPVisionConfig(**SMALL, projection_dim=12)),
        plain(output="image_embeds", interpolate="yes"),
    ),
    "clip whole": Case(
        "hf-clip",
        lambda: T.CLIPModel(
            T.CLIPConfig(
                text_config=TEXT, vision_config=SMALL | {"hidden_act": "gelu"}, projection_dim=12
            )
        ),
        clip_whole,
    ),
    "clip classifier": Case(
        "hf-clip",
        lambda: T.CLIPForImageClassification(
            T.CLIPConfig(text_config=TEXT, vision_config=SMALL, num_labels=5)
        ),
        plain(output="logits"),
        sizes=NATIVE,
    ),
    "siglip vision": Case(
        "hf-siglip",
        lambda: T.SiglipVisionModel(T.SiglipVisionConfig(**SMALL)),
        plain(tokens="last_hidden_state", pooled="pooler_output", interpolate="yes"),
    ),
    "siglip without head": Case(
        "hf-siglip",
        lambda: T.SiglipVisionModel(T.SiglipVisionConfig(**SMALL, vision_use_head=False)),
        BASE,
    ),
    "siglip whole": Case(
        "hf-siglip",
        lambda: T.SiglipModel(T.SiglipConfig(text_config=TEXT, vision_config=SMALL)),
        inner(
            "vision_model",
            plain(tokens="last_hidden_state", pooled="pooler_output", interpolate="yes"),
        ),
    ),
    "siglip classifier": Case(
        "hf-siglip",
        lambda: T.SiglipForImageClassification(
            T.SiglipConfig(text_config=TEXT, vision_config=SMALL, num_labels=5)
        ),
        LOGITS,
    ),
    "siglip 2 naflex": Case(
        "hf-siglip2-naflex",
        lambda: T.Siglip2VisionModel(T.Siglip2VisionConfig(**NAFLEX)),
        naflex,
        FLOAT32_PARTS,
    ),
    "siglip 2 naflex whole": Case(
        "hf-siglip2-naflex",
        lambda: T.Siglip2Model(T.Siglip2Config(text_config=TEXT, vision_config=NAFLEX)),
        inner("vision_model", naflex),
        FLOAT32_PARTS,
    ),
    "internvl 300M": Case(
        "hf-internvl",
        lambda: T.InternVLVisionModel(T.InternVLVisionConfig(**SMALL, attention_bias=True)),
        plain(tokens="last_hidden_state"),
    ),
    "internvl 6B": Case(
        "hf-internvl",
        lambda: T.InternVLVisionModel(
            T.InternVLVisionConfig(**SMALL, use_qk_norm=True, norm_type="rms_norm")
        ),
        plain(tokens="last_hidden_state"),
        FLOAT32_PARTS,
    ),
    "internvl CLS pooling": Case(
        "hf-internvl",
        lambda: T.InternVLVisionModel(
            T.InternVLVisionConfig(**SMALL, attention_bias=True, use_mean_pooling=False)
        ),
        plain(tokens="last_hidden_state"),
    ),
    "internvl whole": Case(
        "hf-internvl",
        lambda: T.InternVLForConditionalGeneration(
            T.InternVLConfig(text_config=TEXT | {"model_type": "qwen2"}, vision_config=SMALL)
        ),
        inner("model.vision_tower", plain(tokens="last_hidden_state")),
    ),
    "qwen2-vl": Case(
        "hf-qwen2-vl",
        lambda: Qwen2VisionTransformerPretrainedModel(Qwen2VLVisionConfig(**QWEN2)),
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "qwen2-vl whole": Case(
        "hf-qwen2-vl",
        lambda: T.Qwen2VLForConditionalGeneration(
            T.Qwen2VLConfig(text_config=TEXT, vision_config=QWEN2)
        ),
        inner("model.visual", qwen_outputs),
        FLOAT32_PARTS,
        QWEN_SIZES[:1],
    ),
    "qwen2.5-vl": Case(
        "hf-qwen2.5-vl",
        lambda: Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**QWEN25)),
        qwen_outputs,
        FLOAT32_PARTS,
        QWEN_SIZES,
    ),
    "qwen2.5-vl whole": Case(
        "hf-qwen2.5-vl",
        lambda: T.Qwen2_5_VLForConditionalGeneration(
            T.Qwen2_5_VLConfig(text_config=TEXT, vision_config=QWEN25)
        ),
        inner("model.visual", qwen_outputs),
        FLOAT32_PARTS,
        QWEN_SIZES[:1],
    ),
}
