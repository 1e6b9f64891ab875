"""Sweep files, directories, folders and storages that somebody else has made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import vitcli
from tests.commands.sweep.conftest import Sweeper
from vitcli.commands.sweep.analysis import check_arguments
from vitcli.commands.sweep.queue import Search
from vitcli.commands.sweep.report import report
from vitcli.commands.sweep.space import WRITES, known_commands
from vitcli.commands.sweep.spec import load_sweep, read_sweep
from vitcli.commands.sweep.storage import check_storage, masked_url, open_storage
from vitcli.commands.sweep.trials import Results, expand, read_result
from vitcli.config.yaml import parse_yaml
from vitcli.errors import VitcliError

HEAD = "command: train-shapes\n"
ROOT = Path(__file__).parents[3]
SEARCH = (
    "search: {trials: 2, metric: result.score, direction: maximize, "
    "space: {lr: {low: 0.1, high: 0.9}}}\n"
)


def refused(text: str) -> VitcliError:
    with pytest.raises(VitcliError) as caught:
        read_sweep(parse_yaml(text, "toy.yaml"), known_commands())
    return caught.value


def test_a_trial_imports_nothing_from_the_folder_where_the_sweep_runs(tmp_path: Path) -> None:
    """A poisoned module of every name that a trial imports stands there."""
    script = "import sys, vitcli.__main__; sys.argv = ['vitcli', 'params', '--json']; " \
             "vitcli.__main__.main()"  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    listed = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    names = {line.rpartition("|")[2].strip().partition(".")[0]
             for line in listed.stderr.splitlines() if "|" in line}  # fmt: skip
    assert {"yaml", "pydantic", "typer", "rich", "json"} <= names
    for name in names | {"torch", "numpy", "site", "sitecustomize", "usercustomize"}:
        mark = f"open({str(tmp_path / 'poisoned')!r}, 'a').write({name!r} + chr(10))"
        (tmp_path / f"{name}.py").write_text(f"{mark}\nraise SystemExit(3)\n")
    (tmp_path / "x.yaml").write_text(
        "command: params\ngrid: {preset: [vit-ti16]}\nmetrics: [models.0.total]\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-m", "vitcli", "sweep", "x.yaml", "--json"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "poisoned").exists()
    assert json.loads(done.stdout)["states"] == {"done": 1}


@pytest.mark.parametrize("given", ["", ".", "relative/place", os.pathsep, f"{os.pathsep}."])
def test_a_trials_path_has_no_relative_entry(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitcli.commands.sweep.runner import environment

    monkeypatch.setenv("PYTHONPATH", f"/first{os.pathsep}{given}")
    made = environment(1)
    entries = made["PYTHONPATH"].split(os.pathsep)
    assert made["PYTHONSAFEPATH"] == "1"
    assert entries[0] == "/first" and all(Path(entry).is_absolute() for entry in entries)


@pytest.mark.parametrize(
    "url",
    ["redis://localhost:1/0", "rediss://h/0", "unix://x", "oracle://u@h/d", "x.db", "file:///a.db"],
)
def test_a_storage_that_is_no_plain_database_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(VitcliError, match="does not support this kind"):
        open_storage(url, tmp_path / "journal")


@pytest.mark.parametrize("url", ["sqlite:///a.db", "postgresql+psycopg://u@h/d", "mysql://h/d"])
def test_plain_databases_are_storages(url: str) -> None:
    assert check_storage(url) in ("sqlite", "postgresql", "mysql")


@pytest.mark.parametrize("kind", ["redis", "postgresql", "mysql"])
def test_a_received_directory_opens_no_connection(
    sweeper: Sweeper, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitcli.commands.sweep import storage

    sweeper.run(HEAD + SEARCH)
    opened: list[str] = []
    monkeypatch.setattr(storage, "_open_database", lambda url, reading: opened.append(url))
    kept = sweeper.out / "sweep.yaml"
    kept.write_text(kept.read_text() + f"storage: {kind}://u:secret@localhost:1/x\n")
    if kind == "redis":
        with pytest.raises(VitcliError, match=r"u:\*\*\*@") as caught:
            vitcli.sweep(sweeper.out)
        assert "secret" not in caught.value.message
    else:
        assert dict(vitcli.sweep(sweeper.out).states) == {"done": 2}
    assert opened == []


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@h:5432/db", "postgresql://me:***@h:5432/db"),
        ("mysql+pymysql://me:a/b@c@h/db", "mysql+pymysql://me:***@h/db"),
        (
            "postgresql://h/db?user=me&password=s3cret&x=1",
            "postgresql://h/db?user=me&password=***&x=1",
        ),
        ("postgresql://h/db?sslpassword=s3cret", "postgresql://h/db?sslpassword=***"),
        ("sqlite:///shared.db", "sqlite:///shared.db"),
        ("postgresql://me@h/db", "postgresql://me@h/db"),
    ],
)
def test_passwords_are_masked(url: str, shown: str) -> None:
    assert masked_url(url) == shown


def test_a_password_is_neither_stored_nor_told(sweeper: Sweeper) -> None:
    url = "postgresql://me:s3cret@localhost:1/db"
    file = sweeper.folder / "toy.yaml"
    for text in (HEAD + SEARCH + f"# {url}\nstorage: {url}\n", HEAD + SEARCH):
        file.write_text(text)
        results = Results(sweeper.folder / str(len(text)))
        results.create("toy", str(file), url)
        kept = results.sweep_file.read_text()
        assert "s3cret" not in kept and "postgresql://me:***@localhost:1/db" in kept
        assert load_sweep(results.sweep_file).search
    with pytest.raises(VitcliError) as caught:
        open_storage(url, sweeper.folder / "journal")
    assert "s3cret" not in caught.value.message


@pytest.mark.parametrize(
    "name", ["../../x", "/tmp/x", "..", ".", "a/b", "a\\b", "a\x1b[2J", "x" * 200]
)
def test_a_name_is_no_path(name: str) -> None:
    error = refused(HEAD + f"name: {json.dumps(name)}\n")
    assert error.message.startswith("toy.yaml:2: name: ") and "\x1b" not in error.message


@pytest.mark.parametrize(
    "where",
    [
        "base: {plot: /tmp/x.png}",
        "base: {plot: x.png}",
        'base: {out: "{trial}/../../x"}',
        'base: {out: "{trial}"}',
        'grid: {out: ["{trial}/a", /tmp/x]}',
        "zip: {show-data: [/tmp/x.png]}",
        "random: {trials: 1, space: {plot: [/tmp/x.png]}}",
        "repeat: {plot: [a.png]}",
    ],
)
def test_a_file_does_not_choose_where_it_writes(where: str) -> None:
    assert "writes outside the trial's directory" in refused(HEAD + where).message


def test_every_option_that_takes_a_file_to_write_is_known() -> None:
    """By the help: what is read says so; a new option is put on one side or the other."""
    import typer

    from vitcli.commands import COMMANDS, command_function

    read = {"config", "adapter", "images", "folder", "data", "source", "image", "weights", "file",
            "a", "b", "report", "groups", "targets", "classes"}  # fmt: skip
    for name in COMMANDS:
        app = typer.Typer()
        app.command(name)(command_function(name))
        for parameter in typer.main.get_command(app).params:
            kind = str(getattr(parameter, "metavar", "") or "")
            if name != "sweep" and any(word in kind for word in ("FILE", "DIR")):
                flag = max(parameter.opts, key=len).removeprefix("--").replace("-", "_")
                assert flag in WRITES | read, f"vitcli {name}: {flag}"


def test_a_grid_of_a_thousand_million_points_is_counted_not_listed(sweeper: Sweeper) -> None:
    lists = ", ".join(f"{key}: {list(range(1, 1001))}" for key in ("lr", "batch"))
    grid = HEAD + f"grid: {{{lists}}}\nrepeat: 1000\n"
    told = r"1,000,000,000 trials \(lr 1000 x batch 1000 x seed 1000\) are too many to list"
    for act in (sweeper.run, sweeper.report, sweeper.plan):  # listing them would take hours
        with pytest.raises(VitcliError, match=told):
            act(grid)
    assert refused_size(sweeper, "repeat: 1000000000") == 10**9
    assert refused_size(sweeper, "random: {trials: 1000000000, space: {lr: [1, 2]}}") == 10**9


def refused_size(sweeper: Sweeper, text: str) -> int:
    sweep = sweeper.load(HEAD + text)
    with pytest.raises(VitcliError, match="too many to list"):
        expand(sweep)
    return sweep.size


@pytest.mark.parametrize(
    "text",
    [
        "base: {encoder: {depth: zero}}",
        "base: {norm: sideways}",
        "grid: {train.lr: [0.1, -1]}",
        "grid: {encoder.hidden: [192, 190], encoder.heads: [3, 5]}",  # 190 / 3 is no width
        "zip: {epochs: [1, 0], data.train_size: [8, 8]}",
        "random: {trials: 30, space: {encoder.depth: {low: 0, high: 3}}}",
        "search: {trials: 1, metric: a, direction: maximize, space: {lr: {low: -1.0, high: 1.0}}}",
        "search: {trials: 1, metric: a, direction: maximize, space: {init: [trunc_normal, x]}}",
        "repeat: {seed: [0, 1, -1]}",
    ],
)
def test_a_value_that_the_config_refuses_is_told_whatever_its_section(text: str) -> None:
    commands = known_commands()
    sweep = read_sweep(parse_yaml(HEAD + text, "toy.yaml"), commands)
    with pytest.raises(VitcliError, match=r"^toy.yaml: `vitcli train-shapes"):
        check_arguments(sweep, commands["train-shapes"])


def test_values_of_a_command_without_a_config_of_its_own_are_checked_too() -> None:
    commands = known_commands()
    text = "command: profile\nbase: {preset: vit-ti16}\ngrid: {encoder.depth: [1, none]}"
    with pytest.raises(VitcliError, match=r"encoder\.depth"):
        check_arguments(read_sweep(parse_yaml(text, "toy.yaml"), commands), commands["profile"])


@pytest.mark.parametrize("file", ["status", "config.yaml", "result.json"])
@pytest.mark.parametrize(
    "text",
    ["", "{", "[1]", "null", '{"state": "dancing"}', '{"state": "done", "wall_s": "x"}', "\x00",
     '{"command": 3}', "- " * 5000, "[" * 100_000, '{"state": "done", "attempts": 1e999}'],
)  # fmt: skip
def test_a_damaged_file_of_a_trial_is_named(sweeper: Sweeper, file: str, text: str) -> None:
    sweeper.run(HEAD + "metrics: [result.score]")
    place = next(Results(sweeper.out).trials())
    (place.path / file).write_text(text)
    if file == "result.json" and text.startswith("{") and text != "{":  # a result of its own kind
        assert dict(sweeper.report(HEAD + "metrics: [result.score]").states) == {"done": 1}
        return
    with pytest.raises(VitcliError) as caught:
        sweeper.report(HEAD + "metrics: [result.score]")
    assert str(place.path) in caught.value.message or file == "config.yaml"


def test_a_damaged_result_is_made_again_by_the_next_run(sweeper: Sweeper) -> None:
    sweeper.run(HEAD)
    place = next(Results(sweeper.out).trials())
    place.result_file.write_text('{"result": {"sc')
    assert sweeper.run(HEAD).ran == 1
    assert place.result()


def test_numbers_beyond_all_measure_are_no_numbers() -> None:
    assert read_result(b'{"a": 1' + b"0" * 400 + b', "b": 1e400, "c": 12}') == {
        "a": None, "b": None, "c": 12,
    }  # fmt: skip


@settings(max_examples=150, derandomize=True, deadline=None)
@given(data=st.data())
def test_a_tampered_journal_is_an_error_that_names_it(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    lines = _journal(tmp_path_factory)
    index = data.draw(st.integers(0, len(lines) - 1))
    entry = json.loads(lines[index])
    key = data.draw(st.sampled_from(sorted(entry)))
    values = st.none() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
    entry[key] = data.draw(values | st.dictionaries(st.sampled_from(["id", "trials"]), values))
    sweeper = Sweeper(tmp_path_factory.mktemp("tampered"))
    sweep = sweeper.load(HEAD + SEARCH)
    results = Results(sweeper.out)
    results.create(sweep.name, sweep.source)
    results.journal.write_text(
        "\n".join([*lines[:index], json.dumps(entry), *lines[index + 1 :]]) + "\n"
    )

    try:
        claim = Search(sweep, results).claim()
    except VitcliError as error:
        assert "study" in error.message
    else:
        if claim:
            claim.release()
    made = {path.name for path in (results.root / "trials").iterdir()}
    assert all(len(name) == 12 for name in made)
    report(sweep, results)


_JOURNAL: list[str] = []


def _journal(factory: pytest.TempPathFactory) -> list[str]:
    if not _JOURNAL:
        sweeper = Sweeper(factory.mktemp("whole"))
        sweeper.run(HEAD + SEARCH)
        _JOURNAL.extend((sweeper.out / "study.journal").read_text().splitlines())
    return _JOURNAL
