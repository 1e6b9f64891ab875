"""Tiny random models of open_clip, their files and what they give."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import open_clip
import timm
from open_clip.model import resize_pos_embed
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.checkpoints.parity import timm_models
from tests.checkpoints.parity.compare import EXACT, FLOAT32_PARTS, Outputs

VISION: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "head_width": 8,
    "mlp_ratio": 3.0,
    "patch_size": 8,
    "image_size": 32,
}
TEXT = {"context_length": 8, "vocab_size": 12, "width": 16, "heads": 2, "layers": 1}
CLIPA = {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}


@dataclass(frozen=True)
class Case:
    """An open_clip model config; `trunk` makes the timm model that it names tiny."""

    family: str
    vision: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    trunk: dict[str, Any] | None = None
    tolerance: float = EXACT

    @property
    def config(self) -> dict[str, Any]:
        vision = self.vision if self.trunk is not None else VISION | self.vision
        return {"embed_dim": 12, "vision_cfg": vision, "text_cfg": TEXT, **self.model}

    def make(self, image_size: int | tuple[int, int] = 32) -> nn.Module:
        config = dict(self.config)
        custom = config.pop("custom_text", False)
        config["vision_cfg"] = config["vision_cfg"] | {"image_size": image_size}
        with tiny_timm(self.trunk or {}):
            return (open_clip.CustomTextCLIP if custom else open_clip.CLIP)(**config)

    def save(self, model: nn.Module, folder: Path) -> None:
        """As open_clip's save_for_hf does, without the tokenizer."""
        save_file(
            {k: v.contiguous() for k, v in model.state_dict().items()},
            folder / "open_clip_model.safetensors",
        )
        preprocess = open_clip.transform.PreprocessCfg().__dict__
        config = {"model_cfg": self.config, "preprocess_cfg": preprocess}
        (folder / "open_clip_config.json").write_text(json.dumps(config))


@contextmanager
def tiny_timm(arguments: dict[str, Any]) -> Iterator[None]:
    """open_clip makes timm models by name alone: here small ones, with the heads of the name."""
    create = timm.create_model
    own = ("num_classes", "num_heads")
    small = {k: v for k, v in timm_models.SMALL.items() if k not in own}
    small |= {"embed_dim": 48, **arguments}
    timm.create_model = lambda name, **given: create(name, **(small | given))
    try:
        yield
    finally:
        timm.create_model = create


def outputs(model: nn.Module, pixels: Tensor) -> Outputs:
    visual = model.visual
    if hasattr(visual, "trunk"):
        found = timm_models.outputs(visual.trunk, pixels)
        found.output = model.encode_image(pixels) if model.visual.head else found.output
        return found
    seen: list[Tensor] = []
    blocks = visual.transformer.resblocks
    hooks = [
        blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0])),
        *(b.register_forward_hook(lambda _, __, out: seen.append(out)) for b in blocks),
    ]
    output = model.encode_image(pixels)
    for hook in hooks:
        hook.remove()
    pooled, _ = visual._pool(seen[-1])
    tokens = seen[-1] if visual.final_ln_after_pool else visual.ln_post(seen[-1])
    return Outputs(seen, seen[-1], tokens, pooled, output)


def at_size(case: Case, model: nn.Module, size: tuple[int, int]) -> nn.Module:
    """The same weights in a model of another size, resized as open_clip does when it loads."""
    other = case.make(size).double().eval()
    state = dict(model.state_dict())
    if not hasattr(other.visual, "trunk"):
        resize_pos_embed(state, other)
    other.load_state_dict(state)
    return other


CASES = {
    "GELU": Case("open-clip"),
    "QuickGELU": Case("open-clip", model={"quick_gelu": True}),
    "CLIPA": Case("open-clip", CLIPA),
    "CLIPA with its own eps and GELU": Case(
        "open-clip",
        {**CLIPA, "norm_kwargs": {"eps": 1e-3}, "act_kwargs": {"approximate": "tanh"}},
    ),
    "mean of normed patches, LayerScale": Case(
        "open-clip", {"pool_type": "avg", "ls_init_value": 0.1}
    ),
    "custom text": Case("open-clip", model={"custom_text": True, "init_logit_bias": -10}),
    "timm SigLIP": Case(
        "open-clip-timm-vit",
        {
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        {"custom_text": True, "init_logit_bias": -10},
        trunk={},
    ),
    "timm CLIP, linear": Case(
        "open-clip-timm-vit",
        {"timm_model_name": "vit_base_patch16_clip_224", "timm_pool": "", "timm_proj": "linear"},
        trunk={},
    ),
    "timm ViT, mean, linear with bias": Case(
        "open-clip-timm-vit",
        {"timm_model_name": "vit_medium_patch16_gap_256", "timm_proj_bias": True},
        trunk={},
    ),
    "timm EVA-02": Case(
        "open-clip-timm-eva02",
        {
            "timm_model_name": "eva02_base_patch16_clip_224",
            "timm_pool": "token",
            "timm_proj": None,
        },
        trunk={},
        tolerance=FLOAT32_PARTS,
    ),
    "timm EVA, own head": Case(
        "open-clip-timm-eva",
        {"timm_model_name": "eva_giant_patch14_224", "timm_pool": "token", "timm_proj": None},
        {"custom_text": True},
        trunk={},
    ),
    "timm Perception Encoder": Case(
        "open-clip-timm-pe",
        {"timm_model_name": "vit_pe_core_base_patch16_224", "timm_pool": "map", "timm_proj": None},
        {"custom_text": True},
        trunk={},
        tolerance=FLOAT32_PARTS,
    ),
}
SIZES = ((32, 32), (40, 40), (48, 24))
