"""How the scripts of experiments/ are run in tests."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "VITCLI": shlex.join([sys.executable, "-m", "vitcli"]),
    "PYTHON": sys.executable,
}
