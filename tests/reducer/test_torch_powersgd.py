"""Why contract 3 exists: torch's PowerSGD hook never recovers from one overflow. Ours does."""

from __future__ import annotations

import torch
from feeding import Fed, backward, compressed, feed
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

SHAPES = {"weight": (24, 16)}  # one bucket: with several the hook aborts on gloo
OVERFLOW_AT, STEPS = 4, 8


def finite_steps(rank: Rank, model: DistributedDataParallel) -> list[bool]:
    """Which steps gave finite gradients, when rank 1 alone overflows once."""

    def given(step: int) -> dict[str, Tensor]:
        gradients = feed(rank.rank, step, SHAPES)
        if rank.rank == 1 and step == OVERFLOW_AT:
            gradients["weight"][3, 5] = torch.inf
        return gradients

    steps = [backward(model, given(step))["weight"] for step in range(STEPS)]
    return [bool(gradient.isfinite().all()) for gradient in steps]


def test_torchs_powersgd_hook_stays_nan_for_ever() -> None:
    """If this fails torch has mended it: then the claim in our documents must go."""

    def body(rank: Rank) -> list[bool]:
        group = rank.group("ddp")
        model = DistributedDataParallel(Fed(SHAPES), process_group=group)
        state = PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        model.register_comm_hook(state, powerSGD_hook)
        return finite_steps(rank, model)

    dead_since = [step < OVERFLOW_AT for step in range(STEPS)]
    assert run_threads(body, 2) == [dead_since] * 2


def test_ours_loses_one_step() -> None:
    def body(rank: Rank) -> list[bool]:
        with compressed(rank, Fed(SHAPES), "int8", min_compress_numel=0) as (model, _):
            return finite_steps(rank, model)

    one_lost = [step != OVERFLOW_AT for step in range(STEPS)]
    assert run_threads(body, 2) == [one_lost] * 2
