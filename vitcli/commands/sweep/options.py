"""What a command accepts, and how an option's or a config key's value becomes arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitcli.config.yaml import parse_value
from vitcli.errors import VitcliError

OWN = frozenset({"json", "help"})
"""Options a sweep gives itself."""


def canonical(key: str) -> str:
    """One name for an option: `image-size` is `image_size`; a dotted config key is itself."""
    return key if "." in key else key.removeprefix("--").replace("-", "_")


@dataclass(frozen=True)
class Option:
    """One option or argument of a command; `flag` is empty for an argument."""

    name: str
    flag: str
    off_flag: str = ""
    is_switch: bool = False
    repeatable: bool = False


@dataclass(frozen=True)
class Command:
    """A command as the sweep sees it.

    `keys` are the dotted keys that `--set` reaches; `check` raises VitcliError for arguments that
    the command's parser refuses.
    """

    name: str
    options: Mapping[str, Option]
    keys: frozenset[str] = frozenset()
    check: Callable[[list[str]], None] = lambda argv: None
    stands_for: Mapping[str, str] = field(default_factory=dict)
    """Options that are shorthands, and their config keys: beside its key, one says nothing."""

    def knows(self, key: str) -> bool:
        return key in self.keys or (key in self.options and key not in OWN)

    def names(self) -> list[str]:
        return sorted({*self.keys, *(self.options.keys() - OWN)})

    def arguments(self, params: Mapping[str, Any]) -> list[str]:
        """The command line after `vitcli`: options by name, then `--set` keys, then arguments.

        Raises:
            VitcliError: a switch that is given a value other than true or false.
        """
        options: list[str] = []
        settings: list[str] = []
        positional: list[str] = []
        for key in sorted(params):
            value = params[key]
            option = self.options.get(key)
            if option is None:
                settings += ["--set", f"{key}={setting_text(value)}"]
            elif not option.flag:
                positional += _several(value)
            else:
                options += _option(option, value)
        end = ["--", *positional] if any(p.startswith("-") for p in positional) else positional
        return [self.name, *options, *settings, "--json", *end]


def setting_text(value: Any) -> str:
    """A value as `--set` reads it back: YAML on one line."""
    if isinstance(value, float) and math.isinf(value):
        return ".inf" if value > 0 else "-.inf"
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        plain = parse_value(value, "") == value
    except VitcliError:
        plain = False
    return value if plain else json.dumps(value, ensure_ascii=False)


def _option(option: Option, value: Any) -> list[str]:
    if value is None:  # the command's own default
        return []
    if option.is_switch:
        if not isinstance(value, bool):
            raise VitcliError(
                f"{option.name} is on or off, not {value!r}", f"{option.name}: true or false"
            )
        chosen = option.flag if value else option.off_flag
        return [chosen] if chosen else []
    if option.repeatable:
        return [part for item in _several(value) for part in (option.flag, item)]
    return [option.flag, ",".join(_several(value))]


def _several(value: Any) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [str(v).lower() if isinstance(v, bool) else str(v) for v in values]
