"""Weights without a config, completed by what the error asks for, give the library's numbers.

What is not asked for is taken as known, so a setting that changes numbers and is not asked for is
seen here as a difference.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.models import save_for_hf
from torch import Tensor, nn

from tests.checkpoints.parity import hf, timm_models
from tests.checkpoints.parity.compare import (
    FLOAT32_PARTS,
    Outputs,
    assert_close,
    images,
    ours,
    randomized,
)
from tests.checkpoints.parity.towers import TOWERS
from tests.checkpoints.parity.vlms import WHOLE
from vitcli.checkpoints.weights import LoadedWeights, load_weights
from vitcli.config.settings import Setting
from vitcli.config.yaml import dotted
from vitcli.errors import VitcliError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.numeric]
Run = Callable[[nn.Module, Tensor], Outputs]
BY_NAME: dict[str, Any] = {**hf.CASES, **TOWERS, **WHOLE}
TIMM = {
    name: case
    for name, case in timm_models.CASES.items()
    if case.family != "timm-qwen3"  # its config is written another way
    and not name.endswith(" img_size")  # a table of 1 + 4 x 6 rows is read as 5 x 5
}


REFUSED = {
    "cosmos3 whole, its tower without a prefix",  # the language model's names are its own
    "vit_msn classifier",  # its file has the encoder beside `vit.`, in which the rest is
    *(
        "aimv2_large_patch14_224 dynamic_img_size num_classes",
        "aimv2_huge_patch14_336 dynamic_img_size",
    ),
}
"""What is not certain to be whole: tensors that the names do not place, or biases that lack."""


def completed(folder: Path, values: dict[str, Any]) -> LoadedWeights | None:
    """What is loaded once every setting that errors name is given; None if that is not enough."""
    given: dict[str, Any] = {}
    while True:
        overrides = [
            Setting(("encoder", *key.split(".")), value, f"--set encoder.{key}")
            for key, value in given.items()
        ]
        try:
            return load_weights(str(folder), dtype=torch.float64, overrides=overrides)
        except VitcliError as error:
            asked = re.findall(r"encoder\.([\w.]+)=", f"{error.message} {error.hint}")
        new = {key: values[key] for key in asked if key in values and key not in given}
        if not new:
            return None
        given |= new


def compare(folder: Path, model: nn.Module, run: Run, name: str, size: tuple[int, int]) -> None:
    values = dotted(load_weights(str(folder)).config.encoder.model_dump())
    for file in folder.glob("*config.json"):
        file.unlink()
    loaded = completed(folder, values)
    assert (loaded is None) == (name in REFUSED)
    if loaded is not None:
        pixels = images(*size)
        with torch.no_grad():
            theirs = run(model.double(), pixels)
        assert_close(theirs, ours(loaded.encoder, pixels), FLOAT32_PARTS)


@pytest.mark.parametrize("name", BY_NAME)
def test_transformers_without_a_config(name: str, tmp_path: Path) -> None:
    case = BY_NAME[name]
    model = randomized(case.make()).float()
    model.save_pretrained(tmp_path)
    size = (32, 32) if (32, 32) in case.sizes else case.sizes[0]

    def run(model: nn.Module, pixels: Tensor) -> Outputs:
        if name in WHOLE:
            return case.run(model.get_submodule(case.tower), pixels)
        return case.outputs(model, pixels)

    compare(tmp_path, model, run, name, size)


@pytest.mark.parametrize("name", TIMM)
def test_timm_without_a_config(name: str, tmp_path: Path) -> None:
    case = TIMM[name]
    model = randomized(case.make()).float()
    arguments = timm_models.SMALL | case.arguments
    save_for_hf(model, tmp_path, model_args=arguments, safe_serialization=True)
    compare(tmp_path, model, timm_models.outputs, name, case.sizes[0])
