"""OpenAI's and OpenCLIP's vision towers give open_clip's numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoints.parity.compare import assert_close, images, ours, randomized
from tests.checkpoints.parity.open_clip_models import CASES, SIZES, Case, at_size, outputs
from vitcli.checkpoints.weights import load_weights
from vitcli.config.settings import Setting
from vitcli.errors import VitcliError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", CASES)
def test_equals_open_clip(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    model = randomized(case.make())
    case.save(model, tmp_path)
    loaded = load_weights(str(tmp_path), dtype=torch.float64)
    assert loaded.report.family == case.family
    assert loaded.report.preprocess_by == "open_clip_config.json"
    for size in SIZES[:1] if case.trunk is not None else SIZES:
        pixels = images(*size)
        with torch.no_grad():
            theirs = outputs(at_size(case, model, size), pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


def test_a_bare_file_needs_its_activation(tmp_path: Path) -> None:
    """The same tensors are a QuickGELU model and an exact one: 1e-2 apart, so it is asked for."""
    case = CASES["QuickGELU"]
    model = randomized(case.make())
    file = tmp_path / "clip.pt"
    torch.save(model.state_dict(), file)
    with pytest.raises(VitcliError) as error:
        load_weights(str(file))
    assert "activation" in error.value.message
    assert "--set encoder.activation=VALUE" in error.value.hint
    told = {"heads": 2, "norm_eps": 1e-5, "activation": "quick_gelu", "pooling": "cls"}
    settings = [
        Setting(("encoder", key), value, "--set")
        for key, value in {**told, "pool_norm": False, "position": "learned"}.items()
    ]
    loaded = load_weights(str(file), overrides=settings, dtype=torch.float64)
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


def test_the_tower_alone(tmp_path: Path) -> None:
    case = CASES["GELU"]
    model = randomized(case.make())
    torch.save({"state_dict": model.visual.state_dict()}, tmp_path / "visual.pt")
    told = {"heads": 2, "norm_eps": 1e-5, "activation": "gelu", "pooling": "cls"}
    settings = [
        Setting(("encoder", key), value, "--set")
        for key, value in {**told, "pool_norm": False, "position": "learned"}.items()
    ]
    loaded = load_weights(str(tmp_path / "visual.pt"), overrides=settings, dtype=torch.float64)
    assert loaded.report.family == "open-clip-tower"
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = outputs(model, pixels)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


@pytest.mark.parametrize("archive", [False, True])
def test_openai_files_say_the_rest_themselves(archive: bool, tmp_path: Path) -> None:
    """Their scalars tell them apart; heads of 64, QuickGELU and LN(CLS) are OpenAI's code."""
    case = Case("openai-clip", {"width": 128, "head_width": 64}, {"quick_gelu": True})
    model = randomized(case.make())
    for name, value in {"input_resolution": 32, "context_length": 8, "vocab_size": 12}.items():
        if hasattr(model, name):
            delattr(model, name)
        model.register_buffer(name, torch.tensor(value))
    pixels = images(32, 32)
    if archive:  # as they are published
        texts = torch.zeros(len(pixels), 8, dtype=torch.long)
        program = torch.jit.trace(model, (pixels, texts), check_trace=False)
        program.save(str(tmp_path / "openai.pt"))
    else:
        torch.save(model.state_dict(), tmp_path / "openai.pt")
    loaded = load_weights(str(tmp_path / "openai.pt"), dtype=torch.float64)
    assert loaded.report.family == case.family
    assert loaded.config.encoder.heads == 2
    assert loaded.config.preprocess.crop_size == (32, 32)
    with torch.no_grad():
        theirs = outputs(model, pixels)
    theirs.tokens = theirs.before_norm  # OpenAI norms CLS alone
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)


@pytest.mark.parametrize(
    "vision",
    [
        {"attentional_pool": True, "attn_pooler_heads": 2},
        {"qk_norm": True},
        {"pool_type": "none"},
    ],
)
def test_what_is_computed_otherwise_is_refused(vision: dict[str, object], tmp_path: Path) -> None:
    case = Case("open-clip", vision)
    case.save(case.make(), tmp_path)
    with pytest.raises(VitcliError):
        load_weights(str(tmp_path))
