"""Every engine gives eager's numbers, at any batch, and says what it cannot do."""

import math
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
import torch
from torch._dynamo.utils import counters

from tests.conftest import tiny_encoder
from vitcli.engines import ENGINES, EngineKind, check_engine, engine
from vitcli.engines.engine import (
    Engine,
    Runner,
    fastest,
    largest_error,
    onednn_limits,
    prepare_engine,
)
from vitcli.engines.onnx_graph import build_graph, write_onnx
from vitcli.engines.pytorch import ONEDNN
from vitcli.errors import VitcliError
from vitcli.nn.encoder import hooked, layer_points

needs_onednn = pytest.mark.skipif(ONEDNN is None, reason="this torch has no oneDNN kernels")
HAS_OPENVINO = bool(find_spec("openvino")) and not onednn_limits()
needs_openvino = pytest.mark.skipif(not HAS_OPENVINO, reason="needs openvino, and all instructions")
OPENVINO = pytest.param("openvino", marks=needs_openvino)
HERE = Path(__file__).parents[2]
VARIANTS = [
    {},
    {"position": "rope2d", "registers": 2, "pooling": "map", "head": "projection", "head_out": 5},
    {"position": "alibi2d", "attention": {"mask": "window", "window": 2}, "pooling": "none"},
    {"cls_token": False, "pooling": "mean", "mlp": "gated", "norm": "rmsnorm", "layer_scale": 0.1},
    {"patch_size": 4, "position": "alibi2d", "head": "merger", "head_out": 5, "deepstack": [1]},
]


def check(name: str, changes: dict, batches: tuple[int, ...] = (1, 3)) -> None:
    """All outputs and every layer's tokens, at the batch prepared for and at others."""
    encoder = tiny_encoder(depth=1, **changes).float()
    example = torch.randn(1, 3, 24, 32)
    engine = prepare_engine(name, encoder, example, layers=True, batches=batches)
    points = layer_points(encoder)
    for batch in batches:
        images = torch.randn(batch, 3, 24, 32, generator=torch.Generator().manual_seed(batch))
        answer, layers = engine.run_layers(images)
        seen: list[torch.Tensor] = []
        with torch.no_grad(), hooked((module, seen.append) for _, module in points):
            reference = encoder(images)
        for ours, theirs in zip((*answer, *layers), (*reference, *seen), strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert ours.shape == theirs.shape
                assert (ours - theirs).abs().max() < 1e-4
        assert largest_error(engine, encoder, images) < 1e-5


@pytest.mark.parametrize("name", ["eager", pytest.param("onednn", marks=needs_onednn)])
@pytest.mark.parametrize("changes", VARIANTS)
def test_torch_engines_agree(name, changes):
    check(name, changes)


@pytest.mark.parametrize("name", ["onnx", OPENVINO])
@pytest.mark.parametrize("changes", VARIANTS)
def test_the_exported_graph_agrees(name, changes):
    check(name, changes)


@pytest.mark.skipif(not find_spec("openvino"), reason="needs openvino")
@pytest.mark.parametrize("limit", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_openvino_is_refused_where_it_would_crash(monkeypatch, limit):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv(limit, "AVX2")
    with pytest.raises(VitcliError, match=f"cannot run under {limit}"):
        prepare_engine("openvino", tiny_encoder(depth=1).float(), torch.zeros(1, 3, 24, 32))


@needs_openvino
def test_openvino_computes_in_bfloat16_where_the_processor_does(monkeypatch):
    """Each of the sums that a token goes through rounds to 8 bits."""
    import openvino

    encoder = tiny_encoder(depth=1).to(torch.bfloat16)
    images = torch.randn(2, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        ready = prepare_engine("openvino", encoder, images[:1].to(torch.bfloat16))
        tokens = ready.run(images.to(torch.bfloat16)).tokens
        assert tokens.dtype == torch.bfloat16
        with torch.no_grad():
            exact = encoder.float()(images).tokens
        assert 1e-5 < (tokens - exact).abs().max() / exact.abs().max() < 0.1
    monkeypatch.setattr(openvino.Core, "get_property", lambda *asked: ["FP32"])
    with pytest.raises(VitcliError, match="this processor has no bfloat16 units"):
        prepare_engine("openvino", encoder, images.to(torch.bfloat16))


def test_eight_bits_are_near_and_not_the_same():
    """The largest of N steps of 1/255 of a range, through two blocks, is a few hundredths."""
    encoder = tiny_encoder(head="linear", head_out=5).float()
    images = torch.randn(3, 3, 24, 32, generator=torch.Generator().manual_seed(0))
    engine = prepare_engine("int8", encoder, images[:1], layers=True)
    answer, layers = engine.run_layers(images)
    with torch.no_grad():
        reference = encoder(images)
    assert len(layers) == len(layer_points(encoder))
    for ours, theirs in zip(answer, reference, strict=True):
        if theirs is not None:
            cosines = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
            assert 0.98 < cosines.min() < 1
            assert ours.shape == theirs.shape and not torch.allclose(ours, theirs, rtol=1e-4)


@pytest.mark.timeout(1200)  # a compiler runs, beside whatever else does
def test_compile_agrees_and_its_graph_is_kept_for_the_next_process():
    counters["inductor"].clear()
    check("compile", VARIANTS[1], batches=(2, 3))  # one compilation; a batch of 1 is another
    kept = {name for name in counters["inductor"] if name.startswith("fxgraph_cache")}
    assert kept and kept <= {"fxgraph_cache_miss", "fxgraph_cache_hit"}


COMPILED = """
from tests.engines.test_engines import VARIANTS, check
check("compile", VARIANTS[1], batches=(2,))
"""


@pytest.mark.timeout(1200)  # a compiler runs, beside whatever else does
def test_graphs_kept_for_other_vector_instructions_are_left_alone():
    """The cache is that of the test above, on a processor with wider instructions than these."""
    narrow = {"ATEN_CPU_CAPABILITY": "default", "PYTHONPATH": str(HERE)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, **narrow},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_largest_error_sees_a_wrong_engine():
    encoder = tiny_encoder().float()
    images = torch.randn(1, 3, 24, 32)
    engine = prepare_engine("eager", tiny_encoder(norm_eps=1e-3).float(), images)
    assert largest_error(engine, encoder, images) > 1e-4


def test_the_exported_file_has_a_free_batch_and_named_outputs(tmp_path):
    encoder = tiny_encoder(depth=1).float()
    images = torch.randn(1, 3, 24, 32)
    graph = build_graph(encoder, images)
    assert write_onnx(graph, images, tmp_path / "a.onnx", opset=19) == [tmp_path / "a.onnx"]
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    written = onnx.load(tmp_path / "a.onnx")
    assert [item.version for item in written.opset_import if item.domain == ""] == [19]
    shape = written.graph.input[0].type.tensor_type.shape.dim
    assert [d.dim_param or d.dim_value for d in shape] == ["batch", 3, 24, 32]
    assert [out.name for out in written.graph.output] == ["tokens", "tokens_before_norm", "pooled"]


def test_weights_too_large_for_one_file_stand_beside_it(tmp_path, monkeypatch):
    from vitcli.engines import onnx_graph
    from vitcli.engines import onnx_graph as export

    monkeypatch.setattr(export, "LARGEST_SINGLE_FILE", 100)
    encoder = tiny_encoder(depth=1).float()
    images = torch.randn(2, 3, 24, 32)
    graph = build_graph(encoder, images)
    files = write_onnx(graph, images, tmp_path / "a.onnx")
    assert [file.name for file in files] == ["a.onnx", "a.onnx.data"]
    run = onnx_graph.open_session(files[0], graph.names, images)
    answer, _ = graph.read(run(images))
    assert (answer.tokens - encoder(images).tokens).abs().max() < 1e-4


@pytest.mark.parametrize(("name", "library"), [("onnx", "onnxruntime"), ("openvino", "openvino")])
def test_a_missing_extra_is_named(name, library, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(VitcliError, match=f"needs {library}, which is not installed") as caught:
        prepare_engine(name, tiny_encoder().float(), torch.zeros(1, 3, 24, 32))
    assert f"[{name}]" in caught.value.hint


def test_onnx_refuses_dtypes_it_cannot_run():
    with pytest.raises(VitcliError, match="got float64"):
        prepare_engine("onnx", tiny_encoder(), torch.zeros(1, 3, 24, 32).double())


def test_unknown_engine():
    with pytest.raises(VitcliError, match="--engine turbo: unknown"):
        prepare_engine("turbo", tiny_encoder(), torch.zeros(1, 3, 24, 32))


def test_the_table_says_what_an_engine_can_do():
    assert all(isinstance(kind, EngineKind) for kind in ENGINES.values())
    check_engine("eager", "float64", "mps", hooks="--map", gradients="--backward")
    for name, needs in (("compile", {"hooks": "--map"}), ("onednn", {"gradients": "--backward"})):
        with pytest.raises(VitcliError, match=f"--engine {name}: does not support --") as caught:
            check_engine(name, **needs)
        assert caught.value.hint == "--engine eager"
    with pytest.raises(VitcliError, match=r"got float16, expected float32 or bfloat16\)"):
        check_engine("onednn", "float16")


def test_a_hole_is_not_the_smallest_difference():
    encoder = tiny_encoder().float()
    engine = Engine("broken", lambda x: (encoder(x * float("nan")), []), "")
    assert math.isnan(largest_error(engine, encoder, torch.randn(1, 3, 24, 32)))


@needs_onednn
def test_a_runner_observes_the_layers_of_any_engine(images):
    encoder = tiny_encoder().float()
    answers = {}
    names = ["eager", "onednn", "onnx", *(["openvino"] if HAS_OPENVINO else [])]
    for name in names:
        seen = []
        output = Runner(name, encoder)(images.float(), seen.append)
        answers[name] = [*seen, output.tokens, output.pooled]
        assert len(seen) == len(layer_points(encoder))
    for name in names[1:]:
        for ours, theirs in zip(answers[name], answers["eager"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_auto_measures_once_and_remembers(images, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked, clock = [], [0.0]  # a clock that only the engines' steps move

    def prepare(name, encoder, images, **how):
        asked.append(name)
        if name == "compile":
            raise VitcliError("no compiler")

        def run(x):
            clock[0] += 1.0 if name == "eager" else 2.0
            return encoder(x), []

        return Engine(name, run, "")

    monkeypatch.setattr("vitcli.engines.engine.prepare_engine", prepare)
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock[0])
    encoder = tiny_encoder()
    with torch.no_grad():
        name, words = fastest(encoder, images)
        assert name == "eager" and "onednn" in words and "compile" not in words
        able = ["eager", "onednn", "compile", "onnx", "openvino"]
        assert asked == able, "those that give the same numbers"
        assert fastest(encoder, images)[0] == "eager" and asked == able
        fastest(encoder, images[:1])
        assert len(asked) == 2 * len(able), "another shape is another question"
        monkeypatch.setenv("DNNL_MAX_CPU_ISA", "SSE41")
        fastest(encoder, images)
        assert len(asked) == 3 * len(able), "so are other vector instructions"
