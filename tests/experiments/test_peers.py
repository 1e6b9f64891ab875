"""experiments/peers.py gives every library the same weights, under that library's names."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from experiments import peers
from tests.experiments.sources import ENVIRONMENT, ROOT
from vitcli.build import build_meta
from vitcli.config.schema import EncoderConfig


@pytest.mark.parametrize("library", peers.EAGER_PEERS)
def test_every_parameter_has_a_name_in_every_library(library: str) -> None:
    ours = build_meta(EncoderConfig()).state_dict()
    with torch.device("meta"):
        theirs = peers.peer(library, None).state_dict()
    renamed = peers.renamed(ours, library)
    assert {k: v.shape for k, v in renamed.items()} == {k: v.shape for k, v in theirs.items()}


def test_the_report_is_made_of_what_was_measured(tmp_path) -> None:
    seconds = {"vitcli eager": [1.0, 2.0, 4.0], "timm": [1.5, 4.0, 4.0]}
    cold = {"vitcli": [1.0, 2.0, 3.0], "timm": [2.0, 8.0, 6.0]}
    entries = {"time 1": {"seconds": seconds}, "cold": {"seconds": cold}}
    (tmp_path / "peers.json").write_text(json.dumps(entries))
    skip = [word for part in peers.PARTS for word in ("--skip", part)]
    command = [sys.executable, "experiments/peers.py", "--out", str(tmp_path), *skip]
    command += ["--batch", "1", "--subject", "vitcli eager", "--subject", "timm"]
    result = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, check=True, capture_output=True, text=True
    )
    timm, cold_timm = (line for line in result.stdout.splitlines() if "| timm |" in line)
    assert timm == "| 1 | timm | 4.000 | 1.50 (1.00 to 2.00) | 1.50 (1.00 to 2.00) |  |"
    assert cold_timm == "| timm | 6.00 | 0.50 (0.25 to 0.50) of it |"
