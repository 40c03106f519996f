"""Draws trials of the restart campaign, each from the seed and its number."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from elastic_jobs import Fault

_DATA = (
    (48, False, 1),
    (50, False, 1),
    (50, False, 2),
    (53, True, 1),
    (53, True, 2),
    (47, False, 3),
)
"""Samples, drop_last, micro-batches per step."""

_POLICIES = {"scale_lr": "scale_lr", "fixed_micro": "fixed_micro_batch"}
"""Batch policies of kinds of trials; the others keep the global batch."""
_UNWATCHED = ("before the trainer", "loading a checkpoint")
"""Where a stopped rank is waited for: nobody watches before the training begins."""
_BEFORE_STEPS = ("before the trainer", "loading a checkpoint", "train start")
"""Where a process has not taken a step yet."""
_OFF_THREAD = ("kill", "stop", "abort", "exit")
"""What ends or stops a process from any thread."""

ONE_WORLD = {  # kind: (action, whom)
    "kill rank 0": ("kill", "first"),
    "kill another rank": ("kill", "other"),
    "kill two ranks": ("kill", "two"),
    "kill all ranks": ("kill", "all"),
    "SIGTERM to one rank": ("terminate", "one"),
    "SIGTERM to all ranks": ("terminate", "all"),
    "SIGSTOP": ("stop", "one"),
    "exception": ("raise", "one"),
    "abort": ("abort", "one"),
    "exit": ("exit", "one"),
    "out of memory": ("oom", "one"),
    "mid-accumulation": ("", "one"),
}
KINDS = (
    *ONE_WORLD,
    "two faults",
    "newest damaged",
    "two newest damaged",
    "other world",
    "other world and back",
    "scale_lr",
    "fixed_micro",
    "stock ddp, new start",
)
_RARE = {"SIGSTOP": 0.4}  # 40 s each


def draw(number: int, *, seed: int, kinds: Sequence[str], is_loop: bool = False) -> Trial:
    """The trial of this number: each kind in turn at first, and then by chance."""
    chance = random.Random(f"{seed}/{number}")
    weights = [_RARE.get(kind, 1.0) for kind in kinds]
    kind = kinds[number] if number < len(kinds) else chance.choices(kinds, weights)[0]
    return _Drawing(chance, number, kind, is_loop=is_loop).trial()


class _Drawing:
    def __init__(self, chance: random.Random, number: int, kind: str, *, is_loop: bool) -> None:
        self.chance, self.number, self.kind, self.is_loop = chance, number, kind, is_loop
        self.changes_world = kind.startswith("other world") or kind in _POLICIES
        self.format = chance.choice(("single", "single", "single" if is_loop else "sharded"))
        self.setup = self._setup()

    def _setup(self) -> Setup:
        chance, kind = self.chance, self.kind
        world = chance.choice((2, 2, 2, 3, 4))
        if self.changes_world:
            world = chance.choice((1, 2, 2, 3, 4))
        elif kind == "kill two ranks":
            world = chance.choice((3, 4))
        elif kind in ("kill all ranks", "SIGTERM to all ranks", "newest damaged"):
            world = chance.choice((1, 2, 2, 3))
        size, drop_last, accumulate = chance.choice(_DATA)
        if kind == "mid-accumulation":
            size, drop_last, accumulate = chance.choice([each for each in _DATA if each[2] > 1])
        codec = "ddp" if kind.startswith("stock") else chance.choice(("int8", "none"))
        noisy = not self.changes_world
        return Setup(world, codec, size, drop_last, accumulate, noisy)

    def trial(self) -> Trial:
        worlds, faults, restarts = self._faults()
        return Trial(
            number=self.number,
            kind=self.kind,
            setup=self.setup,
            worlds=worlds,
            faults=faults,
            max_restarts=restarts,
            policy=_POLICIES.get(self.kind, "fixed_global_batch"),
            format=self.format,
            every=self.chance.choice((1, 2, 2, 3)),
            is_loop=self.is_loop,
        )

    def _faults(self) -> tuple[list[int], list[Fault], int]:
        chance, world = self.chance, self.setup.world
        if self.kind in ONE_WORLD:
            action, whom = ONE_WORLD[self.kind]
            action = action or chance.choice(("kill", "terminate", "raise", "exit"))
            fault = self._fault(action, self._whom(whom, world))
            # ranks that were told to end all end with 0, and the agent is content
            worlds = [world] * (1 + len(fault.ranks) * (action == "terminate"))
            return worlds, [fault], 1 + len(fault.ranks)
        if self.kind == "two faults":
            first = self._fault(self._deadly(), self._whom("any", world))
            again = self._fault(self._deadly(), self._whom("any", world), after=0)
            worlds = [world] * (1 + world * 2 * ("terminate" in (first.kind, again.kind)))
            return worlds, [first, again], 2 + len(first.ranks) + len(again.ranks)
        if self.kind.endswith("damaged"):
            last = EPOCHS * self.setup.steps_per_epoch - 1
            step = chance.randint(min(7, last), last)
            count = 2 if self.kind.startswith("two") else 1
            first = self._fault("kill", self._whom("any", world), step=step, phase="batch start")
            how = chance.choice(("flip", "truncate"))
            damage = Fault(how, "at_start", 0, (0,), start=1, count=count, seed=self.number)
            return [world, world], [first, damage], 0
        worlds = [world, *self._others(world)]
        faults = [
            self._fault(self._deadly(), self._whom("any", of_start), start=start)
            for start, of_start in enumerate(worlds[:-1])
        ]
        return worlds, faults, 0

    def _others(self, world: int) -> list[int]:
        if not self.changes_world:
            return [world]
        choices = {world - 1, world + 1, world * 2, world // 2} & {1, 2, 3, 4} - {world}
        other = self.chance.choice(sorted(choices))
        return [other, world] if self.kind.endswith("back") else [other]

    def _deadly(self) -> str:
        return self.chance.choice(("kill", "kill", "terminate", "raise", "abort", "exit", "oom"))

    def _whom(self, whom: str, world: int) -> list[int]:
        ranks = list(range(world))
        if whom == "any":
            whom = self.chance.choice(("one", "one", "all"))
        if whom == "all":
            return ranks
        if whom == "two":
            return sorted(self.chance.sample(ranks, 2))
        return [{"first": 0, "other": self.chance.choice(ranks[1:] or ranks)}.get(
            whom, self.chance.choice(ranks))]  # fmt: skip

    def _fault(
        self, action: str, ranks: list[int], *, start: int = 0, after: int | None = None,
        step: int | None = None, phase: str = "",
    ) -> Fault:  # fmt: skip
        chance = self.chance
        if step is None:
            step = chance.randrange(1, EPOCHS * self.setup.steps_per_epoch)
        if after is not None and chance.random() < 0.5:
            step = 0  # as soon as the phase is met
        phases = [each for each in HOOKS if self._can_meet(each, action, ranks)]
        if after is None:
            phases = [each for each in phases if each != "loading a checkpoint"]
        if self.kind == "mid-accumulation":
            phases = ["backward", "batch start"]
        if after is not None and chance.random() < 0.3:
            phases = [each for each in _BEFORE_STEPS if each in phases]
        phase = phase or chance.choice(phases)
        skip = 1 if self.kind == "mid-accumulation" and phase == "batch start" else 0
        if phase == "writing a checkpoint":
            skip = chance.randrange(4)
        if phase in _BEFORE_STEPS:
            step = 0
        hook = (PLACES if self.is_loop else HOOKS)[phase]
        return Fault(action, hook, step, ranks, start, skip, after)

    def _can_meet(self, phase: str, action: str, ranks: list[int]) -> bool:
        if self.is_loop and phase not in PLACES:
            return False
        if phase == "writing a checkpoint":
            writes = self.format == "sharded" or ranks == [0]
            return action in _OFF_THREAD and writes
        return action != "stop" or phase not in _UNWATCHED


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
"""Phases of a loop of the user's own, and where tests/support/loop_runs.py meets them."""


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
class Trial:
    """A job of one or more starts, each by an agent of its own, and what befalls it."""

    number: int
    kind: str
    setup: Setup
    worlds: Sequence[int]
    faults: Sequence[Fault] = ()
    max_restarts: int = 0
    policy: str = "fixed_global_batch"
    format: str = "single"
    every: int = 2
    keep: int = 3
    is_loop: bool = False
    """An ElasticLoop around plain DDP; or else ElasticRestart in a Trainer."""

    @property
    def has_stop(self) -> bool:
        return any(fault.kind == "stop" for fault in self.faults)

    @property
    def bound(self) -> float:
        return BOUND_S * max(1, len(self.faults)) + (STOP_EXTRA_S if self.has_stop else 0.0)
