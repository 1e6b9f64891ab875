from __future__ import annotations

import numpy as np
import pytest
import torch

from vitcli.commands.train.data import (
    cut_box,
    mix,
    mix_batch,
    soft_targets,
    swap_neighbors,
)
from vitcli.config.training import TrainConfig


def test_neighbors_swap_within_pairs_however_the_batch_is_split() -> None:
    x = torch.arange(8)
    assert swap_neighbors(x).tolist() == [1, 0, 3, 2, 5, 4, 7, 6]
    assert torch.cat([swap_neighbors(part) for part in x.chunk(2)]).equal(swap_neighbors(x))


def test_smoothed_targets_equal_torchs_label_smoothing() -> None:
    logits, labels = torch.randn(6, 5, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 4, 0])
    ours = torch.nn.functional.cross_entropy(logits, soft_targets(labels, 5, 0.1).double())
    theirs = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-6)


def test_cutmix_targets_follow_the_pixels_of_the_box() -> None:
    images = torch.zeros(2, 1, 4, 5)
    images[1] = 1
    hot = torch.eye(2)
    mixed, targets = mix(images, hot, 0.123, box=(1, 2, 4, 5))  # 9 of 20 pixels
    assert mixed[0].sum() == 9 and mixed[1].sum() == 11
    assert targets[0].tolist() == pytest.approx([11 / 20, 9 / 20])


def test_mixup_takes_lambda_of_each_image() -> None:
    images = torch.tensor([1.0, 5.0]).view(2, 1, 1, 1)
    mixed, targets = mix(images, torch.eye(2), 0.75)
    assert mixed.flatten().tolist() == [2.0, 4.0]
    assert targets.tolist() == [[0.75, 0.25], [0.25, 0.75]]


@pytest.mark.parametrize("alphas", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_targets_sum_to_one_and_the_seed_decides(alphas: dict[str, float]) -> None:
    train = TrainConfig(**alphas)  # type: ignore[arg-type]
    images = torch.rand(6, 3, 8, 8)
    targets = soft_targets(torch.arange(6) % 4, 4, 0.1)
    for seed in range(20):
        mixed, soft = mix_batch(images, targets, train, seed)
        assert torch.allclose(soft.sum(1), torch.ones(6), atol=1e-6)
        again, _ = mix_batch(images, targets, train, seed)
        assert mixed.equal(again)


def test_cut_box_covers_one_minus_lambda_where_nothing_is_clipped() -> None:
    random = np.random.default_rng(0)
    boxes = [cut_box(1000, 1000, 0.99, random) for _ in range(200)]
    inner = [b for b in boxes if b[0] > 0 and b[1] > 0 and b[2] < 1000 and b[3] < 1000]
    assert len(inner) > 100
    assert all((b[2] - b[0]) * (b[3] - b[1]) == 100**2 for b in inner)
