"""Tiny architectures of other libraries, fresh, as their libraries write them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

TIMM = (
    "test_vit",  # ViT with CLS
    "test_vit4",  # ViT with registers
    "test_resnet",
    "test_efficientnet",
    "test_convnext",
    "test_nfnet",
    "test_mambaout",
    "test_maxvit",
    "eva02_tiny_patch14_224",
    "mixer_s32_224",
)
"""Architectures of timm that are small by themselves: ViTs, CNNs, hybrids, EVA, an MLP-Mixer."""


def timm_swin(folder: Path) -> Path:
    """A Swin of two stages that timm writes: maps with channels last."""
    import timm

    arguments = {
        "img_size": 64,
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 16,
        "depths": [2, 2],
        "num_heads": [2, 4],
        "num_classes": 5,
    }
    torch.manual_seed(1)
    model = timm.create_model("swin_tiny_patch4_window7_224", **arguments)
    return _write_timm(folder, model, "swin_tiny_patch4_window7_224", arguments, 64)


def _write_timm(folder: Path, model: Any, name: str, arguments: dict[str, Any], size: int) -> Path:
    from safetensors.torch import save_model

    folder.mkdir(parents=True)
    save_model(model, str(folder / "model.safetensors"))
    config = {
        "architecture": name,
        "num_classes": arguments["num_classes"],
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [3, size, size],
            "fixed_input_size": True,
            "crop_pct": 0.9,
            "interpolation": "bicubic",
            "mean": [0.5, 0.5, 0.5],
            "std": [0.5, 0.5, 0.5],
            "num_classes": arguments["num_classes"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _transformers(folder: Path, model: Any, size: int) -> Path:
    model.eval().save_pretrained(folder)
    settings = {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": size, "width": size},
        "resample": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def transformers_swin(folder: Path) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return _transformers(folder, t.SwinModel(config), 64)


def transformers_resnet(folder: Path) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.ResNetConfig(embedding_size=8, hidden_sizes=[16, 32], depths=[1, 1])
    return _transformers(folder, t.ResNetModel(config), 64)


def transformers_dinov2(folder: Path) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=14
    )
    return _transformers(folder, t.Dinov2Model(config), 28)


def transformers_convnext(folder: Path) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
    return _transformers(folder, t.ConvNextModel(config), 64)


def transformers_classifier(folder: Path, kind: str, names: Sequence[str]) -> Path:
    """`KindForImageClassification` of 32 px, tiny, with an output for each name."""
    import transformers as t

    torch.manual_seed(1)
    labels = {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}
    vit = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": 32}
    swin = {"image_size": 32, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 4]}
    sizes: dict[str, dict[str, Any]] = {
        "ResNet": {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [1, 1]},
        "ConvNext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2},
        "Swin": {**swin, "patch_size": 4, "window_size": 4},
        "ViT": {**vit, "intermediate_size": 48, "patch_size": 8},
        "Dinov2": {**vit, "mlp_ratio": 2, "patch_size": 8},
    }
    config = getattr(t, f"{kind}Config")(**sizes[kind], **labels)
    model = getattr(t, f"{kind}ForImageClassification")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return _transformers(folder, model, 32)


OPEN_CLIP: dict[str, dict[str, Any]] = {
    "ViT": {"layers": 2, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 32},
    "ResNet": {"layers": [1, 1, 1, 1], "width": 8, "image_size": 32},
    "ConvNeXt of timm": {
        "timm_model_name": "test_convnext",
        "timm_pool": "avg",
        "timm_proj": "linear",
        "image_size": 64,
    },
    "ViT of timm with a pooling of its own": {
        "timm_model_name": "test_vit",
        "timm_pool": "map",
        "timm_proj": "none",
        "image_size": 32,
    },
}


def open_clip(folder: Path, vision: dict[str, Any]) -> Path:
    """A CLIP as open_clip's `save_for_hf` writes it, without the tokenizer."""
    import open_clip as library
    from safetensors.torch import save_file

    torch.manual_seed(1)
    text = {"context_length": 8, "vocab_size": 12, "width": 16, "heads": 2, "layers": 1}
    width = 64 if vision.get("timm_proj") == "none" else 12
    config = {"embed_dim": width, "vision_cfg": vision, "text_cfg": text}
    model = library.CustomTextCLIP(**config)
    folder.mkdir(parents=True)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "open_clip_model.safetensors")
    settings = {
        "model_cfg": {**config, "custom_text": True},
        "preprocess_cfg": dict(vars(library.transform.PreprocessCfg())),
    }
    (folder / "open_clip_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def transformers_vit(folder: Path) -> Path:
    import transformers as t

    torch.manual_seed(1)
    config = t.ViTConfig(
        hidden_size=24,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
    )
    return _transformers(folder, t.ViTModel(config), 32)
