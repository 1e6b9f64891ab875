"""Networks of timm, from a checkpoint or fresh by name, and open_clip's, which may hold one.

B images, T tokens of which prefix tokens come first, D channels.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from vitcli.config.request import split_library
from vitcli.config.schema import PreprocessConfig
from vitcli.engines.backbone import (
    Backbone,
    first_tensor,
    library_errors,
    source_config,
    source_place,
)
from vitcli.errors import VitcliError
from vitcli.nn.encoder import EncoderOutput, hooked


def fresh_network(
    name: str, seed: int, image_size: tuple[int, int] | None = None, **more: Any
) -> Any:
    """A model of timm with the weights that timm draws after `torch.manual_seed(seed)`.

    Args:
        name: `timm:NAME`, as `timm.create_model` takes NAME; `more` are its other arguments.

    Raises:
        VitcliError: timm is not installed or does not know the architecture.
    """
    library, architecture = split_library(name)
    if library != "timm":
        raise VitcliError(
            f"--preset {name}: {library} builds nothing by name (expected timm:ARCHITECTURE)",
            f"--weights {library}:SOURCE",
        )
    with library_errors(library, name, "--preset timm:resnet50"):
        timm: Any = importlib.import_module("timm")
        if not timm.is_model(architecture):
            near = difflib.get_close_matches(architecture, timm.list_models(), 1)
            raise VitcliError(
                f"--preset {name}: timm {timm.__version__} does not have this architecture",
                f"--preset timm:{near[0] if near else 'resnet50'}",
            )
        published = timm.get_pretrained_cfg(architecture, allow_unregistered=True)
        fixed = published is not None and published.fixed_input_size
        if image_size and fixed and image_size != tuple(published.input_size[-2:]):
            more["img_size"] = image_size
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return timm.create_model(architecture, **more)


class TimmNetwork(nn.Module):
    """A fresh network of timm with a classifier, for training: (B, 3, height, width) to logits."""

    def __init__(self, name: str, seed: int, size: tuple[int, int], classes: int) -> None:
        super().__init__()
        self.net = fresh_network(name, seed, size, num_classes=classes)
        self.arguments = {"img_size": size} if self.net.pretrained_cfg["fixed_input_size"] else {}

    def forward(self, images: Tensor) -> EncoderOutput:
        nothing = images.new_empty(0)
        return EncoderOutput(nothing, nothing, None, self.net(images))

    def config(self, preprocess: PreprocessConfig, classes: Sequence[str]) -> dict[str, Any]:
        """What timm's `config.json` says beside its weights; the preprocessing is the run's."""
        size, resized = preprocess.output_size, preprocess.resize_size
        if size is None or resized is None or preprocess.resize not in ("squash", "shortest"):
            raise VitcliError(
                f"preprocess.resize: {preprocess.resize}: timm has no such preprocessing",
                "--set preprocess.resize=squash",
            )
        pretrained = {
            "input_size": [3, *size],
            "fixed_input_size": bool(self.arguments),
            "interpolation": preprocess.filter,
            "crop_pct": size[0] / resized[0],
            "crop_mode": "squash" if preprocess.resize == "squash" else "center",
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "num_classes": len(classes),
            "label_names": list(classes),
        }
        return {
            "architecture": self.net.pretrained_cfg["architecture"],
            "num_classes": len(classes),
            "num_features": self.net.num_features,
            "model_args": self.arguments,
            "pretrained_cfg": pretrained,
        }


def open_timm(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    place, more = source_place(source)
    revision = f"@{more['revision']}" if more else ""
    kind = "local-dir" if Path(source).exists() else "hf-hub"
    timm: Any = importlib.import_module("timm")
    named = f"{kind}:{place}{revision}"
    model = timm.create_model(named, pretrained=True)
    published = model.pretrained_cfg
    fixed = published.get("fixed_input_size")
    if image_size and fixed and image_size != tuple(published["input_size"][-2:]):
        model = timm.create_model(named, pretrained=True, img_size=image_size)
    name = model.pretrained_cfg.get("architecture") or type(model).__name__
    return timm_backbone(model, name, device, dtype)


def timm_backbone(model: Any, name: str, device: torch.device, dtype: torch.dtype) -> Backbone:
    model = model.to(device, dtype).eval()
    layers, blocks = timm_blocks(model)

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return timm_outputs(model, pixels)

    height, width = timm_size(model)
    return Backbone(
        "timm",
        name,
        model,
        blocks,
        device,
        dtype,
        _timm_processor(model),
        forward,
        once=model,
        attend=timm_attention(model, blocks),
        layers=layers,
        channels_last=getattr(model, "output_fmt", "") == "NHWC",
        input_size=(height, width),
        prepared_by=model.pretrained_cfg,
    )


def timm_size(model: Any) -> tuple[int, int]:
    patches = getattr(model, "patch_embed", None)
    size = getattr(patches, "img_size", None) or model.pretrained_cfg.get("input_size", (224, 224))
    height, width = tuple(size)[-2:]
    return int(height), int(width)


def timm_blocks(model: Any) -> tuple[list[str], list[nn.Module]]:
    """The stages that timm names in `feature_info`, which are the blocks of a ViT."""
    features = getattr(model, "feature_info", None) or []
    names = [info["module"] for info in getattr(features, "info", features)]
    with contextlib.suppress(AttributeError):
        if names:
            return names, [model.get_submodule(name) for name in names]
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        raise VitcliError(
            f"timm {type(model).__name__}: names no layers", "use another architecture"
        )
    return [f"blocks.{i}" for i in range(len(blocks))], list(blocks)


def timm_attention(
    model: Any, blocks: Sequence[nn.Module]
) -> Callable[[Tensor], Sequence[Tensor]] | None:
    """By the blocks' explicit path, as `timm.utils.AttentionExtract` does; None without one."""
    modules: list[Any] = [getattr(block, "attn", None) for block in blocks]
    if not all(hasattr(m, "fused_attn") and hasattr(m, "attn_drop") for m in modules):
        return None

    def attend(pixels: Tensor) -> Sequence[Tensor]:
        found: list[Tensor] = []
        before = [module.fused_attn for module in modules]
        try:
            for module in modules:
                module.fused_attn = False
            with hooked((module.attn_drop, found.append) for module in modules):
                model.forward_features(pixels)
        finally:
            for module, fused in zip(modules, before, strict=True):
                module.fused_attn = fused
        return found

    return attend


def timm_outputs(model: Any, pixels: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens or maps after the final norm, the pooled vector and the classifier's output."""
    tokens = model.forward_features(pixels)
    unpooled = hasattr(model, "head_dist") or getattr(model, "global_pool", None) == ""
    pooled = None if unpooled else model.forward_head(tokens, pre_logits=True)
    has_head = getattr(model, "num_classes", 0) > 0
    return tokens, pooled, model.forward_head(tokens) if has_head else None


def _timm_processor(model: nn.Module) -> Callable[[Image.Image], Tensor]:
    data: Any = importlib.import_module("timm.data")
    transform: Callable[[Image.Image], Tensor] = data.create_transform(
        **data.resolve_model_data_config(model), is_training=False
    )
    return transform


def open_open_clip(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    open_clip: Any = importlib.import_module("open_clip")
    place, more = source_place(source)
    if more:
        raise VitcliError(f"{source}: open_clip reads no revision", f"verify {place}")
    kind = "local-dir" if Path(source).exists() else "hf-hub"
    model, _, processor = open_clip.create_model_and_transforms(f"{kind}:{place}")
    model = model.to(device, dtype).eval()
    visual = model.visual
    trunk = getattr(visual, "trunk", None)
    if trunk is not None:
        layers, blocks = timm_blocks(trunk)
    elif hasattr(visual, "transformer"):
        blocks = list(visual.transformer.resblocks)
        layers = [f"transformer.resblocks.{i}" for i in range(len(blocks))]
    else:  # its ResNet
        layers = [f"layer{i}" for i in range(1, 5)]
        blocks = [visual.get_submodule(name) for name in layers]

    def forward(pixels: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        if trunk is not None:
            tokens, pooled, output = timm_outputs(trunk, pixels)
            if visual.head:
                output = visual.head(trunk.forward_head(tokens))
            return tokens, pooled, output
        last: list[Tensor] = []
        hook = blocks[-1].register_forward_hook(lambda _, __, out: last.append(first_tensor(out)))
        try:
            output = model.encode_image(pixels)
        finally:
            hook.remove()
        if not hasattr(visual, "transformer"):
            return last[0], output, output
        tokens = last[0] if visual.final_ln_after_pool else visual.ln_post(last[0])
        return tokens, visual._pool(last[0])[0], output

    size = visual.image_size
    return Backbone(
        "open_clip",
        type(visual).__name__,
        visual,
        blocks,
        device,
        dtype,
        processor,
        forward,
        once=model.encode_image,
        attend=None if trunk is None else timm_attention(trunk, blocks),
        layers=layers,
        channels_last=getattr(trunk, "output_fmt", "") == "NHWC",
        input_size=(size, size) if isinstance(size, int) else tuple(size),
        prepared_by=source_config(source, "open_clip_config.json"),
    )
