"""timm's architecture names as the hyper-parameters they stand for.

The name in a timm config.json is a value like any other: it says what the tensors do not, which
is the head count, the activation, the norms' eps and the pooling. Everything else is in the
tensors. A name that is missing here is one whose blocks are built otherwise (parallel branches,
differential attention, post-norm).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Settings that many share, then names by head count.
_VISION_TRANSFORMER: tuple[tuple[dict[str, Any], dict[int, str]], ...] = (
    (
        {"act_layer": "gelu", "norm_eps": 1e-06, "global_pool": "avg"},
        {
            2: "test_vit2",
            3: "test_vit4",
            4: "vit_wee_patch16_reg1_gap_256",
            5: "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
            8: """
                vit_medium_patch16_gap_240 vit_medium_patch16_gap_256 vit_medium_patch16_gap_384
                vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256
                vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384
            """,
            10: """
                vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256
                vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384
            """,
            12: """
                vit_base_patch16_reg4_gap_256 vit_base_patch16_siglip_gap_224
                vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384
                vit_base_patch16_siglip_gap_512
            """,
            13: """
                vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384
                vit_so150m2_patch16_reg1_gap_448
            """,
            14: "vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384",
            16: """
                eva_large_patch14_196 eva_large_patch14_336 vit_base_patch16_gap_224
                vit_giant_patch16_gap_224 vit_huge_patch14_gap_224 vit_huge_patch16_gap_448
                vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
                vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
                vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448
                vit_so400m_patch14_siglip_gap_896
            """,
        },
    ),
    (
        {"act_layer": "gelu", "norm_eps": 1e-06, "global_pool": "map"},
        {
            12: """
                vit_base_patch16_siglip_224 vit_base_patch16_siglip_256
                vit_base_patch16_siglip_384 vit_base_patch16_siglip_512
            """,
            14: "vit_so150m_patch16_reg4_map_256",
            16: """
                vit_large_patch16_siglip_256 vit_large_patch16_siglip_384
                vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378
                vit_so400m_patch14_siglip_384
            """,
        },
    ),
    (
        {"act_layer": "gelu", "norm_eps": 1e-06, "global_pool": "token"},
        {
            2: "test_vit",
            3: """
                deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 vit_tiny_patch16_224
                vit_tiny_patch16_384
            """,
            6: """
                deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224
                deit_small_patch16_224 flexivit_small vit_small_patch14_dinov2
                vit_small_patch14_reg4_dinov2 vit_small_patch16_224 vit_small_patch16_36x1_224
                vit_small_patch16_384 vit_small_patch32_224 vit_small_patch32_384
                vit_small_patch8_224
            """,
            8: "deit3_medium_patch16_224",
            12: """
                deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224
                deit_base_distilled_patch16_384 deit_base_patch16_224 deit_base_patch16_384
                flexivit_base vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
                vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_224_miil
                vit_base_patch16_384 vit_base_patch16_radio_v3 vit_base_patch32_224
                vit_base_patch32_384 vit_base_patch8_224
            """,
            14: "vit_base_patch16_plus_240 vit_base_patch32_plus_256",
            16: """
                deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384
                flexivit_large vit_giant_patch14_224 vit_gigantic_patch14_224 vit_huge_patch14_224
                vit_huge_patch16_radio_v3 vit_huge_patch16_radio_v4 vit_intern300m_patch14_448
                vit_large_patch14_224 vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2
                vit_large_patch14_reg4_dinov2 vit_large_patch16_224 vit_large_patch16_384
                vit_large_patch16_radio_v3 vit_large_patch32_224 vit_large_patch32_384
                vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch16_radio_v4
            """,
            24: "vit_giant_patch16_radio_v3",
        },
    ),
    (
        {"act_layer": "gelu", "norm_eps": 1e-05, "global_pool": "token"},
        {
            4: "vit_xsmall_patch16_clip_224",
            8: "vit_medium_patch16_clip_224 vit_medium_patch32_clip_224",
            10: "vit_betwixt_patch32_clip_224",
            12: """
                vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch32_clip_224
                vit_base_patch32_clip_256 vit_base_patch32_clip_384 vit_base_patch32_clip_448
            """,
            14: "vit_base_patch16_plus_clip_240",
            16: """
                vit_giant_patch14_clip_224 vit_gigantic_patch14_clip_224
                vit_gigantic_patch14_clip_378 vit_huge_patch14_clip_224 vit_huge_patch14_clip_336
                vit_huge_patch14_clip_378 vit_large_patch14_clip_224 vit_large_patch14_clip_336
            """,
        },
    ),
    (
        {"act_layer": "gelu_tanh", "norm_eps": 1e-06, "global_pool": "avg"},
        {
            12: "vit_base_patch32_siglip_gap_256",
            16: """
                vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384
                vit_large_patch16_siglip_gap_512 vit_so400m_patch16_siglip_gap_256
                vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
            """,
        },
    ),
    (
        {"act_layer": "gelu_tanh", "norm_eps": 1e-06, "global_pool": "map"},
        {
            12: "vit_base_patch32_siglip_256",
            16: """
                vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384
                vit_large_patch16_siglip_512 vit_so400m_patch16_siglip_256
                vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512
            """,
        },
    ),
    (
        {"act_layer": "quick_gelu", "norm_eps": 1e-05, "global_pool": "token"},
        {
            12: "vit_base_patch16_clip_quickgelu_224 vit_base_patch32_clip_quickgelu_224",
            16: """
                vit_gigantic_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_224
                vit_huge_patch14_clip_quickgelu_378 vit_large_patch14_clip_quickgelu_224
                vit_large_patch14_clip_quickgelu_336
            """,
        },
    ),
    (
        {
            "act_layer": "silu",
            "norm_eps": 1e-05,
            "global_pool": "avg",
            "proj_bias": False,
            "patch_norm": True,
        },
        {
            heads: " ".join(f"aimv2_{name}_patch14_{side}" for side in (224, 336, 448))
            for heads, name in ((8, "large"), (12, "huge"), (16, "1b"), (24, "3b"))
        },
    ),
    (
        {"act_layer": "silu", "norm_eps": 1e-06, "global_pool": "token"},
        {
            24: """
                vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2
                vit_giant_patch14_reg4_dinov2
            """,
        },
    ),
)

# Names by their number of registers, where there are any.
_REGISTERS = {
    1: """
        test_vit2 test_vit4 vit_base_patch14_reg1_tipsv2 vit_betwixt_patch16_reg1_gap_256
        vit_giant_patch14_reg1_tipsv2 vit_large_patch14_reg1_tipsv2
        vit_little_patch16_reg1_gap_256 vit_medium_patch16_reg1_gap_256
        vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384
        vit_so150m2_patch16_reg1_gap_448 vit_so400m_patch14_reg1_tipsv2
        vit_wee_patch16_reg1_gap_256
    """,
    4: """
        vit_base_patch14_reg4_dinov2 vit_base_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_256 vit_betwixt_patch16_reg4_gap_384
        vit_giant_patch14_reg4_dinov2 vit_large_patch14_reg4_dinov2
        vit_little_patch16_reg4_gap_256 vit_medium_patch16_reg4_gap_256
        vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384
        vit_small_patch14_reg4_dinov2 vit_so150m_patch16_reg4_gap_256
        vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    7: """
        vit_base_patch16_radio_v3 vit_giant_patch16_radio_v3 vit_huge_patch16_radio_v3
        vit_large_patch16_radio_v3
    """,
    9: """
        vit_huge_patch16_radio_v4 vit_so400m_patch16_radio_v4
    """,
}

_TABLE = {"use_abs_pos_emb": True, "use_rot_pos_emb": False}
_TURNED = {"use_abs_pos_emb": False, "use_rot_pos_emb": True}
_BOTH = {"use_abs_pos_emb": True, "use_rot_pos_emb": True}
_DINOV3 = {
    **_TURNED,
    "class_token": True,
    "reg_tokens": 4,
    "norm_eps": 1e-5,
    "rope_type": "dinov3",
    "rope_temperature": 100.0,
    "rope_layout": "half",
}
_REFERENCE_ROPE = {
    **_TURNED,
    "class_token": False,
    "norm_eps": 1e-6,
    "global_pool": "avg",
    "rope_type": "cat",
    "rope_temperature": 10000.0,
    "rope_layout": "interleaved",
    "ref_feat_shape": (16, 16),
}
_AXIAL = {
    **_TURNED,
    "class_token": True,
    "norm_eps": 1e-6,
    "global_pool": "token",
    "rope_type": "index",  # timm's cat without a reference grid
    "rope_temperature": 100.0,
    "rope_layout": "interleaved",
    "rope_grid_indexing": "xy",
}
_MIXED = {
    **{key: value for key, value in _AXIAL.items() if key != "rope_layout"},
    "rope_type": "mixed",
    "rope_temperature": 10.0,
}
_EVA02 = {**_REFERENCE_ROPE, **_BOTH, "class_token": True}
_EVA: tuple[tuple[dict[str, Any], dict[int, str]], ...] = (
    (
        {**_DINOV3, "global_pool": "avg"},
        {
            3: "vit_tiny_patch16_dinov3_qkvb",
            6: """
                vit_small_patch16_dinov3 vit_small_patch16_dinov3_qkvb
                vit_small_plus_patch16_dinov3 vit_small_plus_patch16_dinov3_qkvb
            """,
            12: "vit_base_patch16_dinov3 vit_base_patch16_dinov3_qkvb",
            16: "vit_large_patch16_dinov3 vit_large_patch16_dinov3_qkvb",
            20: "vit_huge_plus_patch16_dinov3 vit_huge_plus_patch16_dinov3_qkvb",
            32: "vit_7b_patch16_dinov3",
        },
    ),
    (
        {**_DINOV3, "global_pool": "token"},
        {
            6: "vit_small_patch16_lingbot",
            12: "vit_base_patch16_lingbot",
            16: "vit_large_patch16_lingbot",
            24: "vit_giant_patch16_lingbot",
        },
    ),
    (
        {**_REFERENCE_ROPE, "reg_tokens": 1},
        {
            8: "vit_medium_patch16_rope_reg1_gap_256 vit_mediumd_patch16_rope_reg1_gap_256",
            12: "vit_base_patch16_rope_reg1_gap_256",
        },
    ),
    (
        _AXIAL,
        {
            6: "vit_small_patch16_rope_224",
            12: "vit_base_patch16_rope_224",
            16: "vit_large_patch16_rope_224",
        },
    ),
    (
        {**_AXIAL, "use_abs_pos_emb": True},
        {
            6: "vit_small_patch16_rope_ape_224",
            12: "vit_base_patch16_rope_ape_224",
            16: "vit_large_patch16_rope_ape_224",
        },
    ),
    *(
        (
            {**_MIXED, "use_abs_pos_emb": bool(table)},
            {
                heads: f"vit_{name}_patch16_rope_mixed{table}_224"
                for heads, name in ((6, "small"), (12, "base"), (16, "large"))
            },
        )
        for table in ("", "_ape")
    ),
    ({**_REFERENCE_ROPE, "reg_tokens": 4}, {10: "vit_betwixt_patch16_rope_reg4_gap_256"}),
    (
        {**_TABLE, "norm_eps": 1e-6, "global_pool": "avg"},
        {16: "eva_giant_patch14_224 eva_giant_patch14_336 eva_giant_patch14_560"},
    ),
    ({**_TABLE, "norm_eps": 1e-6, "global_pool": "token"}, {16: "eva_giant_patch14_clip_224"}),
    (
        _EVA02,
        {
            3: "eva02_tiny_patch14_224 eva02_tiny_patch14_336",
            6: "eva02_small_patch14_224 eva02_small_patch14_336",
        },
    ),
    (
        {**_EVA02, "scale_mlp": True},
        {
            12: "eva02_base_patch14_224 eva02_base_patch14_448",
            16: "eva02_large_patch14_224 eva02_large_patch14_448",
        },
    ),
    (
        {**_EVA02, "scale_mlp": True, "scale_attn_inner": True, "global_pool": "token"},
        {
            12: "eva02_base_patch16_clip_224",
            16: "eva02_large_patch14_clip_224 eva02_large_patch14_clip_336",
        },
    ),
)


def _by_name(
    groups: tuple[tuple[dict[str, Any], dict[int, str]], ...],
) -> dict[str, Mapping[str, Any]]:
    registers = {name: count for count, names in _REGISTERS.items() for name in names.split()}
    return {
        name: {"reg_tokens": registers.get(name, 0), **shared, "num_heads": heads}
        for shared, by_heads in groups
        for heads, names in by_heads.items()
        for name in names.split()
    }


VISION_TRANSFORMERS = {
    name: {
        **found,
        "position": "learned",
        "mlp": "gated" if found["act_layer"] == "silu" else "plain",
    }
    for name, found in _by_name(_VISION_TRANSFORMER).items()
}
EVAS = _by_name(_EVA)

# The Perception Encoder: a table with rotations, whose grid counts from 1 where there is CLS.
_PE = {
    "norm_eps": 1e-5,
    "rope_type": "cat",
    "rope_temperature": 10000.0,
    "rope_layout": "interleaved",
    "rope_grid_indexing": "xy",
}
_PE_CLS = {**_PE, "class_token": True, "rope_grid_offset": 1.0}
_PE_PATCHES = {**_PE, "class_token": False, "rope_grid_offset": 0.0}
_MAP = {"global_pool": "map", "attn_pool_num_heads": 8}
_MEAN = {"global_pool": "avg"}
_PERCEPTION: tuple[tuple[dict[str, Any], dict[int, str]], ...] = (
    (
        {**_PE_CLS, **_MAP, "ref_feat_shape": (24, 24)},
        {
            3: "vit_pe_core_tiny_patch16_384",
            6: "vit_pe_core_small_patch16_384",
            16: "vit_pe_core_large_patch14_336",
        },
    ),
    ({**_PE_CLS, **_MAP, "ref_feat_shape": (14, 14)}, {12: "vit_pe_core_base_patch16_224"}),
    (
        {**_PE_PATCHES, **_MAP, "ref_feat_shape": (32, 32)},
        {16: "vit_pe_core_gigantic_patch14_448"},
    ),
    (
        {**_PE_CLS, **_MEAN, "ref_feat_shape": (32, 32)},
        {
            3: "vit_pe_spatial_tiny_patch16_512",
            6: "vit_pe_spatial_small_patch16_512",
            12: "vit_pe_spatial_base_patch16_512",
            16: "vit_pe_lang_large_patch14_448 vit_pe_spatial_large_patch14_448",
        },
    ),
    (
        {**_PE_PATCHES, **_MEAN, "ref_feat_shape": (32, 32)},
        {16: "vit_pe_lang_gigantic_patch14_448 vit_pe_spatial_gigantic_patch14_448"},
    ),
)
PERCEPTION_ENCODERS = _by_name(_PERCEPTION)

_BEIT = {"class_token": True, "norm_eps": 1e-6, "global_pool": "avg"}
BEITS = _by_name(
    (
        (
            _BEIT,
            {
                12: "beit_base_patch16_224 beit_base_patch16_384 beitv2_base_patch16_224",
                16: """
                    beit_large_patch16_224 beit_large_patch16_384 beit_large_patch16_512
                    beitv2_large_patch16_224
                """,
            },
        ),
    )
)
# All that timm has weights of compute their biases by an MLP, which only `rel_pos_type` changes.
_RELATIVE = {"class_token": False, "norm_eps": 1e-6, "global_pool": "avg", "rel_pos_type": "mlp"}
_RELATIVE_CLS = {**_RELATIVE, "class_token": True}
RELATIVE = _by_name(
    (
        (
            _RELATIVE,
            {
                3: "test_vit_relpos",
                6: "vit_relpos_small_patch16_224",
                8: "vit_relpos_medium_patch16_224",
                12: "vit_relpos_base_patch16_224",
                14: "vit_relpos_base_patch16_plus_240",
            },
        ),
        (
            {**_RELATIVE_CLS, "global_pool": "token"},
            {8: "vit_relpos_medium_patch16_cls_224", 12: "vit_relpos_base_patch16_cls_224"},
        ),
        (_RELATIVE_CLS, {12: "vit_relpos_base_patch16_clsgap_224"}),
    )
)
QWEN3_ENCODERS = _by_name(
    (
        (
            {"norm_eps": 1e-6, "rope_temperature": 10000.0, "pos_embed_grid_size": 48},
            {12: "qwen3_vit_88m_enc", 16: "qwen3_vit_306m_enc qwen3_vit_416m_enc"},
        ),
    )
)
