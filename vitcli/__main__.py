"""The `vitcli` program, also as `python -m vitcli`."""

import os
import sys

INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C is one line and 130 even while it is still being imported."""
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
