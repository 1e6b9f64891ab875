"""The vision tower of a transformers checkpoint: found, called and prepared for as it wants.

B images, T tokens of which prefix tokens come first, D channels.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from vitcli.engines.backbone import Backbone, source_config, source_place
from vitcli.engines.timm_networks import timm_attention, timm_blocks, timm_outputs, timm_size
from vitcli.errors import VitcliError

TOWERS = (
    *("vision_tower", "image_tower", "visual", "vision_model", "vision_encoder", "image_encoder"),
    "backbone",
)
"""What libraries call the image half of a larger model."""
FIRST_VIEW = ("LlavaNext", "LlavaOnevision", "PerceptionLM")
"""Processors whose view of the whole picture comes before its tiles."""


def transformers_backbone(
    source: str, device: torch.device, dtype: torch.dtype, image_size: tuple[int, int] | None
) -> Backbone:
    transformers: Any = importlib.import_module("transformers")
    place, more = source_place(source)
    config = source_config(source, "config.json")
    named, kind = (config.get("architectures") or [""])[0], config["model_type"]
    maker = getattr(transformers, named, None) or _unlisted(kind, named) or transformers.AutoModel
    with _silent_transformers():
        model = maker.from_pretrained(place, dtype=dtype, trust_remote_code=False, **more)
        model = model.to(device).eval()
        processor = _transformers_processor(place, more)
    tower = _tower(model)
    if hasattr(tower, "timm_model"):  # Perception LM's, which is timm's model
        inner = tower.timm_model
        layers, blocks = timm_blocks(inner)
        return Backbone(
            "transformers",
            tower.config.architecture,
            inner,
            blocks,
            device,
            dtype,
            processor,
            lambda pixels: timm_outputs(inner, pixels),
            once=inner,
            attend=timm_attention(inner, blocks),
            layers=layers,
            input_size=timm_size(inner),
            prepared_by=source_config(source, "preprocessor_config.json"),
        )
    config = tower.config
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
        model.config.mask_ratio = 0.0
    if hasattr(tower, "make_preprocessor_external"):  # RADIO normalizes within
        normalize, prepare = tower.make_preprocessor_external().cpu(), processor
        processor = prepare and (lambda picture: normalize(prepare(picture)))
    run = _TransformersForward(model, tower)
    layers, blocks = _transformers_blocks(tower)
    size = getattr(config, "image_size", None)
    return Backbone(
        "transformers",
        config.model_type,
        tower,
        blocks,
        device,
        dtype,
        processor,
        run,
        run.arrange,
        attend=run.attend if run.in_raster_order else None,
        layers=layers,
        input_size=(size, size) if isinstance(size, int) else None if size is None else tuple(size),
        prepared_by=source_config(source, "preprocessor_config.json"),
    )


def _transformers_blocks(tower: Any) -> tuple[list[str], list[nn.Module]]:
    """The blocks of a tower, or the stages of one that has several, and their names."""
    config = tower.config
    depths = [
        getattr(config, key)
        for key in ("num_hidden_layers", "depth", "num_layers", "num_stages")
        if isinstance(getattr(config, key, None), int)
    ]
    stages = getattr(config, "depths", None)
    depths = [len(stages)] if isinstance(stages, list | tuple) else depths[:1]
    for name, module in tower.named_modules():
        if isinstance(module, nn.ModuleList) and [len(module)] == depths:
            return [f"{name}.{i}" for i in range(len(module))], list(module)
    raise VitcliError(
        f"transformers {config.model_type}: no list of its layers found", "report the architecture"
    )


def _unlisted(kind: str, architecture: str) -> Any:
    """A class that the library saves and does not list at its top, such as Qwen's bare towers."""
    for name in (kind, kind.removesuffix("_vision")):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
            return getattr(module, architecture, None)
    return None


@contextmanager
def _silent_transformers() -> Iterator[None]:
    """Without its progress bars and advice: stderr is for what vitcli says."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        logging.enable_progress_bar()


def _tower(model: Any) -> Any:
    """The image half of a model, the outermost of such names; the model itself where it has none.

    A model that holds two (Video-LLaVA) has the images' before the videos' in `TOWERS`.
    """
    halves = [
        (path.count("."), TOWERS.index(name), module)
        for path, module in model.named_modules()
        if (name := path.rpartition(".")[2]) in TOWERS and hasattr(module, "config")
    ]
    if halves:
        return min(halves, key=lambda half: half[:2])[2]
    for name in ("vit", "mae"):  # a pre-training model: its encoder
        if model.config.model_type == "vit_mae" and hasattr(model, name):
            return getattr(model, name)
    return model


JOINED_AFTER = {
    "glm4v_vision": "post_layernorm",
    "glm4v_moe_vision": "post_layernorm",
    "llama4_vision_model": "layernorm_post",
}
"""Towers that end by joining patches, and the norm of the tokens before that."""


class _TransformersForward:
    """Calls a tower with the arguments that its kind wants."""

    def __init__(self, model: Any, tower: Any) -> None:
        self.model, self.tower = model, tower
        self.takes = set(inspect.signature(tower.forward).parameters)
        self.patch = getattr(tower.config, "patch_size", 1)
        self.kind = tower.config.model_type
        inner = model.base_model if tower is model else tower
        classifies = "ForImageClassification" in type(model).__name__
        reads = next(iter(inspect.signature(model.forward).parameters))  # not a VLM's token ids
        self.inner: Any = inner if classifies and reads == "pixel_values" else None
        self.normed: list[Tensor] = []
        if norm := JOINED_AFTER.get(self.kind):
            keep = self.normed.append
            getattr(tower, norm).register_forward_hook(lambda _, __, out: keep(out))

    @property
    def in_raster_order(self) -> bool:
        return "grid_thw" not in self.takes and self.kind != "llama4_vision_model"

    def attend(self, pixels: Tensor) -> Sequence[Tensor]:
        """Each block's attention weights, by the library's own explicit path."""
        before = self.tower.config._attn_implementation
        self.tower.set_attn_implementation("eager")
        try:
            pixels, given = self._given(pixels)
            found = self.tower(pixels, output_attentions=True, **given)
        finally:
            self.tower.set_attn_implementation(before)
        return getattr(found, "attentions", None) or ()

    def __call__(self, pixels: Tensor) -> tuple[Tensor | None, ...]:
        if "grid_thw" in self.takes:
            return self._cells(pixels)
        images, (pixels, given) = pixels, self._given(pixels)
        if self.inner is not None:
            return self._classified(pixels, given)
        found = self.tower(pixels, **given)
        if self.normed:
            return self.arrange(self.normed.pop(), pixels), None, None
        pooled, output = getattr(found, "pooler_output", None), getattr(found, "logits", None)
        if hasattr(getattr(self.tower, "pooler", None), "dense"):
            pooled, output = None, pooled  # a head of its own stands after the pooling
        if pooled is not None and hasattr(self.model, "visual_projection"):
            output = self.model.visual_projection(pooled)
        tokens = getattr(found, "last_hidden_state", None)
        if tokens is not None and {"target_sizes", "pixel_position_ids"} & self.takes:
            tokens = self.arrange(tokens, images)
        return tokens, pooled, output

    def _classified(self, pixels: Tensor, given: Mapping[str, Any]) -> tuple[Tensor | None, ...]:
        """Tokens of the encoder in a classifier, the vector that is classified, the logits."""
        assert self.inner is not None
        kept: dict[str, Any] = {}
        last = getattr(self.model, "classifier", nn.Identity())
        hooks = [
            self.inner.register_forward_hook(lambda _, __, out: kept.update(found=out)),
            last.register_forward_pre_hook(lambda _, read: kept.update(pooled=read[0])),
        ]
        try:
            logits = self.model(pixels, **given).logits
        finally:
            for hook in hooks:
                hook.remove()
        pooled = kept.get("pooled", getattr(kept["found"], "pooler_output", None))
        return kept["found"].last_hidden_state, pooled, logits

    def _given(self, pixels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Pixels as the tower reads them, and its other arguments."""
        given: dict[str, Any] = {}
        if "spatial_shapes" in self.takes:
            pixels, given = self._flat(pixels)
        elif "pixel_position_ids" in self.takes:  # Gemma 4: (x, y) of each patch
            rows, columns = (side // self.patch for side in pixels.shape[-2:])
            at = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).flip(-1)
            given["pixel_position_ids"] = at.expand(len(pixels), -1, -1).to(pixels.device)
            pixels, _ = self._flat(pixels)
        elif "target_sizes" in self.takes:  # MiniCPM-V: all patches in one row of patches
            p = pixels.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
            given["target_sizes"] = torch.tensor([p.shape[2:4]] * len(p), dtype=torch.int32)
            pixels = p.permute(1, 4, 0, 2, 3, 5).flatten(2)[None]  # (1, C, p, B N p)
        elif "pixel_values_videos" in self.takes:  # V-JEPA 2: one frame, without its predictor
            pixels, given["skip_predictor"] = pixels[:, None], True
        elif "interpolate_pos_encoding" in self.takes and not self._native(pixels):
            given["interpolate_pos_encoding"] = True
        if "noise" in self.takes:  # the order of its shuffle: none
            count = (pixels.shape[-2] // self.patch) * (pixels.shape[-1] // self.patch)
            given["noise"] = torch.arange(count, device=pixels.device).expand(len(pixels), -1)
        return pixels, given

    def arrange(self, tokens: Tensor, pixels: Tensor) -> Tensor:
        """(B, T, D), CLS first, in raster order; Qwen keeps one image's tokens cell by cell."""
        if {"target_sizes", "pixel_position_ids"} & self.takes:  # of all images in one
            return tokens.reshape(len(pixels), -1, tokens.shape[-1])
        if self.kind == "llama4_vision_model":
            return tokens.roll(1, dims=1)
        if "grid_thw" not in self.takes:
            return tokens
        raster = torch.empty_like(tokens)
        raster[self._order(pixels)] = tokens
        return raster[None]

    def _native(self, pixels: Tensor) -> bool:
        size = getattr(self.tower.config, "image_size", None)
        return tuple(pixels.shape[-2:]) == ((size, size) if isinstance(size, int) else size)

    def _flat(self, pixels: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """Images of one size as rows of patches without padding, as NaFlex reads them."""
        p = pixels.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        rows, columns = p.shape[2:4]
        flat = p.permute(0, 2, 3, 4, 5, 1).flatten(3).flatten(1, 2)  # (B, N, p p C)
        return flat, {
            "pixel_attention_mask": torch.ones(flat.shape[:2], dtype=torch.int64),
            "spatial_shapes": torch.tensor([[rows, columns]] * len(flat)),
        }

    def _merged(self, pixels: Tensor) -> Tensor:
        """The raster index of each token where 2 x 2 cells come one after another."""
        rows, columns = pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch
        merge = getattr(self.tower.config, "spatial_merge_size", 1)  # Kimi's are row by row
        cells = torch.arange(rows * columns).reshape(rows // merge, merge, columns // merge, merge)
        return cells.transpose(1, 2).flatten()

    def _order(self, pixels: Tensor) -> Tensor:
        """The raster index of each token as the blocks see them: by cell, and window by window."""
        order, merge = self._merged(pixels), getattr(self.tower.config, "spatial_merge_size", 1)
        window = getattr(self.tower.config, "window_size", 0) // merge // self.patch
        if window:
            rows, columns = (side // self.patch // merge for side in pixels.shape[-2:])
            at = torch.arange(rows * columns).reshape(rows, columns)
            tiles = [
                at[r : r + window, c : c + window].flatten()
                for r in range(0, rows, window)
                for c in range(0, columns, window)
            ]
            order = order.reshape(-1, merge * merge)[torch.cat(tiles)].flatten()
        return order

    def _cells(self, pixels: Tensor) -> tuple[Tensor | None, ...]:
        """One image through a tower that reads flat patches cell by cell (Qwen)."""
        if len(pixels) != 1:
            raise VitcliError("this tower reads one image at a time", "give one image")
        rows, columns = pixels.shape[-2] // self.patch, pixels.shape[-1] // self.patch
        p = pixels[0].unfold(1, self.patch, self.patch).unfold(2, self.patch, self.patch)
        p = p.flatten(1, 2).transpose(0, 1)[self._merged(pixels)]  # (N, C, p, p)
        if times := getattr(self.tower.config, "temporal_patch_size", None):
            p = p.unsqueeze(2).expand(-1, -1, times, -1, -1).flatten(1)
        found = self.tower(p, torch.tensor([[1, rows, columns]], device=pixels.device))
        if self.normed:
            return self.arrange(self.normed.pop(), pixels), None, None
        tokens = self.arrange(found.last_hidden_state, pixels)
        if not times:
            return tokens, None, None
        deep = getattr(found, "deepstack_features", None)
        return tokens, None, found.pooler_output[None], torch.stack(deep)[None] if deep else None


def _transformers_processor(
    place: str, more: Mapping[str, Any]
) -> Callable[[Image.Image], Tensor] | None:
    transformers: Any = importlib.import_module("transformers")
    try:
        processor = transformers.AutoImageProcessor.from_pretrained(
            place, backend="pil", trust_remote_code=False, **more
        )
    except (OSError, ValueError):
        return None

    def prepare(picture: Image.Image) -> Tensor:
        found = processor(picture, return_tensors="np")
        pixels = np.asarray(found["pixel_values"])
        if "image_grid_thw" in found:
            _, rows, columns = (int(n) for n in found["image_grid_thw"][0])
            merge, patch = processor.merge_size, processor.patch_size
            if pixels.ndim == 4:  # Kimi's patches, row by row
                merge = 1
            cells = pixels.reshape(
                rows // merge, columns // merge, merge, merge, 3, -1, patch, patch
            )[:, :, :, :, :, 0]
            pixels = cells.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
        elif "spatial_shapes" in found:
            rows, columns = (int(n) for n in found["spatial_shapes"][0])
            patch = processor.patch_size
            cells = pixels[0, : rows * columns].reshape(rows, columns, patch, patch, 3)
            pixels = cells.transpose(4, 0, 2, 1, 3).reshape(3, rows * patch, columns * patch)
        else:
            tiles = pixels.reshape(-1, *pixels.shape[-3:])
            first = type(processor).__name__.startswith(FIRST_VIEW)
            pixels = tiles[0 if first else -1]  # the view of the whole picture
        return torch.from_numpy(np.ascontiguousarray(pixels))

    return prepare
