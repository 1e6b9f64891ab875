from __future__ import annotations

import csv
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from PIL import Image
from typer.testing import CliRunner

from tests.images.files import many_scans
from vitcli.build import build_encoder
from vitcli.checkpoints.weights import save_snapshot
from vitcli.cli import Program, app
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import parse_setting
from vitcli.engines.engine import default_engine
from vitcli.images.decode import decode
from vitcli.images.preprocess import preprocess
from vitcli.images.workers import decode_within

SMALL = [
    f"--set={setting}"
    for setting in (
        "encoder.hidden=24",
        "encoder.depth=4",
        "encoder.heads=3",
        "encoder.mlp_hidden=48",
        "encoder.image_size=32",
    )
]
CONFIG = load_config(ModelConfig, settings=[parse_setting(s[6:]) for s in SMALL])
runner = CliRunner()


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


def run(*arguments: str | Path, code: int = 0) -> Any:
    result = runner.invoke(app, ["encode", *SMALL, *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result


def test_json_has_the_promised_shape(photo: Path) -> None:
    answer = json.loads(run(photo, photo, "--json", "--registers", "2").stdout)
    assert answer["schema_version"] == 1
    assert answer["model"] == {
        "name": "vit-b16",
        "parameters": sum(p.numel() for p in build_encoder(CONFIG.encoder).parameters()) + 2 * 24,
        "hidden": 24,
        "depth": 4,
        "heads": 3,
        "weights": "random (seed 0)",
        "device": "cpu",
        "dtype": "float32",
        "checkpoint": None,
    }
    assert answer["engine"] == default_engine(torch.device("cpu"), torch.float32)
    assert len(answer["images"]) == 2
    image = answer["images"][0]
    assert image["path"] == str(photo)
    assert image["input_shape"] == [1, 3, 32, 32]
    assert image["output_shape"] == [1, 1 + 2 + 4, 24]
    assert [row["layer"] for row in image["layers"]] == [0, 1, 2, 3, 4, 5]
    assert image["layers"][0]["cls_cosine_prev"] is None
    assert image["pooled_norm"] > 0


def test_pixels_that_fill_no_patch_are_told(photo: Path) -> None:
    def prepared(size: str) -> str:
        answer = json.loads(run(photo, "--json", "--image-size", size).stdout)
        return str(answer["images"][0]["preparation"])

    assert "fill no patch" not in prepared("48x32")
    assert prepared("51x32").endswith("; the last 3 rows fill no patch and are not read")
    assert prepared("51x34").endswith(
        "; the last 3 rows and 2 columns fill no patch and are not read"
    )


def test_the_table_is_that_of_the_encoder(photo: Path) -> None:
    """Every figure again, from a plain forward pass block by block."""
    rows = json.loads(run(photo, "--json").stdout)["images"][0]["layers"]
    encoder = build_encoder(CONFIG.encoder)
    x = torch.from_numpy(preprocess(decode(photo).image, CONFIG.preprocess))[None]
    with torch.no_grad():
        x = encoder.front_end(x)
        layers = [x]
        for block in encoder.vit.blocks:
            x = block(x)
            layers.append(x)
        layers.append(encoder.vit.norm(x))
    for row, tokens, before in zip(rows, layers, [None, *layers], strict=False):
        norms = tokens[0, 1:].norm(dim=-1)
        assert row["cls_norm"] == pytest.approx(tokens[0, 0].norm().item(), rel=1e-5)
        assert row["patch_norm_mean"] == pytest.approx(norms.mean().item(), rel=1e-5)
        assert row["patch_norm_max"] == pytest.approx(norms.max().item(), rel=1e-5)
        if before is not None:
            cosine = torch.cosine_similarity(tokens[0, 0], before[0, 0], dim=0).item()
            assert row["cls_cosine_prev"] == pytest.approx(cosine, abs=1e-6)


def test_tables_without_an_image(photo: Path) -> None:
    result = run()
    assert "(1, 3, 32, 32)" in result.stdout and "(1, 5, 24)" in result.stdout
    assert result.stderr.count("weights are random") == 1
    assert "block 3" in result.stdout
    thinned = run("--every", "2").stdout
    assert "block 2" in thinned and "block 3" not in thinned and "norm" in thinned


def test_an_encoder_without_cls(photo: Path) -> None:
    result = run(photo, "--set=encoder.cls_token=false", "--pool", "mean", "--json")
    image = json.loads(result.stdout)["images"][0]
    assert image["layers"][0]["cls_norm"] is None
    assert image["output_shape"] == [1, 4, 24]
    text = run(photo, "--set=encoder.cls_token=false", "--pool", "mean").stdout
    assert "CLS" not in text and "pooled vector" in text


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_vectors_are_the_last_tokens(photo: Path, tmp_path: Path, suffix: str) -> None:
    out = tmp_path / f"vectors{suffix}"
    kinds = "cls,patch,register,pooled"
    run(photo, photo, "--registers", "2", "--out", out, "--tokens", kinds)
    read = dict(np.load(out)) if suffix == ".npz" else safetensors.numpy.load_file(out)
    read = {name: array for name, array in read.items() if array.dtype.kind == "f"}
    assert {kind: array.shape for kind, array in read.items()} == {
        "cls": (2, 24),
        "patch": (2, 4, 24),
        "register": (2, 2, 24),
        "pooled": (2, 24),
    }
    config = CONFIG.encoder.model_copy(update={"registers": 2})
    x = torch.from_numpy(preprocess(decode(photo).image, CONFIG.preprocess))[None]
    with torch.no_grad():
        output = build_encoder(config)(x)
    assert np.allclose(read["cls"][0], output.tokens[0, 0], atol=1e-6)
    assert np.allclose(read["register"][1], output.tokens[0, 1:3], atol=1e-6)
    assert np.allclose(read["patch"][1], output.tokens[0, 3:], atol=1e-6)
    assert np.allclose(read["pooled"][1], output.pooled[0], atol=1e-6)


def test_npy_holds_one_kind(photo: Path, tmp_path: Path) -> None:
    run(photo, "--out", tmp_path / "a.npy")
    assert np.load(tmp_path / "a.npy").shape == (1, 24)
    result = run(photo, "--out", tmp_path / "b.npy", "--tokens", "cls,patch", code=2)
    assert ".npy file holds one" in result.stderr and not (tmp_path / "b.npy").exists()


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".npy"])
def test_vectors_keep_their_names_where_a_file_is_broken(
    photo: Path, tmp_path: Path, suffix: str
) -> None:
    broken, other = tmp_path / "a, broken.png", tmp_path / "other.png"
    broken.write_bytes(b"no image")
    other.write_bytes(photo.read_bytes())
    out = tmp_path / f"vectors{suffix}"
    run(photo, broken, other, "--out", out, code=1)
    if suffix == ".npz":
        read = np.load(out, allow_pickle=False)
        names, failed, rows = list(read["paths"]), list(read["failed_paths"]), read["pooled"]
        assert "not an image" in read["failed_errors"][0]
    elif suffix == ".safetensors":
        with safetensors.safe_open(out, "np") as file:
            metadata, rows = file.metadata(), file.get_tensor("pooled")
        names = json.loads(metadata["paths"])
        failed = [path for path, _ in json.loads(metadata["failed"])]
    else:
        with out.with_suffix(".csv").open(newline="") as file:
            table = list(csv.DictReader(file))
        names = [row["path"] for row in table if row["row"]]
        failed = [row["path"] for row in table if row["error"]]
        rows = np.load(out)
    assert names == [str(photo), str(other)] and failed == [str(broken)]
    assert rows.shape == (2, 24)


def test_an_encoder_with_a_hole_says_where_it_begins(photo: Path, tmp_path: Path) -> None:
    encoder = build_encoder(CONFIG.encoder)
    with torch.no_grad():
        encoder.vit.blocks[1].feed_forward.fc2.bias[3] = float("nan")
    save_snapshot(tmp_path / "broken", CONFIG, encoder)
    weights = ("--weights", tmp_path / "broken")
    out, drawn = tmp_path / "v.npz", tmp_path / "map.png"
    result = runner.invoke(app, ["encode", str(photo), *map(str, weights), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["not_finite_from"] == "block 2"
    assert "not finite (NaN or infinity, from block 2 on" in result.stderr
    for more in (["--out", out], ["--map", drawn]):
        done = runner.invoke(app, ["encode", str(photo), *map(str, [*weights, *more])])
        assert done.exit_code == 1 and "from block 2 on" in done.stderr
    assert not out.exists() and not drawn.exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--tokens", "cls"], "--out"),
        (["--out", "x.npz", "--tokens", "patches"], "--tokens patches: unknown"),
        (["--out", "x.npz", "--tokens", "register"], "does not have such tokens"),
        (["--out", "x.csv"], ".safetensors"),
        (["--out", "missing/x.npz"], "the folder is missing"),
        (["--plot", "x.gif"], ".png"),
        (["--preset", "vit-b61"], "vit-b16"),
        (["--device", "tpu"], "--device tpu: unknown"),
        (["--device", "cuda:x:"], "--device cuda:x:: unknown"),
        (["--device", "cpu:7"], "not available"),
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "9" * 30], "out of range"),
        (["--dtype", "int8"], "bfloat16"),
        (["--image-size", "12x"], "384x512"),
        (["--background", "no-color"], "no-color"),
        (["--no-such-option"], "no-such-option"),
        (["--every", "0"], "every"),
        (["--position", "rope2d", "--pos-resize", "bicubic"], "does not have a position table"),
    ],
)
def test_bad_usage_is_exit_code_2_and_one_reason(arguments: list[str], said: str) -> None:
    result = run(*arguments, code=2)
    assert said in result.output
    assert not Path("x.npz").exists()


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["{tmp}"], "vitcli embed {tmp} --out vectors/"),
        (["@list.txt", "--preset", "dino-b16"], "vitcli embed @list.txt --out vectors/ --preset"),
        (["{tmp}/*.png"], "vitcli embed '{tmp}/*.png' --out vectors/"),
        (["s.tar", "--out", "x.npz"], "vitcli embed s.tar --out vectors/"),
        (["{photo}", "--out", "{tmp}"], "vitcli embed {photo} --out {tmp}"),
    ],
)
def test_many_images_are_the_job_of_embed(
    photo: Path, tmp_path: Path, arguments: list[str], command: str
) -> None:
    texts = [text.format(tmp=tmp_path, photo=photo) for text in arguments]
    said = run(*texts, code=2).stderr
    assert f"try: {command.format(tmp=tmp_path, photo=photo)}" in said


def test_images_are_rgb(photo: Path, tmp_path: Path) -> None:
    result = run(photo, "--set=encoder.channels=1", code=2)
    assert "does not read RGB images (got 1 channels, expected 3)" in result.stderr


def test_an_encoder_larger_than_memory_is_one_line() -> None:
    size = ("--set=encoder.hidden=65536", "--set=encoder.heads=64", "--set=encoder.depth=1000")
    result = run(*size, code=2)
    assert result.stderr.startswith("error: the encoder: its float32 weights do not fit in memory")
    assert result.stderr.count("\n") == 2


def test_one_bad_file_does_not_stop_the_others(photo: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jpg"
    bad.write_bytes(b"not an image")
    result = run(bad, photo, tmp_path / "missing.png", "--json", code=1)
    answer = json.loads(result.stdout)
    assert [image["path"] for image in answer["images"]] == [str(photo)]
    assert "weights are random" in result.stderr
    assert [image["path"] for image in answer["failed"]] == [
        str(bad),
        str(tmp_path / "missing.png"),
    ]
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 2 and "bad.jpg" in warnings[0] and "missing.png" in warnings[1]


def test_a_printed_config_gives_the_same_numbers(photo: Path, tmp_path: Path) -> None:
    printed = tmp_path / "printed.yaml"
    printed.write_text(run("--print-config", "--registers", "1").stdout)
    again = runner.invoke(app, ["encode", str(photo), "--config", str(printed), "--json"])
    first = json.loads(run(photo, "--registers", "1", "--json").stdout)
    assert json.loads(again.stdout)["images"] == first["images"]


def test_image_size_follows_into_the_input(photo: Path) -> None:
    image = json.loads(run(photo, "--image-size", "32x48", "--json").stdout)["images"][0]
    assert image["input_shape"] == [1, 3, 32, 48]
    assert image["output_shape"] == [1, 1 + 2 * 3, 24]


def test_a_plot_is_a_picture(photo: Path, tmp_path: Path) -> None:
    run(photo, "--plot", tmp_path / "norms.png")
    with Image.open(tmp_path / "norms.png") as picture:
        assert picture.format == "PNG" and picture.width > 600


def process(*arguments: str | Path, **how: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "vitcli", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        **how,
    )


def test_as_a_process(photo: Path) -> None:
    done = process("encode", *SMALL, photo, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["images"][0]["output_shape"] == [1, 5, 24]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["encode", "--help"],
        ["encode", "--set", "encoder.depht=3"],
        ["encode", "--nothing"],
        ["encode", "--set", "encoder.heads=5"],
        ["encode", "--device", "tpu"],
        ["encode", "--dtype", "int8"],
        ["encode", "--tokens", "cls"],
        ["encode", "--out", "x.csv"],
        ["encode", "--out", "missing/x.npz"],
        ["train-shapes", "--device", "tpu"],
        ["nothing"],
        ["--version"],
        ["encode", "--print-config"],
    ],
)
def test_help_and_usage_errors_import_no_torch(arguments: list[str]) -> None:
    script = (
        "import sys\n"
        "sys.argv[0] = 'vitcli'\n"
        "from vitcli.__main__ import main\n"
        "try:\n    main()\n"
        "finally:\n    heavy = {'torch', 'numpy', 'PIL', 'matplotlib'} & set(sys.modules)\n"
        "    assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode in (0, 2), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["encode", "--background", "no-color"],
        ["encode", "--out", "x.npz", "--tokens", "register"],
        ["compare", "vit-ti16", "vit-s16", "--background", "no-color"],
        ["attn-entropy", "--background", "no-color"],
    ],
)
def test_other_bad_values_are_told_before_torch_is_loaded(arguments: list[str]) -> None:
    script = "import sys\nfrom vitcli.__main__ import main\ntry:\n    main()\nfinally:\n"
    script += "    assert 'torch' not in sys.modules\n"
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False
    )
    assert "AssertionError" not in done.stderr, done.stderr
    assert done.returncode == 2, done.stderr


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    script = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pydantic':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from vitcli.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr == "error: interrupted\n"


def test_ctrl_c_inside_an_exec_is_130_too(tmp_path: Path) -> None:
    script = (
        "import vitcli.cli\n"
        "def app():\n"
        "    try:\n        exec('raise KeyboardInterrupt')\n"
        "    except KeyboardInterrupt:\n        raise SystemExit(130)\n"
        "vitcli.cli.app = app\n"
        "from vitcli.__main__ import main\n"
        "main()\n"
    )
    (tmp_path / "interrupted.py").write_text(script)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-m", "interrupted"], env={**os.environ, "PYTHONPATH": path}
    )
    assert done.returncode == 130


def test_help_cuts_no_word_at_80_columns() -> None:
    done = process("encode", "--help", env={**os.environ, "COLUMNS": "80"})
    assert done.returncode == 0 and "…" not in done.stdout


def test_ctrl_c_while_the_command_line_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Program, "parse_args", interrupted)
    result = runner.invoke(app, ["presets"])
    assert result.exit_code == 130 and result.stderr == "error: interrupted\n"


def test_ctrl_c_is_one_line_and_130() -> None:
    """A SIGINT that arrives in the middle of the forward pass."""
    program = (
        "import os, signal, sys\n"
        "from vitcli.__main__ import main\n"
        "from vitcli.nn.encoder import Block\n"
        "Block.forward = lambda *_: os.kill(os.getpid(), signal.SIGINT)\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "encode", *SMALL], capture_output=True, text=True
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "error: interrupted" and done.stdout == ""
    assert len(done.stderr.splitlines()) == 2  # the note on random weights before it


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_closed_pipe_is_quiet(photo: Path, form: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "vitcli", "encode", *SMALL, str(photo), *form],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
    assert done.returncode == 128 + signal.SIGPIPE


def test_a_closed_stdout_is_one_line() -> None:
    command = f"{sys.executable} -m vitcli presets >&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "error: stdout is closed\n"


def test_a_closed_stderr_leaves_the_answer() -> None:
    command = f"{sys.executable} -m vitcli presets --json 2>&-"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert done.returncode == 0 and json.loads(done.stdout)["presets"]


def test_a_preset_given_as_weights_is_told_so() -> None:
    result = run("--weights", "vit-b16", code=2)
    assert "--preset vit-b16" in result.stderr
    assert "--weights ''" in run("--weights", "", code=2).stderr


def test_a_full_disk_leaves_nothing_half_written(photo: Path, tmp_path: Path) -> None:
    result = runner.invoke(app, ["encode", *SMALL, str(photo), "--out", "/dev/full/x.npz"])
    assert result.exit_code == 2 and "/dev/full" in result.stderr
    assert list(tmp_path.iterdir()) == [photo]


def test_another_engine_gives_the_same_table(photo: Path) -> None:
    plain = json.loads(run(photo, photo, "--json").stdout)["images"]
    graph = json.loads(run(photo, photo, "--json", "--engine", "onnx").stdout)["images"]
    for image, same in zip(plain, graph, strict=True):
        assert image["output_shape"] == same["output_shape"]
        assert image["pooled_norm"] == pytest.approx(same["pooled_norm"], abs=1e-4)
        for layer, again in zip(image["layers"], same["layers"], strict=True):
            assert layer.keys() == again.keys() and layer["name"] == again["name"]
            assert layer["patch_norm_mean"] == pytest.approx(again["patch_norm_mean"], abs=1e-4)
            assert layer["cls_cosine_prev"] == pytest.approx(again["cls_cosine_prev"], abs=1e-4)


def test_engines_that_cannot_be(photo: Path, tmp_path: Path) -> None:
    assert "--engine turbo: unknown" in run(photo, "--engine", "turbo", code=2).output
    drawn = ("--map", tmp_path / "map.png", "--engine", "onnx")
    assert "does not support --map" in run(photo, *drawn, code=2).output


def test_encode_gives_up_a_file_that_takes_minutes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A JPEG of 240 KB, 400 passes over 36 million coefficients."""
    (tmp_path / "slow.jpg").write_bytes(many_scans(400, (6000, 6000)))
    Image.new("RGB", (64, 48)).save(tmp_path / "good.png")
    limited = functools.partial(decode_within, timeout_s=1.0)
    monkeypatch.setattr("vitcli.model.decode_within", limited)
    names = [str(tmp_path / name) for name in ("slow.jpg", "good.png")]
    done = CliRunner().invoke(app, ["encode", *SMALL, *names, "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert [image["path"] for image in found["images"]] == names[1:]
    assert [(failed["path"], failed["code"]) for failed in found["failed"]] == [
        (names[0], "timed_out")
    ]
    assert "not decoded in 1 s" in found["failed"][0]["error"]


@pytest.mark.parametrize(
    "option", [("--norms",), ("--workers", "2"), ("--format", "npy"), ("--shard=1/2",)]
)
def test_options_of_the_job_name_the_command_that_has_them(option: tuple[str, ...]) -> None:
    done = runner.invoke(app, ["encode", "photos", "--out", "vectors", *option])
    assert done.exit_code == 2
    assert "  try: vitcli embed PATH --out DIR" in done.stderr
    other = runner.invoke(app, ["encode", "photos", "--nothing"])
    assert "embed" not in other.stderr


BOX = ("--set", "preprocess.filter=box", "--set", "preprocess.resize_size=32")


def test_fit_decides_what_the_encoder_reads(photo: Path, tmp_path: Path) -> None:
    """A 60x40 picture: the text says what became of it, and the vectors are those of that."""
    vectors = []
    for fit, said in (
        ("crop", "fit crop: x 10 to 50, y 0 to 40 resized to 32x32"),
        ("whole", "fit whole: resized to 32x21 (bilinear) in the middle of 32x32"),
        ("squash", "fit squash: resized to 32x32"),
    ):
        out = tmp_path / f"{fit}.npy"
        more = ("--out", out, "--plot", tmp_path / f"{fit}.svg")
        assert said in run(photo, "--fit", fit, *more).stdout
        assert "60x40 px" in (tmp_path / f"{fit}.svg").read_text()
        vectors.append(np.load(out))
    image = Image.open(photo)
    square = tmp_path / "square.png"
    image.resize((32, 32), Image.Resampling.BOX, box=(10, 0, 50, 40)).save(square)
    run(photo, "--fit", "crop", *BOX, "--out", tmp_path / "a.npy")
    run(square, "--out", tmp_path / "b.npy")
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))
    run(photo, "--out", tmp_path / "default.npy")  # this preset squashes by itself
    np.testing.assert_array_equal(np.load(tmp_path / "default.npy"), vectors[2])
    assert abs(vectors[0] - vectors[1]).max() > 0.01


def test_fit_is_refused_in_words(photo: Path) -> None:
    follows = ("--set", "preprocess.resize=none", "--set", "preprocess.resize_size=null")
    refused = run(photo, *follows, "--fit", "crop", code=2).stderr
    assert "keeps each image's own aspect ratio" in refused and "add --image-size 224" in refused
    run(photo, *follows, "--fit", "crop", "--image-size", "32")
    assert "did you mean squash?" in run(photo, "--fit", "squish", code=2).stderr
