"""Settings from outside of the code: variables and YAML files. Standard library and YAML only."""

from lightning_dist.configuration.files import read, write
from lightning_dist.configuration.options import OPTIONS, Option
from lightning_dist.configuration.places import CONFIG, PREFIX, SIDECAR
from lightning_dist.configuration.resolve import CODE, Resolved, configured, resolve

__all__ = [
    "CODE",
    "CONFIG",
    "OPTIONS",
    "PREFIX",
    "SIDECAR",
    "Option",
    "Resolved",
    "configured",
    "read",
    "resolve",
    "write",
]
