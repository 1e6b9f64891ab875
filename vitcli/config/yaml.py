"""YAML 1.2 that remembers its lines, refuses duplicate keys, and has limits."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar, cast

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
)

from vitcli.errors import VitcliError

KeyPath = tuple[str, ...]
Kind = TypeVar("Kind")
MOST_TEXT = 1 << 20
"""Bytes of a YAML file."""
MOST_NODES = 20_000
"""Values and keys of a YAML file after its aliases are expanded."""
DEEPEST = 64
"""Levels of nesting."""
_TAG = "tag:yaml.org,2002:"
_CORE = {  # YAML 1.2.2, section 10.3.2; the first that matches whole names the type
    "null": (r"null|Null|NULL|~|", "nN~"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the types of YAML 1.2's core schema and with limits.

    A key is the word as it is written. There are no merge keys, dates or tags of one's own.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}  # type: ignore[misc]
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        key: yaml.SafeLoader.yaml_constructors[key]
        for key in (f"{_TAG}null", f"{_TAG}str", f"{_TAG}seq", f"{_TAG}map", None)
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._open = 0
        self._sizes: dict[int, tuple[int, int]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node whose size, aliases expanded, is within the limits."""
        mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
        alias = self.check_event(yaml.AliasEvent)
        self._open += 1
        self._check(len(self._sizes), self._open, mark)
        node: Any = super().compose_node(parent, index)
        self._open -= 1
        if alias:
            if id(node) not in self._sizes:
                raise yaml.composer.ComposerError(None, None, "an alias of itself", mark)
            return node
        parts = node.value if isinstance(node.value, list) else []
        below = [
            self._sizes[id(part)]
            for pair in parts
            for part in (pair if isinstance(pair, tuple) else (pair,))
        ]
        nodes = 1 + sum(count for count, _ in below)
        levels = 1 + max((deep for _, deep in below), default=0)
        self._check(nodes, levels, mark)
        self._sizes[id(node)] = nodes, levels
        return node

    def fetch_flow_collection_start(self, TokenClass: Any) -> None:
        # Before the scanner looks ahead: its time grows with the square of the open brackets.
        self._check(1, self.flow_level + 1, self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def _check(self, nodes: int, levels: int, mark: Any) -> None:
        if nodes > MOST_NODES:
            wrong = f"more than {MOST_NODES:,} values after its aliases are expanded"
        elif levels > DEEPEST:
            wrong = f"nested more than {DEEPEST} levels deep"
        else:
            return
        raise yaml.composer.ComposerError(None, None, wrong, mark)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        return {key.value: self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_core(self, node: Any) -> Any:
        """A boolean or a number, of a tag that the text has or is written with."""
        word, kind = self.construct_scalar(node), node.tag.removeprefix(_TAG)
        if not re.fullmatch(_CORE[kind][0], word):
            wrong = f"{word!r} is not a YAML 1.2 {kind}"
            raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark)
        if len(word) > 1000:  # the time to convert grows with the square of it
            wrong = f"a number of {len(word):,} characters"
            raise yaml.constructor.ConstructorError(None, None, wrong, node.start_mark)
        if kind == "bool":
            return word.lower() == "true"
        if kind == "int":
            return int(word, {"0o": 8, "0x": 16}.get(word[:2], 10))
        return float(re.sub(r"\.(?=inf|nan)", "", word.lower()))


class _Dumper(yaml.SafeDumper):
    """Quotes a text that YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _kind, (_words, _first) in _CORE.items():
    for _reader in (_Loader, _Dumper):
        _starts = [*_first, ""] if _kind == "null" else list(_first)
        _reader.add_implicit_resolver(f"{_TAG}{_kind}", re.compile(f"^(?:{_words})$"), _starts)
    if _kind != "null":
        _Loader.add_constructor(f"{_TAG}{_kind}", _Loader.construct_core)


@dataclass(frozen=True)
class Document:
    """A parsed mapping, and the line (from 1) of each dotted key."""

    source: str
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)


def read_yaml(path: str | Path) -> Document:
    """Read one YAML mapping from a file.

    Raises:
        VitcliError: unreadable file, YAML that does not parse, a duplicate key, not a mapping.
    """
    try:
        with Path(path).open("rb") as file:
            text = file.read(MOST_TEXT + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise VitcliError(f"{path}: is not UTF-8 text", "name a YAML file") from error
    except (OSError, ValueError) as error:  # a path with a NUL is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise VitcliError(f"cannot read {path}: {reason}", "check the path") from error
    return parse_yaml(text, str(path))


RESTORE = "restore the file, or remove it and run the command again"


def read_json(path: str | Path, kind: type[Kind], hint: str = RESTORE) -> Kind:
    """A JSON file as `kind`: a pydantic model, a dataclass or a type.

    Raises:
        VitcliError: unreadable, not JSON, or a key with a wrong value; names the file and the key.
    """
    try:
        text = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise VitcliError(f"cannot read {path}: {reason}", "check the path") from error
    return checked(text, str(path), kind, hint)


def checked(value: Any, source: str, kind: type[Kind], hint: str = RESTORE) -> Kind:
    """Like `read_json`, from bytes of JSON or from plain data that errors call `source`."""
    reader = _reader_of(cast(Any, kind))
    try:
        read = reader.validate_json if isinstance(value, bytes) else reader.validate_python
        return cast(Kind, read(value))
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in problem["loc"])
        where = f"{source}: {key}" if key else source
        message = problem["msg"][0].lower() + problem["msg"][1:]
        raise VitcliError(f"{where}: {message}", hint) from error


@functools.cache
def _reader_of(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_yaml(text: str, source: str) -> Document:
    """Like `read_yaml`, from a string that errors call `source`."""
    data, lines = _parse(text, source)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise VitcliError(
            f"{source}: is not keys and values (got a {type(data).__name__})",
            "write `encoder:` and the keys below it",
        )
    return Document(source, data, lines)


def parse_value(text: str, source: str) -> Any:
    """One YAML value, as after `--set key=`."""
    return _parse(text, source)[0]


def _parse(text: str, source: str) -> tuple[Any, dict[KeyPath, int]]:
    """The value of a YAML text and the line of each key."""
    if len(text) > MOST_TEXT:
        raise VitcliError(f"{source}: is larger than 1 MiB", "name a YAML file that a person wrote")
    loader: _Loader | None = None
    lines: dict[KeyPath, int] = {}
    try:
        loader = _Loader(text)  # it refuses control characters
        node = loader.get_single_node()
        if node is None:
            return None, lines
        _walk(node, (), lines, source)
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{source}:{mark.line + 1}" if mark else source
        raise VitcliError(f"{where}: {error.problem}", "fix the YAML syntax") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise VitcliError(f"{source}: {reason}", "fix the YAML syntax") from error
    finally:
        if loader:
            loader.dispose()


def _walk(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], source: str) -> None:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*path, str(index)), lines, source)
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


def lookup(value: Any, path: str) -> Any:
    """What is at a dotted path: `result.val_accuracy`, `runs.0.wall_s.median`.

    In a list, `-1` is the last item, a word the item of that `name` (`runs.0.components.FFN.share`)
    and `*` every item: `history.*.loss` is a list. None where there is nothing.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part == "*":
            rest = ".".join(parts[index + 1 :])
            items = value if isinstance(value, list) else []
            return [lookup(item, rest) if rest else item for item in items]
        if isinstance(value, dict):
            value = value.get(part)
        elif isinstance(value, list) and part.lstrip("-").isdecimal():
            position = int(part)
            value = value[position] if -len(value) <= position < len(value) else None
        elif isinstance(value, list):
            named = (item for item in value if isinstance(item, dict) and item.get("name") == part)
            value = next(named, None)
        else:
            return None
    return value


def parse_size(text: str) -> tuple[int, int] | None:
    """`518` or `384x512` (height x width) as (height, width); None for anything else."""
    sides = text.lower().split("x")
    if len(sides) > 2 or not all(s.isascii() and s.isdecimal() and len(s) < 10 for s in sides):
        return None
    height, width = int(sides[0]), int(sides[-1])
    return (height, width) if height and width else None


def dump_yaml(data: Any) -> str:
    """YAML text in the order of the keys, which `read_yaml` reads back to the same values."""
    return str(
        yaml.dump(
            data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None
        )
    )


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


class Section(BaseModel):
    """A block of keys: unknown keys and wrong types are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


AS_LIST = PlainSerializer(lambda v: list(v))
"""YAML has lists, not tuples."""
Width = Annotated[int, Field(ge=1, le=65_536)]
"""Channels, heads, patches or pixels along an axis."""
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]
"""Of things that are made one after another."""
Size = Annotated[tuple[Width, Width], BeforeValidator(_as_size), PlainSerializer(_short_size)]
"""(height, width) in pixels; one number means a square."""
Triple = Annotated[tuple[float, float, float], BeforeValidator(as_tuple), AS_LIST]
Ints = Annotated[tuple[int, ...], BeforeValidator(as_tuple), AS_LIST]
Floats = Annotated[tuple[PositiveFloat, ...], BeforeValidator(as_tuple), AS_LIST]
Names = Annotated[tuple[str, ...], BeforeValidator(as_tuple), AS_LIST]
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
