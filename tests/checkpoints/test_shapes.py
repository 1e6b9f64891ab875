"""What shapes alone say about an encoder."""

from __future__ import annotations

import pytest

from vitcli.build import build_meta
from vitcli.checkpoints.encoder_settings import settings_from_shapes, table_grids
from vitcli.config.schema import EncoderConfig

CONFIGS = {
    "plain": {},
    "gated": {"mlp": "gated", "activation": "silu"},
    "registers": {"registers": 3, "ln_pre": True},
    "no bias": {"attention": {"qkv_bias": "none"}},
    "q and v biases": {"attention": {"qkv_bias": "qv"}},
    "RMSNorm": {"norm": "rmsnorm", "attention": {"qk_norm": "width", "qk_norm_kind": "rmsnorm"}},
    "MAP": {"pooling": "map", "cls_token": False},
    "classifier": {"head": "linear", "head_out": 7},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_told_is_what_was_built(name: str) -> None:
    base = {"hidden": 16, "depth": 3, "heads": 2, "mlp_hidden": 40, "image_size": (32, 32)}
    config = EncoderConfig.model_validate(base | {"patch_size": 8} | CONFIGS[name])
    shapes = {n: tuple(t.shape) for n, t in build_meta(config).state_dict().items()}
    told = settings_from_shapes(shapes)
    plain = config.model_dump()
    for key, value in told.items():
        section, _, inner = key.partition(".")
        expected = plain[section][inner] if inner else plain[section]
        if key == "final_norm":
            expected = config.has_final_norm
        if key != "attention.qk_norm_kind" or config.attention.qk_norm != "none":
            assert value == expected, key
    assert {"hidden", "depth", "patch_size", "mlp_hidden", "mlp", "norm"} <= told.keys()


@pytest.mark.parametrize(
    ("rows", "prefix", "grid", "found"),
    [
        (17, (1,), None, [(1, (4, 4))]),
        (16, (0, 1), None, [(0, (4, 4))]),
        (18, (1,), None, []),
        (25, (1,), (4, 6), [(1, (4, 6))]),
        (25, (0, 1), None, [(0, (5, 5))]),
        (26, (1, 1, 10), None, [(1, (5, 5)), (10, (4, 4))]),
        (1, (1,), None, []),
    ],
)
def test_grids_of_a_table(
    rows: int,
    prefix: tuple[int, ...],
    grid: tuple[int, int] | None,
    found: list[tuple[int, tuple[int, int]]],
) -> None:
    assert table_grids(rows, prefix, grid) == found
