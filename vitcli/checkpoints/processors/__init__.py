"""Preprocessing that comes with weights: other libraries' settings as a PreprocessConfig.

Tables say what a library assumes where its file is silent. A setting that cannot be honored is
an error naming the file and the key; nothing is ignored but what cannot change a pixel.
"""

from vitcli.checkpoints.processors.open_clip import from_open_clip
from vitcli.checkpoints.processors.timm import from_timm
from vitcli.checkpoints.processors.transformers import from_transformers

__all__ = ["from_open_clip", "from_timm", "from_transformers"]
