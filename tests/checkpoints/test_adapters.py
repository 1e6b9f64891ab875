"""PEFT's adapters on a checkpoint, beside the formula of LoRA on the library's own model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from safetensors.torch import load_file, save_file

from tests.checkpoints.parity.compare import EXACT, assert_close, images, ours, randomized
from tests.checkpoints.parity.hf import BASE_POOLED, SMALL
from tests.checkpoints.parity.vlms import WHOLE
from vitcli.build import build_encoder
from vitcli.checkpoints.adapters import (
    adapt_heads,
    adapters,
    add_to_encoder,
    are_of_encoder,
    merged_state,
    read_peft,
    write_peft,
)
from vitcli.config.request import ModelRequest
from vitcli.config.schema import EncoderConfig
from vitcli.errors import VitcliError
from vitcli.loading import load_model

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none"}
# The module's name in a file, and where it is in transformers 5.
TARGETS = {
    "encoder.layer.0.attention.attention.query": "layers.0.attention.q_proj",
    "encoder.layer.1.attention.attention.value": "layers.1.attention.v_proj",
    "encoder.layer.1.intermediate.dense": "layers.1.mlp.fc1",
}


def adapter(folder: Path, names: dict[str, torch.Size], **config: Any) -> Path:
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, (out, width) in names.items():
        for part, shape in (("A", (2, width)), ("B", (out, 2))):
            draw = torch.randn(shape, generator=generator, dtype=torch.float64)
            tensors[f"base_model.model.{name}.lora_{part}.weight"] = draw
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | config))
    return folder


def merged(model: torch.nn.Module, folder: Path, places: dict[str, str], scale: float) -> None:
    """W + scale * B A, in the library's model."""
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, module in places.items():
            a, b = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
            model.get_submodule(module).weight += scale * (b @ a)


@pytest.mark.parametrize("names", ["file", "memory", "task"])
@pytest.mark.parametrize(("more", "scale"), [({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5)])
def test_adapters_of_a_library_model(
    names: str, more: dict[str, Any], scale: float, tmp_path: Path
) -> None:
    model = randomized(T.ViTModel(T.ViTConfig(**SMALL)))
    model.save_pretrained(tmp_path / "vit")
    spelled = {
        {"file": file, "memory": memory, "task": f"vit.{memory}"}[names]: memory
        for file, memory in TARGETS.items()
    }
    shapes = {name: model.get_submodule(at).weight.shape for name, at in spelled.items()}
    folder = adapter(tmp_path / "lora", shapes, **more)
    merged(model, folder, spelled, scale)
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = BASE_POOLED(model, pixels)
    for path in (folder, folder / "adapter_model.safetensors"):
        request = ModelRequest(
            weights=str(tmp_path / "vit"), adapter=str(path), dtype="float64", device="cpu"
        )
        assert_close(theirs, ours(load_model(request).encoder, pixels), EXACT)


def test_of_a_vlms_adapters_those_of_its_tower_are_read(tmp_path: Path) -> None:
    case = WHOLE["llava"]
    model = randomized(case.make())
    model.save_pretrained(tmp_path / "llava")
    ends = ("mlp.up_proj", "self_attn.q_proj")
    language = [n for n, _ in model.named_modules() if "language_model" in n and n.endswith(ends)]
    tower = [f"{case.tower}.encoder.layers.{i}.self_attn.q_proj" for i in (0, 1)]
    tower = [name for name, _ in model.named_modules() if name in tower]
    assert len(language) == len(tower) == 2
    shapes = {name: model.get_submodule(name).weight.shape for name in (*language, *tower)}
    folder = adapter(tmp_path / "lora", shapes)
    merged(model, folder, {name: name for name in tower}, 3.0)
    pixels = images(32, 32)
    with torch.no_grad():
        theirs = case.run(model.get_submodule(case.tower), pixels)
    request = ModelRequest(
        weights=str(tmp_path / "llava"), adapter=str(folder), dtype="float64", device="cpu"
    )
    loaded = load_model(request)
    assert_close(theirs, ours(loaded.encoder, pixels), case.tolerance)
    assert loaded.report is not None
    assert "2 adapters of the language model, not read" in loaded.report.notes
    adapter(tmp_path / "lora", {name: shapes[name] for name in language})
    with pytest.raises(VitcliError, match="none of the vision tower"):
        load_model(request)


def test_adapters_in_the_names_of_our_own_encoder(tmp_path: Path) -> None:
    model = randomized(T.ViTModel(T.ViTConfig(**SMALL)))
    model.save_pretrained(tmp_path / "vit")
    name = "vit.blocks.0.attention.qkv"
    folder = adapter(tmp_path / "lora", {name: torch.Size((48, 16))})
    plain, changed = (
        load_model(
            ModelRequest(weights=str(tmp_path / "vit"), adapter=path, dtype="float64", device="cpu")
        ).encoder
        for path in (None, str(folder))
    )
    merged(plain, folder, {name: name}, 3.0)
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(changed.state_dict()[key], value, rtol=EXACT, atol=EXACT)


def test_what_is_written_for_peft_is_the_change_that_the_adapters_make(tmp_path: Path) -> None:
    config = EncoderConfig(hidden=16, depth=2, heads=2, mlp_hidden=32, image_size=(32, 32))
    base, encoder = (build_encoder(config, seed=1).double() for _ in range(2))
    adapt_heads(encoder, [(0, 0), (0, 1), (1, 1)], parts=("q", "v"), rank=3, alpha=5.0)
    generator = torch.Generator().manual_seed(2)
    for _, one in adapters(encoder):
        with torch.no_grad():
            one.up.copy_(torch.randn(one.up.shape, generator=generator))
    write_peft(tmp_path, encoder)
    wanted = merged_state(encoder)
    found = read_peft(str(tmp_path))
    assert found is not None and are_of_encoder(found) and len(found) == 2
    add_to_encoder(base, found)
    for name, value in base.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=EXACT, atol=EXACT)
    ranks = json.loads((tmp_path / "adapter_config.json").read_text())["rank_pattern"]
    assert ranks == {"vit.blocks.0.attention.qkv": 12, "vit.blocks.1.attention.qkv": 6}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"use_dora": True}, "use_dora = True is not supported"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3' is not supported"),
        ({"modules_to_save": ["classifier"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
    ],
)
def test_what_peft_does_besides_is_refused(
    config: dict[str, Any], told: str, tmp_path: Path
) -> None:
    T.ViTModel(T.ViTConfig(**SMALL)).save_pretrained(tmp_path / "vit")
    folder = adapter(tmp_path / "lora", {"layers.0.mlp.fc1": torch.Size((40, 16))}, **config)
    with pytest.raises(VitcliError) as caught:
        load_model(ModelRequest(weights=str(tmp_path / "vit"), adapter=str(folder), device="cpu"))
    assert told in caught.value.message


@pytest.mark.parametrize(
    ("name", "shape"), [("layers.7.mlp.fc1", (40, 16)), ("layers.0.mlp.fc1", (40, 17))]
)
def test_adapters_of_another_model_are_refused(
    name: str, shape: tuple[int, int], tmp_path: Path
) -> None:
    T.ViTModel(T.ViTConfig(**SMALL)).save_pretrained(tmp_path / "vit")
    folder = adapter(tmp_path / "lora", {name: torch.Size(shape)})
    with pytest.raises(VitcliError, match=f"the adapter changes {name}.weight, 40x{shape[1]}"):
        load_model(ModelRequest(weights=str(tmp_path / "vit"), adapter=str(folder), device="cpu"))
    with pytest.raises(VitcliError, match="--weights is missing"):
        load_model(ModelRequest(preset="vit-ti16", adapter=str(folder), device="cpu"))
