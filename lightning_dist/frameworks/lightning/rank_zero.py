"""Messages that Lightning shows on rank 0 only, with the prefix of the package."""

from __future__ import annotations

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_dist.base.log import prefixed


def info(text: str) -> None:
    rank_zero_info(prefixed(text))


def warn(text: str) -> None:
    rank_zero_warn(prefixed(text), stacklevel=5)
