"""What `profile` answers: sums, the same operations as `params`, and rows for what cannot be."""

import copy
import gzip
import json
import math

import pytest
import torch
from torch import nn

from tests.conftest import TINY
from vitcli.build import build_encoder
from vitcli.commands.params import analysis as components
from vitcli.commands.params.analysis import model_costs
from vitcli.commands.profile import measure
from vitcli.commands.profile.analysis import (
    attend,
    largest_batches,
    profile,
    slower_words,
    verdict,
)
from vitcli.commands.profile.components import OTHER
from vitcli.commands.profile.measure import Way, random_images, spread
from vitcli.commands.profile.memory import peak_alone
from vitcli.commands.profile.result import (
    Comparison,
    ComponentTime,
    ProfileRun,
    ProfileSettings,
    WallTime,
)
from vitcli.config.request import resized_to
from vitcli.config.schema import EncoderConfig, ModelConfig, PreprocessConfig
from vitcli.engines.engine import Engine, onednn_limits, prepare_engine
from vitcli.errors import VitcliError
from vitcli.images.synthetic import synthetic_image
from vitcli.model import Model
from vitcli.nn.attention import ExplicitAttention
from vitcli.nn.encoder import attentions

MIB = 2**20


def tiny_model(**changes) -> Model:
    config = ModelConfig(name="tiny", encoder=EncoderConfig.model_validate(TINY | changes))
    return Model(
        config=config,
        encoder=build_encoder(config.encoder),
        known_preprocessing=resized_to(PreprocessConfig(), config.encoder.image_size),
        weights="random (seed 0)",
        fresh=True,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


@pytest.fixture(scope="module")
def tiny() -> Model:
    return tiny_model()


def test_figures_follow_from_one_another(tiny):
    result = profile(tiny, ProfileSettings(batches=(1, 4), runs=3))
    assert [run.batch for run in result.runs] == [1, 4]
    assert (result.image_size, result.tokens) == ((24, 32), 13)
    for run in result.runs:
        assert run.timed_runs == 3
        assert 0 < run.wall_s.p10 <= run.wall_s.median <= run.wall_s.p90
        assert run.images_per_s == pytest.approx(run.batch / run.wall_s.median)
        work = 2 * result.macs_per_image * run.batch / 1e9
        assert run.gflops == pytest.approx(work / run.wall_s.median)
        assert run.gemm_fraction == pytest.approx(run.gflops / run.gemm_gflops)
        assert run.attention == "fused" and run.engine == tiny.engine and run.warmup_s > 0
        assert sum(part.share for part in run.components) == pytest.approx(1)
        assert len(run.ops) == 12
        assert all(a.self_s >= b.self_s for a, b in zip(run.ops, run.ops[1:], strict=False))
    assert result.machine.torch == torch.__version__
    assert result.machine.threads == torch.get_num_threads()


@pytest.mark.parametrize("changes", [{}, {"mlp": "gated", "pooling": "map", "registers": 4}])
def test_operations_are_those_of_params(changes):
    model = tiny_model(**changes)
    result = profile(model, ProfileSettings(batches=(1,), runs=1, ops=0))
    table = model_costs(model.config, model.input_size)
    shares = {part.name: part.macs_share for part in table.components}
    assert result.macs_per_image == table.macs_per_image
    for part in result.runs[0].components:
        assert part.flop_share == pytest.approx(shares.get(part.name, 0), abs=1e-12)
    assert sum(part.flop_share for part in result.runs[0].components) == pytest.approx(1)
    assert result.runs[0].ops == ()


def test_attention_over_channels_has_one_implementation() -> None:
    encoder = build_encoder(EncoderConfig(**TINY, attention={"over": "channels"}))
    attend(encoder, None)
    for kind in ("fused", "explicit"):
        with pytest.raises(VitcliError, match="one implementation"):
            attend(encoder, kind)


def test_explicit_attention_gives_the_same_tokens(tiny, images):
    model = tiny_model()
    before = model.encoder(images.float()).tokens
    attend(model.encoder, "explicit")
    assert all(isinstance(a.attend, ExplicitAttention) for a in attentions(model.encoder))
    assert torch.allclose(model.encoder(images.float()).tokens, before, atol=1e-5)
    assert profile(model, ProfileSettings(batches=(1,), runs=1)).runs[0].attention == "explicit"


def test_engines_are_timed_in_turn_and_compared():
    told: list[tuple[int, int]] = []
    settings = ProfileSettings(batches=(1, 2), engines=("eager", "onnx"), runs=3)
    result = profile(tiny_model(), settings, lambda done, total: told.append((done, total)))
    assert [(run.batch, run.engine) for run in result.runs] == [
        (1, "eager"), (1, "onnx"), (2, "eager"), (2, "onnx"),
    ]  # fmt: skip
    eager, onnx = result.engines
    assert eager.max_error is None and onnx.max_error < 1e-4 and onnx.prepare_s > 0
    assert result.machine.engines.keys() == {"eager", "onnx"}
    assert [(c.batch, c.engine, c.baseline) for c in result.comparisons] == [
        (1, "onnx", "eager"), (2, "onnx", "eager"),
    ]  # fmt: skip
    for run in result.runs:
        assert bool(run.components) == bool(run.ops) == (run.engine == "eager")
        assert run.timed_runs == 3 and run.gemm_fraction > 0
    assert told[-1] == ((1 + 2) * 2 * (3 + 3), (1 + 2) * 2 * (3 + 3))
    assert told == sorted(told)


def test_a_training_step(tiny):
    model = tiny_model(drop_path=0.1)
    result = profile(model, ProfileSettings(batches=(2,), runs=2, backward=True))
    run = result.runs[0]
    assert result.step == "forward and backward"
    assert run.gflops * run.wall_s.median * 1e9 == pytest.approx(6 * 2 * result.macs_per_image)
    assert any(
        "Backward" in op.name
        for op in profile(model, ProfileSettings(batches=(2,), runs=1, backward=True, ops=1000))
        .runs[0]
        .ops
    )
    assert all(parameter.grad is None for parameter in model.encoder.parameters())


def test_a_batch_that_cannot_fit_is_a_row_and_the_others_are_answered(tiny):
    result = profile(tiny, ProfileSettings(batches=(1, 10**9, 2), runs=1))
    first, huge, last = result.runs
    assert huge.error.startswith("out of memory: needs about") and huge.wall_s is None
    assert first.error is None and last.error is None and last.wall_s is not None


def test_an_allocation_that_fails_is_a_row(tiny, monkeypatch):
    real = measure.random_images

    def fails(model, batch):
        if batch == 3:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return real(model, batch)

    monkeypatch.setattr(measure, "random_images", fails)
    runs = profile(tiny, ProfileSettings(batches=(3, 1), runs=1)).runs
    assert runs[0].error == "out of memory" and runs[1].wall_s is not None


def test_other_errors_are_not_taken_for_memory(tiny, monkeypatch):
    def fails(model, batch):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(measure, "random_images", fails)
    with pytest.raises(RuntimeError, match="shapes"):
        profile(tiny, ProfileSettings(batches=(1,), runs=1))


def test_the_yardstick_is_the_fastest_call_of_each_shape(monkeypatch):
    """A machine that is busy for one trial does not lower the rate."""
    now = [0.0]
    monkeypatch.setattr(measure, "timed", lambda call, device: (call(), now[0])[1])
    yard = measure.Yardstick([(4, 8), (8, 2)], 3, torch.device("cpu"), torch.float32)
    for now[0] in (4.0, 1.0, 9.0):
        yard.trial()
    assert yard.gflops == pytest.approx(2 * 3 * (4 * 8 + 8 * 2) / 2.0 / 1e9)


@pytest.mark.parametrize("runs", [1, 7])
def test_the_yardstick_is_tried_beside_every_step_and_five_times_at_least(tiny, monkeypatch, runs):
    tried: list[int] = []
    trial = measure.Yardstick.trial
    monkeypatch.setattr(
        measure.Yardstick, "trial", lambda yard: (tried.append(yard.rows), trial(yard))
    )
    result = profile(tiny, batches=[2], runs=runs)
    assert tried == [2 * result.tokens] * max(runs, 5)
    assert result.runs[0].gemm_gflops >= result.runs[0].gflops > 0


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_time_that_is_not_positive_and_finite_is_an_error(bad):
    with pytest.raises(VitcliError, match="positive and finite"):
        spread([1.0, bad])


def test_percentiles():
    assert spread([float(i) for i in range(1, 12)]) == WallTime(6.0, 2.0, 10.0)
    assert spread([2.0]) == WallTime(2.0, 2.0, 2.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ProfileSettings(batches=(1, 8, 1)), "--batch 1: is given twice"),
        (ProfileSettings(engines=("eager", "eager")), "--engine eager: is given twice"),
        (ProfileSettings(engines=("turbo",)), "--engine turbo: unknown"),
        (ProfileSettings(engines=("onnx",), backward=True), "does not support --backward"),
        (ProfileSettings(attention="flash"), "--attention flash: unknown"),
    ],
)
def test_settings_that_cannot_be(tiny, settings, message):
    with pytest.raises(VitcliError, match=message):
        profile(tiny, settings)


def test_the_trace_is_one_step_in_chrome_format(tiny, tmp_path):
    path = tmp_path / "trace.json.gz"
    profile(tiny, ProfileSettings(batches=(1, 2), runs=1, trace=path))
    with gzip.open(path) as file:
        trace = json.load(file)
    whole = [e for e in trace["traceEvents"] if e.get("name") == f"component: {OTHER}"]
    assert len(whole) == 1 and whole[0]["ph"] == "X" and whole[0]["dur"] > 0
    blocks = [e for e in trace["traceEvents"] if e.get("name") == f"component: {components.FFN}"]
    assert len(blocks) == TINY["depth"]
    assert all({"ph", "pid"} <= event.keys() for event in trace["traceEvents"])


def test_the_verdict_is_arithmetic_on_the_figures():
    def run(batch: int, ffn: float, products: float) -> ProfileRun:
        shares = {components.FFN: ffn, components.QKV: 0.2, components.ATTENTION_PRODUCTS: products}
        parts = tuple(ComponentTime(n, s, s, 0.0) for n, s in shares.items())
        return ProfileRun(batch, "eager", "fused", images_per_s=2.0 * batch, components=parts)

    text = verdict(EncoderConfig(), (224, 224), [run(1, 0.5, 0.05), run(8, 0.6, 0.2)])
    assert (
        "At batch 8, FFN 60% of the time, attention 40% (of which the attention products 50%)"
        in text
    )
    assert "From batch 1 to 8, 2 to 16 images/s, FFN 50% to 60%, attention 25% to 40%." in text
    # ViT-B: products 2 N^2 D per block against 12 N D^2 in all else; N is 197, then 785
    assert "(448x448) the attention products go from 4% to 14% of the operations" in text
    assert "beyond 3072 tokens the products outweigh FFN" in text


def grow(megabytes: int):
    """A step whose peak is known."""
    return lambda: torch.ones(megabytes * 2**18).sum()


def test_peak_in_a_process_of_its_own_knows_nothing_of_earlier_steps() -> None:
    first = peak_alone(grow, 64)
    peak_alone(grow, 128)
    again = peak_alone(grow, 64)
    if first is None or again is None:
        pytest.skip("this system resolves no growth of the resident set")
    assert 60 * 2**20 < first < 100 * 2**20 and 60 * 2**20 < again < 100 * 2**20


def hoard(megabytes: int):
    """A step that keeps what it took for the next one, as a session keeps its buffers."""
    kept: list[torch.Tensor] = []
    return lambda: kept or kept.append(torch.ones(megabytes * 2**18))


def test_buffers_that_are_kept_count_once() -> None:
    cold = peak_alone(hoard, 64, keeps=True)
    if cold is None:
        pytest.skip("this system resolves no growth of the resident set")
    assert 60 * 2**20 < cold < 100 * 2**20
    warm = peak_alone(hoard, 64)
    assert warm is None or warm < 4 * 2**20, "a step after the first takes nothing new"


def test_dtypes_are_timed_in_turn_with_their_distance_to_float32(tiny):
    settings = {"batches": [1, 2], "dtypes": ["float32", "bfloat16"], "runs": 2}
    settings["engines"] = ["eager"]
    result = profile(tiny, **settings, memory_bytes=2**30)
    assert [(r.batch, r.dtype) for r in result.runs] == [
        (1, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16"),
    ]  # fmt: skip
    (low,) = result.fidelity
    assert low.dtype == "bfloat16" and low.images == 1
    pixels = tiny.transform([synthetic_image(tiny.input_size)])
    with torch.no_grad():
        reference = tiny.encoder(pixels).tokens
        ours = copy.deepcopy(tiny.encoder).bfloat16()(pixels.bfloat16()).tokens
    cosines = torch.nn.functional.cosine_similarity(ours.double(), reference.double(), dim=-1)
    assert low.cosine_min == pytest.approx(float(cosines.min()), abs=1e-4)
    assert 0 < low.relative_difference < 0.1
    assert [(c.dtype, c.baseline_dtype) for c in result.comparisons] == [
        ("bfloat16", "float32")
    ] * 2
    assert "smallest cosine of a" in result.verdict and next(tiny.encoder.parameters()).dtype == (
        torch.float32
    )
    assert all(0 < run.gemm_fraction <= 1 for run in result.runs)


def test_eight_bits_are_a_row_with_their_distance_to_float32(tiny):
    result = profile(tiny, batches=[2], engines=["eager", "int8"], runs=2)
    assert [(run.engine, run.error) for run in result.runs] == [("eager", None), ("int8", None)]
    (low,) = result.fidelity
    assert [run.gemm_fraction is None for run in result.runs] == [False, True]
    assert low.engine == "int8" and 0.9 < low.cosine_min < 1 and low.relative_difference > 0
    assert " int8 is " in result.verdict and "smallest cosine of a pooled vector" in result.verdict


def test_dtypes_that_overflow_are_holes(tiny):
    broken = tiny_model()
    with torch.no_grad():
        broken.encoder.vit.blocks[0].feed_forward.fc2.bias.fill_(1e6)  # float16 ends at 65504
    result = profile(broken, batches=[1], dtypes=["float32", "float16"], runs=1)
    assert math.isnan(result.fidelity[0].cosine_min)
    assert result.to_dict()["fidelity"][0]["cosine_min"] is None
    assert "float16 (eager) gives values that are not finite" in result.verdict


def test_an_engine_that_is_prepared_and_slower_all_the_same_is_told() -> None:
    def compared(batch: int, low: float, high: float, dtype: str = "float32") -> Comparison:
        ratio = WallTime((low + high) / 2, low, high)
        return Comparison(batch, "compile", "eager", ratio, dtype, dtype)

    rows = [compared(1, 1.1, 1.3), compared(8, 0.8, 0.9), compared(64, 0.9, 1.1)]
    first, second = slower_words([*rows, compared(8, 0.5, 0.7, "bfloat16")])
    assert first.startswith("compile is slower than eager in float32 at batch 8 (0.85 times): ")
    assert second.startswith("compile is slower than eager in bfloat16 at batch 8 (0.60 times): ")
    assert not [*slower_words(rows[:1])]


def test_the_largest_batch_is_on_the_line_through_the_peaks(tiny):
    runs = [
        ProfileRun(batch, "eager", "fused", peak_bytes=10 * MIB + batch * 4 * MIB)
        for batch in (1, 9)
    ]
    engine = Engine("eager", lambda images: None, "")
    weights = sum(p.numel() * 4 for p in tiny.encoder.parameters())
    (fit,) = largest_batches(runs, [Way(engine, tiny)], 110 * MIB + weights)
    assert fit.batch == 25 and fit.image_bytes == 4 * MIB and fit.weight_bytes == weights
    (none,) = largest_batches(runs, [Way(engine, tiny)], 2**10)
    assert none.batch == 0


def test_one_value_is_not_its_characters(tiny) -> None:
    result = profile(tiny, batches=2, engines="eager", dtypes="float32", runs=1, ops=0)
    assert [(run.batch, run.engine, run.dtype) for run in result.runs] == [(2, "eager", "float32")]


def test_the_largest_batch_counts_the_weights_that_a_session_holds() -> None:
    """The float32 graph has each weight once more, the 8-bit one a quarter of the linear maps."""
    model = tiny_model(hidden=128, heads=4, mlp_hidden=512)
    weights = sum(p.numel() * 4 for p in model.encoder.parameters())
    linear = sum(m.weight.numel() for m in model.encoder.modules() if isinstance(m, nn.Linear))
    graphs = ["onnx"] if onednn_limits() else ["onnx", "openvino"]  # which such limits refuse
    names = ["eager", "int8", *graphs]
    ways = [
        Way(prepare_engine(name, model.encoder, random_images(model, 1)), model) for name in names
    ]
    runs = [ProfileRun(1, name, "fused", peak_bytes=MIB) for name in names]
    memory = 100 * MIB
    fits = {fit.engine: fit for fit in largest_batches(runs, ways, memory)}
    assert fits["eager"].weight_bytes == weights
    for name in graphs:
        assert 2 * weights <= fits[name].weight_bytes < 2.5 * weights
    assert 2 * weights - 3 * linear <= fits["int8"].weight_bytes < fits["onnx"].weight_bytes
    for fit in fits.values():
        assert fit.batch == (memory - fit.weight_bytes) // MIB
