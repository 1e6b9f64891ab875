"""What each command answers: frozen dataclasses of scalars, strings and tuples.

Field names carry the unit. Nothing here knows tensors, colours or how it will be shown; the JSON
of a result is its fields plus `schema_version` (see `vitcli.render.json`).
"""

from __future__ import annotations

SCHEMA_VERSION = 1
