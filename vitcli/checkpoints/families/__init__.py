"""The families that are read, as tables, in the order in which they are tried."""

from __future__ import annotations

from vitcli.checkpoints.families import (
    hf_clip,
    hf_dino,
    hf_native_resolution,
    hf_vit,
    open_clip,
    originals,
    timm,
    timm_eva,
)
from vitcli.checkpoints.family import Family

FAMILIES: tuple[Family, ...] = (
    *hf_vit.FAMILIES,
    *hf_dino.FAMILIES,
    *hf_clip.FAMILIES,
    *hf_native_resolution.FAMILIES,
    *open_clip.FAMILIES,
    *originals.FAMILIES,
    hf_dino.TIPS_V2,  # after DINOv2's authors, whose names it shares where there is no config
    *timm_eva.FAMILIES,
    originals.VIT,  # after timm's Eva with rotations, whose names it would take
    *timm.FAMILIES,
    timm_eva.ROPE_TABLE,  # its names are DeiT III's too
)
