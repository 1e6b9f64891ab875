"""python -m vitcli"""

from vitcli.cli import main

if __name__ == "__main__":
    main()
