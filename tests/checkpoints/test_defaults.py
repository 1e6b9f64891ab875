"""What is taken where a nested config leaves a key out is what the library takes."""

from __future__ import annotations

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from vitcli.checkpoints.families import FAMILIES
from vitcli.checkpoints.family import Family

CASES = [
    pytest.param(family, kind, id=f"{family.name} {kind}")
    for family in FAMILIES
    if family.library == "transformers"
    for kind in family.model_types
    if kind in CONFIG_MAPPING
]


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_defaults_are_those_of_the_librarys_class(family: Family, kind: str) -> None:
    config: transformers.PreTrainedConfig = CONFIG_MAPPING[kind]()
    written = getattr(config, "vision_config", config).to_dict()
    compared = 0
    for key, to in family.settings.items():
        if written.get(key) is None:
            continue
        value = to(written[key])  # raises for a default that the encoder cannot follow
        default = to.by_type.get(kind, to.default)
        if to.key is not None and default is not None:
            assert value == default, key
            compared += 1
    assert compared
