from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.sweep.conftest import COMMAND, Sweeper
from vitcli.commands.sweep.report import belongs
from vitcli.commands.sweep.space import Choice, Range, draw, setting_text
from vitcli.commands.sweep.trials import expand, repeats, trial_id
from vitcli.config.settings import parse_setting
from vitcli.config.yaml import parse_yaml
from vitcli.errors import VitcliError

HEAD = "command: train-shapes\n"
WORDS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS


def varied(sweeper: Sweeper, text: str, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(t.params[k] for k in keys) for t in expand(sweeper.load(HEAD + text))]


def test_a_grid_is_the_product_of_its_lists(sweeper: Sweeper) -> None:
    pairs = varied(sweeper, "grid: {norm: [pre, post], lr: [1, 2, 3]}", "norm", "lr")
    assert pairs == [(n, lr) for n in ("pre", "post") for lr in (1, 2, 3)]


def test_zip_goes_in_step_and_crosses_the_grid(sweeper: Sweeper) -> None:
    text = "zip: {norm: [pre, post], lr: [1, 2]}\ngrid: {batch: [8, 16]}"
    assert varied(sweeper, text, "norm", "lr", "batch") == [
        ("pre", 1, 8), ("pre", 1, 16), ("post", 2, 8), ("post", 2, 16),
    ]  # fmt: skip


def test_every_point_runs_with_the_first_seed_before_any_with_the_second(sweeper: Sweeper) -> None:
    assert varied(sweeper, "grid: {norm: [pre, post]}\nrepeat: 3", "seed", "norm") == [
        (seed, norm) for seed in (0, 1, 2) for norm in ("pre", "post")
    ]


def test_base_goes_into_every_trial_and_a_value_twice_is_one_trial(sweeper: Sweeper) -> None:
    assert varied(sweeper, "base: {batch: 4}\ngrid: {lr: [1, 2, 1]}", "batch", "lr") == [
        (4, 1), (4, 2),
    ]  # fmt: skip


def test_a_sweep_of_nothing_is_one_trial(sweeper: Sweeper) -> None:
    assert [dict(t.params) for t in expand(sweeper.load(HEAD))] == [{}]


def test_random_points_cross_the_grid_and_more_of_them_begin_with_the_same(
    sweeper: Sweeper,
) -> None:
    space = "{lr: {low: 1e-4, high: 1, log: true}}"
    text = "grid: {norm: [pre, post]}\nrandom: {trials: %d, space: " + space + "}"
    few, more = (varied(sweeper, text % n, "norm", "lr") for n in (3, 5))
    assert len(few) == 6 and len(set(few)) == 6
    assert set(few) < set(more)
    assert all(1e-4 <= lr <= 1 for _, lr in more)


def test_draws_do_not_depend_on_the_order_of_the_axes() -> None:
    a, b = Range(0.0, 1.0), Range(1, 100)
    one, other = draw({"a": a, "b": b}, 4, seed=7), draw({"b": b, "a": a}, 4, seed=7)
    assert one == other
    assert one != draw({"a": a, "b": b}, 4, seed=8)


@given(st.dictionaries(st.text(), SCALARS | st.lists(SCALARS), max_size=5), st.randoms())
def test_a_trials_name_does_not_depend_on_the_order_of_its_keys(
    params: dict[str, Any], random: Any
) -> None:
    keys = list(params)
    random.shuffle(keys)
    assert trial_id("a", {k: params[k] for k in keys}) == trial_id("a", params)


def test_a_trials_name_does_not_depend_on_how_a_number_is_written() -> None:
    one, same = (
        parse_yaml(text, "").data for text in ("a: [1, 0, 1e-1, [2]]", "a: [1.0, 0.0, 0.1, [2e0]]")
    )
    assert trial_id("a", one) == trial_id("a", same)
    assert trial_id("a", {"a": 1}) != trial_id("a", {"a": True})


def test_a_switch_is_on_or_off() -> None:
    with pytest.raises(VitcliError, match="resume: is a flag"):
        COMMAND.arguments({"resume": "false"})


def test_a_trials_name_is_the_sha_of_its_config() -> None:
    # echo -n '{"command": "encode", "params": {"lr": 0.001, "norm": "pre"}}' | sha256sum
    import hashlib

    text = '{"command": "encode", "params": {"lr": 0.001, "norm": "pre"}}'
    wanted = hashlib.sha256(text.encode()).hexdigest()[:12]
    assert trial_id("encode", {"norm": "pre", "lr": 1e-3}) == wanted
    assert trial_id("params", {"norm": "pre", "lr": 1e-3}) != wanted
    assert trial_id("encode", {"norm": "pre", "lr": "0.001"}) != wanted


def test_arguments_are_what_a_user_would_type() -> None:
    params = {
        "norm": "pre", "lr": 1e-05, "resume": True, "compile": False, "lora": ["1:2", "3:0"],
        "batch": None, "images": ["a.png", "b.png"], "encoder.depth": 3,
        "encoder.position": "none", "out": [1, 2],
    }  # fmt: skip
    assert COMMAND.arguments(params) == [
        "train-shapes", "--no-compile", "--lora", "1:2", "--lora", "3:0", "--lr", "1e-05",
        "--norm", "pre", "--out", "1,2", "--resume",
        "--set", "encoder.depth=3", "--set", "encoder.position=none", "--json", "a.png", "b.png",
    ]  # fmt: skip


@given(SCALARS | st.lists(st.integers() | st.booleans()))
def test_a_setting_is_read_back_as_the_value_it_was(value: Any) -> None:
    text = setting_text(value)
    assert parse_setting(f"encoder.depth={text}").value == value


def test_a_search_knows_its_own_trials(sweeper: Sweeper) -> None:
    sweep = sweeper.load(
        HEAD + "base: {batch: 4}\nrepeat: 2\nsearch: {trials: 2, metric: a, direction: maximize, "
        "space: {lr: {low: 0.1, high: 0.5}, norm: [pre, post]}}"
    )
    assert expand(sweep) == []
    trials = repeats(sweep, {"lr": 0.2, "norm": "pre"})
    assert [t.params["seed"] for t in trials] == [0, 1]
    assert all(belongs(sweep, t.params) for t in trials)
    params = dict(trials[0].params)
    for change in ({"lr": 0.6}, {"norm": "x"}, {"seed": 2}, {"batch": 5}, {"out": "x"}):
        assert not belongs(sweep, {**params, **change})
    assert json.dumps(params)


def test_draws_are_those_of_optunas_random_sampler() -> None:
    """Sweeps of the first release drew by Optuna; resumed, they must draw the same points."""
    import optuna
    from optuna import distributions as of

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pairs: dict[str, tuple[Range | Choice, Any]] = {
        "real": (Range(0.0, 1.0), of.FloatDistribution(0, 1)),
        "log": (Range(1e-4, 0.1, True), of.FloatDistribution(1e-4, 0.1, log=True)),
        "steps": (Range(0.0, 0.9, False, 0.1), of.FloatDistribution(0, 0.9, step=0.1)),
        "whole": (Range(-3, 50), of.IntDistribution(-3, 50)),
        "stride": (Range(1, 9, False, 2), of.IntDistribution(1, 9, step=2)),
        "octave": (Range(1, 1000, True), of.IntDistribution(1, 1000, log=True)),
        "word": (Choice(("x", 2, None)), of.CategoricalDistribution(("x", 2, None))),
        "one": (Choice((3,)), of.CategoricalDistribution((3,))),
        "point": (Range(5, 5), of.IntDistribution(5, 5)),
    }
    for seed in (0, 1, 2**31):
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=seed))
        asked = {name: pairs[name][1] for name in sorted(pairs)}
        wanted = [dict(study.ask(asked).params) for _ in range(100)]
        assert draw({name: ours for name, (ours, _) in pairs.items()}, 100, seed) == wanted


def test_a_high_off_the_step_is_told_and_never_drawn(sweeper: Sweeper) -> None:
    text = "random: {trials: 40, space: {lr: {low: 0.1, high: 1.0, step: 0.4}}}"
    sweep = sweeper.load(HEAD + text)
    assert sweep.notes() == [
        "lr: high 1 is not a whole number of steps of 0.4 from 0.1; the last value is 0.9",
        "40 draws from a space of 3 points: some repeat",
    ]
    assert {t.params["lr"] for t in expand(sweep)} == {0.1, 0.5, 0.9}
    assert sweeper.load(HEAD + text.replace("1.0", "0.9").replace("40", "3")).notes() == []


def test_sweeps_read_yaml_1_2(sweeper: Sweeper) -> None:
    """No octal by a leading zero, no base 60, only true and false are switches."""
    grid = "grid: {seed: [007, 008, 010], norm: [on, off, yes], lr: [1e-3, 1.0e1]}"
    sweep = sweeper.load(HEAD + grid)
    assert sweep.grid == {
        "seed": [7, 8, 10], "norm": ["on", "off", "yes"], "lr": [0.001, 10.0],
    }  # fmt: skip
    assert sweeper.load(HEAD + "base: {lr: 1:30}").base == {"lr": "1:30"}
    with pytest.raises(VitcliError, match=r"toy\.yaml:2: on"):
        sweeper.load(HEAD + "on: 3")
