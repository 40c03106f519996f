"""Settings of users, declared once, for code, variables and YAML files. Imports no torch."""

from lightning_dist.settings.files import CONFIG, PREFIX, SIDECAR, read, write
from lightning_dist.settings.options import OPTIONS
from lightning_dist.settings.resolve import CODE, FromOutside, Resolved, from_outside, resolve

__all__ = [
    "CODE",
    "CONFIG",
    "OPTIONS",
    "PREFIX",
    "SIDECAR",
    "FromOutside",
    "Resolved",
    "from_outside",
    "read",
    "resolve",
    "write",
]
