"""Preprocessing that comes with weights: other libraries' settings as a PreprocessConfig.

Tables say what a library assumes where its file is silent. A setting that cannot be honoured is
an error naming the file and the key; nothing is ignored but what cannot change a pixel.
"""

from vitcli.inputs.foreign.open_clip import from_open_clip
from vitcli.inputs.foreign.timm import from_timm
from vitcli.inputs.foreign.transformers import from_transformers

__all__ = ["from_open_clip", "from_timm", "from_transformers"]
