"""Draws the faults of a job, each from the seed and its number."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

RANKS, BATCH, EPOCH_STEPS = 4, 4, 6
SIZE = RANKS * BATCH * EPOCH_STEPS
"""Samples of an epoch."""
SAVES = 5
"""Steps between two checkpoints."""

_IN_STEPS = ("forward", "between buckets", "after the vote", "after the step")
_BEFORE_THE_VOTE = _IN_STEPS[:2]
_ON_THREAD = ("before the vote", "after the answer")
"""On the reducer's thread, where an exception is that of an exchange."""
_KINDS: Mapping[str, float] = {
    "SIGKILL": 6,
    "os._exit": 2,
    "exception": 2,
    "SIGSTOP": 1.5,
    "SIGSTOP and SIGCONT": 1,
    "straggler": 1,
    "two at once": 3,
    "newcomer while it is healed": 2,
    "source of a newcomer": 2,
    "while groups are made": 2,
    "while a checkpoint is saved": 2,
    "end of an epoch": 2,
}
"""And how often they are drawn."""
ADAPTERS = ("loop", "trainer", "local_steps")
KINDS = (*_KINDS, "first step", "last step")
_ACTIONS = {
    "os._exit": "exit",
    "exception": "raise",
    "SIGSTOP": "stop",
    "SIGSTOP and SIGCONT": "stop for long",
    "straggler": "pause",
}


@dataclass(frozen=True)
class Strike:
    """What happens to one worker, once.

    Attributes:
        number: unique among those of a job.
        fault: of which it is a part.
        step: from which on, counted from 0.
        local_rank: whoever is in that place then.
        place: of the training.
        action: what it does to itself.
        after: the strike that has to be past; -1: none.
    """

    number: int
    fault: int
    kind: str
    step: int
    local_rank: int
    place: str
    action: str = "kill"
    after: int = -1


def draw(count: int, *, seed: int, spared: int | None = None) -> tuple[list[Strike], int]:
    """Strikes of ``count`` faults, and the steps of the training.

    The first is in the first step and the last in the last one.

    Args:
        spared: the place of a worker to which nothing happens.
    """
    chance = random.Random(f"{seed}/{count}/{spared}")
    ranks = [rank for rank in range(RANKS) if rank != spared]
    strikes: list[Strike] = []
    step = 0
    for fault in range(count):
        (kind,) = chance.choices([*_KINDS], [*_KINDS.values()])
        if fault == 0:
            kind = "first step"
        elif fault == count - 1:
            kind = "last step"
            step += -(step + 1) % EPOCH_STEPS
        for each in _strikes(kind, step, chance, ranks):
            after = -1 if each.after < 0 else len(strikes) - 1
            strikes.append(replace(each, number=len(strikes), fault=fault, after=after))
        step += chance.choice((2, 3, 3, 4)) if fault < count - 1 else 1
    assert step % EPOCH_STEPS == 0
    return strikes, step


def _strikes(kind: str, step: int, chance: random.Random, ranks: Sequence[int]) -> Iterator[Strike]:
    first, second = chance.sample(ranks, 2)
    place = chance.choice(_IN_STEPS)
    some = Strike(0, 0, kind, step, first, place, _ACTIONS.get(kind, "kill"))
    if kind == "SIGKILL":
        some = replace(some, place=chance.choice((*_IN_STEPS, *_ON_THREAD)))
    elif kind == "while a checkpoint is saved":
        some = replace(some, place="saving")
    elif kind == "end of an epoch":
        some = replace(some, place="end of an epoch")
    elif kind == "last step":  # later all restart: nothing is left to be repeated
        some = replace(some, place=chance.choice(_BEFORE_THE_VOTE))
    yield some
    if kind == "two at once":
        yield replace(some, local_rank=second, place=chance.choice(_IN_STEPS))
    elif kind == "newcomer while it is healed":
        yield replace(some, place="healed", after=0)
    elif kind == "source of a newcomer":
        # Whoever is the source then, if it is not spared.
        yield replace(some, local_rank=-1, place="source", after=0)
    elif kind == "while groups are made":
        yield replace(some, local_rank=second, place="groups", after=0)
