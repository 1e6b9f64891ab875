"""Bad input is never called a fault in vitcli: mutated configs, sweeps, options and checkpoints."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.conftest import tiny_config
from vitcli.build import build_encoder
from vitcli.checkpoints.weights import save_snapshot
from vitcli.cli import app
from vitcli.commands.sweep.trials import new_values
from vitcli.commands.train.result import metrics_entry
from vitcli.config.request import load_config
from vitcli.config.schema import ModelConfig
from vitcli.config.yaml import leaves, read_json
from vitcli.errors import VitcliError

FEW = settings(
    max_examples=60,
    derandomize=True,  # the same inputs in every run
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ODD: list[Any] = [
    *(
        -1,
        0,
        1,
        3,
        10**400,
        -(10**30),
        0.5,
        1e-320,
        float("inf"),
        float("nan"),
        True,
        None,
        "",
        "x",
    ),
    *("١", "1e999", "../x", "\u202e\x00", "a" * 5000, [], [1], [[]], {}, {"a": {}}, {"": None}),
]
SWEEP = {
    "command": "params",
    "metrics": ["models.0.total"],
    "grid": {"preset": ["vit-b16"], "encoder": {"depth": [2, 4]}},
    "seeds": [0, 1],
}


def run(*arguments: str) -> None:
    """A command that must answer or refuse."""
    done = CliRunner().invoke(app, arguments)
    assert "fault in vitcli" not in done.stderr, (arguments, done.stderr)
    assert done.exit_code in (0, 1, 2), (arguments, done.exit_code)
    assert done.exit_code == 0 or done.stderr.startswith(("error: ", "note: ", "warning: "))


@st.composite
def mutated(draw: st.DrawFn, data: dict[str, Any]) -> dict[str, Any]:
    """The data with one to three of its values, keys or sections changed."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, 3))):
        paths = [path for path, _ in leaves(data)]
        if not paths:
            break
        path = draw(st.sampled_from(paths))
        path = path[: draw(st.integers(1, len(path)))]
        node: Any = data
        for key in path[:-1]:
            node = node[key]
        how = draw(st.sampled_from(["value", "value", "value", "delete", "rename"]))
        if how == "value":
            node[path[-1]] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif path[-1] in node:
            value = node.pop(path[-1])
            if how == "rename":
                node[draw(st.sampled_from(["x", "dept", "", "on"]))] = value
    return data


def spoiled(content: bytes, draw: Any) -> bytes:
    """Cut, with bytes changed, or with bytes added."""
    at = draw(st.integers(0, max(len(content) - 1, 0)))
    how = draw(st.sampled_from(["cut", "flip", "add"]))
    if how == "cut":
        return content[:at]
    junk = draw(st.binary(min_size=1, max_size=9))
    return content[:at] + junk + content[at + (len(junk) if how == "flip" else 0) :]


BASE = load_config(ModelConfig, "vit-ti16").model_dump(mode="json")


@FEW
@given(data=mutated(BASE))
def test_configs(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(data, allow_unicode=True))
    run("params", "--config", str(tmp_path / "x.yaml"))


@FEW
@given(data=st.data())
def test_config_bytes(tmp_path: Path, data: st.DataObject) -> None:
    (tmp_path / "x.yaml").write_bytes(spoiled(yaml.safe_dump(BASE).encode(), data.draw))
    run("params", "--config", str(tmp_path / "x.yaml"))


@FEW
@given(data=mutated(SWEEP))
def test_sweeps(tmp_path: Path, data: dict[str, Any]) -> None:
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(data, allow_unicode=True))
    run("sweep", str(tmp_path / "x.yaml"), "--dry-run", "--out", str(tmp_path / "out"))


KEYS = [".".join(path) for path, _ in leaves(BASE)]
VALUES = [json.dumps(value) if not isinstance(value, str) else value for value in ODD]


@FEW
@given(
    key=st.sampled_from([*KEYS, "x", "encoder", "", "."]),
    value=st.sampled_from(VALUES),
    more=st.lists(
        st.sampled_from(
            ["--image-size=0", "--image-size=9x", "--registers=-1", "--registers=1,x", "--dtype=x",
             "--norm=x", "--position=", "--pool=\u202e", "--preset=" + "a" * 300, "--preset=../x",
             "--format=", "--width=nan", "--config=/dev/null", "--config=/", "--image-size=99999"]
        ),
        max_size=2,
    ),
)  # fmt: skip
def test_command_lines(key: str, value: str, more: list[str]) -> None:
    run("params", "--set", f"{key}={value}", *more)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("snapshot") / "own"
    config = ModelConfig(encoder=tiny_config())
    save_snapshot(folder, config, build_encoder(config.encoder))
    return folder


@FEW
@given(data=st.data())
def test_checkpoints(tmp_path: Path, snapshot: Path, data: st.DataObject) -> None:
    import vitcli

    for file in snapshot.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name = data.draw(st.sampled_from(sorted(path.name for path in snapshot.iterdir())))
    head = (snapshot / name).read_bytes()[:3000]  # the header; flipped values are still values
    rest = (snapshot / name).read_bytes()[3000:]
    (tmp_path / name).write_bytes(spoiled(head, data.draw) + rest)
    try:
        vitcli.load(str(tmp_path))
    except VitcliError as error:
        assert str(error)


DTYPES = [torch.complex64, torch.bool, torch.int8, torch.float64, torch.bfloat16, torch.uint8]


@FEW
@given(data=st.data())
def test_tensors(tmp_path: Path, snapshot: Path, data: st.DataObject) -> None:
    from safetensors.torch import load_file

    import vitcli

    state = load_file(snapshot / "model.safetensors")
    name = data.draw(st.sampled_from(sorted(state)))
    change = data.draw(st.sampled_from(["drop", "dtype", "shape", "empty", "rename"]))
    tensor = state.pop(name)
    if change == "dtype":
        state[name] = tensor.to(data.draw(st.sampled_from(DTYPES)))
    elif change == "shape":
        state[name] = tensor.reshape(-1)[: max(1, tensor.numel() // 2)].clone()
    elif change == "empty":
        state[name] = torch.empty(0, 3)
    elif change == "rename":
        state["\x1b[2J" + name] = tensor
    (tmp_path / "config.yaml").write_bytes((snapshot / "config.yaml").read_bytes())
    save_file(state, tmp_path / "model.safetensors")
    try:
        vitcli.load(str(tmp_path))
    except VitcliError as error:
        assert str(error)


@FEW
@given(content=st.binary(max_size=60) | st.sampled_from([b"[" * 100_000, b'{"a": NaN}', b"1e999"]))
def test_json_of_ours(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    try:
        read_json(tmp_path / "x.json", dict[str, int])
    except VitcliError as error:
        assert "x.json" in error.message


HOSTILE = [
    b"[" * 100_000, b'{"step": 1e999, "loss": 1}', b'{"step": 1, "loss": 1' + b"0" * 400 + b"}",
    b'{"step": null}', b"[1]", b'"step"', b"\xff", b'{"step": NaN, "loss": 0}', b"1" * 5000,
]  # fmt: skip


def test_lines_of_a_run_that_are_none_are_passed_over(tmp_path: Path) -> None:
    lines = [*HOSTILE, b'{"step": 2, "loss": 0.5}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    found, _ = new_values(tmp_path / "metrics.jsonl", 0, "step", "loss")
    assert found == [(2, 0.5)]


@pytest.mark.parametrize("line", HOSTILE)
def test_a_snapshot_has_no_such_line(line: bytes) -> None:
    assert metrics_entry(line, 10) is None


FOREIGN = {
    "architectures": ["Dinov2Model"], "model_type": "dinov2", "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_ratio": 4, "image_size": 28,
    "patch_size": 14, "layer_norm_eps": 1e-6, "hidden_act": "gelu", "qkv_bias": True,
}  # fmt: skip


@FEW
@given(data=mutated(FOREIGN))
def test_configs_of_others(tmp_path: Path, snapshot: Path, data: dict[str, Any]) -> None:
    import vitcli

    (tmp_path / "config.json").write_text(json.dumps(data))
    (tmp_path / "model.safetensors").write_bytes((snapshot / "model.safetensors").read_bytes())
    with pytest.raises(VitcliError):  # the tensors are of another family
        vitcli.load(str(tmp_path))
