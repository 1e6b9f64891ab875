from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from tests.commands.train.runs import command, shell
from tests.commands.train.sources import folder
from vitcli.cli import app
from vitcli.commands.train.command import FIRST_REPORTS_S, read_classes

TINY = command()[command().index("train-shapes") + 1 :]
SETS = [word for word in TINY if word not in ("--device", "cpu")]


def invoke(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "120"})
    return result.exit_code, result.stdout, result.stderr


def test_json_has_result_history_and_config() -> None:
    code, out, err = invoke("train-shapes", *SETS, "--norm", "post", "--warmup", "0.25", "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert {
        "verdict",
        "val_accuracy",
        "val_loss",
        "steps",
        "images_per_s",
        "parameters",
        "trainable",
    } <= answer["result"].keys()
    assert answer["result"]["steps"] == 8
    assert (answer["device"], answer["processes"]) == ("cpu", 1)
    assert [row["step"] for row in answer["history"]] == [*range(1, 9), 8]
    assert answer["history"][0]["lr"] == pytest.approx(1.25e-3)  # two steps of warm-up
    assert answer["config"]["encoder"]["norm_placement"] == "post"
    assert answer["config"]["train"]["warmup"] == 0.25
    assert answer["config"]["encoder"]["head_out"] == 4


def test_the_table_says_the_verdict_and_agrees_with_the_json() -> None:
    code, out, _ = invoke("train-shapes", *SETS)
    answer = json.loads(invoke("train-shapes", *SETS, "--json")[1])
    assert code == 0
    assert f"accuracy {answer['result']['val_accuracy']:.4f} of 64 images" in out
    assert answer["result"]["verdict"] in out
    assert f"{answer['history'][-1]['val_loss']:.4f}" in out


def test_divergence_is_an_answer_with_exit_code_0() -> None:
    code, out, err = invoke("train-shapes", *SETS, "--norm", "post", "--lr", "1e4")
    assert code == 0, err
    assert "diverged at step 2" in out and "first bad layer" in out
    code, out, _ = invoke("train-shapes", *SETS, "--norm", "post", "--lr", "1e4", "--json")
    assert code == 0 and json.loads(out)["result"]["verdict"] == "diverged"


def test_the_figure_and_the_sheet_are_drawn(tmp_path: Path) -> None:
    code, _, err = invoke("train-shapes", *SETS, "--plot", str(tmp_path / "run.png"))
    assert code == 0, err
    code, _, err = invoke("train-shapes", "--show-data", str(tmp_path / "sheet.png"))
    assert code == 0, err
    for name in ("run.png", "sheet.png"):
        with Image.open(tmp_path / name) as picture:
            assert min(picture.size) > 300


def test_a_run_directory_goes_on_and_is_listed(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    assert invoke("train-shapes", *SETS, "--out", out)[0] == 0
    code, _, err = invoke("train-shapes", *SETS, "--out", out)
    assert code == 2 and "--resume" in err
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    code, again, _ = invoke("train-shapes", "--out", out, "--resume", "--json")
    assert code == 0
    assert json.loads(again)["history"] == first["history"]
    assert json.loads(again)["result"]["images_per_s"] is None  # there was no step left
    code, _, err = invoke("train-shapes", "--out", out, "--resume", "--lr", "0.5")
    assert code == 2 and "train.lr is 0.0025 in the run, 0.5 now" in err


def test_files_of_a_run_have_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    out, plain = tmp_path / "run", tmp_path / "plain"
    plain.touch()
    words = ("--lora", "2:1", "--set", "train.ema=0.9", "--out", str(out))
    assert invoke("train-shapes", *SETS, *words)[0] == 0
    files = [path for path in out.rglob("*") if path.is_file()]
    assert "ema.safetensors" in {path.name for path in files}
    assert {path.stat().st_mode for path in files} == {plain.stat().st_mode}


def test_usage_errors_are_one_line() -> None:
    for words, said in (
        (["--resume"], "add --out DIR"),
        (["--set", "data.train_sise=3"], "did you mean data.train_size?"),
        (
            ["--lora", "x", "--lora", "1:2"],
            "--lora x --lora 1:2: train.lora.heads: each BLOCK:HEAD",
        ),
        (["--lora", "40:1"], "no block 40"),
        (["--lora-rank", "2"], "--lora-rank 2: --lora is missing"),
        (["--train-head"], "--lora is missing"),
        (["--warmup", "soon"], "train.warmup"),
        (["--warmup", "1.5"], "a whole number of steps"),
        (["--set", "encoder.head=tanh"], "training classifies 4 classes"),
        (["--show-data", "sheet.nonsense"], "cannot draw"),
        (["--pool", "none"], "pooled vector"),
        (["--position", "rope2d", "--pos-resize", "bicubic"], "does not have a position table"),
        (["--plot", "a.gif"], "cannot draw"),
    ):
        code, out, err = invoke("train-shapes", *SETS, *words)
        assert code == 2 and out == "" and said in err, (words, err)


def test_a_run_directory_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    code, out, err = invoke("train-shapes", *SETS, "--out", str(tmp_path / "file"))
    assert code == 1 and out == "" and "cannot be written" in err


def test_adapters_print_the_audit() -> None:
    code, out, err = invoke(
        "train-shapes", *SETS, "--lora", "2:1", "--lora-rank", "2", "--lora-on", "q,v"
    )
    assert code == 0, err
    assert "gradient audit" in out and "vit.blocks.1.attention.qkv.down" in out
    assert f"{2 * (2 * 16 + 8 * 2)} trainable" in out


def test_an_adapter_alone_makes_the_adapted_model_of_its_base(tmp_path: Path) -> None:
    base, lora = str(tmp_path / "base"), str(tmp_path / "lora")
    assert invoke("train-shapes", *SETS, "--out", base)[0] == 0
    adapt = ("--weights", base, "--lora", "2:1", "--lr", "0.1", "--out", lora)
    code, _, err = invoke("train-shapes", *SETS, *adapt)
    assert code == 0, err
    small = Path(lora, "adapter.safetensors")
    assert small.stat().st_size < Path(lora, "model.safetensors").stat().st_size / 2

    def encoded(*words: str) -> list[float]:
        code, out, err = invoke("encode", "--json", "--device", "cpu", *words)
        assert code == 0, err
        return [layer["patch_norm_mean"] for layer in json.loads(out)["images"][0]["layers"]]

    merged = encoded("--weights", lora)
    added = encoded("--weights", base, "--adapter", str(small))
    plain = encoded("--weights", base)
    assert added == pytest.approx(merged, rel=1e-6)
    assert plain != pytest.approx(merged, rel=1e-6)
    code, _, err = invoke("encode", "--weights", base, "--adapter", str(tmp_path / "none"))
    assert code == 2 and "--adapter" in err.splitlines()[0]


def test_training_on_a_folder(tmp_path: Path) -> None:
    path = folder(tmp_path / "pictures")
    keys = [word for word in SETS if "." in word and not word.startswith("data.")]
    sets = [word for key in (*keys, "encoder.patch_size=8") for word in ("--set", key)]
    code, out, err = invoke("train", str(path), *sets)
    assert code == 0, err
    assert "blue" in out and "red" in out
    code, _, err = invoke("train")
    assert code == 2 and "DATA: is missing" in err
    code, _, err = invoke("train", str(tmp_path / "nowhere"))
    assert code == 2 and "no such folder" in err


def test_another_process_leaves_the_first_one_time_to_report(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun ends all where one has ended: the error of a slow first process was lost."""
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    waited: list[float] = []
    monkeypatch.setattr("vitcli.commands.train.command.time.sleep", waited.append)
    code, out, err = invoke("train-shapes", "--lora-rank", "3")
    assert (code, out, err) == (2, "", "")
    assert FIRST_REPORTS_S in waited


def test_a_list_of_classes_may_be_written_on_windows(tmp_path: Path) -> None:
    """With a mark of its encoding, which is no part of the first name, and its ends of lines."""
    file = tmp_path / "classes.txt"
    file.write_bytes(b"\xef\xbb\xbfcat\r\n\r\ndog\r\n")
    assert read_classes(file) == ("cat", "", "dog")


def test_as_a_real_process() -> None:
    done = shell(command("--json"))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["steps"] == 8
    assert "step 8/8: validation" in done.stderr


def test_help_and_usage_errors_load_no_torch() -> None:
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom vitcli.cli import app\n"
        "for words in (['train-shapes', '--help'], ['train', '--help'], "
        "['train-shapes', '--set', 'train.lr=x']):\n    CliRunner().invoke(app, words)\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = shell([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
