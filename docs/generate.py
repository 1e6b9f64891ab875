"""Pages that are made from the program itself: commands, config keys, presets and families.

An mkdocs hook. Each command's page is its own help, then one of its examples run on small encoders
and pictures drawn here, with what it printed and drew.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import json
import os
import re
import shlex
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
RUN = "--weights run"
RUNS = {
    "train-shapes": "vitcli train-shapes --out run --plot run.png",
    "encode": f"vitcli encode photo.png {RUN} --plot encode.png",
    "embed": f"vitcli embed photos/ {RUN} --out vectors/ --format npy",
    "neighbors": "vitcli neighbors vectors/ photos/cross/0.png --count 3 --plot neighbors.png",
    "probe": f"vitcli probe photos/ {RUN} --preset vit-ti16 --k 3 --plot probe.png",
    "params": "vitcli params --preset vit-b16 --preset dinov2-s14 --plot params.png",
    "profile": f"vitcli profile {RUN} --batch 1 --batch 8 --runs 3 --plot profile.png",
    "attn-entropy": f"vitcli attn-entropy photo.png {RUN} --plot entropy.png",
    "compare": "vitcli compare run run photo.png --set-b encoder.norm_eps=1e-2 --plot cka.png",
    "explore": f"vitcli explore photo.png {RUN} --out photo.html",
    "grid": f"vitcli grid photo.png {RUN} --plot grid.png",
    "presets": "vitcli presets siglip2-b16",
    "families": "vitcli families timm",
    "sweep": "vitcli sweep toy.yaml --plot toy.png",
}
"""One command per page, in an order in which each finds what it reads."""
TOY = """\
question: How do parameters grow with depth?
command: params
base: {preset: vit-ti16}
grid: {encoder.depth: [3, 6, 12]}
metrics: {parameters: models.0.total}
"""


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = dict(examples(Path(folder)))
    pages = {
        "reference/config.md": config_page(),
        "reference/families.md": families_page(),
        "reference/json.md": json_page(),
        "commands/index.md": commands_index(),
    }
    for name in commands():
        text, picture = outputs.get(name, ("", b""))
        pages[f"commands/{name}.md"] = command_page(name, text, bool(picture))
        if picture:
            files.append(File.generated(config, f"commands/{name}.png", content=picture))
    for result in sorted({r for name in commands() for r in results_of(name)}, key=by_name):
        schema = json.dumps(schema_of(result), indent=1)
        files.append(
            File.generated(config, f"reference/json/{result.__name__}.json", content=schema)
        )
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def commands() -> list[str]:
    from vitcli.commands import COMMANDS

    return list(COMMANDS)


def examples(folder: Path) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """What each command of RUNS printed, and what it drew."""
    from typer.testing import CliRunner

    from vitcli.cli import app

    draw_pictures(folder)
    (folder / "toy.yaml").write_text(TOY)
    with contextlib.chdir(folder):
        for name, line in RUNS.items():
            done = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "100"})
            if done.exit_code:
                raise SystemExit(f"docs: {line}\n{done.output}")
            drawn = re.search(r"--plot (\S+)", line)
            picture = Path(drawn[1]).read_bytes() if drawn else b""
            yield name, (done.stdout.rstrip(), picture)


def draw_pictures(folder: Path) -> None:
    """Shapes that the run of train-shapes has not seen, a folder per class."""
    from PIL import Image

    import vitcli

    images, classes = vitcli.shapes(96, seed=1)
    for number, (image, name) in enumerate(zip(images, classes, strict=True)):
        place = folder / "photos" / name
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(place / f"{len(list(place.iterdir()))}.png")
        if number == 0:
            Image.fromarray(image).save(folder / "photo.png")


def command_page(name: str, printed: str, drawn: bool) -> str:
    """The help of a command and, where RUNS has one, an example with its output."""
    shown = "" if not printed else f"## An example\n\n```console\n$ {RUNS[name]}\n{printed}\n```\n"
    picture = f"\n![What --plot draws]({name}.png)\n" if drawn else ""
    return f"# vitcli {name}\n\n```text\n{help_text(name)}\n```\n\n{shown}{picture}"


def help_text(name: str) -> str:
    from typer.testing import CliRunner

    from vitcli.cli import app

    done = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "100", "NO_COLOR": "1"})
    return "\n".join(line.rstrip() for line in done.stdout.splitlines()).strip()


def commands_index() -> str:
    lines = ["# Commands", "", "| command | what it does |", "|---|---|"]
    for name in commands():
        from vitcli.commands import command_function

        summary = (inspect.getdoc(command_function(name)) or "").splitlines()[0]
        lines.append(f"| [`{name}`]({name}.md) | {summary} |")
    lines += [
        "",
        "Every command has `--help` with examples and defaults, prints JSON, CSV, Markdown",
    ]
    lines += ["or LaTeX with `--format`, and draws with `--plot` where there is something to draw."]
    return "\n".join(lines) + "\n"


def config_page() -> str:
    """Every key of the config: its type, default and meaning, from the schema."""
    from vitcli.config import schema, training

    parts = [
        "# Config keys",
        "",
        "A preset, then a YAML file, then `--set KEY=VALUE`: the later wins. Keys are those of the "
        "YAML with dots, such as `encoder.attention.mask`. `--print-config` prints every key of a "
        "model with its value. Plain scalars follow YAML 1.2's core schema.",
    ]
    sections = [
        ("encoder", schema.EncoderConfig),
        ("encoder.position_table", schema.TableConfig),
        ("encoder.rope", schema.RopeConfig),
        ("encoder.attention", schema.AttentionConfig),
        ("preprocess", schema.PreprocessConfig),
        ("data (train-shapes)", training.ShapesData),
        ("data (train)", training.ImagesData),
        ("train", training.TrainConfig),
        ("train.lora", training.LoraConfig),
    ]
    for title, section in sections:
        meaning = " ".join((inspect.getdoc(section) or "").split())
        parts += ["", f"## {title}", "", meaning, "", "| key | type | default | meaning |"]
        parts.append("|---|---|---|---|")
        comments = field_comments(section)
        for key, field in section.model_fields.items():
            default = field.get_default(call_default_factory=True)
            plain = "see its own section" if hasattr(default, "model_fields") else f"`{default}`"
            row = (f"`{key}`", f"`{type_words(field)}`", plain, comments.get(key, ""))
            parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(parts) + "\n"


def type_words(field: Any) -> str:
    from typing import get_origin

    annotation = field.annotation
    words = [str(choice) for choice in get_args(annotation)] if "Literal" in str(annotation) else []
    if words and get_origin(annotation) is not None and "Literal" in str(get_origin(annotation)):
        return " or ".join(words)
    text = getattr(annotation, "__name__", str(annotation))
    return re.sub(r"(typing\.|vitcli\.[\w.]+\.|<class '|'>)", "", text)


def field_comments(section: Any) -> dict[str, str]:
    """The string below each field of a class, by the field's name."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(node, ast.ClassDef)
    found, last = {}, ""
    for line in node.body:
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            last = line.target.id
        elif isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant) and last:
            found[last] = " ".join(str(line.value.value).split())
        else:
            last = ""
    return found


def by_name(kind: type) -> str:
    return kind.__name__


def results_of(command: str) -> list[type]:
    """The results that a command's API function returns, from its annotation."""
    import vitcli
    from vitcli.results import Result

    function = getattr(vitcli, command.replace("-", "_"))
    annotation = eval(function.__annotations__["return"], function.__globals__)
    kinds = [annotation, *get_args(annotation)]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Result)]


def schema_of(result: type) -> dict[str, Any]:
    """JSON Schema of what `--json` prints of a result."""
    from pydantic import TypeAdapter

    from vitcli.results import SCHEMA_VERSION

    schema = TypeAdapter(result).json_schema(mode="serialization")
    version = {"const": SCHEMA_VERSION, "type": "integer"}
    schema["properties"] = {"schema_version": version, **schema["properties"]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def json_page() -> str:
    """The fields of every command's JSON."""
    parts = [
        "# JSON of every command",
        "",
        "`vitcli COMMAND --json` prints one object. Any number is `null` where it is not finite. "
        "What the names promise is in [Files](files.md). Each heading links to its JSON Schema.",
    ]
    shown: set[str] = set()
    for command in commands():
        for result in results_of(command):
            parts += ["", f"## {command}: [{result.__name__}](json/{result.__name__}.json)", ""]
            meanings = {k: v for kind in result.__mro__[:-1] for k, v in documented(kind).items()}
            parts += fields_table(schema_of(result), meanings)
            for name, part in schema_of(result).get("$defs", {}).items():
                if name not in shown and "properties" in part:
                    shown.add(name)
                    kind = next(k for k in dataclasses_of(result) if k.__name__ == name)
                    parts += ["", f"### {name}", "", *fields_table(part, documented(kind))]
    return "\n".join(parts) + "\n"


def fields_table(schema: dict[str, Any], meanings: dict[str, str]) -> list[str]:
    rows = [
        f"| `{key}` | {json_type(kind)} | {meanings.get(key, '')} |".replace("\\|", "|")
        for key, kind in schema["properties"].items()
    ]
    return ["| field | type | meaning |", "|---|---|---|", *rows]


def json_type(kind: dict[str, Any]) -> str:
    """A JSON type in words: `array of Layer`, `number or null`."""
    if "$ref" in kind:
        return str(kind["$ref"].rsplit("/", 1)[-1])
    if "anyOf" in kind:
        return " or ".join(json_type(one) for one in kind["anyOf"])
    if kind.get("type") == "array":
        items = kind.get("items") or next(iter(kind.get("prefixItems", [])), {})
        return f"array of {json_type(items)}"
    if kind.get("type") == "object" and isinstance(kind.get("additionalProperties"), dict):
        return f"object of {json_type(kind['additionalProperties'])}"
    if "enum" in kind or "const" in kind:
        return " or ".join(f"`{json.dumps(v)}`" for v in kind.get("enum", [kind.get("const")]))
    return str(kind.get("type", "any"))


def documented(kind: type) -> dict[str, str]:
    return {} if kind is object else field_comments(kind)


def dataclasses_of(result: type) -> Iterator[type]:
    """Every dataclass that can be met in a result's fields."""
    waiting, seen = [result], set()
    while waiting:
        kind = waiting.pop()
        if kind in seen:
            continue
        seen.add(kind)
        if dataclasses.is_dataclass(kind):
            yield kind
            waiting += [t for hint in get_type_hints(kind).values() for t in inside(hint)]


def inside(hint: Any) -> Iterator[type]:
    """The classes of an annotation such as `tuple[Layer, ...] | None`."""
    if isinstance(hint, type) and not get_args(hint):
        yield hint
    for part in get_args(hint):
        yield from inside(part)


def families_page() -> str:
    """What --weights reads and how each family was verified; the presets."""
    from vitcli.commands.catalog.analysis import families, presets

    parts = [
        "# Checkpoint families and presets",
        "",
        "A family is recognized by its tensors and config, never by a file's name, and accepted "
        "only where every setting that changes numbers is known. `vitcli verify SOURCE` compares "
        "your own file with its library.",
        "",
        "| family | library | model_type | verified |",
        "|---|---|---|---|",
    ]
    for row in families().families:
        cells = (row.name, row.library, ", ".join(row.model_types), row.verified)
        parts.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    parts += ["", "## Presets", "", "| preset | hidden | depth | heads | patch | parameters |"]
    parts.append("|---|---:|---:|---:|---:|---:|")
    for preset in presets().presets:
        numbers = (preset.hidden, preset.depth, preset.heads, preset.patch_size)
        shown = " | ".join(map(str, numbers))
        parts.append(f"| `{preset.name}` | {shown} | {preset.parameters:,} |")
    return "\n".join(parts) + "\n"


if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
os.environ.setdefault("MPLBACKEND", "Agg")
