"""YAML 1.2's core schema, and the limits of what is read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, seed, settings
from hypothesis import strategies as st

from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import Setting, parse_setting
from vitcli.config.training import ImagesRun
from vitcli.config.yaml import dump_yaml, parse_value, parse_yaml, read_yaml
from vitcli.errors import VitcliError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # YAML 1.2.2, section 10.3.2, and what YAML 1.1 makes of the same words.
        *((word, None) for word in ("null", "Null", "NULL", "~", "")),
        *((word, True) for word in ("true", "True", "TRUE")),
        *((word, False) for word in ("false", "False", "FALSE")),
        *((word, word) for word in ("on", "off", "yes", "No", "y", "tRue", "nULL")),
        ("010", 10),
        ("-007", -7),
        ("+12", 12),
        ("0o17", 15),
        ("0x1F", 31),
        *((word, word) for word in ("1:30", "11:2", "190:20:30", "1_000", "0b11", "0o8", "-0x1")),
        ("1e-3", 1e-3),
        ("1.0e1", 10.0),
        ("1E5", 1e5),
        (".5", 0.5),
        ("5.", 5.0),
        ("-.5e+2", -50.0),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        *((word, word) for word in ("e3", ".", "1e", "inf", "nan", ".iNf", "1.2.3")),
        *((word, word) for word in ("2024-01-31", "12:30:00", "<<", "=")),
        ("'010'", "010"),
        ("!!float 3", 3.0),
        ("!!str 010", "010"),
        ("[007, 008, 010]", [7, 8, 10]),
        ("[11:2]", ["11:2"]),
        ("{on: 1, 2: off, null: x}", {"on": 1, "2": "off", "null": "x"}),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, value: Any) -> None:
    parsed = parse_value(text, "test")
    assert parsed == value and type(parsed) is type(value)


def test_not_a_number_is_one() -> None:
    assert all(math.isnan(parse_value(word, "test")) for word in (".nan", ".NaN", ".NAN"))


def test_the_same_in_a_file_and_after_set(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train:\n  seed: 010\n  lora: {heads: [11:2], on: [q]}\n")
    config = load_config(ImagesRun, file=file)
    assert config.train.seed == 10
    assert config.train.lora.heads == ("11:2",) and config.train.lora.on == ("q",)
    assert load_config(ImagesRun, None, None, [parse_setting("train.seed=010")]).train.seed == 10
    with pytest.raises(VitcliError, match=r"train\.epochs: input should be a valid integer"):
        load_config(ImagesRun, None, None, [parse_setting("train.epochs=1:30")])
    with pytest.raises(VitcliError) as refused:
        load_config(ModelConfig, None, None, [parse_setting("encoder.cls_token=no")])
    assert refused.value.hint == "write true or false"


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("!!python/object/apply:os.system [x]", "could not determine a constructor"),
        ("!!timestamp 2001-01-01", "could not determine a constructor"),
        ("!!int 1.5", "'1.5' is not a YAML 1.2 int"),
        ("a: &a [*a]", "an alias of itself"),
        ("a: 1\nb: {c: 1, c: 2}", r"test:2: b\.c is given twice"),
        ("[{c: 1}, {d: 1, d: 2}]", r"1\.d is given twice"),
        ("? [a]\n: 1", "a key must be a word"),
        ("a: \x07", "special characters"),
    ],
)
def test_what_is_not_plain_data_is_refused(text: str, wrong: str) -> None:
    with pytest.raises(VitcliError, match=wrong):
        parse_value(text, "test")


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n"
    for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
"""Ten to the ninth values in half a kilobyte."""


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (LAUGHS, "more than 20,000 values after its aliases are expanded"),
        ("k: 1\n" * 30_000, "more than 20,000 values"),
        ("[" * 500_000, "nested more than 64 levels"),
        ("- " * 100_000 + "x", "nested more than 64 levels"),
        ("a: &a0 1\n" + "".join(f"b{i}: &a{i + 1} [*a{i}]\n" for i in range(100)), "nested more"),
        ("9" * 5_000, "a number of 5,000 characters"),
        ("# " + "x" * (1 << 20), "larger than 1 MiB"),
    ],
    ids=["aliases", "values", "brackets", "dashes", "chained", "digits", "text"],
)
def test_small_files_cannot_take_the_machine(text: str, wrong: str) -> None:
    with pytest.raises(VitcliError, match=wrong):
        parse_yaml(text, "test")


def test_few_aliases_are_fine() -> None:
    assert parse_yaml("a: &x [1, 2]\nb: [*x, *x]", "test").data["b"] == [[1, 2], [1, 2]]


def test_a_file_that_never_ends_is_read_to_the_limit(tmp_path: Path) -> None:
    endless = tmp_path / "endless.yaml"
    endless.symlink_to("/dev/zero")
    with pytest.raises(VitcliError):
        read_yaml(endless)


@pytest.mark.parametrize(
    ("key", "value", "wrong"),
    [
        ("encoder.image_size", "-1", "greater than or equal to 1, got -1"),
        ("encoder.image_size", "[224, 10000000000]", "less than or equal to 65536"),
        ("encoder.depth", "1000000", "less than or equal to 1000, got 1000000"),
        ("encoder.hidden", "1" + "0" * 400, "less than or equal to 65536, got a number of 1329"),
        ("encoder.norm_eps", "1" + "0" * 400, "encoder.norm_eps"),
        ("encoder.norm_eps", "1e400", "finite number, got inf"),
        ("encoder.layer_scale", ".nan", "finite number, got nan"),
        ("data.workers", "100000", "less than or equal to 256, got 100000"),
        ("train.epochs", "99999999999", "less than or equal to 1000000000"),
    ],
)
def test_absurd_values_are_refused_in_one_line(key: str, value: str, wrong: str) -> None:
    with pytest.raises(VitcliError) as refused:
        load_config(ImagesRun, None, None, [parse_setting(f"{key}={value}")])
    assert wrong in refused.value.message and key in refused.value.message
    assert "\n" not in refused.value.message and len(refused.value.message) < 300


@pytest.mark.parametrize("name", ["x" * 5_000, "a/b", "nul\0byte", "..", "VIT-B16"])
def test_what_is_no_preset_is_said_so(name: str) -> None:
    with pytest.raises(VitcliError, match="is not a preset") as refused:
        load_config(ModelConfig, f"{name}")
    assert len(refused.value.message) < 100


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12)
    | st.sampled_from(["on", "1e-3", "0o7", "0x1F", "010", "11:2", "null", "~", "<<", "1_0", "="])
)
DATA = st.dictionaries(
    st.text("abcdeo_.- 01", min_size=1, max_size=6), SCALARS | st.lists(SCALARS, max_size=4)
)


@seed(20)
@settings(deadline=None, max_examples=200)
@given(DATA)
def test_what_is_dumped_reads_back_to_the_same(data: dict[str, Any]) -> None:
    again = parse_yaml(dump_yaml(data), "test").data
    assert again == data
    assert [type(v) for v in again.values()] == [type(v) for v in data.values()]


KEYS = (
    *("encoder", "encoder.image_size", "encoder.rope", "encoder.rope.periods", "encoder.position"),
    *("encoder.attention", "encoder.attention.full_blocks", "encoder.head_out", "data.classes"),
    *("encoder.layer_scale", "preprocess.mean", "preprocess.resize_size", "data.crop_scale"),
    *("train.lora", "train.lora.heads", "train.betas", "train.warmup", "name", "no.such.key"),
)
VALUES = st.recursive(
    SCALARS | st.sampled_from([10**400, -1, 1e308, -0.0, math.inf, math.nan, "x" * 300, "-1x-1"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("a.é ", max_size=4), inner),
    max_leaves=6,
)


@seed(21)
@settings(deadline=None, max_examples=400)
@given(st.lists(st.tuples(st.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
@example([("encoder", None)])
@example([("encoder.rope", None), ("encoder.rope.periods", [])])
def test_any_settings_give_a_config_or_one_clear_line(settings: list[tuple[str, Any]]) -> None:
    given_ = [Setting(tuple(key.split(".")), value, f"set {key}") for key, value in settings]
    try:
        assert isinstance(load_config(ImagesRun, None, None, given_), ImagesRun)
    except VitcliError as error:
        assert "\n" not in error.message and error.hint


@seed(22)
@settings(deadline=None, max_examples=400)
@given(st.text("ab:-[]{}&*!#|>'\"%@,? \n\t01.~e\\<", max_size=40))
def test_any_text_parses_or_is_one_clear_line(text: str) -> None:
    try:
        parse_yaml(text, "test")
    except VitcliError as error:
        assert error.message.startswith("test") and "\n" not in error.message
