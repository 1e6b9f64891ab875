"""vitcli attn-entropy"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vitcli.cli.options import JsonOption, PlotOption, SharedModelOptions, grouped
from vitcli.errors import VitcliError
