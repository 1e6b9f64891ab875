"""Memory is measured in this process: another one per batch would cost seconds each."""

from __future__ import annotations

import pytest
import torch

from vitcli.commands.profile import measure as session
from vitcli.commands.profile import memory


def here(make_step, *arguments, keeps=False):
    step = make_step(*arguments)
    if not keeps:
        step()
    return memory.peak_memory(step, torch.device("cpu"))


@pytest.fixture(autouse=True)
def memory_in_this_process(request: pytest.FixtureRequest, monkeypatch) -> None:
    if "in_a_process" not in request.node.name:
        monkeypatch.setattr(session, "peak_alone", here)
