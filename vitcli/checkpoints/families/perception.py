"""The Perception Encoder (core, lang, spatial) as timm stores it, alone or in Perception LM."""

from __future__ import annotations

from vitcli.checkpoints.families import timm
from vitcli.checkpoints.families.timm_architectures import PERCEPTION_ENCODERS
from vitcli.checkpoints.family import Family, To, Variant, only

OWN = {
    "rope_grid_offset": To("rope.offset", float),
    "rope_grid_indexing": To("rope.first_axis", {"ij": "rows", "xy": "columns"}),
    "attn_pool_num_heads": To("pool_heads"),
}
# The names are those of a CLIP by timm, whose queries and keys are not rotated.
PERCEPTION = Family(
    name="timm-pe",
    library=timm.LIBRARY,
    preprocess=timm.preprocess,
    verified="tiny random models, from files with and without config.json; also in Perception LM",
    signature=("norm_pre.weight", "pos_embed", *timm.SIGNATURE),
    absent=(*timm.ABSENT, "rope.freqs"),
    distinguished_by=("position", "learned+rope2d"),
    prefixes=("", "timm_model."),
    renames={**timm.RENAMES, **timm.QKV, **timm.MAP},
    settings={
        **timm.SHARED_SETTINGS,
        **timm.UNSUPPORTED,
        **timm.ROPE_SETTINGS,
        "attn_type": only("rope"),
        "architecture.rope_layout": To("rope.layout"),
        "rope_rotate_half": To("rope.layout", {True: "half", False: "interleaved"}),
        **{f"{where}{key}": to for where in ("architecture.", "") for key, to in OWN.items()},
        "use_abs_pos_emb": only(True),
        "use_rot_pos_emb": only(True),
    },
    ignored=(*timm.EVA_IGNORED, "attn_pool_mlp_ratio", "do_pooling"),
    decides={
        **timm.RESIZE,
        "patch_bias": timm.patch_bias,
        "position": "learned+rope2d",
        "activation": timm.gated_activation,
    },
    needs=(
        *("heads", "norm_eps", "pooling", "rope.coordinates", "rope.theta", "rope.layout"),
        *("rope.reference_grid", "rope.offset", "rope.first_axis"),
    ),
    unproven=("position",),
    packed_gate=True,
    flatten=timm.flattened(PERCEPTION_ENCODERS),
    any_prefix_rows=True,
    variants=(
        *timm.EVA_VARIANTS,
        Variant(when=("attn_pool.latent",), unproven=("pool_heads",)),
        Variant(when=("attn_pool.latent", "cls_token"), settings={"pool_prefix": True}),
    ),
)
FAMILIES = (PERCEPTION,)
