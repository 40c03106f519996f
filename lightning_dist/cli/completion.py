"""Shell completion of codec names and settings."""

from __future__ import annotations

from lightning_dist.configuration import OPTIONS


def codec_names(incomplete: str) -> list[str]:
    """Names of codecs that start with ``incomplete``, those of installed packages too."""
    from lightning_dist.codecs import CODECS  # torch

    return [name for name in CODECS if name.startswith(incomplete)]


def settings(incomplete: str) -> list[str]:
    """Completions of ``KEY=VALUE``: keys, and codec names as values of ``codec``."""
    key, equals, value = incomplete.partition("=")
    if not equals:
        return [f"{option}=" for option in OPTIONS if option.startswith(key)]
    return [f"codec={name}" for name in codec_names(value)] if key == "codec" else []


def codecs_and_ddp(incomplete: str) -> list[str]:
    """Names of codecs, and ``ddp`` for uncompressed DDP."""
    return [*(["ddp"] if "ddp".startswith(incomplete) else []), *codec_names(incomplete)]
