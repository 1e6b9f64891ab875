"""oneDNN's kernels give the same outputs, step aside where they do not apply, leave no trace."""

import copy

import pytest
import torch
from torch import nn

from tests.conftest import tiny_encoder
from vitcli.engines.pytorch import ONEDNN, _OneDnnPatches, onednn_kernels
from vitcli.nn.encoder import hooked, layer_points

pytestmark = pytest.mark.skipif(ONEDNN is None, reason="this torch has no oneDNN kernels")
OPERATOR = "mkldnn::_linear_pointwise"


def calls(recording) -> set[str]:
    return {event.name for event in recording.events()}


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
    encoder = tiny_encoder(**changes).float()
    pictures = images.float()
    with torch.inference_mode(), torch.profiler.profile() as recording, onednn_kernels(encoder):
        answers = encoder(pictures)
    assert OPERATOR in calls(recording)
    for ours, theirs in zip(answers, encoder(pictures), strict=True):
        if theirs is not None:
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-5)


def test_gradients_float64_and_autocast_run_as_before(images):
    plain = tiny_encoder()
    fast = copy.deepcopy(plain)
    with onednn_kernels(fast):
        fast(images).tokens.sum().backward()  # the operator has no gradient
    plain(images).tokens.sum().backward()
    for ours, theirs in zip(fast.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    with torch.inference_mode(), onednn_kernels(fast):
        assert torch.equal(fast(images).tokens, plain(images).tokens)
        with torch.autocast("cpu", torch.bfloat16), torch.profiler.profile() as recording:
            fast.float()(images.float())
    assert OPERATOR not in calls(recording)


def test_hooks_inside_the_feed_forward_still_fire(images):
    fast = tiny_encoder().float()
    block = fast.vit.blocks[0]
    seen = []
    points = [(block.feed_forward.activation, seen.append), (block.attention.qkv, seen.append)]
    points += [(layer_points(fast)[1][1], seen.append), (fast.vit, seen.append)]
    with torch.inference_mode(), onednn_kernels(fast), hooked(points):
        fast(images.float())
    assert len(seen) == 4


def test_a_loaded_model_is_plain_torch_before_and_after(images):
    encoder = tiny_encoder().float()
    kinds = [type(module) for module in encoder.modules()]
    names = {name: set(vars(module)) for name, module in encoder.named_modules()}
    with pytest.raises(RuntimeError), onednn_kernels(encoder):
        assert type(encoder.vit.blocks[0].attention.proj) is not nn.Linear
        raise RuntimeError
    assert [type(module) for module in encoder.modules()] == kinds
    assert {name: set(vars(module)) for name, module in encoder.named_modules()} == names


@pytest.mark.parametrize("size", [(24, 32), (29, 23)])
def test_a_patch_projection_as_a_linear_map_is_the_convolution(size):
    """Pixels beyond the last whole patch are left out by both."""
    projection = nn.Conv2d(3, 10, 8, 8)
    pictures = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected = projection(pictures)
        projection.__class__ = _OneDnnPatches
        torch.testing.assert_close(projection(pictures), expected, rtol=1e-5, atol=1e-5)
