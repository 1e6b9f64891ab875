"""The `vitcli` program, also as `python -m vitcli`."""

import os
import sys
from pathlib import Path

INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C is one line and 130 even while it is still being imported."""
    if sys.stdout is None:  # Python's sign that it was closed before the start
        if sys.stderr is not None:
            sys.stderr.write("error: there is no stdout to answer on\n")
        raise SystemExit(1)
    if sys.stderr is None:
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 (for as long as the process lasts)
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
