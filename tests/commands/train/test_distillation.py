"""Distillation: its loss by DeiT's equations, teachers of known answers, runs that go on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import vitcli
from tests.commands.train.runs import command, request, run, shell
from tests.engines import sources
from vitcli.commands.train import analysis as train
from vitcli.commands.train.data import ShapesSource, channels
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.optimization import distillation_loss
from vitcli.commands.train.start import World, load_teacher, start_encoder
from vitcli.config.schema import PreprocessConfig
from vitcli.config.training import TrainConfig
from vitcli.errors import VitcliError
from vitcli.images.synthetic import Shapes

CPU = torch.device("cpu")
CLASSES = ("circle", "square", "triangle", "cross")
B, K = 5, 7


def numbers(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits (2, B, K) of a student, labels (B), logits (B, K) of a teacher, all in float64."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(2, B, K)), rng.integers(0, K, B), 3 * rng.normal(size=(B, K))


def loss(logits: Any, labels: Any, told: Any, **recipe: Any) -> float:
    values = map(torch.from_numpy, (logits, labels, told))
    return float(distillation_loss(*values, TrainConfig(**recipe)))


def log_softmax(values: np.ndarray) -> np.ndarray:
    logs: np.ndarray = values - np.log(np.exp(values).sum(1, keepdims=True))
    return logs


@pytest.mark.parametrize(("alpha", "smoothing"), [(0.5, 0.0), (0.1, 0.2)])
def test_hard_is_equation_3(alpha: float, smoothing: float) -> None:
    """The labels of the data are smoothed, those of the teacher are not."""
    logits, labels, told = numbers(0)
    rows = np.arange(B)
    wanted = np.full((B, K), smoothing / K)
    wanted[rows, labels] += 1 - smoothing
    base = -(wanted * log_softmax(logits[0])).sum(1).mean()
    copied = -log_softmax(logits[1])[rows, told.argmax(1)].mean()
    recipe = {"distillation_alpha": alpha, "label_smoothing": smoothing}
    both = (1 - alpha) * base + alpha * copied
    assert loss(logits, labels, told, **recipe) == pytest.approx(both, rel=1e-12)
    # Mixed labels (B, K) are smoothed already.
    assert loss(logits, wanted, told, **recipe) == pytest.approx(both, rel=1e-12)


@pytest.mark.parametrize(("alpha", "t"), [(0.5, 1.0), (0.1, 3.0)])
def test_soft_is_equation_2(alpha: float, t: float) -> None:
    logits, labels, told = numbers(1)
    base = -log_softmax(logits[0])[np.arange(B), labels].mean()
    its, mine = log_softmax(told / t), log_softmax(logits[1] / t)
    copied = t**2 * (np.exp(its) * (its - mine)).sum(1).mean()
    found = loss(
        *(logits, labels, told),
        distillation="soft",
        distillation_alpha=alpha,
        distillation_temperature=t,
    )
    assert found == pytest.approx((1 - alpha) * base + alpha * copied, rel=1e-12)


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_it_is_timms_token_distillation(kind: str) -> None:
    task = pytest.importorskip("timm.task")
    logits, labels, told = numbers(2)

    class Student(nn.Module):
        pretrained_cfg: ClassVar = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
        num_classes, in_chans = K, 3

        def set_distilled_training(self, enable: bool) -> None:
            assert enable

        def forward(self, images: Any) -> Any:
            return torch.from_numpy(logits[0]), torch.from_numpy(logits[1])

    class Constant(nn.Module):
        def forward(self, images: Any) -> Any:
            return torch.from_numpy(told)

    theirs = task.TokenDistillationTask(
        Student(),
        Constant(),
        nn.CrossEntropyLoss(),
        distill_type=kind,
        task_loss_weight=0.7,
        temperature=2.5,
        device=CPU,
        verbose=False,
    )(torch.zeros(B, 3, 4, 4), torch.from_numpy(labels))["loss"]
    ours = loss(
        *(logits, labels, told),
        distillation=kind,
        distillation_alpha=0.3,
        distillation_temperature=2.5,
    )
    assert ours == pytest.approx(float(theirs), rel=1e-12)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with a linear classifier on mean-pooled patches."""
    out = tmp_path_factory.mktemp("teacher") / "run"
    run(out, train__seed=1, encoder__pooling="mean", preprocess__std=[0.5, 0.25, 0.2])
    return out


def constant(trained: Path, place: Path, bias: list[float]) -> Path:
    """A copy of the teacher that answers `bias` whatever the image is."""
    shutil.copytree(trained, place)
    tensors = load_file(place / "model.safetensors")
    assert tensors["head.linear.bias"].shape == (4,)
    tensors["head.linear.weight"].zero_()
    tensors["head.linear.bias"].copy_(torch.tensor(bias))
    save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
    return place


def test_the_token_learns_a_constant_teacher_and_cls_the_labels(
    trained: Path, tmp_path: Path
) -> None:
    """The teacher says `triangle` of everything: the classifier on the token says it too, the one
    on CLS does not, and what the run answers is the mean of both."""
    teacher = constant(trained, tmp_path / "teacher", [0.0, -1.0, 3.0, 1.0])
    result = run(
        tmp_path / "run",
        train__teacher=str(teacher),
        train__lr=0.01,
        train__epochs=4,
        train__distillation_alpha=0.9,
    )
    model = vitcli.load(tmp_path / "run")
    pixels, _ = Shapes(model.input_size, CLASSES, 0.1, 5).batch(range(32))
    mean, scale = channels(model.preprocessing)
    with torch.no_grad():
        out = model.encoder((torch.from_numpy(pixels).float() - mean) * scale)
        on_cls, on_dist = cast(Any, model.encoder.head).both(out.tokens)
    assert (on_dist.argmax(1) == 2).all()
    assert (on_dist - on_cls)[:, 2].min() > 1
    assert torch.equal(out.output, (on_cls + on_dist) / 2)
    told = result.config["train"]
    assert told["teacher"] == str(teacher) and len(told["teacher_sha256"]) == 64
    written = (tmp_path / "run" / "config.yaml").read_text()
    assert told["teacher_sha256"] in written and "head: distilled" in written
    assert "dist_token: true" in written


def test_a_step_has_the_loss_of_both_classifiers(trained: Path, tmp_path: Path) -> None:
    """A soft teacher of known probabilities, on the batch of the first step."""
    bias = [0.0, -1.0, 3.0, 1.0]
    teacher = constant(trained, tmp_path / "teacher", bias)
    asked = request(
        train__teacher=str(teacher),
        train__distillation="soft",
        train__distillation_alpha=0.25,
        train__distillation_temperature=2.0,
    )
    config = train.shapes_config(asked)
    data = ShapesSource(train.shapes_of(config), 64, 64, config.preprocess)
    encoder = start_encoder(config.encoder, config.train)
    taught = load_teacher(config.train, data.classes, config.preprocess, CPU)
    trainer = Trainer(encoder, data, config.train, CPU, World(), teacher=taught)
    images, labels = batch = next(trainer._batches())
    with torch.no_grad():
        tokens = encoder(images).tokens
        on_cls, on_dist = (values.double().numpy() for values in encoder.head.both(tokens))
    its, mine = log_softmax(np.array([bias]) / 2), log_softmax(on_dist / 2)
    copied = 4 * (np.exp(its) * (its - mine)).sum(1).mean()
    base = -log_softmax(on_cls)[np.arange(8), labels.numpy()].mean()
    _, entry = trainer._update(batch)
    assert entry["loss"] == pytest.approx(0.75 * base + 0.25 * copied, rel=1e-5)  # in float32


def test_a_compiled_student_has_the_loss_of_one_that_is_not(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced, forwards and backwards, by torch.compile; the backend is that which needs no C++."""
    keys = {"train__teacher": str(trained), "train__distillation": "soft"}
    plain = run(**keys)
    compiled: list[nn.Module] = []

    def traced(model: nn.Module) -> Any:
        compiled.append(model)
        return compile_(model, backend="aot_eager", fullgraph=True)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", traced)
    found = run(**keys, train__compile=True)
    assert len(compiled) == 1
    first, same = found.history[0], plain.history[0]  # what follows grows from rounding
    assert first.loss == pytest.approx(same.loss, rel=1e-5)
    assert first.grad_norm == pytest.approx(same.grad_norm, rel=1e-4)
    assert [row.step for row in found.history] == [row.step for row in plain.history]


def test_a_teacher_reads_what_it_would_read_itself(trained: Path) -> None:
    """Its own normalization of the pixels that the student read, and classes by name."""
    own = PreprocessConfig.for_output((16, 16))
    order = ("cross", "triangle", "circle")
    teacher = load_teacher(TrainConfig(teacher=str(trained)), order, own, CPU)
    model = vitcli.load(trained)
    assert model.preprocessing.std != own.std and model.config.classes == CLASSES
    pixels = torch.randint(0, 256, (4, 3, 16, 16), generator=torch.Generator().manual_seed(0))
    (mean, scale), (its_mean, its_scale) = map(channels, (own, model.preprocessing))
    with torch.no_grad():
        expected = model.encoder((pixels - its_mean) * its_scale).output[:, [3, 2, 0]]
    found = teacher((pixels - mean) * scale)
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert not found.requires_grad and teacher.training is not None
    larger = torch.nn.functional.interpolate(
        (pixels.float() - mean) * scale, (32, 32), mode="nearest"
    )
    assert teacher(larger).shape == (4, 3)  # resized to what the teacher reads


def test_a_distilled_run_goes_on_as_if_it_had_not_been_stopped(
    trained: Path, tmp_path: Path
) -> None:
    keys = {"train__teacher": str(trained), "train__mixup": 0.8}
    whole = run(tmp_path / "whole", **keys)
    run(tmp_path / "cut", **keys)
    shutil.rmtree(tmp_path / "cut" / "snapshots" / "step-000000008")
    moved = shutil.copytree(trained, tmp_path / "moved")
    rest = run(tmp_path / "cut", resume=True, **keys | {"train__teacher": str(moved)})
    assert [row.loss for row in rest.history] == [row.loss for row in whole.history]
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut")]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    other = constant(trained, tmp_path / "other", [0.0] * 4)
    with pytest.raises(VitcliError, match="has other weights than when the run began"):
        run(tmp_path / "cut", resume=True, **keys | {"train__teacher": str(other)})


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"train__teacher": "no/such/run"}, "no/such/run"),
        ({"data__classes": ["circle", "star", "ring"]}, "has no output for ring, star"),
        ({"encoder__head": "linear", "encoder__head_out": 4}, "leave encoder.head out"),
        ({"encoder__cls_token": False, "encoder__pooling": "mean"}, "needs a CLS token"),
        ({"train__backbone": "timm:resnet18"}, "only `encoder` has a distillation token"),
        ({"train__distillation_alpha": 1.0}, "distillation_alpha"),
    ],
)
def test_what_cannot_be_distilled_is_refused_before_there_is_a_run(
    keys: dict[str, Any], told: str, trained: Path, tmp_path: Path
) -> None:
    with pytest.raises(VitcliError) as caught:
        run(tmp_path / "run", **{"train__teacher": str(trained)} | keys)
    assert told in f"{caught.value.message} {caught.value.hint}" and caught.value.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_a_teacher_without_names_or_a_classifier_is_refused(trained: Path, tmp_path: Path) -> None:
    place = shutil.copytree(trained, tmp_path / "nameless")
    config = place / "config.yaml"
    lines = config.read_text().splitlines()
    config.write_text("\n".join(line for line in lines if "classes:" not in line))
    with pytest.raises(VitcliError, match="is not a classifier whose outputs have names"):
        run(tmp_path / "run", train__teacher=str(place))


def test_a_cnn_of_timm_teaches(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    cnn: dict[str, Any] = {
        "set": {
            "train.backbone": "timm:test_efficientnet",
            "data.train_size": 64,
            "data.val_size": 32,
        },
        "batch": 16,
        "device": "cpu",
    }
    vitcli.train_shapes(**cnn, out=tmp_path / "cnn")
    teacher = f"timm:{tmp_path / 'cnn'}"
    result = run(train__teacher=teacher, train__distillation="soft")
    assert result.config["train"]["teacher"] == teacher and result.history[0].loss > 0
    loaded = vitcli.load(teacher)
    own = PreprocessConfig.for_output((32, 32))
    found = load_teacher(TrainConfig(teacher=teacher), CLASSES[::-1], own, CPU)
    assert found.size == (32, 32) and json.loads((tmp_path / "cnn" / "config.json").read_text())
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert loaded.preprocessing.mean == own.mean and loaded.preprocessing.std == own.std
    with torch.no_grad():
        assert torch.equal(found(images), loaded.encoder(images).output.flip(1))


@pytest.mark.parametrize("kind", ["ResNet", "ViT"])
def test_a_classifier_of_transformers_teaches(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    names = ("star", *CLASSES[::-1])  # it knows more classes than the run has
    place = sources.transformers_classifier(tmp_path / "teacher", kind, names)
    own = PreprocessConfig.for_output((32, 32))
    found = load_teacher(TrainConfig(teacher=f"transformers:{place}"), CLASSES, own, CPU)
    model: Any = getattr(transformers, f"{kind}ForImageClassification").from_pretrained(place)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    assert own.mean == own.std == (0.5,) * 3  # as the teacher's own
    with torch.no_grad():
        assert torch.equal(found(images), model.eval()(images).logits[:, [4, 3, 2, 1]])


def test_two_processes_distill_as_one_and_go_on(tmp_path: Path) -> None:
    """gloo, through torchrun: the losses of one process, and after a cut those of the whole run."""
    pytest.importorskip("transformers")
    place = sources.transformers_classifier(tmp_path / "teacher", "ResNet", CLASSES)
    keys = {"train__teacher": f"transformers:{place}", "train__distillation": "soft"}
    alone = run(tmp_path / "one", **keys)
    asked = command("--out", str(tmp_path / "two"), "--json", processes=2, **keys)
    histories = []
    for more in ((), ("--resume",)):
        done = shell([*asked, *more])
        assert done.returncode == 0, done.stderr
        histories.append(json.loads(done.stdout)["history"])
        shutil.rmtree(tmp_path / "two" / "snapshots" / "step-000000008")
    for ours, theirs in zip(alone.history, histories[0], strict=True):
        for key in ("loss", "accuracy", "grad_norm"):
            expected = getattr(ours, key)
            assert theirs[key] == (
                None if expected is None else pytest.approx(expected, 1e-5, 1e-5)
            )
    losses = [[row["loss"] for row in history] for history in histories]
    assert losses[0] == losses[1] and len(losses[0]) == 9
