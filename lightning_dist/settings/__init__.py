"""Settings from outside of the code: variables and YAML files. Standard library and YAML only."""

from lightning_dist.settings.files import CONFIG, PREFIX, SIDECAR, read, write
from lightning_dist.settings.options import OPTIONS, Option
from lightning_dist.settings.resolve import CODE, LEFT_OUT, Resolved, resolve

__all__ = [
    "CODE",
    "CONFIG",
    "LEFT_OUT",
    "OPTIONS",
    "PREFIX",
    "SIDECAR",
    "Option",
    "Resolved",
    "read",
    "resolve",
    "write",
]
