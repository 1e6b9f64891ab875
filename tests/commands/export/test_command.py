from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

import vitcli
from tests.commands.sources import SMALL_SIZE
from vitcli.build import build_encoder
from vitcli.cli import app
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.settings import parse_setting
from vitcli.errors import VitcliError

SMALL_SIZE = [*SMALL_SIZE, "--set=encoder.depth=2"]
runner = CliRunner()


def test_the_file_gives_the_encoders_numbers_at_any_batch(tmp_path: Path) -> None:
    path = tmp_path / "small.onnx"
    result = runner.invoke(app, ["export", str(path), *SMALL_SIZE, "--seed", "3", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["files"] == [{"path": str(path), "bytes": path.stat().st_size}]
    assert answer["opset"] == 20 and answer["max_error"] <= answer["tolerance"] == 1e-4
    assert answer["inputs"] == [{"name": "images", "shape": ["batch", 3, 32, 32]}]
    assert answer["outputs"][0] == {"name": "tokens", "shape": ["batch", 5, 24]}

    config = load_config(ModelConfig, settings=[parse_setting(s[6:]) for s in SMALL_SIZE])
    encoder = build_encoder(config.encoder, seed=3)
    session = onnxruntime.InferenceSession(str(path))
    for batch in (1, 8):
        images = np.random.default_rng(0).normal(size=(batch, 3, 32, 32)).astype(np.float32)
        (tokens,) = session.run(["tokens"], {"images": images})
        with torch.no_grad():
            expected = encoder(torch.from_numpy(images)).tokens.numpy()
        np.testing.assert_allclose(tokens, expected, atol=1e-4)


@pytest.mark.parametrize(("error", "shown"), [(3e-4, "3.0e-04"), (float("nan"), "nan")])
def test_a_graph_that_differs_leaves_the_file_that_was_there(
    tmp_path: Path, monkeypatch, error: float, shown: str
) -> None:
    from vitcli.commands.export import analysis

    monkeypatch.setattr(analysis, "largest_error", lambda *_: error)
    file = tmp_path / "small.onnx"
    file.write_bytes(b"a good one")
    result = runner.invoke(app, ["export", str(file), *SMALL_SIZE])
    assert result.exit_code == 1 and f"largest difference {shown}" in result.output
    assert file.read_bytes() == b"a good one" and list(tmp_path.iterdir()) == [file]


def test_class_names_are_in_the_graph(tmp_path: Path) -> None:
    names = ["dog, wet", "Hündchen", "10"]
    head = ["--set=encoder.head=linear", "--set=encoder.head_out=3"]
    given = f"--set=classes={json.dumps(names)}"
    file = tmp_path / "small.onnx"
    result = runner.invoke(app, ["export", str(file), *SMALL_SIZE, *head, given, "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["classes"] == names
    held = onnxruntime.InferenceSession(str(file)).get_modelmeta().custom_metadata_map
    assert json.loads(held["classes"]) == names


def test_operator_sets_have_bounds(tmp_path: Path) -> None:
    file = tmp_path / "small.onnx"
    file.write_bytes(b"a good one")
    for opset in ("17", "24"):
        result = runner.invoke(app, ["export", str(file), *SMALL_SIZE, "--opset", opset])
        assert result.exit_code == 2 and "--opset" in result.output
    with pytest.raises(vitcli.VitcliError, match="got 24, expected 18 to 23"):
        vitcli.export("vit-b16", file, opset=24)
    assert file.read_bytes() == b"a good one"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graph.pb"], "graph.pb: unknown suffix"),
        (["nowhere/graph.onnx"], "nowhere/graph.onnx: the folder is missing"),
        (["graph.onnx", "--dtype", "bfloat16"], "float32 on the CPU"),
    ],
)
def test_what_cannot_be_exported(arguments: list[str], message: str) -> None:
    result = runner.invoke(app, ["export", *arguments, *SMALL_SIZE])
    assert result.exit_code == 2 and message in result.output


def test_an_operator_set_that_torch_cannot_write_is_one_line(tmp_path: Path, monkeypatch) -> None:
    from vitcli.engines import onnx_graph as export

    def refuses(*_: object, **__: object) -> None:
        raise RuntimeError("no operator\nsecond line")

    monkeypatch.setattr(torch.onnx, "export", refuses)
    encoder = build_encoder(
        load_config(ModelConfig, settings=[]).encoder.model_copy(
            update={"hidden": 24, "depth": 1, "heads": 3, "mlp_hidden": 24}
        )
    )
    images = torch.zeros(1, 3, 224, 224)
    with pytest.raises(VitcliError, match=r"cannot export: RuntimeError: no operator$"):
        export.write_onnx(export.build_graph(encoder, images), images, tmp_path / "a.onnx")
    assert not list(tmp_path.iterdir())
