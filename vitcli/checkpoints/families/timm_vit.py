"""timm's VisionTransformer, and the originals of DeiT, MAE and I-JEPA that share its names."""

from __future__ import annotations

from vitcli.checkpoints.families import hugging_face, timm
from vitcli.checkpoints.families.hugging_face import flag
from vitcli.checkpoints.families.timm_architectures import VISION_TRANSFORMERS
from vitcli.checkpoints.family import Family, To, Variant, only

SIGNATURE = ("patch_embed.proj.weight", timm.BLOCK + "attn.qkv.weight", timm.BLOCK + "norm1.weight")
# Rank-5 patches are Qwen's; q_bias is Eva's.
ABSENT = ("merger.ln_q.weight", timm.BLOCK + "attn.q_bias")
NEEDS = ("heads", "norm_eps", "activation", "pooling")
# Each head predicts for itself and their mean is the answer; there is no one pooled vector.
DISTILLED = Variant(
    when=("head.weight", "head_dist.weight"),
    settings={"pooling": "none", "head": "distilled"},
    renames={"head.cls": "head", "head.dist": "head_dist"},
)
# Without its two heads timm gives the mean of CLS and the distillation token.
HEADLESS_DISTILLED = Variant(
    when=("dist_token",),
    unless=("head_dist.weight",),
    settings={"pooling": "none"},
)
VARIANTS = (
    timm.CLASSIFIER,
    timm.NO_CLASSIFIER,
    DISTILLED,
    HEADLESS_DISTILLED,
)

VIT = Family(
    name="timm-vit",
    library=timm.LIBRARY,
    verified="tiny random models, from files with and without config.json",
    signature=SIGNATURE,
    absent=(*ABSENT, timm.BLOCK + "gamma_1"),
    prefixes=("", "timm_model."),
    renames={**timm.RENAMES, **timm.QKV, **timm.LAYER_SCALE, **timm.MAP},
    settings={
        **timm.SETTINGS,
        "act_layer": To("activation", timm.ACTIVATIONS),
        "architecture.act_layer": To("activation", timm.ACTIVATIONS),
        "reg_tokens": To("registers"),
        "pre_norm": To("ln_pre", flag),
        "pos_embed": To("position", {"learn": "learned", "none": "none", "": "none"}, "learned"),
        "pool_include_prefix": only(False),
        "scale_attn_norm": only(False),
        "scale_mlp_norm": only(False),
        "proj_bias": only(True),
    },
    ignored=(
        *hugging_face.IGNORED,
        *timm.IGNORED,
        "fc_norm",
        "final_norm",
        "fix_init",
        "weight_init",
    ),
    fixed={
        **timm.RESIZE,
        "patch_bias": timm.patch_bias,
        "attention.qk_norm_eps": lambda told: told["norm_eps"],
    },
    needs=NEEDS,
    flatten=timm.flattened(VISION_TRANSFORMERS),
    any_prefix_rows=True,
    variants=VARIANTS,
)
# Their code resizes the table, when it loads one for another size, without antialiasing.
ORIGINAL = Family(
    name="original-vit",
    library="facebookresearch deit, mae, ijepa",
    verified="tiny random models of timm under the originals' keys; once beside them",
    signature=SIGNATURE,
    absent=ABSENT,
    wrappers=("model", "encoder"),
    renames={**timm.RENAMES, **timm.QKV, **timm.LAYER_SCALE},
    drops=(r"decoder_.*", r"mask_token"),
    fixed={"position_table.resize": "bicubic", "position_table.resize_dtype": "model"},
    needs=NEEDS,
    any_prefix_rows=True,
    variants=(
        *VARIANTS,
        Variant(when=(timm.BLOCK + "gamma_1",), renames=timm.GAMMAS),  # deit3
    ),
)
FAMILIES = (ORIGINAL, VIT)
