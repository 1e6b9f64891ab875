"""Tiny random towers of transformers: Pixtral, AIMv2, Ovis2, Llama 4 and GLM-4V."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T
from torch import Tensor, nn
from transformers.models.glm4v.configuration_glm4v import Glm4vVisionConfig
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig
from transformers.models.glm4v_moe.modeling_glm4v_moe import Glm4vMoeVisionModel
from transformers.models.ovis2.configuration_ovis2 import Ovis2VisionConfig
from transformers.models.ovis2.modeling_ovis2 import Ovis2VisionModel

from tests.checkpoints.parity.compare import FLOAT32_PARTS, Outputs
from tests.checkpoints.parity.hf import ANY_SIZE, SMALL, TEXT, Case, inner, plain

TEXT_1 = TEXT | {"head_dim": 8}
PIXTRAL = SMALL | {"hidden_act": "silu"}
AIMV2_SIZES = (32, 40, 48)  # the library has no size but a model's own


def one_by_one(model: nn.Module, pixels: Tensor) -> Outputs:
    """The images of a batch are one sequence to Pixtral."""
    found = [model(image[None], output_hidden_states=True) for image in pixels]
    blocks = [torch.cat(layer) for layer in zip(*(f.hidden_states for f in found), strict=True)]
    tokens = torch.cat([f.last_hidden_state for f in found])
    return Outputs(blocks, tokens, tokens)


AIMV2 = plain(tokens="last_hidden_state", pooled="pooler_output")
AIMV2_WITHOUT = plain(tokens="last_hidden_state")


def _whole_aimv2(model: nn.Module, pixels: Tensor) -> Outputs:
    out = AIMV2(model.vision_model, pixels)
    out.output = model.visual_projection(out.pooled)
    return out


def ovis2(model: nn.Module, pixels: Tensor) -> Outputs:
    seen: list[Tensor] = []
    layers = model.transformer.encoder.layers
    hooks = [
        layers[0].register_forward_pre_hook(
            lambda _, given, named: seen.append(given[0] if given else named["hidden_states"]),
            with_kwargs=True,
        ),
        *(layer.register_forward_hook(lambda _, __, out: seen.append(out)) for layer in layers),
    ]
    tokens = model.transformer(pixels).last_hidden_state
    for hook in hooks:
        hook.remove()
    return Outputs(seen, seen[-1], tokens)


def _pixtral(make: Callable[[], nn.Module], where: str = "") -> Case:
    run = inner(where, one_by_one) if where else one_by_one
    return Case("hf-pixtral", make, run, FLOAT32_PARTS, ANY_SIZE)


def _aimv2(side: int, run: Any = AIMV2, **more: Any) -> Case:
    config = {**SMALL, "image_size": side, **more}
    return Case(
        "hf-aimv2",
        lambda: T.Aimv2VisionModel(T.Aimv2VisionConfig(**config)),
        run,
        FLOAT32_PARTS,
        ((side, side),),
    )


def _ovis2(make: Callable[[], nn.Module], side: int, where: str = "") -> Case:
    run = inner(where, ovis2) if where else ovis2
    return Case("hf-ovis2", make, run, FLOAT32_PARTS, ((side, side),))


def llama4(model: nn.Module, pixels: Tensor) -> Outputs:
    """CLS is the last token there; the norm of all tokens is seen by a hook."""
    normed: list[Tensor] = []
    hook = model.layernorm_post.register_forward_hook(lambda _, __, out: normed.append(out))
    found = model(pixels, output_hidden_states=True, return_dict=True)
    hook.remove()
    blocks = [layer.roll(1, dims=1) for layer in found.hidden_states]
    return Outputs(blocks, blocks[-1], normed[0].roll(1, dims=1))


def glm4v(model: nn.Module, pixels: Tensor) -> Outputs:
    """Image by image; the library's 2x2 order is undone."""
    patch = model.config.patch_size
    rows, columns = pixels.shape[-2] // patch, pixels.shape[-1] // patch
    cells = torch.arange(rows * columns).reshape(rows // 2, 2, columns // 2, 2)
    order = cells.transpose(1, 2).flatten()  # raster index of each token in their order
    images: list[list[Tensor]] = []
    for image in pixels:
        p = image.unfold(1, patch, patch).unfold(2, patch, patch)  # (C, rows, columns, p, p)
        p = p.flatten(1, 2).transpose(0, 1)[order]
        p = p.unsqueeze(2).expand(-1, -1, 2, -1, -1).flatten(1)
        seen: list[Tensor] = []
        hooks = [
            m.register_forward_hook(lambda _, __, out, seen=seen: seen.append(out))
            for m in (model.embeddings, *model.blocks, model.post_layernorm)
        ]
        model(p, torch.tensor([[1, rows, columns]]))
        for hook in hooks:
            hook.remove()
        images.append([torch.empty_like(out).index_copy_(0, order, out) for out in seen])
    *blocks, tokens = [torch.stack(layer) for layer in zip(*images, strict=True)]
    return Outputs(blocks, blocks[-1], tokens)


GLM4V = {
    "depth": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "patch_size": 8,
    "image_size": 32,
    "out_hidden_size": 24,
    "intermediate_size": 20,
}


def _glm4v(make: Callable[[], nn.Module], where: str = "") -> Case:
    run = inner(where, glm4v) if where else glm4v
    return Case("hf-glm4v", make, run, FLOAT32_PARTS, ((32, 32), (64, 64), (48, 80), (96, 32)))


LLAMA4 = SMALL | {
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 8,
    "projector_output_dim": 8,
    "vision_output_dim": 8,
    "intermediate_size": 64,  # the adapter reads 4 x 16 channels by this key
}


def _llama4(make: Callable[[], nn.Module], side: int, where: str = "") -> Case:
    run = inner(where, llama4) if where else llama4
    return Case("hf-llama4", make, run, FLOAT32_PARTS, ((side, side),))


OVIS2 = SMALL | {"vocab_size": 24}
RMS_TOWERS: dict[str, Case] = {
    "pixtral": _pixtral(lambda: T.PixtralVisionModel(T.PixtralVisionConfig(**PIXTRAL))),
    "pixtral in llava whole": _pixtral(
        lambda: T.LlavaForConditionalGeneration(
            T.LlavaConfig(
                text_config=TEXT_1 | {"model_type": "mistral"},
                vision_config=PIXTRAL | {"model_type": "pixtral"},
            )
        ),
        "model.vision_tower",
    ),
    "mistral 3 whole": _pixtral(
        lambda: T.Mistral3ForConditionalGeneration(
            T.Mistral3Config(
                text_config=TEXT_1 | {"model_type": "mistral"},
                vision_config=PIXTRAL | {"model_type": "pixtral"},
            )
        ),
        "model.vision_tower",
    ),
    **{f"aimv2 at {side}": _aimv2(side) for side in AIMV2_SIZES},
    "aimv2 without head": _aimv2(32, AIMV2_WITHOUT, use_head=False),
    "aimv2 with biases": _aimv2(32, qkv_bias=True, mlp_bias=True),
    "aimv2 whole": Case(
        "hf-aimv2",
        lambda: T.Aimv2Model(
            T.Aimv2Config(text_config=TEXT, vision_config=SMALL, projection_dim=12)
        ),
        _whole_aimv2,
        FLOAT32_PARTS,
        ((32, 32),),
    ),
    **{
        f"ovis2 at {side}": _ovis2(
            lambda side=side: Ovis2VisionModel(Ovis2VisionConfig(**OVIS2 | {"image_size": side})),
            side,
        )
        for side in AIMV2_SIZES
    },
    **{
        f"llama4 at {side}": _llama4(
            lambda side=side: T.Llama4VisionModel(
                T.Llama4VisionConfig(**LLAMA4 | {"image_size": side})
            ),
            side,
        )
        for side in (32, 48, 64)  # the adapter joins 2x2 patches
    },
    "glm4v": _glm4v(lambda: T.Glm4vVisionModel(Glm4vVisionConfig(**GLM4V))),
    "glm4v-moe": _glm4v(lambda: Glm4vMoeVisionModel(Glm4vMoeVisionConfig(**GLM4V))),
    "glm4v with biases": _glm4v(
        lambda: T.Glm4vVisionModel(Glm4vVisionConfig(**GLM4V, attention_bias=True))
    ),
    "glm4v whole": _glm4v(
        lambda: T.Glm4vForConditionalGeneration(
            T.Glm4vConfig(
                text_config=TEXT_1
                | {
                    "rope_parameters": {
                        "rope_type": "default",
                        "mrope_section": [1, 1, 2],
                        "rope_theta": 1e4,
                    }
                },
                vision_config=GLM4V,
            )
        ),
        "model.visual",
    ),
    "llama4 whole": _llama4(
        lambda: T.Llama4ForConditionalGeneration(
            T.Llama4Config(
                text_config=TEXT_1 | {"intermediate_size_mlp": 16, "num_local_experts": 2},
                vision_config=LLAMA4,
            )
        ),
        32,
        "vision_model",
    ),
    "ovis2 whole": _ovis2(
        lambda: T.Ovis2ForConditionalGeneration(
            T.Ovis2Config(
                text_config=TEXT | {"model_type": "qwen2"}, vision_config=OVIS2, hidden_size=16
            )
        ),
        32,
        "model.vision_tower",
    ),
}
