"""YAML that remembers its lines, refuses duplicate keys and reads 1e-3 as a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import (
    BeforeValidator,
    Field,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
)

from vitcli.errors import VitcliError

KeyPath = tuple[str, ...]
Kind = TypeVar("Kind")


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with YAML 1.2's floats."""


# YAML 1.1 wants a dot in every float, so PyYAML alone reads 1e-3 as a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


@dataclass(frozen=True)
class Document:
    """A parsed mapping, and the line (from 1) that each dotted key stands on."""

    source: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_yaml(path: str | Path) -> Document:
    """Read one YAML mapping from a file.

    Raises:
        VitcliError: unreadable file, YAML that does not parse, a duplicate key, not a mapping.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise VitcliError(
            f"cannot read {path}: {error.strerror or error}", "check the path"
        ) from error
    except UnicodeDecodeError as error:
        raise VitcliError(f"{path} is not UTF-8 text", "is it a YAML file?") from error
    return parse_yaml(text, str(path))


def read_json(path: str | Path, kind: type[Kind]) -> Kind:
    """A JSON file that this package wrote, as `kind`: a pydantic model, a dataclass or a type.

    Raises:
        VitcliError: unreadable, not JSON, or a key with a wrong value; names the file and the key.
    """
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise VitcliError(f"cannot read {path}: {reason}", "check the path") from error
    return parse_json(text, str(path), kind)


def parse_json(text: str | bytes, source: str, kind: type[Kind]) -> Kind:
    """Like `read_json`, from text that errors call `source`."""
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        where = f"{source}: {key}" if key else source
        message = problem["msg"][0].lower() + problem["msg"][1:]
        raise VitcliError(
            f"{where}: {message}", "restore the file, or remove it and run the command again"
        ) from error


def parse_yaml(text: str, source: str) -> Document:
    """Like `read_yaml`, from a string that errors call `source`."""
    loader: _Loader | None = None
    try:
        loader = _Loader(text)  # it refuses control characters
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _walk(node, (), lines, source)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise VitcliError(f"{where}: {error.problem}", "fix the YAML syntax") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VitcliError(f"{source}: {reason}", "fix the YAML syntax") from error
    finally:
        if loader:
            loader.dispose()
    if not isinstance(data, dict):
        raise VitcliError(
            f"{source}: expected keys and values, found a {type(data).__name__}",
            "write `encoder:` and the keys below it",
        )
    return Document(source, data, lines)


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise VitcliError(f"{source}:{line}: a key must be a word", "fix the YAML syntax")
        if key.value in seen:
            dotted = ".".join((*path, key.value))
            raise VitcliError(
                f"{source}:{line}: {dotted} is given twice (first on line {seen[key.value]})",
                "keep one of the two",
            )
        seen[key.value] = line
        lines[(*path, key.value)] = line
        _walk(value, (*path, key.value), lines, source)


def leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """(path, value) of everything in nested mappings that is not itself a mapping.

    An empty mapping has no leaves: as a section of a config it changes nothing.
    """
    if isinstance(value, Mapping):
        for key, child in value.items():
            yield from leaves(child, (*path, str(key)))
    else:
        yield path, value


def dotted(value: Mapping[str, Any]) -> dict[str, Any]:
    """`{"encoder": {"depth": 6}}` as `{"encoder.depth": 6}`."""
    return {".".join(path): leaf for path, leaf in leaves(value)}


def parse_size(text: str) -> tuple[int, int] | None:
    """`518` or `384x512` (height x width) as (height, width); None for anything else."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(s.isascii() and s.isdecimal() and len(s) < 10 for s in sides):
        return None
    height, width = int(sides[0]), int(sides[-1])
    return (height, width) if height and width else None


def parse_value(text: str, source: str) -> Any:
    """One YAML value, as after `--set key=`."""
    return parse_yaml(f"value: {text}" if text.strip() else "value:", source).data["value"]


def dump_yaml(data: Any) -> str:
    """YAML text in the order of the keys, which `read_yaml` reads back to the same values."""
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, default_flow_style=None))


def _as_size(value: Any) -> Any:
    """A height and a width from `224`, `[384, 512]` or `"384x512"`."""
    if isinstance(value, int) and not isinstance(value, bool):
        return (value, value)
    if isinstance(value, str):
        return parse_size(value) or value
    return as_tuple(value)


def as_tuple(value: Any) -> Any:
    """YAML's list as the tuple that the schema holds."""
    return tuple(value) if isinstance(value, list) else value


def _short_size(value: tuple[int, int]) -> int | list[int]:
    return value[0] if value[0] == value[1] else list(value)


AS_LIST = PlainSerializer(lambda v: list(v))
"""YAML has lists, not tuples."""
Size = Annotated[
    tuple[PositiveInt, PositiveInt], BeforeValidator(_as_size), PlainSerializer(_short_size)
]
"""(height, width) in pixels; one number means a square."""
Triple = Annotated[tuple[float, float, float], BeforeValidator(as_tuple), AS_LIST]
Ints = Annotated[tuple[int, ...], BeforeValidator(as_tuple), AS_LIST]
Floats = Annotated[tuple[PositiveFloat, ...], BeforeValidator(as_tuple), AS_LIST]
Pair = Annotated[tuple[float, float], BeforeValidator(as_tuple), AS_LIST]
Rate = Annotated[float, Field(ge=0.0, lt=1.0)]
"""A share of what is dropped: not all."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]


def as_words(value: Any) -> Any:
    """A list, or one text with commas: `q,v`."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(","))
    return as_tuple(value)


def words(kind: Any) -> Any:
    """Several words of `kind`."""
    return Annotated[tuple[kind, ...], BeforeValidator(as_words), AS_LIST]
