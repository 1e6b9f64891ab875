"""The families that are read, as tables, in the order in which they are tried."""

from __future__ import annotations

from vitcli.checkpoints.families import (
    facebook,
    google,
    hf_clip,
    hf_dino,
    hf_internvl,
    hf_qwen,
    hf_vit,
    internvit,
    open_clip,
    timm_eva,
    timm_vit,
    torchvision_vit,
)
from vitcli.checkpoints.family import Family

FAMILIES: tuple[Family, ...] = (
    *hf_vit.FAMILIES,
    *hf_dino.FAMILIES,
    *hf_clip.FAMILIES,
    *hf_internvl.FAMILIES,
    *hf_qwen.FAMILIES,
    *internvit.FAMILIES,
    *google.FAMILIES,
    *open_clip.FAMILIES,
    *torchvision_vit.FAMILIES,
    *facebook.FAMILIES,
    *timm_eva.FAMILIES,
    *timm_vit.FAMILIES,
)
