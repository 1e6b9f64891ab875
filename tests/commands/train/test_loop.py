from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.commands.train.runs import command, request, run, shell
from vitcli.build import build_encoder
from vitcli.commands.train import analysis as train
from vitcli.commands.train import start as train_start
from vitcli.commands.train.data import ShapesSource, batch_indices
from vitcli.commands.train.loop import Trainer
from vitcli.commands.train.optimization import audit, first_bad_layer
from vitcli.commands.train.start import World, local_device, world
from vitcli.errors import VitcliError
from vitcli.nn.encoder import VisionEncoder


def trainer(**keys: Any) -> Trainer:
    config = train.shapes_config(request(**keys))
    data = config.data
    source = ShapesSource(
        train.shapes_of(config), data.train_size, data.val_size, config.preprocess
    )
    encoder = build_encoder(config.encoder, config.train.seed)
    return Trainer(encoder, source, config.train, torch.device("cpu"), World())


def losses(result: Any) -> list[float]:
    return [row.loss for row in result.history if row.loss is not None]


def test_every_image_is_seen_once_an_epoch_in_another_order() -> None:
    steps = list(batch_indices(0, 20, 4, range(10), slice(0, 4)))
    first, second = ([i for e, part in steps if e == epoch for i in part] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second


def test_parts_of_a_batch_are_those_of_one_process() -> None:
    whole = [list(i) for _, i in batch_indices(3, 20, 4, range(5), slice(0, 4))]
    shares = [World(rank, 2).share(4) for rank in (0, 1)]
    parts = [[list(i) for _, i in batch_indices(3, 20, 4, range(5), share)] for share in shares]
    assert [a + b for a, b in zip(*parts, strict=True)] == whole


def test_one_step_is_adamw_on_the_mean_cross_entropy() -> None:
    """The loop's first update against the same written out with torch alone."""
    ours = trainer(train__lr=0.01, train__weight_decay=0.0, train__clip_grad=None)
    plain = build_encoder(train.shapes_config(request()).encoder, 0)
    batch = next(ours._batches())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    loss = torch.nn.functional.cross_entropy(plain.train()(batch[0]).output, batch[1])
    loss.backward()
    optimizer.step()
    finite, entry = ours._update(batch)
    assert finite and entry["loss"] == pytest.approx(loss.item(), rel=1e-6)
    squares = sum(p.grad.square().sum().item() for p in plain.parameters() if p.grad is not None)
    assert entry["grad_norm"] == pytest.approx(squares**0.5, rel=1e-5)
    for a, b in zip(ours.encoder.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_clipping_bounds_the_gradient() -> None:
    ours = trainer(train__clip_grad=0.01)
    _, entry = ours._update(next(ours._batches()))
    assert entry["grad_norm"] > 0.01  # reported as it was
    clipped = torch.nn.utils.get_total_norm([p.grad for p in ours.trainable if p.grad is not None])
    assert clipped.item() == pytest.approx(0.01, rel=1e-3)


def test_ema_is_its_closed_form() -> None:
    """The first update copies w_1; update t + 1 moves by 1 - min(d, (1 + t) / (10 + t))."""
    ours, d = trainer(train__ema=0.25, train__lr=0.01), 0.25
    name = "vit.blocks.0.attention.qkv.weight"
    seen = []
    for batch, _ in zip(ours._batches(), range(5), strict=False):
        ours._update(batch)
        ours.step += 1
        seen.append(ours.encoder.get_parameter(name).detach().double().clone())
    decays = [min(d, part) for part in (2 / 11, 3 / 12, 4 / 13, 5 / 14)]
    assert decays == [2 / 11, d, d, d]
    expected = seen[0]
    for decay, weights in zip(decays, seen[1:], strict=True):
        expected = decay * expected + (1 - decay) * weights
    assert ours.averaged is not None
    assert torch.allclose(ours.averaged.get_parameter(name).double(), expected, atol=1e-7)
    assert not torch.allclose(seen[4], expected, atol=1e-4)


def test_an_average_of_two_updates_says_how_much_of_it_is_the_first() -> None:
    """After updates 1 and 2 the first weights are 2/11 of it; after three, 2/11 * 3/12."""
    history = run(data__train_size=8, train__ema=0.999, train__epochs=3).history
    shown = [row.ema_first_share for row in history if row.val_loss is not None]
    assert shown == [1.0, pytest.approx(2 / 11), None]


@pytest.mark.parametrize("mixing", [{}, {"train__mixup": 0.8, "train__cutmix": 1.0}])
def test_accumulating_changes_no_loss(mixing: dict[str, float]) -> None:
    whole = run(train__accumulate=1, **mixing)
    split = run(train__accumulate=4, **mixing)
    assert losses(split) == pytest.approx(losses(whole), abs=1e-5)
    norms = [[r.grad_norm for r in x.history if r.grad_norm is not None] for x in (split, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)  # AdamW alone would forgive a factor


def test_bfloat16_stays_near_float32() -> None:
    assert losses(run(train__dtype="bfloat16")) == pytest.approx(losses(run()), abs=0.05)
    assert losses(run(train__dtype="bfloat16")) != losses(run())


def test_a_separable_task_is_learned() -> None:
    result = run(
        data__train_size=2400,
        data__classes=["circle", "cross"],
        data__difficulty=0.0,
        train__lr=3e-3,
        data__val_size=256,
        train__batch=16,
        encoder__patch_size=4,
    )
    assert result.result.verdict == "learned"
    assert result.result.val_accuracy is not None and result.result.val_accuracy > 0.8
    assert sum(row.images for row in result.result.classes) == 256


def test_an_enormous_rate_diverges_and_names_step_and_layer(tmp_path: Path) -> None:
    result = run(tmp_path, encoder__norm_placement="post", train__lr=1e4).result
    assert result.verdict == "diverged" and result.val_accuracy is None
    assert result.bad_step is not None and result.steps == result.bad_step - 1
    assert result.bad_layer is not None


def test_the_first_bad_layer_is_the_one_that_was_broken() -> None:
    ours = trainer()
    images, _ = next(ours._batches())
    assert first_bad_layer(ours.encoder, images) is None
    with torch.no_grad():
        ours.encoder.get_parameter("vit.blocks.1.feed_forward.fc1.weight")[3, 2] = float("inf")
    assert first_bad_layer(ours.encoder, images) == "vit.blocks.1.feed_forward.fc1.weight"


def test_the_audit_catches_a_planted_leak_and_a_dry_adapter() -> None:
    result = run(train__lora__heads=["2:1"], train__lora__rank=2)
    assert [row.name for row in result.audit if row.trainable] == [
        "vit.blocks.1.attention.qkv.down",
        "vit.blocks.1.attention.qkv.up",
    ]
    assert result.result.trainable == 3 * (2 * 16 + 8 * 2)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    model(torch.ones(1, 2)).sum().backward()
    audit(model, {"1.weight", "1.bias"})
    with pytest.raises(VitcliError, match=r"no gradient reaches 0\.weight"):
        audit(model, {"0.weight", "1.weight", "1.bias"})
    model[0].weight.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(VitcliError, match=r"a gradient reaches 0\.weight, which should be frozen"):
        audit(model, {"1.weight", "1.bias"})


def test_a_leak_planted_in_a_run_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    update = Trainer._update

    def leaking(self: Trainer, batch: Any) -> Any:
        self.encoder.get_parameter("front_end.projection.weight").requires_grad_(True)
        return update(self, batch)

    monkeypatch.setattr(Trainer, "_update", leaking)
    with pytest.raises(VitcliError, match=r"front_end\.projection\.weight"):
        run(train__freeze="encoder")


@pytest.mark.parametrize("keys", [{"train__freeze": "encoder"}, {"train__lora__heads": ["2:1"]}])
def test_a_parameter_that_was_never_frozen_is_a_leak(
    monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any]
) -> None:
    start = train_start.start_encoder

    def leaking(*words: Any) -> VisionEncoder:
        encoder = start(*words)
        encoder.vit.blocks[0].get_parameter("norm1.weight").requires_grad_(True)
        return encoder

    monkeypatch.setattr(train_start, "start_encoder", leaking)
    with pytest.raises(VitcliError, match=r"a gradient reaches vit\.blocks\.0\.norm1\.weight"):
        run(**keys)


def test_a_run_of_one_step_is_audited_too() -> None:
    rows = run(data__train_size=8, train__lora__heads=["2:1"]).audit
    norms = {row.name.rpartition(".")[2]: row.gradient_norm for row in rows if row.trainable}
    assert norms["down"] == 0 and norms["up"]  # B is zero, and with it the gradient of A


def test_a_frozen_encoder_keeps_its_weights_and_the_classifier_learns(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run(tmp_path, train__freeze="encoder", train__lr=0.1)
    fresh = build_encoder(train.shapes_config(request()).encoder, 0).state_dict()
    after = load_file(tmp_path / "model.safetensors")
    moved = {name for name in fresh if not torch.equal(fresh[name], after[name])}
    assert moved == {"head.linear.weight", "head.linear.bias"}


def test_adapters_train_nothing_else_and_are_saved_alone(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run(tmp_path, train__lora__heads=["2:1"], train__lr=0.1, train__weight_decay=0.0)
    fresh = build_encoder(train.shapes_config(request()).encoder, 0).state_dict()
    merged = load_file(tmp_path / "model.safetensors")
    moved = {name for name in fresh if not torch.equal(fresh[name], merged[name])}
    assert moved == {"vit.blocks.1.attention.qkv.weight"}
    rows = (merged["vit.blocks.1.attention.qkv.weight"] != fresh[moved.pop()]).any(dim=1)
    assert rows.nonzero().flatten().tolist() == [*range(8), *range(16, 24), *range(32, 40)]
    assert set(load_file(tmp_path / "adapter.safetensors")) == {
        f"vit.blocks.1.attention.qkv.{part}" for part in ("down", "up", "rows", "scale")
    }


def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    """gloo, through torchrun: the same metrics to 1e-5, from rank 0 alone."""
    alone = run(tmp_path / "one", train__clip_grad=1.0)
    done = shell(
        command("--out", str(tmp_path / "two"), "--json", processes=2, train__clip_grad=1.0)
    )
    assert done.returncode == 0, done.stderr
    both = json.loads(done.stdout)  # one object: the other rank prints nothing
    assert len(both["history"]) == len(alone.history) == 9
    for ours, theirs in zip(alone.history, both["history"], strict=True):
        for key in ("loss", "accuracy", "grad_norm", "val_loss", "val_accuracy"):
            expected = getattr(ours, key)
            assert theirs[key] == (
                None if expected is None else pytest.approx(expected, 1e-5, 1e-5)
            )
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {key: value for key, value in row.items() if value is not None} for row in both["history"]
    ]


def test_what_another_process_could_not_read_is_in_the_snapshots() -> None:
    """The first process alone writes them, and a resumed run lists what was left out before."""

    class OfTwo(World):
        def gather(self, value: Any) -> list[Any]:
            return [value, {"cat/1.png": "not an image"}]

    ours = trainer()
    ours.world = OfTwo()
    ours.validate()
    assert ours.data.unreadable == {"cat/1.png": "not an image"}


def test_collectives_run_where_the_backend_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes no tensor of the CPU: counts on it travel over the GPU and come back."""
    seen: list[torch.device] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        seen.append(tensor.device)
        assert tensor.device.type != "cpu", "No backend type associated with device type cpu"

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with FakeTensorMode():
        counts = World(0, 2, torch.device("cuda", 1)).total(torch.zeros(3, dtype=torch.float64))
    assert seen == [torch.device("cuda", 1)]
    assert counts.device.type == "cpu" and counts.dtype == torch.float64


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    taken: dict[str, object] = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.update(current=device))

    def init(backend: str, device_id: torch.device) -> None:
        taken.update(backend=backend, bound=device_id)
        raise RuntimeError("nobody else is here")

    monkeypatch.setattr(torch.distributed, "init_process_group", init)
    own = local_device(torch.device("cuda"))
    with pytest.raises(VitcliError, match="8 processes cannot connect: nobody else"), world(own):
        pass
    assert taken == {"current": own, "backend": "nccl", "bound": own} and own.index == 1
    with pytest.raises(VitcliError, match="cannot share one GPU"):
        local_device(torch.device("cuda", 0))
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(VitcliError, match="has no GPU"):
        local_device(torch.device("cuda"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"RANK": "1"}, "WORLD_SIZE: is missing beside RANK=1"),
        ({"WORLD_SIZE": "2"}, "RANK: is missing beside WORLD_SIZE=2"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK: is not a count (got 'x')"),
        ({"RANK": "0", "WORLD_SIZE": "-1"}, "WORLD_SIZE: is not a count"),
        ({"RANK": "0", "WORLD_SIZE": "9" * 5000}, "WORLD_SIZE: is not a count"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK: is out of range"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK: is out of range"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "\u0662"}, "LOCAL_RANK: is not a count"),
    ],
)
def test_an_environment_that_torchrun_never_makes_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], said: str
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(VitcliError) as caught:
        run()
    assert said in caught.value.message


def test_a_model_that_cannot_be_compiled_is_an_error_of_the_option(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._dynamo.exc import TorchDynamoException

    class Broken(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise TorchDynamoException("No C++ compiler")

    monkeypatch.setattr(torch, "compile", lambda model: Broken())
    with pytest.raises(VitcliError, match=r"train\.compile: .*No C\+\+ compiler") as caught:
        run(train__compile=True)
    assert caught.value.exit_code == 1 and "leave out --compile" in caught.value.hint


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(VitcliError, match="do not fill a batch"):
        run(data__train_size=4)
    with pytest.raises(VitcliError, match="pair neighbors"):
        run(train__mixup=0.2, train__accumulate=8)
