"""The pixels of transformers' own processors: the view of the whole image, by rows and columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import transformers
from PIL import Image

Pixels = np.ndarray[Any, Any]
FIRST = ("LlavaNext", "LlavaOnevision", "Ovis2", "Gemma3", "PerceptionLM")
"""Those whose tiles come after the whole image; elsewhere they come before it."""


def picture() -> Image.Image:
    y, x = np.mgrid[0:200, 0:300]
    grain = np.random.default_rng(0).integers(0, 60, (200, 300, 3))
    waves = np.stack([x % 97, (x + y) % 151, (2 * y) % 193], axis=-1)
    return Image.fromarray((waves + grain).clip(0, 255).astype(np.uint8))


def reference(kind: str, settings: dict[str, Any]) -> Any:
    """The processor by Pillow, or the only one where there is none by Pillow."""
    made = getattr(transformers, f"{kind}Pil", None) or getattr(transformers, kind)
    return made(**settings)


def base_view(processor: Any, image: Image.Image) -> Pixels:
    """(3, h, w) of the whole image."""
    by_pillow = type(processor).__name__.endswith("Pil")
    found = processor(image, return_tensors="np" if by_pillow else "pt")
    kind = type(processor).__name__.removesuffix("Pil").removesuffix("ImageProcessor")
    if kind == "Idefics":
        return np.asarray(found)[0]
    pixels = found["pixel_values"]
    pixels = np.asarray(pixels.float() if hasattr(pixels, "float") else pixels)
    if kind in ("Siglip2", "Lfm2Vl"):
        patch = getattr(processor, "encoder_patch_size", None) or processor.patch_size
        return flat(pixels[-1], *np.asarray(found["spatial_shapes"])[-1], patch)
    if kind == "Gemma4":
        columns, rows = found["image_position_ids"][0].max(axis=0) + 1
        return flat(pixels[0], rows, columns, processor.patch_size)
    if kind.startswith(("Qwen2VL", "Glm")):
        patch, merge, times = (
            getattr(processor, f"{what}_size") for what in ("patch", "merge", "temporal_patch")
        )
        _, rows, columns = found["image_grid_thw"][0]
        cells = (rows // merge, columns // merge, merge, merge)
        first = pixels.reshape(*cells, 3, times, patch, patch)[:, :, :, :, :, 0]
        return first.transpose(4, 0, 2, 5, 1, 3, 6).reshape(3, rows * patch, columns * patch)
    if kind.startswith("Kimi"):
        (rows, columns), patch = np.asarray(found["image_grid_thw"])[0, 1:], processor.patch_size
        cells = pixels.reshape(rows, columns, 3, patch, patch).transpose(2, 0, 3, 1, 4)
        return cells.reshape(3, rows * patch, columns * patch)
    if kind == "Aria":  # what lies beyond whole patches is masked
        height, width = np.argwhere(found["pixel_mask"][0])[-1] + 1
        return pixels[0, :, : -(-height // 14) * 14, : -(-width // 14) * 14]
    views = pixels.reshape(-1, *pixels.shape[-3:])
    return views[0 if kind in FIRST else -1]


def flat(patches: Pixels, rows: int, columns: int, side: int) -> Pixels:
    """Rows of flattened patches (row, column, channel), those that fill a batch up left out."""
    cells = patches[: rows * columns].reshape(rows, columns, side, side, 3)
    return cells.transpose(4, 0, 2, 1, 3).reshape(3, rows * side, columns * side)
