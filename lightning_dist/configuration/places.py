"""Places of settings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SIDECAR = "lightning_dist.yaml"
PREFIX = "LIGHTNING_DIST_"
CONFIG = f"{PREFIX}CONFIG"
OTHERS = (f"{PREFIX}HOSTNAME",)
"""Variables with our prefix that are no settings of what travels."""


def accelerate_folder(environ: Mapping[str, str]) -> Path:
    """Where Accelerate keeps ``default_config.yaml``; its rule, without importing it."""
    cache = environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(environ.get("HF_HOME", f"{cache}/huggingface")).expanduser()
    return home / "accelerate"


def accelerate_default(environ: Mapping[str, str]) -> Path:
    """The file that ``accelerate launch`` reads when none is named."""
    return accelerate_folder(environ) / "default_config.yaml"


def sidecar_of(config: Path) -> Path:
    """Our file beside a file of Accelerate's."""
    return config.with_name(SIDECAR)
