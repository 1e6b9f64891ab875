"""Encoders that their own libraries run, against these libraries called directly."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

import vitcli
from tests.engines import sources
from vitcli.cli import app
from vitcli.commands.attention.reducers import FIELDS, attention_maps, observe_attention
from vitcli.engines.backbone import macs_per_image
from vitcli.engines.reference import LibraryEncoder
from vitcli.errors import VitcliError
from vitcli.images.synthetic import synthetic_image

timm = pytest.importorskip("timm")
pytest.importorskip("transformers")


def rows(value: Tensor, channels_last: bool = False) -> Tensor:
    """Tokens, or a map's tokens row by row, without vitcli."""
    if value.ndim == 3:
        return value
    value = value if channels_last else value.permute(0, 2, 3, 1)
    return value.reshape(len(value), -1, value.shape[-1])


def tokens_of(found: vitcli.Features) -> Tensor:
    """All tokens in the library's order."""
    b = len(found.patches)
    kinds = [None if t is None else t[:, None] for t in (found.cls, found.dist)]
    parts = [*kinds, found.registers, found.patches.reshape(b, -1, found.patches.shape[-1])]
    return torch.cat([part for part in parts if part is not None], dim=1)


def pixels(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", sources.TIMM)
def test_fresh_encoders_of_timm_are_timms_to_the_bit(name: str) -> None:
    before = torch.random.get_rng_state()
    model = vitcli.load(f"timm:{name}", seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    reference = timm.create_model(name).eval()
    x = pixels(model.input_size)
    found = model.features(x, layers=[1, -1])
    with torch.inference_mode():
        _, stages = reference.forward_intermediates(x, norm=False, output_fmt="NCHW")
        pooled = reference.forward_head(reference.forward_features(x), pre_logits=True)
        output = reference(x)
        features = reference.forward_features(x)
    assert torch.equal(tokens_of(found), rows(features, name == "test_mambaout"))
    assert found.pooled is not None and torch.equal(found.pooled, pooled)
    answer = found.output if reference.num_classes else found.pooled
    assert answer is not None and torch.equal(answer, output)
    assert len(stages) == model.config.encoder.depth
    for layer, stage in ((1, stages[0]), (-1, stages[-1])):
        assert torch.equal(found.layers[layer].patches.permute(0, 3, 1, 2), stage)
    assert model.parameters == sum(p.numel() for p in reference.parameters())


def test_a_checkpoint_of_timm_is_timms_to_the_bit(tmp_path: Path) -> None:
    source = sources.timm_swin(tmp_path / "source")
    model = vitcli.load(weights=source, engine="reference")
    reference = timm.create_model(f"local-dir:{source}", pretrained=True).eval()
    x = pixels(model.input_size)
    found = model.features(x)
    with torch.inference_mode():
        features = reference.forward_features(x)
    assert torch.equal(tokens_of(found), rows(features, channels_last=True))
    with torch.inference_mode():
        assert found.output is not None and torch.equal(found.output, reference(x))


@pytest.mark.parametrize(
    "make",
    [
        sources.transformers_swin,
        sources.transformers_resnet,
        sources.transformers_dinov2,
        sources.transformers_convnext,
    ],
)
def test_checkpoints_of_transformers_are_its_own_to_the_bit(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    from transformers import AutoModel

    source = make(tmp_path / "source")
    model = vitcli.load(weights=source, engine="reference")
    reference = AutoModel.from_pretrained(source).eval()
    x = pixels(model.input_size)
    found = model.features(x, layers=[0, -1])
    with torch.inference_mode():
        theirs: Any = reference(x)
    assert torch.equal(tokens_of(found), rows(theirs.last_hidden_state))
    assert found.pooled is not None
    assert torch.equal(found.pooled, theirs.pooler_output.flatten(1))
    assert found.output is None
    assert model.report is not None and "run by transformers, unchanged" in model.report.notes


@pytest.mark.parametrize("kind", ["ResNet", "ConvNext", "Swin", "ViT", "Dinov2"])
def test_classifiers_of_transformers_are_its_own_to_the_bit(kind: str, tmp_path: Path) -> None:
    """Tokens of the encoder, the vector that the classifier reads, and the logits."""
    import transformers

    source = sources.transformers_classifier(tmp_path / "source", kind, ("a", "b", "c"))
    model = vitcli.load(f"transformers:{source}")
    reference: Any = getattr(transformers, f"{kind}ForImageClassification").from_pretrained(source)
    reference.eval()
    x = pixels((32, 32))
    found = model.features(x)
    with torch.inference_mode():
        logits = reference(x).logits
        tokens = reference.base_model(x).last_hidden_state
        assert torch.equal(tokens_of(found), rows(tokens))
        assert found.output is not None and torch.equal(found.output, logits)
        assert found.pooled is not None
        assert torch.equal(reference.classifier(found.pooled), logits)
    assert model.parameters == sum(p.numel() for p in reference.parameters())


@pytest.mark.parametrize("kind", sources.OPEN_CLIP)
@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_open_clip_are_its_own_to_the_bit(kind: str, tmp_path: Path) -> None:
    library = pytest.importorskip("open_clip")
    source = sources.open_clip(tmp_path / "source", sources.OPEN_CLIP[kind])
    model = vitcli.load(f"open_clip:{source}")
    reference, _, transform = library.create_model_and_transforms(f"local-dir:{source}")
    reference.eval()
    x = pixels(model.input_size)
    found = model.features(x)
    with torch.inference_mode():
        answer = found.output if found.output is not None else found.pooled
        assert answer is not None and torch.equal(answer, reference.encode_image(x))
        if "timm" in kind:
            trunk = reference.visual.trunk
            features = trunk.forward_features(x)
            assert torch.equal(tokens_of(found), rows(features))
            assert found.pooled is not None and torch.equal(found.pooled, trunk(x))
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8))
    torch.testing.assert_close(model.transform(picture)[0], transform(picture), rtol=0, atol=1e-6)
    assert isinstance(model.encoder, LibraryEncoder)
    reference.requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        reference.encode_image(x[:1])
    macs = counter.get_total_flops() // 2
    assert macs_per_image(model.encoder.backbone, model.input_size) == macs > 0


def test_a_checkpoint_that_vitcli_knows_too_gives_the_same_vectors(tmp_path: Path) -> None:
    source = sources.transformers_dinov2(tmp_path / "source")
    own = vitcli.load(source, dtype="float64")
    theirs = vitcli.load(f"transformers:{source}", dtype="float64")
    picture = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    assert torch.equal(own.transform(picture), theirs.transform(picture))
    a, b = own.features(picture, [0, 1, 2]), theirs.features(picture, [0, 1, 2])
    torch.testing.assert_close(tokens_of(a), tokens_of(b), rtol=1e-12, atol=1e-12)
    for layer in (0, 1, 2):
        ours, there = tokens_of(a.layers[layer]), tokens_of(b.layers[layer])
        torch.testing.assert_close(ours, there, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("size", [(40, 50), (300, 200)])
def test_pixels_are_those_of_timms_transform(size: tuple[int, int]) -> None:
    model = vitcli.load("timm:test_convnext")
    reference = timm.create_model("test_convnext")
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8))
    config = timm.data.resolve_model_data_config(reference)
    expected = timm.data.create_transform(**config, is_training=False)(picture)
    torch.testing.assert_close(model.transform(picture)[0], expected, rtol=1e-6, atol=1e-6)


def test_a_size_of_image_is_the_librarys_business() -> None:
    vit = vitcli.load("timm:test_vit", image_size=(64, 96))
    assert vit.features(pixels((64, 96))).patches.shape[1:3] == (4, 6)
    net = vitcli.load("timm:test_resnet", image_size=(64, 96))
    assert net.features(pixels((64, 96))).patches.shape[1:3] == (2, 3)
    assert net.transform(np.zeros((20, 20, 3), np.uint8)).shape[-2:] == (64, 96)


@pytest.mark.parametrize("name", sources.TIMM)
def test_costs_of_timms_networks_are_torchs(name: str) -> None:
    """Parameters and MACs of the parts sum to those of timm's own forward pass."""
    reference = timm.create_model(name).eval()
    height, width = reference.pretrained_cfg["input_size"][-2:]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        reference(torch.zeros(1, 3, height, width))
    costs = vitcli.params(f"timm:{name}").models[0]
    assert costs.macs_per_image == sum(c.macs for c in costs.components)
    assert costs.macs_per_image == counter.get_total_flops() // 2
    assert costs.total == sum(c.parameters for c in costs.components)
    assert costs.total == sum(p.numel() for p in reference.parameters())
    layers = [info["module"] for info in reference.feature_info]
    parts = {c.name: c for c in costs.components}
    for layer in layers:
        module = reference.get_submodule(layer)
        assert parts[layer].parameters == sum(p.numel() for p in module.parameters())
    assert f"timm {timm.__version__}" in costs.counted and "FlopCounterMode" in costs.counted


def test_macs_of_a_stage_are_those_of_its_convolutions() -> None:
    """out numbers x numbers of a filter, written out, for every stage."""
    reference = timm.create_model("test_resnet").eval()
    counts: dict[str, int] = {}
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Conv2d):

            def count(module: Any, _: Any, out: Tensor, stage: str = name.split(".")[0]) -> None:
                macs = out.numel() * module.weight[0].numel()
                counts[stage] = counts.get(stage, 0) + macs

            module.register_forward_hook(count)
    reference(torch.zeros(1, 3, 64, 64))
    (costs,) = vitcli.params("timm:test_resnet", image_size=64).models
    parts = {c.name: c.macs for c in costs.components if c.macs}
    assert parts == counts | {"fc": reference.fc.in_features * reference.fc.out_features}


@pytest.mark.parametrize(
    "make",
    [sources.transformers_vit, sources.transformers_swin, sources.transformers_resnet],
)
def test_params_of_a_checkpoint_by_its_own_library(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    from transformers import AutoModel

    source = make(tmp_path / "source")
    reference = AutoModel.from_pretrained(source).eval()
    found = run("params", "--weights", source, "--engine", "reference", "--json")["models"][0]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        reference(torch.zeros(1, 3, *found["image_size"]))
    assert found["macs_per_image"] == counter.get_total_flops() // 2
    assert found["total"] == sum(p.numel() for p in reference.parameters())
    assert found["counted"].startswith("from the module of transformers")


def test_params_of_a_library_are_those_of_the_config_where_vitcli_has_one(tmp_path: Path) -> None:
    source = sources.transformers_dinov2(tmp_path / "source")
    own, theirs = vitcli.params(str(source), f"transformers:{source}").models
    mask_token = theirs.hidden  # of the pre-training, which vitcli leaves out
    assert own.total + mask_token == theirs.total
    assert own.macs_per_image == theirs.macs_per_image
    assert (own.biases, own.tokens, own.block_macs) == (
        theirs.biases,
        theirs.tokens,
        theirs.block_macs,
    )
    assert own.counted == "from the config"


def test_tables_and_figures_of_params_mix_libraries(tmp_path: Path) -> None:
    plot = tmp_path / "costs.png"
    names = ("--preset", "vit-ti16", "--preset", "timm:test_resnet", "--preset", "timm:test_vit")
    result = CliRunner().invoke(app, ["params", *names, "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    assert result.stdout.count("counted from the module of timm") == 2
    assert plot.stat().st_size > 0
    single = CliRunner().invoke(app, ["params", "--preset", "timm:test_resnet"])
    assert all(name in single.stdout for name in ("conv1", "layer1", "layer4", "fc"))


@pytest.mark.parametrize("make", [sources.transformers_vit, sources.transformers_dinov2])
def test_attention_is_what_transformers_returns(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    from transformers import AutoModel

    source = make(tmp_path / "source")
    reference = AutoModel.from_pretrained(source, attn_implementation="eager").double().eval()
    model = vitcli.load(f"transformers:{source}", dtype="float64")
    x = pixels(model.input_size).double()
    with torch.no_grad():
        expected = reference(x, output_attentions=True).attentions
    before = model.features(x)
    for block in (1, -1):
        got = model.attention(x, block)
        torch.testing.assert_close(got, expected[block - (block > 0)], rtol=1e-12, atol=1e-15)
    assert torch.equal(tokens_of(model.features(x)), tokens_of(before))  # the path is put back
    own = vitcli.attn_entropy([str(source)]).models[0]
    theirs = vitcli.attn_entropy([f"transformers:{source}"]).models[0]
    for ours, there in zip(own.layers, theirs.layers, strict=True):
        assert ours.entropy == pytest.approx(there.entropy, rel=1e-5)
        assert ours.attention_distance_px == pytest.approx(there.attention_distance_px, rel=1e-4)
        assert ours.patch_norm_median == pytest.approx(there.patch_norm_median, rel=1e-5)


def test_entropy_of_timms_attention_is_that_of_its_weights() -> None:
    """Against the softmax of timm's own queries and keys."""
    model = vitcli.load("timm:test_vit", dtype="float64", seed=4)
    torch.manual_seed(4)
    reference = timm.create_model("test_vit").double().eval()
    x = pixels(model.input_size).double()
    rows_of: list[Tensor] = []

    def keep(module: Any, given: Any, _: Any) -> None:
        q, k, _ = (
            module.qkv(given[0]).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        rows_of.append((module.q_norm(q) * module.scale @ module.k_norm(k).mT).softmax(-1))

    for block in reference.blocks:
        block.attn.register_forward_hook(keep)
    with torch.inference_mode():
        reference(x)
    for block, expected in enumerate(rows_of, start=1):
        torch.testing.assert_close(model.attention(x, block), expected, rtol=1e-12, atol=1e-14)
    seen = observe_attention(model.encoder, x)
    entropies = [-(p * p.log()).sum(-1).mean(-1) for p in rows_of]  # (B, H)
    got = seen.heads[..., FIELDS.index("entropy")]
    torch.testing.assert_close(got, torch.stack(entropies), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (sources.transformers_resnet, "returns no attention weights"),
        (sources.transformers_convnext, "returns no attention weights"),
        (sources.transformers_swin, "not between all tokens"),
        (sources.timm_swin, "returns no attention weights"),
    ],
)
def test_what_has_no_attention_says_so_in_one_line(
    make: Callable[[Path], Path], told: str, tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    asked = ["attn-entropy", "--weights", str(source), "--engine", "reference"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and told in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 3  # the report, the error, the hint


def test_maps_of_a_librarys_attention(tmp_path: Path) -> None:
    source = sources.transformers_vit(tmp_path / "source")
    own, theirs = vitcli.load(source), vitcli.load(f"transformers:{source}")
    x = pixels(own.input_size)
    a, b = (
        attention_maps(model.encoder, x, [1, 3], query="1,2", rollout=True)
        for model in (own, theirs)
    )
    for name in ("heads", "fused", "rollout"):
        torch.testing.assert_close(getattr(a, name), getattr(b, name), rtol=1e-4, atol=1e-6)
    plot = tmp_path / "maps.png"
    asked = ["attn-entropy", "--weights", f"transformers:{source}", "--overlay", str(plot)]
    result = CliRunner().invoke(app, [*asked, "--rollout"])
    assert result.exit_code == 0 and plot.stat().st_size > 0


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"preset": "timm:tset_resnet"}, "does not have this architecture"),
        ({"preset": "transformers:resnet"}, "builds nothing by name"),
        ({"preset": "vit-b16", "engine": "reference"}, "is not of another library"),
        ({"engine": "reference"}, "is not of another library"),
        ({"preset": "timm:test_vit", "engine": "compile"}, "is run by its own library"),
        ({"preset": "timm:test_vit", "set": {"encoder.depth": 3}}, "unchanged"),
        ({"weights": "timm:/nowhere/at/all"}, "cannot load it"),
    ],
)
def test_what_a_library_cannot_do_is_one_line(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(VitcliError, match=told) as caught:
        vitcli.load(**asked)
    assert "\n" not in caught.value.message and caught.value.hint


def test_what_is_not_asked_of_a_library_is_refused() -> None:
    model = vitcli.load("timm:test_resnet")
    with pytest.raises(VitcliError, match="attention weights"):
        model.attention(torch.zeros(1, 3, 160, 160))
    with pytest.raises(VitcliError, match="cannot run an input of 50x50"):
        vitcli.params(vitcli.load("timm:test_vit"), image_size=50)
    with pytest.raises(VitcliError, match="run by its own library"):
        vitcli.export(model, "x.onnx")


def test_a_stage_without_the_prefix_tokens_is_refused() -> None:
    model = vitcli.load("timm:cait_xxs24_224")  # its CLS joins after the blocks
    with pytest.raises(VitcliError, match="prefix tokens are not known"):
        model.features(torch.zeros(1, 3, 224, 224), layers=[3])


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes that differ in color."""
    rng = np.random.default_rng(0)
    for label, base in (("dark", 50), ("light", 200)):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(6):
            values = np.clip(rng.normal(base, 20, (40, 50, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(values).save(tmp_path / "pictures" / label / f"{number}.png")
    return tmp_path / "pictures"


def run(*arguments: object) -> Any:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_embed_and_neighbors_end_to_end(pictures: Path, tmp_path: Path) -> None:
    out = tmp_path / "vectors"
    asked = ("embed", pictures, "--preset", "timm:test_resnet", "--seed", "2", "--out", out)
    found = run(*asked, "--format", "npy", "--json", "--workers", "1")
    assert (found["ok"], found["engine"]) == (12, "reference")
    assert found["model"]["name"] == "timm:test_resnet" and found["model"]["heads"] is None
    torch.manual_seed(2)
    reference = timm.create_model("test_resnet").eval()
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(reference))
    files = sorted(pictures.rglob("*.png"))
    batch = torch.stack([transform(Image.open(file).convert("RGB")) for file in files])
    with torch.inference_mode():
        expected = reference.forward_head(reference.forward_features(batch), pre_logits=True)
    vectors = np.load(next(out.glob("*.npy")))
    np.testing.assert_allclose(vectors, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert run(*asked, "--format", "npy", "--json", "--workers", "1")["rows_encoded"] == 0
    copy = tmp_path / "copy.png"
    copy.write_bytes(files[3].read_bytes())
    nearest = run("neighbors", out, copy, "--json")["neighbours"][0]
    assert nearest["path"].endswith("dark/3.png")
    assert nearest["cosine"] == pytest.approx(1, abs=1e-5)


def test_stages_of_several_widths_are_columns_of_their_own(pictures: Path, tmp_path: Path) -> None:
    asked = ("embed", pictures, "--preset", "timm:test_convnext", "--out", tmp_path / "v")
    found = run(*asked, "--layers", "1,4", "--format", "safetensors", "--json", "--workers", "1")
    widths = [column["shape"] for column in found["columns"]]
    channels = timm.create_model("test_convnext").feature_info
    assert widths == [[channels[0]["num_chs"]], [channels[3]["num_chs"]]]


def test_probe_ranks_libraries_beside_vitclis_own(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = sources.transformers_dinov2(tmp_path / "dinov2")
    names = ("--preset", "timm:test_resnet", "--weights", source)
    found = run(
        *("probe", pictures, *names, "--weights", f"transformers:{source}"),
        *("--json", "--folds", "3", "--seeds", "1", "--k", "3"),
    )
    ranked = {one["weights"]: one for one in found["ranked"]}
    assert len(ranked) == 3
    net = timm.create_model("test_resnet")
    cost = ranked["random (seed 0)"]["cost"]
    assert cost["parameters"] == sum(p.numel() for p in net.parameters())
    own, theirs = ranked[str(source)], ranked[f"transformers:{source}"]
    assert own["cost"]["macs_per_image"] == theirs["cost"]["macs_per_image"]
    assert own["scores"] == theirs["scores"]


@pytest.mark.parametrize("asked", [["export", "x.onnx"], ["params", "--print-config"], ["explore"]])
def test_other_commands_say_that_they_do_not(asked: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*asked, "--preset", "timm:test_vit"])
    assert result.exit_code == 2
    assert "run by its own library" in result.stderr


def test_the_norms_of_a_net_are_those_of_its_stages() -> None:
    found = run("encode", "--preset", "timm:test_resnet", "--json", "--seed", "3")
    layers = found["images"][0]["layers"]
    names = ["input", "act1", "layer1", "layer2", "layer3", "layer4", "features"]
    assert [layer["name"] for layer in layers] == names
    assert all(layer["cls_norm"] is None for layer in layers)
    model = vitcli.load("timm:test_resnet", seed=3)
    picture = synthetic_image(model.input_size)
    torch.manual_seed(3)
    reference = timm.create_model("test_resnet").eval()
    with torch.inference_mode():
        stages = reference.forward_intermediates(model.transform(picture), intermediates_only=True)
    expected = [float(stage.norm(dim=1).mean()) for stage in stages]
    told = [layer["patch_norm_mean"] for layer in layers[1:6]]
    assert told == pytest.approx(expected, rel=1e-5)


def test_a_vit_of_a_library_has_blocks_by_number() -> None:
    found = run("encode", "--preset", "timm:test_vit", "--json")
    layers = found["images"][0]["layers"]
    assert [one["name"] for one in layers] == [
        "input",
        *(f"block {i}" for i in range(1, 7)),
        "norm",
    ]
    assert all(layer["cls_norm"] > 0 for layer in layers)


def test_compare_is_verify_between_the_engines(tmp_path: Path) -> None:
    source = sources.transformers_dinov2(tmp_path / "source")
    found = run("compare", source, f"transformers:{source}", "--dtype", "float64", "--json")
    assert found["verdict_code"] in ("rounding", "identical")
    layers = {row["layer"] for row in found["differences"]}
    assert layers >= {"pixels", "input", "block 1", "block 2", "norm", "pooled"}
    for layer in range(3):
        assert found["cka"]["values"][layer][layer] == pytest.approx(1, abs=1e-9)


def test_a_net_is_compared_with_a_vit_across_images(pictures: Path) -> None:
    files = sorted(map(str, pictures.rglob("*.png")))
    asked = ("compare", "timm:test_resnet", "timm:test_vit", *files, "--json")
    found = run(*asked, "--examples", "images")
    assert found["verdict_code"] == "incomparable"
    values = np.array(found["cka"]["values"], float)
    assert values.shape == (7, 8) and (values <= 1 + 1e-9).all()
    result = CliRunner().invoke(app, [*asked, "--examples", "patches"])
    assert result.exit_code == 2 and "CKA across patches needs" in result.stderr


def test_tables_and_figures_of_nets(tmp_path: Path, pictures: Path) -> None:
    files = sorted(map(str, pictures.rglob("*.png")))
    for command in (
        ["encode", files[0], "--preset", "timm:test_resnet"],
        ["compare", "timm:test_resnet", "timm:test_convnext", *files, "--examples", "images"],
    ):
        plot = tmp_path / f"{command[0]}.png"
        result = CliRunner().invoke(app, [*command, "--plot", str(plot)])
        assert result.exit_code == 0, result.output
        assert "layer4" in result.stdout and plot.stat().st_size > 0


def test_maps_of_features_are_for_vitclis_encoders(tmp_path: Path) -> None:
    asked = ["encode", "--preset", "timm:test_vit", "--map", str(tmp_path / "m.png")]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "--engine reference: does not support --map" in result.stderr


def test_profile_times_the_library_beside_vitcli(tmp_path: Path) -> None:
    source = sources.transformers_dinov2(tmp_path / "source")
    asked = ("profile", "--weights", source, "--engine", "eager", "--engine", "reference")
    found = run(*asked, "--batch", "1", "--runs", "2", "--ops", "0", "--json")
    assert [one["engine"] for one in found["runs"]] == ["eager", "reference"]
    assert all(one["error"] is None and one["images_per_s"] > 0 for one in found["runs"])
    assert found["engines"][1]["max_error"] < 1e-5
    assert found["machine"]["engines"]["reference"].startswith("transformers ")
    (speed,) = found["comparisons"]
    assert (speed["engine"], speed["baseline"]) == ("reference", "eager")
    for more, told in (
        (("--backward",), "another library's"),
        (("--attention", "explicit"), "attends in its own way"),
    ):
        result = CliRunner().invoke(app, [*map(str, asked), "--batch", "1", *more])
        assert result.exit_code == 2 and told in result.stderr


def test_profile_of_fresh_weights_has_no_library() -> None:
    asked = ["profile", "--preset", "vit-ti16", "--engine", "reference", "--batch", "1"]
    result = CliRunner().invoke(app, asked)
    assert result.exit_code == 2 and "no library wrote them" in result.stderr


def test_profile_times_an_encoder_that_only_its_library_runs(tmp_path: Path) -> None:
    named = ["profile", "--preset", "timm:test_resnet", "--image-size", "64"]
    asked = [*named, "--batch", "1", "--batch", "2", "--runs", "2"]
    found = run(*asked, "--ops", "3", "--memory", "1", "--json")
    assert [one["engine"] for one in found["runs"]] == ["reference"] * 2
    (costs,) = vitcli.params("timm:test_resnet", image_size=64).models
    assert found["macs_per_image"] == costs.macs_per_image
    for one in found["runs"]:
        work = 2 * costs.macs_per_image * one["batch"] / one["wall_s"]["median"]
        assert one["gflops"] == pytest.approx(work / 1e9)
        assert (one["attention"], one["gemm_fraction"], one["components"]) == ("library", None, [])
        assert len(one["ops"]) == 3
    assert found["fits"][0]["engine"] == "reference"
    for more, told in (
        (("--backward",), "another library's"),
        (("--attention", "explicit"), "attends in its own way"),
        (("--engine", "eager"), "is run by its own library"),
    ):
        result = CliRunner().invoke(app, [*asked, *more])
        assert result.exit_code == 2 and told in result.stderr
    source = str(sources.timm_swin(tmp_path / "swin"))  # vitcli does not implement it
    plot = str(tmp_path / "speed.png")
    result = CliRunner().invoke(
        app,
        [*("profile", "--weights", source, "--engine", "reference", "--batch", "1", "--runs", "1"),
         *("--dtype", "float32", "--dtype", "bfloat16", "--plot", plot)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "images/s" in result.stdout and Path(plot).stat().st_size > 0


def test_a_checkpoint_named_by_its_library_is_refused_elsewhere(tmp_path: Path) -> None:
    source = sources.transformers_dinov2(tmp_path / "source")
    result = CliRunner().invoke(app, ["export", "x.onnx", "--weights", f"transformers:{source}"])
    assert result.exit_code == 2 and "run by its own library" in result.stderr


@pytest.mark.parametrize("make", [sources.transformers_resnet, sources.timm_swin])
def test_the_error_of_another_architecture_names_the_engine(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = make(tmp_path / "source")
    with pytest.raises(VitcliError) as caught:
        vitcli.load(source)
    command = caught.value.hint.partition("vitcli ")[2]
    assert command == f"encode --weights {source} --engine reference"
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", [["export", "x.onnx", "--preset"], ["explore", "--preset"]])
def test_a_hint_of_another_command_works_when_typed(command: list[str]) -> None:
    result = CliRunner().invoke(app, [*command, "timm:test_resnet"])
    assert result.exit_code == 2 and "this command does not support" in result.stderr
    _, _, words = result.stderr.partition("try: vitcli ")
    assert CliRunner().invoke(app, shlex.split(words)).exit_code == 0


def test_a_size_that_a_library_refuses_is_one_line() -> None:
    result = CliRunner().invoke(app, ["encode", "--preset", "timm:test_vit", "--image-size", "50"])
    assert result.exit_code == 2
    assert "timm cannot run an input of 50x50 px" in result.stderr
    assert "try: leave out --image-size" in result.stderr
