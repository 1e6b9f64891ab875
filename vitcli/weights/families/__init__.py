"""The families that are read, as tables, in the order in which they are tried."""

from __future__ import annotations

from vitcli.weights.families import (
    hf_clip,
    hf_dino,
    hf_internvl,
    hf_qwen,
    hf_vit,
    open_clip,
    timm_eva,
    timm_vit,
    torchvision_vit,
)
from vitcli.weights.family import Family

FAMILIES: tuple[Family, ...] = (
    *hf_vit.FAMILIES,
    *hf_dino.FAMILIES,
    *hf_clip.FAMILIES,
    *hf_internvl.FAMILIES,
    *hf_qwen.FAMILIES,
    *open_clip.FAMILIES,
    *torchvision_vit.FAMILIES,
    *timm_eva.FAMILIES,
    *timm_vit.FAMILIES,
)
