"""Values by dotted key, layer on layer, as a schema; errors name the layer that is wrong."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from vitcli.config.yaml import Document, KeyPath, leaves, parse_value
from vitcli.errors import VitcliError

Schema = TypeVar("Schema", bound=BaseModel)
RENAMED = {"encoder.head_dim": "encoder.head_out"}
"""Keys of earlier releases. `head_dim` was the width of the output head; in the field it is the
width of an attention head."""
RENAMED_HINT = "write encoder.head_out, the width of the head's output"


@dataclass(frozen=True)
class Setting:
    """One value for one dotted key, and what the user wrote to set it."""

    path: KeyPath
    value: Any
    source: str


def named_settings(values: Mapping[str, Any] | None) -> tuple[Setting, ...]:
    """Dotted keys and values, as the API's `set` takes them."""
    return tuple(
        Setting(tuple(key.split(".")), value, f"set[{key!r}]")
        for key, value in (values or {}).items()
    )


def parse_setting(text: str) -> Setting:
    """`encoder.depth=6` as a Setting; the value is YAML."""
    key, equals, value = text.partition("=")
    source = f"--set {text if len(text) <= 80 else text[:79] + '…'}"
    if not equals or not key.strip():
        raise VitcliError(f"{source}: is not KEY=VALUE", "--set encoder.depth=6")
    return Setting(tuple(key.strip().split(".")), parse_value(value, source), source)


@dataclass
class Layers:
    """Values merged so far, and which layer, from 1, and what in it gave each dotted key."""

    data: dict[str, Any] = field(default_factory=dict)
    sources: dict[KeyPath, tuple[int, str]] = field(default_factory=dict)
    count: int = 0

    def add(self, document: Document) -> None:
        """A layer of many values."""
        self.count += 1
        for path, value in leaves(document.data):
            line = document.lines.get(path)
            self._put(Setting(path, value, document.source + (f":{line}" if line else "")))

    def set(self, setting: Setting) -> None:
        """A layer of one value, or of the values of one section."""
        self.count += 1
        self._put(setting)

    def _put(self, setting: Setting) -> None:
        for path, value in leaves(setting.value, setting.path):
            node = self.data
            for depth, key in enumerate(path[:-1], start=1):
                child = node.setdefault(key, {})
                if not isinstance(child, dict):
                    dotted = ".".join(path[:depth])
                    raise VitcliError(
                        f"{setting.source}: {dotted} is a value, not a section",
                        f"set {dotted} itself",
                    )
                node = child
            node[path[-1]] = value
            self.sources[path] = (self.count, setting.source)

    def source(self, *paths: KeyPath) -> str:
        """Who gave one of these keys, or one above or below it.

        That is the last layer that did; in it the closest key, and the first of `paths`.
        """
        about = [
            (layer, -abs(len(given) - len(path)), -index, source)
            for given, (layer, source) in self.sources.items()
            for index, path in enumerate(paths)
            if given[: len(path)] == path[: len(given)]
        ]
        return max(about)[-1] if about else "config"


def validate(schema: type[Schema], layers: Layers) -> Schema:
    """The layers as a `schema`; errors name the source, the dotted key and the nearest key."""
    try:
        return schema.model_validate(layers.data)
    except ValidationError as error:
        raise _explain(schema, layers, error) from error


def _explain(schema: type[BaseModel], layers: Layers, error: ValidationError) -> VitcliError:
    problems = error.errors()
    # A misspelled key comes first: the key that was meant may also be missing.
    problem = next((p for p in problems if p["type"] == "extra_forbidden"), problems[0])
    path = tuple(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        source, dotted = layers.source(path), ".".join(path)
        if dotted in RENAMED:
            return VitcliError(f"{source}: {dotted}: is {RENAMED[dotted]} now", RENAMED_HINT)
        return VitcliError(f"{source}: {dotted}: unknown key", nearest(dotted, known_keys(schema)))
    if problem["type"] == "value_error":  # our own checks begin with the keys they are about
        named, _, text = str(problem["ctx"]["error"]).partition(": ")
        paths = [(*path, *key.split(".")) for key in named.split(", ")]
        return VitcliError(
            f"{layers.source(*paths)}: {'.'.join(paths[0])}: {text}",
            "change either key" if len(paths) > 1 else _example(schema),
        )
    if problem["type"] == "missing" and isinstance(problem["loc"][-1], str):
        hint = f"write `{path[-1]}: …`"
        return VitcliError(f"{layers.source(path[:-1])}: {'.'.join(path)}: is missing", hint)
    keys = set(known_keys(schema))
    while path and ".".join(path) not in keys and len(path) > 1:
        path = path[:-1]  # positions inside a list are not keys
    value = problem["input"]
    shown = (
        f", got {shortened(value)}" if isinstance(value, str | int | float | bool | None) else ""
    )
    text = problem["msg"][0].lower() + problem["msg"][1:]
    if problem["type"] == "missing":  # of a list
        text = f"too few values, there are {problem['loc'][-1]}"
    hint = {"bool_type": "write true or false"}.get(problem["type"], _example(schema))
    if problem["type"] == "literal_error" and isinstance(value, str):
        words = re.findall(r"'([^']*)'", problem["ctx"]["expected"])
        hint = nearest(value, words, hint)
    return VitcliError(f"{layers.source(path)}: {'.'.join(path)}: {text}{shown}", hint)


def _example(schema: type[BaseModel]) -> str:
    """Where valid values of every key are seen."""
    command = {"ModelConfig": "params", "ShapesRun": "train-shapes", "ImagesRun": "train DATA"}
    shown = command.get(schema.__name__)
    return f"run `vitcli {shown} --print-config` for valid values" if shown else "change the value"


def shortened(value: Any) -> str:
    """A value as it is written, cut where it is long."""
    if isinstance(value, int) and value.bit_length() > 200:  # too long to print, or to convert
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def known_keys(schema: type[BaseModel], path: KeyPath = ()) -> list[str]:
    """Every dotted key of a schema, sections included."""
    keys: list[str] = []
    for name, info in schema.model_fields.items():
        keys.append(".".join((*path, name)))
        for kind in (info.annotation, *get_args(info.annotation)):  # a section, or one or none
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                keys += known_keys(kind, (*path, name))
    return keys


def nearest(word: str, known: Sequence[str], otherwise: str = "") -> str:
    """`did you mean …?`, by the whole dotted key first, then by its last word.

    Where nothing is near, `otherwise`, else all that is known.
    """
    matches = difflib.get_close_matches(word, known, n=1, cutoff=0.75)
    if not matches:
        tails = {key.rsplit(".", 1)[-1]: key for key in reversed(known)}
        last = difflib.get_close_matches(word.rsplit(".", 1)[-1], list(tails), n=1, cutoff=0.6)
        matches = [tails[last[0]]] if last else difflib.get_close_matches(word, known, 1, 0.4)
    if matches:
        return f"did you mean {matches[0]}?"
    return otherwise or "known: " + ", ".join(known)


def parse_counts(text: str | None) -> list[int]:
    """`0,4` as numbers, each once."""
    parts = text.split(",") if text else []
    if not all(part.strip().isdecimal() for part in parts):
        raise VitcliError(f"--registers {text}: expected whole numbers", "--registers 0,4")
    return list(dict.fromkeys(int(part) for part in parts))


def parse_layers(text: str) -> list[int]:
    """`6,12` or `-1` as numbers.

    Raises:
        VitcliError: anything else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise VitcliError(
            f"--layers {text}: is not a list of layers (expected whole numbers with commas)",
            "--layers 3,6,9,12",
        ) from error
