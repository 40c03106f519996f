"""Ranks as Lightning and Accelerate keep them, where members change within the process."""

from __future__ import annotations

import sys

from lightning_utilities.core.rank_zero import rank_zero_only


def set_framework_rank(*, rank: int, world_size: int) -> None:
    """Let functions of Lightning and Accelerate that ask for a rank have the present one."""
    rank_zero_only.rank = rank  # type: ignore[attr-defined]  # where Lightning keeps it
    if "accelerate" not in sys.modules:
        return
    from accelerate.state import AcceleratorState, PartialState, is_initialized

    if is_initialized():
        for state in (PartialState(), AcceleratorState()):
            state.num_processes, state.process_index = world_size, rank
