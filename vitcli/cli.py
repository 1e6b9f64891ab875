"""The command line. Importing it imports no torch: `--help` and usage errors stay fast."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.markup import escape
from typer import _completion_shared
from typer.core import TyperCommand, TyperGroup

from vitcli import __version__
from vitcli.commands import ALIASES, COMMANDS, command_function
from vitcli.errors import VitcliError
from vitcli.ui.completion import BASH
from vitcli.ui.console import detail, duration, set_verbosity, stream, warn

INTERRUPTED = 130
READER_LEFT = 128 + 13
"""As a shell reports a process that SIGPIPE ended."""


def complain(message: str, hint: str = "") -> None:
    """`error:` and what to do next, one line each, on stderr."""
    console = stream(stderr=True)
    console.print(f"[bold red]error:[/] {escape(message)}")
    if hint:
        console.print(f"  [cyan]try:[/] {escape(hint)}")


def _full_disk(error: BaseException) -> bool:
    """Python's own; what writes in Rust or C++ raises its own class with the system's text."""
    return getattr(error, "errno", None) == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error)


def _out_of_memory(error: BaseException) -> bool:
    """Python's own; torch's on a GPU; torch's on the CPU, which has no class, only a text."""
    kinds = ("MemoryError", "OutOfMemoryError")
    return type(error).__name__ in kinds or "DefaultCPUAllocator" in str(error)


def report(error: BaseException) -> int:
    """Print what went wrong in one line, what to do next in another; the exit code."""
    if isinstance(error, VitcliError):
        complain(error.message, error.hint)
        for cause in _causes(error):
            detail(f"because of {type(cause).__name__}: {cause}")
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        complain("interrupted")
        return INTERRUPTED
    if isinstance(error, BrokenPipeError):
        # The reader went away; keep Python's own flush at exit from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT
    if isinstance(error, OSError) or _full_disk(error):
        file = getattr(error, "filename", None)
        where = f"{file}: " if file else ""
        full = _full_disk(error)
        said = os.strerror(errno.ENOSPC) if full else getattr(error, "strerror", None) or error
        complain(f"{where}{said}", "free some space and run it again" if full else "")
        return 1
    if _out_of_memory(error):
        complain("out of memory", "use a smaller batch, image or encoder")
        return 1
    complain(
        f"{type(error).__name__}: {error}",
        "this is a fault in vitcli: `vitcli --debug ...` shows where",
    )
    return 1


def _causes(error: BaseException) -> Iterator[BaseException]:
    while cause := error.__cause__:
        yield cause
        error = cause


def _usage(error: Any) -> int:
    """An error of the command line itself, as click found it."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
    else:
        path = error.ctx.command_path if getattr(error, "ctx", None) else "vitcli"
        complain(error.format_message(), _moved(error) or f"{path} --help")
    return int(error.exit_code)


def _moved(error: Any) -> str:
    """What to type for an option of `encode` that went to `embed` with its job."""
    option, context = getattr(error, "option_name", None), getattr(error, "ctx", None)
    if not option or not context or context.info_name != "encode":
        return ""
    there = context.parent.command.commands["embed"].params
    return "vitcli embed PATH --out DIR" if any(option in p.opts for p in there) else ""


def _common(parameters: list[Any]) -> list[Any]:
    """The parameters with -q and -v; flags take no value, so the help names no type for them."""
    if not any("-q" in parameter.opts for parameter in parameters):
        parameters = [*parameters[:-1], *_verbosity(), *parameters[-1:]]  # --help is the last
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


def _verbosity() -> list[Any]:
    """-q and -v as typer makes them of a function; their callbacks do the work."""

    def flag(level: int, *names: str, help: str) -> Any:
        def act(asked: bool) -> None:
            if asked:
                set_verbosity(level)

        how: dict[str, Any] = {
            "callback": act,
            "is_eager": True,
            "expose_value": False,
            "help": help,
        }
        return Annotated[bool, typer.Option(*names, **how)]

    def options(quiet: bool = False, verbose: bool = False) -> None: ...

    options.__annotations__ = {
        "quiet": flag(-1, "--quiet", "-q", help="Print only results and errors."),
        "verbose": flag(
            1, "--verbose", "-v", help="Also print versions, times and the causes of errors."
        ),
    }
    both = typer.Typer(add_completion=False)
    both.command()(options)
    return list(typer.main.get_command(both).params)


class Command(TyperCommand):
    """A command with the options that all have."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _common(super().get_params(ctx))

    def invoke(self, ctx: Any) -> Any:
        begin = time.monotonic()
        python = ".".join(map(str, sys.version_info[:3]))
        detail(f"vitcli {__version__}, Python {python}, {ctx.command_path}")
        try:
            return super().invoke(ctx)
        finally:
            torch = sys.modules.get("torch")
            used = (
                f", torch {torch.__version__}, {torch.get_num_threads()} threads" if torch else ""
            )
            detail(f"took {duration(time.monotonic() - begin)}{used}")


class Program(TyperGroup):
    """All commands; the one place where errors become a line and an exit code."""

    debug = False

    def get_params(self, ctx: Any) -> list[Any]:
        return _common(super().get_params(ctx))

    def main(self, *arguments: Any, **more: Any) -> Any:
        # OpenMP reads these once, when torch is loaded. Beside other work, threads that spin while
        # they wait can make a step a hundred times as slow, and threads that sleep at once make
        # small steps slower on an idle machine: they spin for some µs (experiments/training.py).
        if "OMP_WAIT_POLICY" not in os.environ:
            os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
            os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        set_verbosity(0)
        try:
            code = super().main(*arguments, **more | {"standalone_mode": False})
            sys.stdout.flush()
        except SystemExit as end:
            if not isinstance(end.__context__, BrokenPipeError):
                raise
            code = report(end.__context__)  # rich ends the process by itself
        except Exception as error:
            if hasattr(error, "format_message"):  # click's own
                code = _usage(error)
            elif self.debug and not isinstance(error, BrokenPipeError):
                raise
            else:
                code = report(error)
        sys.exit(code if isinstance(code, int) else 0)

    def make_context(self, *arguments: Any, **more: Any) -> Any:
        return self._reported(super().make_context, *arguments, **more)

    def invoke(self, ctx: Any) -> Any:
        self.debug = bool(ctx.params.get("debug"))
        return self._reported(super().invoke, ctx)

    @staticmethod
    def _reported(call: Any, *arguments: Any, **more: Any) -> Any:
        """typer ends the process without a word for these two, before `main` sees them."""
        try:
            return call(*arguments, **more)
        except (KeyboardInterrupt, BrokenPipeError) as error:
            raise typer.Exit(report(error)) from error


_completion_shared._completion_scripts["bash"] = BASH  # what --show-completion prints

app = typer.Typer(
    cls=Program,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"vitcli {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Questions about Vision Transformer encoders, one command each.

    Every command takes a preset, a YAML config or a published checkpoint, and
    answers as a table, as JSON (--json) or as a picture (--plot).
    """


def _add_commands() -> None:
    """Ours, then those that other packages add by the entry point group `vitcli.commands`."""
    for name in COMMANDS:
        app.command(name, cls=Command)(command_function(name))
    for alias, name in ALIASES.items():
        app.command(alias, cls=Command, hidden=True)(command_function(name))
    for entry in importlib.metadata.entry_points(group="vitcli.commands"):
        source = f"the command {entry.name} of {entry.value}"
        if entry.name in (*COMMANDS, *ALIASES):
            warn(f"{source} is left out: vitcli has a command of this name")
            continue
        try:
            app.command(entry.name, cls=Command)(entry.load())
        except Exception as error:  # theirs must not stop ours
            warn(f"{source} is left out: {type(error).__name__}: {error}")


_add_commands()
