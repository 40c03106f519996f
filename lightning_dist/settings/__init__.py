"""Settings of users, declared once, for code, variables and YAML files. Imports no torch."""

from lightning_dist.settings.options import OPTIONS
from lightning_dist.settings.resolve import (
    CODE,
    CONFIG,
    PREFIX,
    SIDECAR,
    FromOutside,
    Resolved,
    from_outside,
    read,
    resolve,
    write,
)

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
