"""The faster linear maps give the same outputs, and step aside wherever they do not apply."""

import copy
import pickle

import pytest
import torch

from tests.conftest import tiny_encoder
from vitcli.engines.onednn import accelerate, onednn_linear, restore
from vitcli.nn.hooks import layer_points, tapped

needs_onednn = pytest.mark.skipif(onednn_linear.operator is None, reason="torch without oneDNN")


def calls(recording) -> set[str]:
    return {event.name for event in recording.events()}


@needs_onednn
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "gelu_tanh", "attention": {"qkv_bias": "none"}, "pooling": "map"},
        {"activation": "quick_gelu", "attention": {"qkv_bias": "qv"}},
        {"mlp": "gated", "activation": "silu", "head": "linear", "head_out": 3},
    ],
)
def test_outputs_agree_with_plain_torch(changes, images):
    plain = tiny_encoder(**changes).float()
    fast = accelerate(copy.deepcopy(plain))
    pictures = images.float()
    with torch.inference_mode(), torch.profiler.profile() as recording:
        answers = fast(pictures)
    assert "mkldnn::_linear_pointwise" in calls(recording)
    for ours, theirs in zip(answers, plain(pictures), strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


@needs_onednn
def test_gradients_float64_and_autocast_run_as_before(images):
    plain = tiny_encoder()
    fast = accelerate(copy.deepcopy(plain))
    fast(images).tokens.sum().backward()  # the operator has no gradient
    plain(images).tokens.sum().backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with torch.inference_mode():
        assert torch.equal(fast(images).tokens, plain(images).tokens)
        with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as recording:
            fast.float()(images.float())
    assert "mkldnn::_linear_pointwise" not in calls(recording)


@needs_onednn
def test_hooks_inside_the_feed_forward_still_fire(images):
    fast = accelerate(tiny_encoder().float())
    block = fast.vit.blocks[0]
    seen = []
    points = [(block.feed_forward.activation, seen.append), (block.attention.qkv, seen.append)]
    with torch.inference_mode(), tapped([*points, (layer_points(fast)[1][1], seen.append)]):
        fast(images.float())
    assert len(seen) == 3


def test_restore_leaves_nothing_behind(images):
    encoder = tiny_encoder()
    before = {name: set(vars(module)) for name, module in encoder.named_modules()}
    restore(accelerate(encoder))
    assert {name: set(vars(module)) for name, module in encoder.named_modules()} == before


@needs_onednn
def test_an_accelerated_encoder_can_be_copied_and_pickled(images):
    fast = accelerate(tiny_encoder().float())
    pictures = images.float()
    with torch.inference_mode():
        expected = fast(pictures).tokens
        for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
            assert torch.equal(twin(pictures).tokens, expected)
            twin.vit.blocks[0].attention.proj.weight.mul_(2)
            twin.vit.blocks[0].feed_forward.fc1.weight.mul_(2)
            assert not torch.equal(twin(pictures).tokens, expected)
        assert torch.equal(fast(pictures).tokens, expected)  # the twins' weights are their own
