"""Every preset against the parameter counts of the published models.

The counts come from instantiating the reference libraries (transformers, timm, torchvision,
open_clip) on the meta device. "Bare" is the encoder with its final norm and nothing after it.
"""

from __future__ import annotations

import importlib.resources
from typing import Any, get_args

import pytest
import yaml

from vitcli import build
from vitcli.config import attention_variants as config_attention
from vitcli.config import schema
from vitcli.config.request import load_config, preset_names
from vitcli.config.schema import EncoderConfig, ModelConfig
from vitcli.config.settings import Setting
from vitcli.nn import attention, positions
from vitcli.nn import encoder as block
from vitcli.nn import encoder as feedforward
from vitcli.nn.attention import SCHEMES

LINEAR = {"head": "linear", "head_out": 1000}
TANH = {"head": "tanh"}
DISTILLED = {"head": "distilled", "head_out": 1000}
PROBE = {"pooling": "cls+mean", **LINEAR}
BARE = {"head": "none", "head_out": None}

# The processors read a still image through two equal temporal slots of a 3D patch weight; here
# the slots are one weight, their sum, so a Qwen tower has one slot fewer than the published file.
QWEN_SLOT = 3 * 14 * 14 * 1280
QWEN3_SLOT = 3 * 16 * 16 * 1152

# preset -> (parameters bare, [(encoder keys that add a head, parameters), ...]).
# An empty dict of keys is the preset as it stands.
Counts = tuple[int, list[tuple[dict[str, Any], int]]]
COUNTS: dict[str, Counts] = {
    "vit-ti16": (5_524_416, [(LINEAR, 5_717_416), (TANH, 5_561_472)]),
    "vit-s16": (21_665_664, [(LINEAR, 22_050_664), (TANH, 21_813_504)]),
    "vit-s32": (22_493_952, [(LINEAR, 22_878_952), (TANH, 22_641_792)]),
    "vit-b16": (85_798_656, [(LINEAR, 86_567_656), (TANH, 86_389_248)]),
    "vit-b32": (87_455_232, [(LINEAR, 88_224_232), (TANH, 88_045_824)]),
    "vit-l16": (303_301_632, [(LINEAR, 304_326_632), (TANH, 304_351_232)]),
    "vit-l32": (305_510_400, [(LINEAR, 306_535_400), (TANH, 306_560_000)]),
    "vit-h14": (630_764_800, [(LINEAR, 632_045_800), (TANH, 632_404_480)]),
    "vit-b16-384": (86_090_496, [(LINEAR, 86_859_496), (TANH, 86_681_088)]),
    "vit-l16-384": (303_690_752, [(LINEAR, 304_715_752), (TANH, 304_740_352)]),
    "vit-h14-518": (632_189_440, [(LINEAR, 633_470_440), (TANH, 633_829_120)]),
    "deit-ti16": (5_524_416, [(LINEAR, 5_717_416)]),
    "deit-ti16-distilled": (
        5_524_800,
        [(DISTILLED, 5_910_800), (LINEAR, 5_717_800), (TANH, 5_561_856)],
    ),
    "deit-s16": (21_665_664, [(LINEAR, 22_050_664)]),
    "deit-s16-distilled": (
        21_666_432,
        [(DISTILLED, 22_436_432), (LINEAR, 22_051_432), (TANH, 21_814_272)],
    ),
    "deit-b16": (85_798_656, [(LINEAR, 86_567_656)]),
    "deit-b16-distilled": (
        85_800_192,
        [(DISTILLED, 87_338_192), (LINEAR, 86_569_192), (TANH, 86_390_784)],
    ),
    "clip-b32": (87_456_000, [({}, 87_849_216)]),
    "clip-b16": (85_799_424, [({}, 86_192_640)]),
    "clip-l14": (303_179_776, [({}, 303_966_208)]),
    "clip-l14-336": (303_507_456, [({}, 304_293_888)]),
    "clip-h14": (630_766_080, [({}, 632_076_800)]),
    "clip-g14": (1_011_203_840, [({}, 1_012_645_632)]),
    "clip-bigg14": (1_842_777_344, [({}, 1_844_907_264)]),
    "siglip-b16-224": (85_797_120, [({}, 92_884_224)]),
    "siglip-b16-256": (85_843_200, [({}, 92_930_304)]),
    "siglip-b16-384": (86_088_960, [({}, 93_176_064)]),
    "siglip-b16-512": (86_433_024, [({}, 93_520_128)]),
    "siglip2-b32-256": (87_465_216, [({}, 94_552_320)]),
    "siglip-l16-256": (303_361_024, [({}, 315_956_224)]),
    "siglip-l16-384": (303_688_704, [({}, 316_283_904)]),
    "siglip2-l16-512": (304_147_456, [({}, 316_742_656)]),
    "siglip-so400m14-224": (412_442_352, [({}, 427_680_704)]),
    "siglip-so400m14-384": (412_987_248, [({}, 428_225_600)]),
    "siglip-so400m16-256": (412_649_712, [({}, 427_888_064)]),
    "siglip2-so400m16-384": (413_018_352, [({}, 428_256_704)]),
    "siglip2-so400m16-512": (413_534_448, [({}, 428_772_800)]),
    "siglip2-g-opt16-256": (1_134_838_272, [({}, 1_163_168_256)]),
    "siglip2-g-opt16-384": (1_135_329_792, [({}, 1_163_659_776)]),
    "dinov2-s14": (22_056_192, [(PROBE, 22_825_576 - 384)]),
    "dinov2-s14-reg": (22_057_728, []),
    "dinov2-b14": (86_579_712, [(PROBE, 88_117_480 - 768)]),
    "dinov2-b14-reg": (86_582_784, []),
    "dinov2-l14": (304_367_616, [(PROBE, 306_417_640 - 1024)]),
    "dinov2-l14-reg": (304_371_712, []),
    "dinov2-g14": (1_136_479_232, [(PROBE, 1_139_553_768 - 1536)]),
    "dinov2-g14-reg": (1_136_485_376, []),
    "dinov3-s16": (21_596_160, []),
    "dinov3-s16plus": (28_692_480, []),
    "dinov3-b16": (85_659_648, []),
    "dinov3-l16": (303_128_576, []),
    "dinov3-l16plus": (403_890_176, []),
    "dinov3-h16plus": (840_591_360, []),
    "dinov3-7b16": (6_716_030_976, []),
    "mae-b16": (85_798_656, [({"position": "none"}, 85_647_360)]),
    "mae-l16": (303_301_632, [({"position": "none"}, 303_099_904)]),
    "mae-h14": (630_764_800, [({"position": "none"}, 630_435_840)]),
    "ijepa-h14": (630_762_240, []),
    "ijepa-h16-448": (631_668_480, []),
    "ijepa-g16": (1_011_368_576, []),
    "internvit-300m": (304_012_288, []),
    "internvit-6b": (5_536_496_000, []),
    "internvit-6b-v1.0": (5_905_251_200, []),
    "internvit-6b-224": (5_902_793_600, []),
    "qwen2-vl-2b": (631_183_360 - QWEN_SLOT, [({}, 665_271_296 - QWEN_SLOT)]),
    "qwen2-vl-7b": (631_183_360 - QWEN_SLOT, [({}, 675_759_104 - QWEN_SLOT)]),
    "qwen2-vl-72b": (631_183_360 - QWEN_SLOT, [({}, 699_356_672 - QWEN_SLOT)]),
    "qwen2.5-vl-3b": (631_975_680 - QWEN_SLOT, [({}, 668_684_288 - QWEN_SLOT)]),
    "qwen2.5-vl-7b": (631_975_680 - QWEN_SLOT, [({}, 676_550_144 - QWEN_SLOT)]),
    "qwen2.5-vl-32b": (636_401_664 - QWEN_SLOT, [({}, 688_841_984 - QWEN_SLOT)]),
    "qwen2.5-vl-72b": (636_401_664 - QWEN_SLOT, [({}, 704_573_696 - QWEN_SLOT)]),
    "tipsv2-b14": (86_315_520, []),
    # transformers' PixtralVisionModel, and its Aimv2VisionModel without the pooling.
    "pixtral-12b": (403_489_792, []),
    "kimi-k2.5": (416_866_032, []),
    "aimv2-l14": (309_197_824, []),
    "eva02-b14": (85_758_720, []),
    "eva02-l14-448": (304_055_232, []),
}
# transformers' Qwen3VLVisionModel and Qwen3_5VisionModel, their mergers, and those of DeepStack.
COUNTS |= {
    name: (whole - merger - deepstack - slot, [({}, whole - slot)])
    for name, whole, merger, deepstack, slot in (
        ("qwen3-vl-2b", 406_957_056, 25_174_016, 75_540_480, QWEN3_SLOT // 1152 * 1024),
        ("qwen3-vl-4b", 415_347_712, 27_271_680, 81_833_472, QWEN3_SLOT // 1152 * 1024),
        ("qwen3-vl-8b", 576_388_336, 40_119_040, 120_377_856, QWEN3_SLOT),
        ("qwen3-vl-32b", 595_266_800, 44_838_656, 134_536_704, QWEN3_SLOT),
        ("qwen3.5-0.8b", 100_592_896, 12_588_544, 0, QWEN3_SLOT // 1152 * 768),
        ("qwen3.5-4b", 333_514_240, 27_271_680, 0, QWEN3_SLOT // 1152 * 1024),
        ("qwen3.5-9b", 456_010_480, 40_119_040, 0, QWEN3_SLOT),
    )
}
# timm's vit_pe_*: without pooling and head, and with them.
COUNTS |= {
    "pe-core-t16": (5_597_568, [({}, 6_141_056)]),
    "pe-core-s16": (21_811_968, [({}, 23_783_168)]),
    "pe-core-b16": (85_799_424, [({}, 93_673_984)]),
    "pe-core-l14": (303_507_456, [({}, 317_152_256)]),
    "pe-core-g14": (1_851_736_576, [({}, 1_882_033_920)]),
    "pe-lang-l14": (291_415_040, []),
    "pe-lang-g14": (1_740_922_624, []),
    "pe-spatial-t16": (5_683_200, []),
    "pe-spatial-s16": (21_983_232, []),
    "pe-spatial-b16": (86_433_792, []),
    "pe-spatial-l14": (303_964_160, []),
    "pe-spatial-g14": (1_851_887_104, []),
}
# torchvision's weights: the counts in the metadata of its weights, classifier included.
COUNTS |= {
    f"vit-{name}": (count - 1000 * (hidden + 1), [(LINEAR, count)])
    for name, hidden, count in (
        ("b16-torchvision", 768, 86_567_656),
        ("b16-torchvision-swag", 768, 86_859_496),
        ("b16-torchvision-swag-linear", 768, 86_567_656),
        ("b32-torchvision", 768, 88_224_232),
        ("l16-torchvision", 1024, 304_326_632),
        ("l16-torchvision-swag", 1024, 305_174_504),
        ("l16-torchvision-swag-linear", 1024, 304_326_632),
        ("l32-torchvision", 1024, 306_535_400),
        ("h14-torchvision-swag-linear", 1280, 632_045_800),
    )
}
# The fixed sizes of SigLIP 2 that SigLIP has as well: the same graph under both names.
COUNTS |= {
    f"siglip2-{size}": COUNTS[f"siglip-{size}"]
    for size in (
        *("b16-224", "b16-256", "b16-384", "b16-512", "l16-256", "l16-384"),
        *("so400m14-224", "so400m14-384", "so400m16-256"),
    )
}

# timm's are the same models; where registers are, the CLS row is folded into the CLS token.
COUNTS |= {
    f"{name}-timm": COUNTS[name]
    for name in (
        *("vit-ti16", "vit-s16", "vit-s32", "vit-b16", "vit-b32", "vit-l16"),
        *("vit-b16-384", "vit-l16-384"),
        *("siglip-b16-224", "siglip-b16-256", "siglip-b16-384", "siglip-b16-512"),
        *("siglip-l16-256", "siglip-l16-384", "siglip-so400m14-224", "siglip-so400m14-384"),
        *("dinov2-s14", "dinov2-b14", "dinov2-l14", "dinov2-g14"),
    )
}
COUNTS |= {
    "dinov2-s14-reg-timm": (22_057_344, []),
    "dinov2-b14-reg-timm": (86_582_016, []),
    "dinov2-l14-reg-timm": (304_370_688, []),
    "dinov2-g14-reg-timm": (1_136_483_840, []),
}

PRESETS = preset_names()


def preset(name: str, **encoder: Any) -> ModelConfig:
    settings = [Setting(("encoder", key), value, key) for key, value in encoder.items()]
    return load_config(ModelConfig, preset=name, settings=settings)


def bare(name: str) -> EncoderConfig:
    pooling: dict[str, Any] = {"pooling": "none"} if name.startswith("siglip") else {}
    if name.startswith("pe-core"):
        pooling = {"pooling": "none", "pool_heads": None, "pool_prefix": False}
        pooling |= {"pool_mlp_hidden": None}
    if name.startswith("qwen3"):
        pooling = {"deepstack": []}
    return preset(name, **BARE, **pooling).encoder


def parameters(config: EncoderConfig) -> int:
    return sum(p.numel() for p in build.build_meta(config).parameters())


def test_every_preset_has_a_published_count() -> None:
    assert set(PRESETS) == set(COUNTS)


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_equal_the_published_model(name: str) -> None:
    bare_count, with_heads = COUNTS[name]
    assert parameters(bare(name)) == bare_count
    for keys, count in with_heads:
        assert parameters(preset(name, **keys).encoder) == count, keys
    if not any(keys == {} for keys, _ in with_heads):
        assert preset(name).encoder == bare(name)  # as it stands it has nothing after the norm


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_says_only_what_its_base_does_not(name: str) -> None:
    """A key equal to the base's (or to the schema's default) would be noise that can go stale."""
    text = (importlib.resources.files("vitcli.config") / "presets" / f"{name}.yaml").read_text()
    own = yaml.safe_load(text)
    assert own.pop("name") == name == preset(name).name
    base_name = own.pop("preset", None)
    base = (preset(base_name) if base_name else ModelConfig()).model_dump()

    def check(own: dict[str, Any], base: dict[str, Any], where: str) -> None:
        for key, value in own.items():
            if isinstance(value, dict):
                check(value, base[key], f"{where}{key}.")
            else:
                assert value != base[key], f"{where}{key} repeats {value}"

    check(own, base, "")


@pytest.mark.parametrize("name", PRESETS)
def test_preprocessing_yields_an_image_the_encoder_reads(name: str) -> None:
    config = preset(name)
    size = config.preprocess.output_size
    if name.startswith("dinov2") and not name.endswith("-timm"):
        assert size == (224, 224)  # the table is 37x37, the processor still crops to 224
    elif name.startswith("pixtral"):
        assert size is None
        assert config.preprocess.multiple == config.encoder.patch_size
        assert (config.preprocess.longest_edge,) * 2 == config.encoder.image_size
    elif name.startswith(("qwen", "kimi")):
        assert size is None  # follows the image
        unit = config.preprocess.fill or config.preprocess.multiple
        assert unit == 2 * config.encoder.patch_size
    else:
        assert size == config.encoder.image_size


def test_head_widths_are_the_published_ones() -> None:
    """Head counts leave no trace in the tensors, so the counts above cannot catch a wrong one."""
    odd = {
        "aimv2-l14": 128,
        "kimi-k2.5": 72,
        "clip-h14": 80,
        "clip-g14": 88,
        "clip-bigg14": 104,
        "dinov3-7b16": 128,
    }
    families = {
        "vit-h14": 80,
        "mae-h14": 80,
        "ijepa-h": 80,
        "ijepa-g": 88,
        "siglip-so400m": 72,
        "siglip2-so400m": 72,
        "siglip2-g-opt": 96,
        "internvit-6b": 128,
        "qwen3-vl-2b": 64,
        "qwen3-vl-4b": 64,
        "qwen3.5-0.8b": 64,
        "qwen3.5-4b": 64,
        "qwen3": 72,
        "pe-core-g14": 96,
        "pe-lang-g14": 96,
        "pe-spatial-g14": 96,
        "qwen": 80,
    }
    for name in PRESETS:
        starts = [width for start, width in families.items() if name.startswith(start)]
        expected = odd.get(name) or (starts[0] if starts else 64)
        assert preset(name).encoder.head_dim == expected, name


@pytest.mark.parametrize(
    ("literal", "table"),
    [
        (schema.PositionKind, build.POSITIONS),
        (schema.PoolingKind, build.POOLINGS),
        (schema.NormPlacement, block.BLOCKS),
        (schema.ActivationKind, feedforward.ACTIVATIONS),
        (config_attention.AttendKind, attention.ATTENDS),
        (schema.InitScheme, SCHEMES),
        (config_attention.TableResize, positions.TABLE_RESIZES),
        (config_attention.RopeCoordinates, positions.ROPE_COORDINATES),
        (config_attention.RopeLayout, positions.ROPE_LAYOUTS),
    ],
    ids=lambda value: "" if isinstance(value, dict) else "|".join(get_args(value)),
)
def test_each_word_of_the_schema_is_built(literal: Any, table: dict[str, Any]) -> None:
    assert set(get_args(literal)) == set(table)
