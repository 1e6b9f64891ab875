"""Each instant belongs to one component, and the components are those of `vitcli params`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profiler

from tests.conftest import tiny_encoder
from vitcli.commands.params import analysis as components
from vitcli.commands.profile.components import (
    BACKWARD,
    MARK,
    OTHER,
    component_modules,
    component_ranges,
    component_times,
    whole_step,
)
from vitcli.commands.profile.measure import training_step
from vitcli.nn.encoder import explicit_attention


def event(name: str, start: float, end: float, parent: Any = None, sequence: int = -1) -> Any:
    interval = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    return SimpleNamespace(
        name=name,
        time_range=interval,
        cpu_parent=parent,
        sequence_nr=sequence,
        device_time_total=(end - start) / 2,
    )


def known_nest() -> list[Any]:
    """step 0-100 us; qkv 10-40 with an operator in an operator; FFN 50-90 with a norm 60-65."""
    step = event(MARK + OTHER, 0, 100)
    qkv = event(MARK + components.QKV, 10, 40, step)
    linear = event("aten::linear", 11, 39, qkv)
    addmm = event("aten::addmm", 12, 38, linear)
    ffn = event(MARK + components.FFN, 50, 90, step)
    wrapper = event("aten::linear", 55, 70, ffn)
    norm = event(MARK + components.NORMS, 60, 65, wrapper)
    return [step, qkv, linear, addmm, ffn, wrapper, norm]


def test_self_times_of_a_known_nest():
    seconds = component_times(known_nest())
    expected = {OTHER: 30e-6, components.QKV: 30e-6, components.FFN: 35e-6, components.NORMS: 5e-6}
    assert seconds == pytest.approx(expected)
    assert sum(seconds.values()) == pytest.approx(100e-6)  # the step, each instant once
    on_device = component_times(known_nest(), on_device=True)
    assert on_device == pytest.approx({name: value / 2 for name, value in expected.items()})


def test_the_backward_pass_belongs_to_the_component_that_made_it():
    step = event(MARK + OTHER, 0, 100)
    qkv = event(MARK + components.QKV, 10, 20, step)
    # detach records nothing and carries the number of the next operator that does
    detach = event("aten::detach", 11, 12, qkv, sequence=7)
    ffn = event(MARK + components.FFN, 20, 30, step)
    addmm = event("aten::addmm", 21, 29, ffn, sequence=7)
    back = event(BACKWARD + "AddmmBackward0", 50, 75, step, sequence=7)
    inner = event("aten::mm", 51, 70, back, sequence=7)
    accumulate = event(BACKWARD + "torch::autograd::AccumulateGrad", 80, 85, step)
    seconds = component_times([step, qkv, detach, ffn, addmm, back, inner, accumulate])
    assert seconds == pytest.approx({components.QKV: 10e-6, components.FFN: 35e-6, OTHER: 55e-6})


def test_a_nest_that_torch_recorded_adds_up_to_its_outer_range():
    x = torch.ones(64, 64)
    with torch_profiler(activities=[ProfilerActivity.CPU]) as recording, whole_step():
        x @ x
        with record_function(MARK + components.FFN):
            nn.functional.linear(x, x)
            with record_function(MARK + components.NORMS):
                nn.functional.layer_norm(x, (64,))
    events = {e.name: e.time_range.elapsed_us() * 1e-6 for e in recording.events()}
    seconds = component_times(recording.events())
    whole, ffn, norms = (events[MARK + name] for name in (OTHER, components.FFN, components.NORMS))
    expected = {OTHER: whole - ffn, components.FFN: ffn - norms, components.NORMS: norms}
    assert seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "more"),
    [
        ({}, {components.POSITIONS}),
        (
            {"position": "rope2d", "layer_scale": 0.1},
            {components.POSITIONS, components.LAYER_SCALE},
        ),
        ({"ln_pre": True, "pooling": "map", "pool_norm": True}, {components.LN_PRE}),
        ({"attention": {"qk_norm": "head"}, "mlp": "gated"}, {components.QK_NORM}),
    ],
)
def test_components_of_an_encoder(changes, more, images):
    encoder = tiny_encoder(head="linear", head_out=5, **changes)
    modules = component_modules(encoder)
    inside = {id(part) for _, module in modules for part in list(module.modules())[1:]}
    assert not inside & {id(module) for _, module in modules}  # none within another
    before = dict(vars(encoder.front_end.position))
    with (
        torch.inference_mode(),
        component_ranges(encoder),
        torch_profiler(activities=[ProfilerActivity.CPU]) as recording,
        whole_step(),
    ):
        encoder(images)
    always = {
        *(
            components.PATCH_EMBEDDING,
            components.NORMS,
            components.QKV,
            components.ATTENTION_PRODUCTS,
            OTHER,
        ),
        *(
            components.OUTPUT_PROJECTION,
            components.FFN,
            components.FINAL_NORM,
            components.POOLING,
            components.HEAD,
        ),
    }
    seconds = component_times(recording.events())
    assert always | more <= set(seconds) <= always | more | {components.POSITIONS}
    assert all(value > 0 for value in seconds.values())
    assert vars(encoder.front_end.position).keys() == before.keys()
    assert not any(module._forward_hooks or module._forward_pre_hooks for _, module in modules)


def operators_of(recording: Any, component: str) -> set[str]:
    """Operators whose nearest range is the component's."""
    found = set()
    for e in recording.events():
        outer = e.cpu_parent
        while outer is not None and not outer.name.startswith(MARK):
            outer = outer.cpu_parent
        if outer is not None and outer.name == MARK + component:
            found.add(e.name)
    return found


def test_products_and_softmax_are_apart_from_projections_when_explicit(images):
    encoder = tiny_encoder()
    with (
        explicit_attention(encoder),
        torch.inference_mode(),
        component_ranges(encoder),
        torch_profiler(activities=[ProfilerActivity.CPU]) as recording,
        whole_step(),
    ):
        encoder(images)
    assert {"aten::softmax", "aten::bmm"} <= operators_of(recording, components.ATTENTION_PRODUCTS)
    for component in (components.QKV, components.OUTPUT_PROJECTION, OTHER):
        assert not {"aten::softmax", "aten::bmm"} & operators_of(recording, component)
    assert "aten::add" in operators_of(recording, OTHER)  # the residual sums


@pytest.mark.parametrize(
    ("position", "operator"),
    [
        *[(kind, "aten::cos") for kind in ("rope2d", "learned+rope2d", "mixed_rope2d")],
        *[("learned+mixed_rope2d", "aten::cos"), ("relative2d", "aten::index")],
        ("alibi2d", "aten::sqrt"),
    ],
)
def test_what_a_position_encoding_computes_is_its_own(position, operator, images):
    encoder = tiny_encoder(position=position)
    before = [dict(vars(part)) for part in encoder.front_end.position.modules()]
    with (
        torch.inference_mode(),
        component_ranges(encoder),
        torch_profiler(activities=[ProfilerActivity.CPU]) as recording,
        whole_step(),
    ):
        expected = encoder(images)
    assert operator in operators_of(recording, components.POSITIONS)
    for component in (OTHER, components.ATTENTION_PRODUCTS):
        assert operator not in operators_of(recording, component)
    assert [dict(vars(part)) for part in encoder.front_end.position.modules()] == before
    assert torch.equal(encoder(images).tokens, expected.tokens)


def test_a_training_step_gives_its_backward_pass_to_components(images):
    encoder = tiny_encoder().train()
    with (
        component_ranges(encoder),
        torch_profiler(activities=[ProfilerActivity.CPU]) as recording,
        whole_step(),
    ):
        training_step(encoder, images)
    events = recording.events()
    backward = sum(
        e.time_range.elapsed_us() * 1e-6
        for e in events
        if e.name.startswith(BACKWARD)
        and any(word in e.name for word in ("AddmmBackward", "LayerNorm", "Gelu", "Convolution"))
    )
    forward_only = [e for e in events if not e.name.startswith(BACKWARD)]
    gained = {
        name: value - component_times(forward_only)[name]
        for name, value in component_times(events).items()
    }
    assert (
        gained[components.FFN] > 0 and gained[components.QKV] > 0 and gained[components.NORMS] > 0
    )
    assert sum(gained.values()) == pytest.approx(0, abs=1e-9)  # moved out of OTHER, not added
    assert -gained[OTHER] >= backward  # all of these went to a component
