from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.sweep.conftest import COMMAND, Sweeper
from vitcli.commands.sweep.space import Choice, Range, read_space
from vitcli.commands.sweep.spec import load_sweep, read_sweep, sweep_path
from vitcli.commands.sweep.trials import expand
from vitcli.config.yaml import parse_yaml
from vitcli.errors import VitcliError

HEAD = "command: train-shapes\n"


def refused(text: str) -> VitcliError:
    with pytest.raises(VitcliError) as caught:
        read_sweep(parse_yaml(text, "toy.yaml"), {"train-shapes": COMMAND})
    return caught.value


@pytest.mark.parametrize(
    ("text", "line", "key", "hint"),
    [
        (HEAD + "grid:\n  nrom: [pre]", 3, "grid.nrom", "norm"),
        (HEAD + "base:\n  lr: 1\n  encoder.dpeth: 3", 4, "base.encoder.dpeth", "encoder.depth"),
        (HEAD + "base:\n  encoder:\n    dpeth: 3", 4, "base.encoder.dpeth", "encoder.depth"),
        (HEAD + "gird:\n  norm: [pre]", 2, "gird", "grid"),
        (HEAD + "\nsearch:\n  trials: 3", 3, "search.metric", ""),
        ("command: train-shape", 1, "command", "train-shapes"),
        (HEAD + "grid:\n  norm: pre", 3, "grid.norm", "norm: [first"),
        (HEAD + "grid: {norm: []}", 2, "grid.norm", ""),
        (HEAD + "grid:\n  lr: {low: 0.1, high: 1}", 3, "grid.lr", "space: {lr:"),
        (HEAD + "random: {}", 2, "random.trials: is missing", "trials"),
        (HEAD + "repeat: 2\nsearch: {}", 3, "search.trials: is missing", "trials"),
        (HEAD + "zip:\n  norm: [pre, post]\n  lr: [1]", 2, "zip", "step"),
        (HEAD + "base: {lr: 1}\ngrid:\n  lr: [1]", 4, "grid.lr", "one of the two"),
        (HEAD + "jobs: 0", 2, "jobs", ""),
        (HEAD + "repeat: {sede: 3}", 2, "repeat.sede", "seed"),
        (HEAD + "random: {trials: 2, space: {lr: {low: 3}}}", 2, "random.space.lr", ""),
        (HEAD + "random: {trials: 2, space: {lrr: [1]}}", 2, "random.space.lrr", "lr"),
        (HEAD + "base: {json: true}", 2, "base.json", ""),
        ("comand: train-shapes", 1, "comand", "command"),
        ("jobs: 2", 1, "command: is missing", "command"),
        (HEAD + "random: {space: {lr: [1]}}", 2, "random.trials: is missing", "trials"),
        (HEAD + "random: {trails: 2, space: {lr: [1]}}", 2, "random.trails", "random.trials"),
        (HEAD + "configs:\n  small: {encoder.depth: 1}", 3, "configs.small", "config: [small"),
        (HEAD + "base: {config: a}\nconfigs:\n  a: {encoder.dpeth: 1}", 4,
         "configs.a.encoder.dpeth", "encoder.depth"),
        (HEAD + "base: {config: a}\nconfigs:\n  a: {lr: 1}", 4, "configs.a.lr", "base"),
        (HEAD + "base: {config: a, encoder.depth: 1}\nconfigs:\n  a: {encoder.depth: 2}", 4,
         "configs.a.encoder.depth", "one of the two"),
        (HEAD + "base: {encoder.depth: 6}\ngrid:\n  encoder: [{depth: 1}]", 2,
         "base.encoder.depth: is also part of encoder in grid", "one of the two"),
    ],
)  # fmt: skip
def test_an_error_names_file_line_key_and_what_was_meant(
    text: str, line: int, key: str, hint: str
) -> None:
    error = refused(text)
    assert f"{error.message}:".startswith(f"toy.yaml:{line}: {key}:")
    assert hint in error.hint


def test_a_search_stands_alone() -> None:
    search = "search: {trials: 2, metric: a, direction: maximize, space: {lr: [1, 2]}}\n"
    assert "cannot be combined" in refused(HEAD + search + "grid: {norm: [pre]}").message


def test_a_pruner_reads_what_the_trial_is_told_to_write(sweeper: Sweeper) -> None:
    search = (
        "search: {trials: 2, metric: a, direction: maximize, space: {lr: [1, 2]}, "
        "pruner: {value: loss%s}}\n"
    )
    assert "no option makes" in refused(HEAD + search % "").message
    assert "directory" in refused(HEAD + search % ", file: run/metrics.jsonl").message
    out = 'base: {out: "{trial}/run"}\n'
    found = sweeper.load(HEAD + out + search % "").search
    assert found and found.pruner and found.pruner.file == "{trial}/run/metrics.jsonl"


def test_names_are_canonical_and_nested_keys_are_dotted(sweeper: Sweeper) -> None:
    sweep = sweeper.load(
        HEAD + "base: {--batch: 2, encoder: {depth: 3}}\nrepeat: {seed: [4, 5]}\n"
        "metrics: [result.a, runs.0.b]"
    )
    assert sweep.base == {"batch": 2, "encoder.depth": 3}
    assert sweep.repeat == {"seed": [4, 5]}
    assert {n: m.path for n, m in sweep.metrics.items()} == {"a": "result.a", "b": "runs.0.b"}
    assert sweep.name == "toy"


def test_a_config_of_the_file_is_its_keys_under_a_name(sweeper: Sweeper) -> None:
    text = (
        HEAD + "base: {encoder.position: rope}\ngrid: {config: [small, other.yaml]}\n"
        "configs: {small: {encoder: {depth: 3}, data.train_size: 8}}\nrepeat: 2"
    )
    sweep = sweeper.load(text)
    small, other = expand(sweep)[:2]
    assert small.params["config"] == "small"  # as tables name it
    assert COMMAND.arguments(sweep.spelled_out(small.params)) == [
        *("train-shapes", "--seed", "0", "--set", "data.train_size=8"),
        *("--set", "encoder.depth=3", "--set", "encoder.position=rope", "--json"),
    ]
    assert sweep.spelled_out(other.params) == other.params
    changed = expand(sweeper.load(text.replace("depth: 3", "depth: 4")))
    assert changed[0].id != small.id and changed[1].id == other.id
    alone = "base: {encoder.position: rope, encoder.depth: 3, data.train_size: 8}\nrepeat: 2"
    assert expand(sweeper.load(HEAD + alone))[0].id == small.id  # the same trial


def test_a_config_without_keys_is_the_default(sweeper: Sweeper) -> None:
    text = HEAD + "grid: {config: [plain, deep]}\nconfigs: {plain: {}, deep: {encoder.depth: 9}}"
    sweep = sweeper.load(text)
    plain, deep = expand(sweep)
    assert sweep.spelled_out(plain.params) == {}
    assert sweep.spelled_out(deep.params) == {"encoder.depth": 9}


def test_metrics_with_the_same_last_word_keep_their_paths(sweeper: Sweeper) -> None:
    sweep = sweeper.load(HEAD + "metrics: [runs.0.wall, runs.1.wall]")
    paths = {name: metric.path for name, metric in sweep.metrics.items()}
    assert paths == {"runs.0.wall": "runs.0.wall", "runs.1.wall": "runs.1.wall"}


def test_numbers_without_a_dot_are_numbers(sweeper: Sweeper) -> None:
    sweep = sweeper.load(HEAD + "grid: {lr: [1e-3]}\nrandom: {trials: 1, space: {batch: [1]}}")
    assert sweep.grid["lr"] == [0.001]


def test_a_range_is_whole_where_it_is_written_so() -> None:
    assert read_space({"low": 1, "high": 9, "step": 2}) == Range(1, 9, False, 2)
    assert read_space({"low": 1, "high": 9}).whole  # type: ignore[union-attr]
    assert not read_space({"low": 1.0, "high": 9}).whole  # type: ignore[union-attr]
    assert read_space(["a", None, 2]) == Choice(("a", None, 2))


@pytest.mark.parametrize(
    "value",
    [[], [[1]], 3, {"low": 1}, {"low": 2, "high": 1}, {"low": 0, "high": 1, "log": True},
     {"low": 1, "high": 2, "lgo": True}, {"low": True, "high": 2}, {"low": 1, "high": 2, "step": 0},
     {"low": 1, "high": 9, "step": 0.5}, {"low": 1, "high": 9, "log": 1}],
)  # fmt: skip
def test_what_is_no_space_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_space(value)


def test_a_name_is_a_shipped_sweep_where_nothing_here_is_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_sweep("position").name == "position"
    with pytest.raises(VitcliError, match="neither a file nor a shipped sweep") as error:
        load_sweep("postion")
    assert error.value.hint == "did you mean position?"
    Path("position").mkdir()  # as `--out position` makes it: run again, the sweep goes on
    assert load_sweep("position").name == "position"
    with pytest.raises(VitcliError, match="is a shipped sweep and also a directory"):
        sweep_path("position", or_directory=True)
    assert sweep_path("./position") == sweep_path(Path("position")) == Path("position")
