"""vitcli: a command-line experimentation tool for Vision Transformer encoders."""

from vitcli._version import __version__

__all__ = ["__version__"]
