"""The `vitcli` program, also as `python -m vitcli`."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C is one line and 130 even while it is still being imported."""
    try:
        from vitcli.cli import app

        app()
    except KeyboardInterrupt:
        sys.stderr.write("error: interrupted\n")
        sys.exit(130)


if __name__ == "__main__":
    main()
