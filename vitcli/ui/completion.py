"""What a shell completes: the values of options, by their names or metavars, and files."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer

from vitcli.config.attention_variants import TableResize
from vitcli.config.request import DEFAULT_PRESET, DTYPES, load_config, preset_names
from vitcli.config.schema import (
    FitKind,
    InitScheme,
    ModelConfig,
    NormPlacement,
    PoolingKind,
    PositionKind,
)
from vitcli.engines import AUTO, ENGINES


def complete(words: Iterable[str]) -> Callable[[str], Iterator[str]]:
    """What a shell completes an option's value with, or the last of several with commas."""
    known = tuple(words)

    def completed(incomplete: str) -> Iterator[str]:
        before, comma, last = incomplete.rpartition(",")
        return (before + comma + word for word in known if word.startswith(last))

    return completed


def complete_files(incomplete: str) -> list[str]:
    """The shell completes files: bash where it reads FILES, others where there are no words."""
    return [incomplete + FILES] if "VITCLI_FILES" in os.environ else []


def complete_names(names: Callable[[], Iterable[str]], suffix: str = "") -> Callable[[str], Any]:
    """Names, folders, and files that end in `suffix`."""

    def completed(incomplete: str) -> list[str]:
        base = "".join(incomplete.rpartition("/")[:2])
        words = list(names())
        with suppress(OSError):
            for path in sorted(Path(base).iterdir()):
                if path.is_dir() or path.name.endswith(suffix):
                    words.append(f"{base}{path.name}{'/' * path.is_dir()}")
        return [word for word in words if word.startswith(incomplete)]

    return completed


FILES = "//files"
BASH = """
%(complete_func)s() {
    local IFS=$'\\n'
    COMPREPLY=( $( env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD=$COMP_CWORD VITCLI_FILES=1 \\
                   %(autocomplete_var)s=complete_bash $1 ) )
    if [[ ${COMPREPLY[0]} == *//files ]]; then
        COMPREPLY=()
        compopt -o default
    elif [[ ${COMPREPLY[0]} == */ ]]; then
        compopt -o nospace
    fi
}

complete -F %(complete_func)s %(prog_name)s
"""
"""typer's completes files wherever there is no word to complete; this one where files are meant."""


def complete_presets(incomplete: str) -> Iterator[str]:
    return complete(preset_names())(incomplete)


def _layers(ctx: typer.Context, incomplete: str) -> Iterator[str]:
    """Layers of the preset that the line names: the last, then by number."""
    named = ctx.params.get("preset") or DEFAULT_PRESET
    preset = named if isinstance(named, str) else named[0]
    depth = load_config(ModelConfig, preset).encoder.depth if preset in preset_names() else 0
    words = ["-1", *map(str, range(depth + 1))]
    return complete(["all", *words] if ctx.command.name == "probe" else words)(incomplete)


COMPLETIONS: dict[str, Callable[..., Any]] = {
    "--preset": complete_presets,
    "--norm": complete(get_args(NormPlacement)),
    "--position": complete(get_args(PositionKind)),
    "--pool": complete(get_args(PoolingKind)),
    "--fit": complete(get_args(FitKind)),
    "--device": complete(("auto", "cpu", "cuda", "mps")),
    "--dtype": complete(DTYPES),
    "--vector-dtype": complete(("float32", "float16")),
    "--engine": complete([*ENGINES, AUTO]),
    "--layers": _layers,
    "--layer": _layers,
    "--tokens": complete(("pooled", "output", "cls", "dist", "register", "patch")),
    "--width": complete(("column", "page")),
    "--init": complete(get_args(InitScheme)),
    "--pos-resize": complete(get_args(TableResize)),
    "--lora-on": complete(("q", "k", "v")),
}
"""What a shell completes the value of an option with."""
FILES_MEANT = re.compile(r"\b(FILE|DIR|PATH|SOURCE|IMAGE|OUT|DATA)\b")
"""In the metavar of what is a file, a folder or a glob."""


def with_completion(hint: Any) -> None:
    """Give an annotated parameter its completion: by its name, else by its metavar."""
    for info in get_args(hint)[1:] if get_origin(hint) is Annotated else ():
        if isinstance(info, typer.models.ParameterInfo) and info.autocompletion is None:
            words = [w for w in (info.metavar or "").split("|") if re.fullmatch("[a-z_0-9]+", w)]
            names = (info.default, *(info.param_decls or ()))  # typer holds the first as default
            named = (COMPLETIONS[n] for n in names if isinstance(n, str) and n in COMPLETIONS)
            other: Callable[..., Any] = complete(words)
            if FILES_MEANT.search(info.metavar or ""):
                other = complete_names(functools.partial(list, words)) if words else complete_files
            info.autocompletion = next(named, other)
