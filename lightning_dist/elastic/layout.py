"""How a global batch is dealt to ranks and cut into passes, for any number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

BatchPolicy = Literal["constant_global", "scale_lr", "scale_lr:sqrt", "fixed_micro"]


@dataclass(frozen=True)
class Layout:
    """Who takes how many samples of an optimizer step.

    Args:
        world_size: ranks.
        micro_batch: samples that a rank takes in one forward and backward pass, at most.
        accumulate: passes per optimizer step.
        global_batch: samples per optimizer step, of all ranks together.
    """

    world_size: int
    micro_batch: int
    accumulate: int
    global_batch: int

    @classmethod
    def of_script(cls, *, world_size: int, micro_batch: int, accumulate: int) -> Layout:
        """What a script means that sets a batch size per rank and passes per step."""
        return cls(world_size, micro_batch, accumulate, world_size * micro_batch * accumulate)

    def share(self, rank: int, *, begin: int, count: int) -> range:
        """Which samples of ``begin .. begin + count`` a rank takes: every world_size-th.

        Sample ``p`` goes to rank ``p % world_size``, so the shares of a step differ by one sample
        at most and the ranks take turns in having more.
        """
        first = begin + (rank - begin) % self.world_size
        return range(first, max(first, begin + count), self.world_size)

    def passes_for(self, count: int) -> int:
        """Passes that a step of ``count`` samples takes; the same on every rank."""
        largest = math.ceil(count / self.world_size)
        return max(1, math.ceil(largest / self.micro_batch))


def require_policy(policy: str) -> None:
    """Raise a ValueError if there is no such policy."""
    if policy not in get_args(BatchPolicy):
        names = ", ".join(map(repr, get_args(BatchPolicy)))
        raise ValueError(f"batch_policy is one of {names}; got {policy!r}")


def layout_for(policy: BatchPolicy, first: Layout, *, script: Layout) -> Layout:
    """The layout for the ranks of ``script`` in a run that began with the layout ``first``.

    Args:
        policy: ``"constant_global"`` keeps the global batch and changes the passes per step; the
            others do what the script says, and the global batch grows with the ranks.
        script: what the script asks for now.

    Raises:
        ValueError: more ranks than samples in a global batch.
    """
    if policy != "constant_global":
        return script
    world_size, micro_batch = script.world_size, script.micro_batch
    if world_size > first.global_batch:
        raise ValueError(
            f"batch_policy='constant_global' deals a global batch of {first.global_batch} samples "
            f"to at most as many ranks; got {world_size} ranks. Start fewer, or use "
            "batch_policy='scale_lr'"
        )
    accumulate = math.ceil(math.ceil(first.global_batch / world_size) / micro_batch)
    return Layout(world_size, micro_batch, accumulate, first.global_batch)


def lr_factor(policy: BatchPolicy, *, before: Layout, now: Layout) -> float:
    """What the learning rate is multiplied with when the layout changes.

    Linear scaling: Goyal et al. 2017, arXiv 1706.02677. Square root: Krizhevsky 2014,
    arXiv 1404.5997.
    """
    ratio = now.global_batch / before.global_batch
    return {"scale_lr": ratio, "scale_lr:sqrt": math.sqrt(ratio)}.get(policy, 1.0)
