"""A source opened by the library that wrote it: transformers, timm or open_clip."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitcli.config.load import split_library
from vitcli.engines.backbone import (
    Backbone,
    first_tensor,
    library_errors,
    source_config,
    source_place,
)
from vitcli.engines.timm_networks import (
    fresh_network,
    open_timm,
    timm_backbone,
    timm_blocks,
    timm_outputs,
)
from vitcli.engines.transformers_towers import transformers_backbone
from vitcli.errors import VitcliError


def open_reference(
    source: str,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    image_size: tuple[int, int] | None = None,
) -> Backbone:
    """The encoder of a directory or hub id, by the library that its config names.

    Args:
        source: `timm:`, `transformers:` or `open_clip:` before it names the library.
        image_size: (height, width) of the images, for an encoder that is built for one size.

    Raises:
        VitcliError: the library is not installed, does not know the source or cannot read it.
    """
    library, source = split_library(source)
    library = library or library_of(source)
    make = {"transformers": transformers_backbone, "timm": open_timm, "open_clip": _open_clip}[
        library
    ]
    with library_errors(library, source, "check that the directory is as the library writes it"):
        return make(source, device or torch.device("cpu"), dtype, image_size)


def fresh_reference(
    name: str,
    *,
    seed: int = 0,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    image_size: tuple[int, int] | None = None,
) -> Backbone:
    """An architecture of timm in eval mode, see `fresh_network`."""
    model = fresh_network(name, seed, image_size)
    where = device or torch.device("cpu")
    return timm_backbone(model, split_library(name)[1], where, dtype)


def library_of(source: str) -> str:
    """transformers, timm or open_clip, by the config of a directory or hub id.

    Raises:
        VitcliError: no config that one of them writes.
    """
    if source_config(source, "open_clip_config.json"):
        return "open_clip"
    config = source_config(source, "config.json")
    if "architecture" in config and config.get("model_type") != "timm_wrapper":
        return "timm"
    if "model_type" in config:
        return "transformers"
    raise VitcliError(
        f"{source}: no config of transformers, timm or open_clip found",
        "give a directory that one of them wrote, or a hub id",
    )


def _open_clip(
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
        output = model.encode_image(pixels)
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
        layers=layers,
        channels_last=getattr(trunk, "output_fmt", "") == "NHWC",
        input_size=(size, size) if isinstance(size, int) else tuple(size),
        prepared_by=source_config(source, "open_clip_config.json"),
    )
