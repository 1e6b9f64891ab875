"""The `vitcli` program, also as `python -m vitcli`."""

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
    try:
        from vitcli.cli import app

        app()
        return
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
    except SystemExit as end:
        if end.code != INTERRUPTED:
            raise
    # Python's own exit would die of the signal if the interrupt had come inside an exec().
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
