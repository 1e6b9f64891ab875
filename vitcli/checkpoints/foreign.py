"""A library's config in our words: every key is handled, known to be harmless, or refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitcli.checkpoints.family import Family
from vitcli.errors import VitcliError


def section_of(config: Mapping[str, Any], name: str) -> tuple[dict[str, Any], bool]:
    """The encoder's part of a config, and whether it is nested in that of a larger model.

    CLIP configs of 2022 keep a second copy, `vision_config_dict`, which wins.
    """
    inner = config.get(name)
    if not isinstance(inner, dict):
        return dict(config), False
    newer = config.get(f"{name}_dict")
    return {**inner, **(newer if isinstance(newer, dict) else {})}, True


def read_settings(
    config: Mapping[str, Any], family: Family
) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """(our settings the config states, those its library takes for what it leaves out, origins).

    Origins name the foreign key of each setting of ours.

    Raises:
        VitcliError: a value that we cannot follow, or a key that we do not know.
    """
    file = family.config_file
    if family.flatten:
        section, nested = _flat(config, family), True
    else:
        section, nested = section_of(config, family.section)
    stated: dict[str, Any] = {}
    implied: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for key, to in family.settings.items():
        if section.get(key) is not None:
            try:
                value = to(section[key])
            except (ValueError, TypeError, KeyError) as error:
                raise VitcliError(
                    f"{file}: {key} = {section[key]!r} is not supported in {family.name} ({error})",
                    "this encoder computes something that is not built here",
                ) from error
            if to.key is not None:
                stated[to.key] = value
                origins[to.key] = f"{file}: {key}"
        elif nested and to.key is not None and to.default is not None:
            implied[to.key] = to.default
            origins[to.key] = f"the default that {family.library} has for {key}"
    unknown = [
        key
        for key, value in section.items()
        if key not in family.settings and key not in family.ignored and not _off(value)
    ]
    if unknown:
        shown = ", ".join(f"{key} = {section[key]!r}"[:60] for key in unknown[:4])
        raise VitcliError(
            f"{file}: settings that are not known in {family.name}: {shown}",
            "if they do not change the encoder's numbers, take them out of a copy of the config",
        )
    return stated, implied, origins


def _flat(config: Mapping[str, Any], family: Family) -> dict[str, Any]:
    assert family.flatten is not None
    try:
        return dict(family.flatten(config))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise VitcliError(
            f"{family.config_file}: not a config of {family.library} that is known here ({error})",
            "--preset NAME beside a copy of the weights without it, or --set encoder.KEY=VALUE",
        ) from error


def _off(value: Any) -> bool:
    """A setting that is absent in all but name."""
    return value is None or value is False or value in ("", [], {})
