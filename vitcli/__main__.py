"""The `vitcli` program, also as `python -m vitcli`."""

import atexit
import os
import signal
import sys

INTERRUPTED = 130


def _terminate(number: int, frame: object) -> None:
    """A SIGTERM unwinds the program, so that no half-written file stays."""
    raise SystemExit(128 + number)


def main() -> None:
    """Run the command line; Ctrl-C is one line and 130 even while it is still being imported."""
    if sys.stdout is None:  # Python's sign that it was closed before the start
        if sys.stderr is not None:
            sys.stderr.write("error: stdout is closed\n")
        raise SystemExit(1)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 (for as long as the process lasts)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # no character of an answer ends the program
            stream.reconfigure(errors="backslashreplace")
    signal.signal(signal.SIGTERM, _terminate)
    code = INTERRUPTED
    try:
        from vitcli.cli import app

        app()
        return
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
    except SystemExit as end:
        # Of several processes: DDP never lets go of gloo's threads, which abort Python's own exit
        # if they still have a tensor of the last exchange in hand.
        several = os.environ.get("WORLD_SIZE", "1") != "1"
        if not isinstance(end.code, int) or (end.code != INTERRUPTED and not several):
            raise
        code = end.code
    # Python's own exit would die of the signal if the interrupt had come inside an exec().
    if code != INTERRUPTED:
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
