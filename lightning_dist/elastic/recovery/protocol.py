"""Protocol of recovery: generations, what workers report, and what a change has cost.

A *generation* is a list of workers that train together; process groups live as long as one. The
coordinator, a thread of the launcher that hosts the store, is the only one that makes generations,
so there is never a second opinion about who takes part: a worker that cannot reach the store stops.

- A worker that is ready to train writes a :class:`WorkerReport` with ``generation=-1`` and waits
  for a generation that has it.
- A worker that cannot go on (a peer is gone), or pauses at a step boundary since others want to
  join, writes a report for its generation, and waits for the next one.
- An agent writes which of its workers are dead, and starts others in their place. It kills workers
  that a generation has left out although they may still live.
- The coordinator asks :func:`next_generation` again and again.

Nothing of a step is applied before every rank has all its payloads, and the answer to one
all-reduce, the vote, says so. A rank that dies before or in it leaves every survivor at step ``s``,
or some at ``s`` that hold all payloads and miss the answer only, and some at ``s + 1``. In the
second case the generation tells the first ones to apply it (``Generation.applies``); they need
nobody's help for that. Otherwise the step is taken again, and residuals that were written while
encoding are restored from a copy.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

ROOT = "lightning_dist/recovery"
"""Prefix of all keys in the store."""

_WORKERS_PER_NODE = 256
"""At most."""

NOT_YET = -1
"""The generation of a worker that has not been in one."""


class Worker(NamedTuple):
    """One process of the training. Workers are ranked in this order.

    ``incarnation`` counts the processes that an agent has started in this place, so a name is never
    used twice.
    """

    node: int
    local_rank: int
    incarnation: int

    @property
    def place(self) -> int:
        """Number of node and local rank, unique among the workers that live."""
        assert self.local_rank < _WORKERS_PER_NODE
        return self.node * _WORKERS_PER_NODE + self.local_rank

    def __str__(self) -> str:
        return f"{self.node}.{self.local_rank}.{self.incarnation}"

    @classmethod
    def parse(cls, text: str) -> Worker:
        """The worker that ``str`` gave ``text`` for."""
        node, local_rank, incarnation = map(int, text.split("."))
        return cls(node, local_rank, incarnation)


@dataclass(frozen=True)
class WorkerReport:
    """Position of a worker; it writes nothing more of ``generation`` and waits for the next one.

    Attributes:
        step: optimizer steps that it has applied; -1 where it has no state of the training, as a
            newcomer, also one that has not been healed yet when its generation fails.
        holds: it has all payloads of the next step, and misses only the answer to the vote.
        finite: of the last vote that it has the answer to: whether that step was finite.
        failed: False where it pauses at a step boundary, for newcomers.
        reason: of the failure, for people.
        facts: of model, script, settings and versions, by name; a newcomer with others is refused.
    """

    worker: str
    generation: int = NOT_YET
    step: int = -1
    holds: bool = False
    finite: bool = True
    failed: bool = False
    reason: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Generation:
    """The workers that train together from now on.

    Attributes:
        number: greater than that of all before.
        members: names by rank.
        step: optimizer steps that every member has applied before it goes on.
        applies: members that hold all payloads of step ``step`` and apply it before they go on.
        finite: whether that step was finite.
        heals: members, newcomers among them, that receive the state of ``source``.
        source: who sends its state; it has applied ``step`` steps. None where nobody needs one:
            all begin.
        leader: the member that writes; it stays as long as it is one. Members that have missed a
            generation know it too.
        newcomers: members that were in no generation.
        refused: newcomers that are of another training, and end with an error; and what differs.
        waiting: value of ``Keys.waiting`` when it was made; members pause when it is greater.
        reason: for people: who is gone and why, who has joined.
        ends: why there can be no such generation, so that all end and are restarted from a
            checkpoint; empty if it can.
    """

    number: int
    members: Sequence[str] = ()
    step: int = 0
    applies: Sequence[str] = ()
    finite: bool = True
    heals: Sequence[str] = ()
    source: str | None = None
    leader: str = ""
    newcomers: Sequence[str] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    waiting: int = 0
    reason: str = ""
    ends: str = ""


def leader_of(generation: Generation) -> int:
    """The rank that writes and keeps the account."""
    return list(generation.members).index(generation.leader)


def encode(record: WorkerReport | Generation) -> str:
    """``record`` as a value of the store."""
    return json.dumps(asdict(record))


def decode_report(value: bytes | str) -> WorkerReport:
    """The report that :func:`encode` gave ``value`` for."""
    return WorkerReport(**json.loads(value))


def decode_generation(value: bytes | str) -> Generation:
    """The generation that :func:`encode` gave ``value`` for."""
    fields: dict[str, Any] = {
        name: tuple(field) if isinstance(field, list) else field
        for name, field in json.loads(value).items()
    }
    return Generation(**fields)


class Keys:
    """Keys of the store, under :data:`ROOT`."""

    newest = "newest"
    """The number of the newest generation; written after its record."""
    waiting = "waiting"
    """The number of newcomers for whom there was a place; workers look at it between steps."""

    @staticmethod
    def generation(number: int) -> str:
        """The record of a generation."""
        return f"generation/{number}"

    @staticmethod
    def broken(number: int) -> str:
        """Set by the first who knows that a generation cannot go on; the reason."""
        return f"broken/{number}"

    @staticmethod
    def report(number: int, worker: str) -> str:
        """The report of ``worker`` at the end of a generation."""
        return f"report/{number}/{worker}"

    @staticmethod
    def handle(number: int, group: int) -> str:
        """Handles by which members of a group find each other; a worker's name follows."""
        return f"handle/{number}/{group}"

    @staticmethod
    def beat(worker: str) -> str:
        """A number that changes as long as ``worker`` lives, and how far it has come."""
        return f"beat/{worker}"

    @staticmethod
    def process(worker: str) -> str:
        """Process of ``worker``, which its agent may have started by a script."""
        return f"process/{worker}"

    @staticmethod
    def cpu(worker: str) -> str:
        """CPU time that ``worker`` has used, in clock ticks, as its agent sees it."""
        return f"cpu/{worker}"

    @staticmethod
    def dead(worker: str) -> str:
        """Set by the agent, or by the coordinator for whom no beats come; the reason."""
        return f"dead/{worker}"

    # Between agents and the coordinator only.
    workers = "workers"
    """The number of workers that agents have started."""
    over = "over"
    """Set by the coordinator when all members of the newest generation have ended with 0."""
    nodes = "nodes"
    """The number of agents that have come."""
    left = "left"
    """The number of agents that have seen :attr:`over`, or have ended."""

    @staticmethod
    def worker(index: int) -> str:
        """The name of a worker that an agent has started, counted from 0."""
        return f"worker/{index}"

    @staticmethod
    def done(worker: str) -> str:
        """Set by the agent when ``worker`` has ended with 0."""
        return f"done/{worker}"


def next_generation(
    now: Generation,
    reports: Mapping[str, WorkerReport],
    *,
    ready: Mapping[str, WorkerReport],
    dead: Mapping[str, str],
    late: Collection[str] = (),
    min_workers: int,
    max_workers: int,
) -> Generation | None:
    """Successor of ``now``; None: it goes on, or not all its members have come yet.

    Args:
        reports: of members of ``now``, at its end.
        ready: reports of newcomers.
        dead: workers that are known to be dead, and why.
        late: members that did not report in time after the first did; they are left out.
        min_workers: with fewer there is no generation.
        max_workers: newcomers beyond are left waiting.
    """
    gone = {name: dead.get(name, "does not respond") for name in (*dead, *late)}
    members = [name for name in now.members if name not in gone]
    stopped = [name for name in members if name in reports]
    newcomers = sorted(ready.keys() - gone.keys() - set(now.members), key=Worker.parse)
    if now.members:
        is_broken = len(members) < len(now.members) or bool(stopped)
        if not is_broken or len(stopped) < len(members):
            return None
    elif len(newcomers) < min_workers:
        return None
    reasons = [f"worker {name} was lost: {gone[name]}" for name in now.members if name in gone]
    number = now.number + 1

    def end(why: str, refused: Mapping[str, str] | None = None) -> Generation:
        return Generation(number, refused=refused or {}, ends="; ".join([*reasons, why]))

    if now.members and not stopped:
        return end("no worker is left")
    step = max(
        (reports[name].step for name in stopped),
        default=max([0, *(ready[name].step for name in newcomers)]),
    )
    if step < 0:
        return end("no remaining worker has the state of training")
    known = reports[stopped[0]].facts if stopped else ready[newcomers[0]].facts
    refused = {
        name: differences
        for name in newcomers
        if (differences := _differences(ready[name].facts, known))
    }
    if not now.members and refused:  # nobody knows who is right
        other = ready[next(iter(refused))].facts
        refused |= {
            name: _differences(ready[name].facts, other)
            for name in newcomers
            if name not in refused
        }
        return end("the workers belong to different trainings", refused)
    room = max(0, max_workers - len(stopped))
    admitted = [name for name in newcomers if name not in refused][:room]
    if len(stopped) + len(admitted) < min_workers:
        few = f"{len(stopped) + len(admitted)} workers are left, fewer than {min_workers}"
        return end(few, refused)
    reasons += [f"worker {name} has joined" for name in admitted if now.members]
    newest = [name for name in stopped if reports[name].step == step]
    applies = [name for name in stopped if reports[name].holds and reports[name].step == step - 1]
    heals = [name for name in stopped if name not in newest and name not in applies]
    return Generation(
        number,
        members=tuple(sorted((*stopped, *admitted), key=Worker.parse)),
        step=step,
        applies=tuple(applies),
        finite=reports[newest[0]].finite if newest else True,
        heals=(*heals, *(admitted if stopped else ())),
        source=newest[0] if newest else None,
        leader=now.leader if now.leader in stopped else (newest or applies or admitted)[0],
        newcomers=tuple(admitted),
        refused=refused,
        reason="; ".join(reasons),
    )


def _differences(facts: Mapping[str, str], known: Mapping[str, str]) -> str:
    """Facts of a newcomer that are not those of the members, as text; empty if there are none."""
    names = dict.fromkeys((*known, *facts))
    return "; ".join(
        f"{name} is {facts.get(name)} here and {known.get(name)} there"
        for name in names
        if facts.get(name) != known.get(name)
    )


@dataclass(frozen=True)
class OutageReport:
    """A pause in which members were lost or joined, and training went on.

    Attributes:
        generation: number of the generation that goes on.
        step: optimizer steps done, of all starts.
        world_size: ranks that go on.
        lost: workers that are gone.
        joined: workers that are new.
        reason: for people; of all generations of the pause.
        is_redone: the step that was under way is taken again.
        pause_s: from the moment when this rank knew of it until all go on.
        norm_lost: norm of the residuals of the lost ranks, estimated from those of the others: the
            root of the sum of as many mean squares. 0 where other ranks have taken them over.
        taken_over: lost workers whose residuals another rank takes over from its copy.
    """

    generation: int
    step: int
    world_size: int
    lost: Sequence[str] = ()
    joined: Sequence[str] = ()
    reason: str = ""
    is_redone: bool = False
    pause_s: float = 0.0
    norm_lost: float = 0.0
    taken_over: Sequence[str] = ()

    @property
    def line(self) -> str:
        """The event in one line, for people."""
        reason = self.reason or "process groups rebuilt"
        next_step = f"step {self.step + 1} is repeated" if self.is_redone else ""
        lost = f"residuals of norm {self.norm_lost:.3g} lost" if self.norm_lost else ""
        taken = f"residuals of {', '.join(self.taken_over)} taken over" if self.taken_over else ""
        residuals = ", ".join(filter(None, (lost, taken)))
        ranks = f"{self.world_size} rank{'' if self.world_size == 1 else 's'}"
        parts = filter(None, (reason, next_step, residuals, f"paused {self.pause_s:.2f} s"))
        return (
            f"elastic: {ranks} after step {self.step}, within the process (generation "
            f"{self.generation}): {'; '.join(parts)}"
        )


@dataclass
class Outage:
    """Events between two steps, from the first failure until all ranks continue.

    Attributes:
        members: of the last step.
        since: when this rank first knew that it cannot go on with them; None: it can.
        is_redone: a rank has begun the next step, which is taken again.
        norm: of the residuals of this rank at the start; None on a newcomer.
        reasons: of the generations since then.
        norm_lost: as of a :class:`OutageReport`.
        taken_over: lost workers whose residuals others have taken over.
    """

    members: Sequence[str] = ()
    since: float | None = None
    is_redone: bool = False
    norm: float | None = None
    reasons: list[str] = field(default_factory=list)
    norm_lost: float = 0.0
    taken_over: set[str] = field(default_factory=set)

    def begin(self) -> None:
        """This rank knows that it cannot go on. From any thread."""
        if self.since is None:
            self.since = time.monotonic()

    def enter(
        self, generation: Generation, facts: Sequence[tuple[float | None, str, bool]]
    ) -> None:
        """Add a generation that is complete; others may follow in this pause.

        Args:
            facts: of each member, the norm of its residuals, None for a new one; the lost
                worker whose residuals it has taken over; and its :attr:`is_redone`.
        """
        norms, names, redone = zip(*facts, strict=True)
        self.reasons.append(generation.reason)
        self.taken_over.update(filter(None, names))
        self.is_redone = any(redone)
        lost = set(self.members) - set(generation.members) - self.taken_over
        self.norm_lost = norm_of_lost(norms, lost=len(lost))

    def report(self, generation: Generation, *, step: int) -> OutageReport:
        """The change, once all ranks continue."""
        before, now = set(self.members), set(generation.members)
        return OutageReport(
            generation.number,
            step,
            world_size=len(now),
            lost=sorted(before - now),
            joined=sorted(now - before),
            reason="; ".join(filter(None, self.reasons)),
            is_redone=self.is_redone,
            pause_s=0.0 if self.since is None else time.monotonic() - self.since,
            norm_lost=self.norm_lost,
            taken_over=sorted(self.taken_over & (before - now)),
        )


def norm_of_lost(norms: Sequence[float | None], *, lost: int) -> float:
    """Norm of ``lost`` residuals, estimated from ``norms``; None of ranks that are new."""
    known = [norm for norm in norms if norm is not None]
    mean_square = sum(norm**2 for norm in known) / max(len(known), 1)
    return float((lost * mean_square) ** 0.5)
