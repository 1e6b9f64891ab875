"""What `--help` says, for every command there is."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from safetensors import SafetensorError
from typer.testing import CliRunner

from vitcli.cli import app, report
from vitcli.commands import COMMANDS, command_function
from vitcli.config.schema import InitScheme, NormPlacement, PoolingKind, PositionKind
from vitcli.errors import VitcliError

GROUP: Any = typer.main.get_command(app)
NAMES = sorted(GROUP.commands)
MODEL = (
    *("preset", "config", "weights", "adapter", "which", "prefix", "registers"),
    *("set", "norm", "position", "pool"),
    *("image_size", "pos_resize", "fit", "seed", "device", "dtype", "init"),
)
"""The options that name a model, then those that change it, then how it runs."""


def options(name: str) -> list[Any]:
    return [p for p in GROUP.commands[name].params if p.param_type_name == "option"]


def page(*arguments: str, columns: int = 200) -> str:
    done = CliRunner().invoke(app, [*arguments, "--help"], env={"COLUMNS": str(columns)})
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_model_options_have_one_order(name: str) -> None:
    shown = [p.name for p in options(name) if p.rich_help_panel == "Model"]
    assert shown == [known for known in MODEL if known in shown]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("params --preset siglip2-b", {"siglip2-b16-256"}),
        ("params --dtype f", {"float32", "float16", "float64"}),
        ("params --norm p", {"pre", "post"}),
        ("presets --format m", {"markdown"}),
        ("encode --device c", {"cpu", "cuda"}),
        ("encode --fit c", {"crop"}),
        ("encode --preset vit-ti16 --layer 1", {"1", "10", "11", "12"}),
        ("embed --preset dinov2-l14 --layers 6,12,2", {"6,12,2", "6,12,20", "6,12,24"}),
        ("probe --layers a", {"all"}),
        ("embed --tokens cls,p", {"cls,pooled", "cls,patch"}),
        ("embed --format n", {"npy"}),
        ("embed --projection u", {"umap"}),
        ("embed --engine o", {"onednn", "onnx", "openvino"}),
        ("embed --vector-dtype float1", {"float16"}),
        ("profile --engine e", {"eager"}),
        ("profile --dtype b", {"bfloat16"}),
        ("encode --which e", {"ema"}),
        ("encode --width c", {"column"}),
        ("attn-entropy --scale p", {"panel"}),
        ("presets dinov2-s", {"dinov2-s14", "dinov2-s14-reg"}),
        ("probe x --groups p", {"parent"}),
        ("train-shapes --init x", {"xavier_uniform"}),
        ("sweep posi", {"position"}),
    ],
)
def test_values_are_completed(words: str, wanted: set[str]) -> None:
    environment = {
        "_VITCLI_COMPLETE": "complete_bash",
        "COMP_WORDS": f"vitcli {words}",
        "COMP_CWORD": str(len(words.split())),
    }
    done = CliRunner().invoke(app, [], env=environment, prog_name="vitcli")
    assert wanted <= set(done.stdout.split()), done.output


FILE_LINES = ("encode ", "encode --weights ", "params --config a", "embed x --out ", "probe ")
NO_LINES = ("params ", "params --dtype q", "profile --batch ", "encode --seed ", "presets qqq")


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_files_only_where_files_are_meant(tmp_path: Path) -> None:
    """`compopt -o default` is what makes bash complete files."""
    program = tmp_path / "vitcli"
    program.write_text(f"#!{sys.executable}\nfrom vitcli.__main__ import main\nmain()\n")
    program.chmod(0o755)
    lines = [*FILE_LINES, *NO_LINES, "sweep --plot-kind h", "compare vit-ti16-"]
    calls = []
    for line in lines:
        words = ["vitcli", *line.split(), *([""] if line.endswith(" ") else [])]
        calls.append(
            f"COMP_WORDS=({shlex.join(words)}); COMP_CWORD={len(words) - 1}\n"
            f'_vitcli_completion vitcli {shlex.quote(words[-1])}; echo "${{COMPREPLY[*]}}"'
        )
    script = "\n".join(
        [
            "compopt() { printf '%s ' \"$@\"; }",
            'eval "$(vitcli --show-completion bash)"',
            *calls,
        ]
    )
    environment = os.environ | {
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    files = [["-o", "default"]] * len(FILE_LINES)
    told = [line.split() for line in done.stdout.splitlines()]
    assert told == [*files, *[[]] * len(NO_LINES), ["heatmap"], ["vit-ti16-timm"]], done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_parameter_has_a_completion(name: str) -> None:
    """Without one a shell would complete files for a number or a name."""
    for annotation in command_function(name).__annotations__.values():
        for info in getattr(annotation, "__metadata__", ()):
            assert info.autocompletion or not isinstance(info, typer.models.ParameterInfo)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_says_what_it_does(name: str) -> None:
    assert not [p.opts for p in options(name) if not p.help]


@pytest.mark.parametrize("name", NAMES)
def test_a_bracket_in_a_help_text_is_not_taken_for_markup(name: str) -> None:
    """`[default: 1, 8]` written by hand is swallowed as a style of that name."""
    texts = [p.help or "" for p in GROUP.commands[name].params]
    assert not [text for text in texts if re.search(r"\[[a-z#/@]", text)]


@pytest.mark.parametrize("name", ["", *NAMES])
def test_flags_show_no_type(name: str) -> None:
    assert "<bool>" not in page(*([name] if name else []))


def test_defaults_are_told() -> None:
    flat = re.sub(r"[│\s]+", " ", page("profile"))
    assert "Images per step. Repeatable. [default: (1, 8, 64)]" in flat
    assert "Timed steps per batch size. [default: (5 to 30, in about 15 s)]" in flat


@pytest.mark.parametrize("kind", [NormPlacement, PositionKind, PoolingKind, InitScheme])
def test_the_words_of_the_schema_are_those_of_the_help(kind: Any) -> None:
    flat = re.sub(r"[│\s]+", " ", page("train-shapes"))
    assert "|".join(get_args(kind)) in flat or ", ".join(get_args(kind)) in flat


@pytest.mark.parametrize("name", NAMES)
def test_no_word_is_cut_at_80_columns(name: str) -> None:
    assert not re.search(r"\w…", page(name, columns=80))


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "weights"),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
    ],
)
def test_a_full_disk_is_told_as_that_whatever_library_wrote(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(error) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and "free some space" in said
    assert "fault in vitcli" not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "1000")),
        ({"GOMP_SPINCOUNT": "7"}, ("PASSIVE", "7")),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, ("ACTIVE", None)),
    ],
)
def test_threads_that_wait_soon_sleep(
    given: dict[str, str],
    expected: tuple[str, str | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Set before torch is loaded, and only where the user has not."""
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
        if name in given:
            monkeypatch.setenv(name, given[name])
    page("encode")
    assert tuple(map(os.environ.get, names)) == expected


def test_which_tensors_of_several_checkpoints_are_read() -> None:
    """One value is for all, several are for each in order; presets have none."""
    from vitcli.ui.options import EncodersOptions

    options = EncodersOptions(
        preset=["vit-b16"], weights=["a.pth", "b.pth"], which=["ema", "raw"], prefix=["tower."]
    )
    told = [(request.which, request.prefix) for request in options.to_requests()]
    assert told == [(None, None), ("ema", "tower."), ("raw", "tower.")]
    with pytest.raises(VitcliError, match="3 values for 1 checkpoints"):
        EncodersOptions(weights=["a.pth"], which=["raw"] * 3).to_requests()
    with pytest.raises(VitcliError, match="1 values for 0 checkpoints"):
        EncodersOptions(preset=["vit-b16"], prefix=["tower."]).to_requests()


@pytest.mark.parametrize(("processes", "ended"), [("1", ""), ("2", "ended with 0\n")])
def test_one_of_several_processes_ends_without_pythons_own_end(processes: str, ended: str) -> None:
    """gloo's threads, which DDP keeps, abort Python's finalization now and then."""
    code = (
        "import os, sys; leave = os._exit; sys.argv = ['vitcli', 'presets', 'vit-b16', '--json']\n"
        "say = lambda code: print('ended with', code, file=sys.stderr, flush=True)\n"
        "os._exit = lambda code: (say(code), leave(code))\n"
        "from vitcli.__main__ import main; main()"
    )
    environment = {**os.environ, "WORLD_SIZE": processes}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0 and done.stdout.startswith("{")
    assert done.stderr.endswith(ended) and ("ended" in done.stderr) == bool(ended)
