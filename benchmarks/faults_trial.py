"""Trials of the restart campaign: which training, which faults, which starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EPOCHS = 3
BOUND_S = 90.0
"""Seconds for every fault of a trial; more for a stopped rank: torch's agent kills it after 30."""
STOP_EXTRA_S = 45.0
HANG_TIMEOUT_S = 4.0
"""What a trial with a stopped rank gives ElasticRestart."""

HOOKS = {
    "before the trainer": "at_start",
    "loading a checkpoint": "on_load_checkpoint",
    "train start": "on_train_start",
    "batch start": "on_train_batch_start",
    "backward": "on_after_backward",
    "before the optimizer step": "on_before_optimizer_step",
    "after the optimizer step": "after_optimizer_step",
    "batch end": "on_train_batch_end",
    "validation": "on_validation_batch_start",
    "taking a checkpoint": "on_save_checkpoint",
    "writing a checkpoint": "fsync",
    "epoch end": "on_train_epoch_end",
    "train end": "on_train_end",
}
"""Phases, and the hook in which they are met; ``fsync``: of the thread that writes."""

PLACES = {
    "before the trainer": "at_start",
    "batch start": "in_pass",
    "backward": "after_backward",
    "after the optimizer step": "after_optimizer",
    "batch end": "after_step",
    "epoch end": "after_epoch",
}
"""Phases of a loop of the user's own, and where tests/integrations/loop_runs.py meets them."""


@dataclass(frozen=True)
class Setup:
    """What decides the result of a training without faults."""

    world: int
    codec: str
    """``"ddp"``: stock DDP; otherwise of compressed_ddp."""
    size: int
    drop_last: bool
    accumulate: int
    noisy: bool
    """Dropout, and samples that draw random numbers."""

    @property
    def batch(self) -> int:
        """Of one pass of one rank: less of many, so that an epoch has several steps."""
        return 4 if self.world * self.accumulate < 4 else 2

    @property
    def global_batch(self) -> int:
        return self.batch * self.world * self.accumulate

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.size, self.global_batch)
        return whole + (rest > 0 and not self.drop_last)


@dataclass(frozen=True)
class Strike:
    """What happens to some ranks, once to each.

    Args:
        action: of :data:`benchmarks.faults_actions.ACTIONS`, or ``"flip"`` and ``"truncate"``.
        phase: of :data:`HOOKS`.
        step: optimizer steps that are done, at least.
        skip: so many more times that the phase is met.
        ranks: to which it happens.
        start: in which start of the job, counted from 0.
        after: only in a process that begins when this other strike has happened.
        count: newest checkpoints to damage.
    """

    action: str
    phase: str
    step: int = 0
    skip: int = 0
    ranks: Sequence[int] = (0,)
    start: int = 0
    after: int | None = None
    count: int = 1


@dataclass(frozen=True)
class Trial:
    """A job of one or more starts, each by an agent of its own, and what befalls it."""

    number: int
    kind: str
    setup: Setup
    worlds: Sequence[int]
    strikes: Sequence[Strike] = ()
    max_restarts: int = 0
    policy: str = "constant_global"
    format: str = "single"
    every: int = 2
    keep: int = 3
    is_loop: bool = False
    """An ElasticLoop around plain DDP; or else ElasticRestart in a Trainer."""

    @property
    def has_stop(self) -> bool:
        return any(strike.action == "stop" for strike in self.strikes)

    @property
    def bound(self) -> float:
        return BOUND_S * max(1, len(self.strikes)) + (STOP_EXTRA_S if self.has_stop else 0.0)
