from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from vitcli.commands.train.optimization import learning_rate, warmup_steps
from vitcli.config.training import TrainConfig


def test_warmup_is_a_fraction_below_one_and_steps_from_one_on() -> None:
    assert warmup_steps(0.1, 512) == 51
    assert warmup_steps(1, 512) == 1
    assert warmup_steps(100, 512) == 100
    assert warmup_steps(0, 512) == 0
    assert warmup_steps(1000, 512) == 512


def test_warmup_rises_linearly_to_the_peak_and_the_cosine_falls_to_the_end() -> None:
    rates = [learning_rate(step, 110, 1.0, 10, end=0.2) for step in range(110)]
    assert rates[:10] == pytest.approx([(k + 1) / 10 for k in range(10)])
    assert rates[10] == 1.0
    assert rates[60] == pytest.approx(0.6)  # half way: the mean of peak and end
    assert rates[35] == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    assert rates[109] == pytest.approx(0.2, abs=3e-4)
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_cosine_equals_torchs_own() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50, eta_min=0.01)
    for step in range(50):
        ours = learning_rate(step, 50, 0.3, end=0.01)
        assert ours == pytest.approx(theirs.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        theirs.step()


def test_constant_stays_at_the_peak_after_warmup() -> None:
    assert [learning_rate(s, 6, 2.0, 2, "constant") for s in range(6)] == [1, 2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"min_lr": 0.1, "lr": 0.01}, "above the peak"),
        ({"min_lr": 1e-5, "schedule": "constant"}, "a constant rate has no end"),
    ],
)
def test_an_end_that_the_rate_cannot_have_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        TrainConfig(**keys)
