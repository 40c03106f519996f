"""Records of one rank, as types; :mod:`.lines` makes lines of them.

Times are nanoseconds of the rank's own monotonic clock; inside a step they count from its begin.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import ClassVar

SCHEMA = 1
"""Raised when a field changes its meaning; a new field or kind does not raise it."""

PHASES = ("data", "forward", "backward", "optimizer")
"""What a step spends its time on, besides what no phase covers."""


@dataclass(frozen=True, slots=True)
class RankRecord:
    """Who writes this file. The first line.

    Args:
        groups: ranks of each process group that exchanges gradients, by name: ``"flat"``, or
            ``"intra"`` and ``"inter"``; with more levels ``"inter2"`` and so on.
        clock: monotonic nanoseconds when it was ``unix`` seconds since 1970.
        codec: as the user would write it; ``"ddp"`` where gradients are not ours to compress.
        cores: that the processes of this host may use; 0: not known.
        budget: most that the profiler was to take of a step; 0: not known.
        unseen: why no bucket of this model can be seen; empty: they can.
        script: the program, as it was called; empty: not known.
    """

    kind: ClassVar[str] = "rank"
    rank: int
    world_size: int
    host: str
    groups: Mapping[str, Sequence[int]]
    clock: int
    unix: float
    codec: str = ""
    backend: str = ""
    device: str = ""
    pid: int = 0
    cores: int = 0
    budget: float = 0.0
    unseen: str = ""
    schema: int = SCHEMA
    versions: Mapping[str, str] = field(default_factory=dict)
    script: str = ""

    @property
    def started(self) -> str | None:
        """UTC time at which the profile began, in ISO 8601; None where the line has none."""
        try:
            return datetime.fromtimestamp(self.unix, UTC).isoformat(timespec="seconds")
        except (ValueError, OverflowError, OSError):  # a line may say anything
            return None


@dataclass(frozen=True, slots=True)
class ClockRecord:
    """At ``at``, rank 0's clock was ``at + offset``, give or take ``uncertainty``."""

    kind: ClassVar[str] = "clock"
    at: int
    offset: int
    uncertainty: int


@dataclass(frozen=True, slots=True)
class Phase:
    """One of :data:`PHASES`; the backward pass ends when the mean of the gradients is there."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class BucketTimes:
    """One bucket of gradients in one step.

    Args:
        ready: its last gradient was there, and the hook was called.
        done: the mean over ranks was there.
        raw: bytes that uncompressed DDP would have sent from this rank.
        intra: bytes sent to ranks of the same host.
        inter: bytes sent to other hosts.
        codec: of its parameters, ``"int8"``; several as ``"int8+none"``.
    """

    index: int
    ready: int
    done: int
    raw: int
    intra: int
    inter: int
    codec: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that was done for a bucket.

    Args:
        phase: ``"encode"``; ``"decode"``; or ``"exchange"``: one collective from its launch on this
            rank to its completion here.
        bucket: index of the bucket.
        op: of an exchange: ``"all_reduce"``, ``"all_gather"``, ``"all_to_all"``, ``"broadcast"``.
        group: of an exchange: a name in :attr:`RankRecord.groups`.
        sent: of an exchange: bytes that this rank sends.
        order: of an exchange: its number among those of this step on this group; the same
            collective has the same number on every member.
    """

    phase: str
    bucket: int
    begin: int
    end: int
    op: str = ""
    group: str = ""
    sent: int = 0
    order: int = -1


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step. It begins where the one before it has ended.

    It begins later by as long as evaluations took in between, also by those that interrupted it.

    Args:
        step: number of the step, equal on all ranks.
        begin: on this rank's clock.
        duration: to the end of the step.
        phases: in order, without overlap; what they leave out is nobody's.
        buckets: in the order in which they were ready.
        spans: in the order in which they began. Empty with ``detailed=False``.
        detailed: whether buckets and spans were recorded.
        overhead: nanoseconds of this step that the profiler itself took.
    """

    kind: ClassVar[str] = "step"
    step: int
    begin: int
    duration: int
    phases: Sequence[Phase] = ()
    buckets: Sequence[BucketTimes] = ()
    spans: Sequence[Span] = ()
    detailed: bool = True
    overhead: int = 0


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """What compression lost of one bucket, on this rank; of a sample of its elements.

    ``p`` is what was encoded: the gradient of this rank, and the residual where one is kept (with
    ``dgc`` the momentum too); ``C(p)`` what the payload of this rank says of it. What is rounded
    once more on the way to the mean is not in it. Parameters that travel uncompressed are left out.
    In a hierarchical exchange the gradient is the mean of the host, on the share of this rank.

    Args:
        relative_l2: ``|p - C(p)| / |p|``.
        cosine: of ``p`` and ``C(p)``; None: nothing was sent.
        residual_ratio: ``|e| / |g|``, of the residual that is kept after the step, with all that
            the exchange adds to it, and the gradient; None without residual.
    """

    kind: ClassVar[str] = "error"
    step: int
    bucket: int
    relative_l2: float
    cosine: float | None
    residual_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """A measured transfer with nothing else on the link.

    Args:
        group: a name in :attr:`RankRecord.groups`.
        peer: the rank at the other end; None: a collective of the group.
        sent: bytes that this rank sent.
        seconds: it took.
    """

    kind: ClassVar[str] = "link"
    group: str
    sent: int
    seconds: float
    peer: int | None = None


@dataclass(frozen=True, slots=True)
class BurstRecord:
    """Collectives of a few bytes, issued at once, with nothing else on the link.

    Args:
        group: a name in :attr:`RankRecord.groups`.
        op: as in :class:`Span`.
        sent: bytes that this rank sent in each.
        count: of them; 1: what is found is how long one takes, not how many fit into a time.
        seconds: from the call of the first to the end of all, on the rank where it took longest.
        cpu: seconds of all threads of this process meanwhile.
    """

    kind: ClassVar[str] = "burst"
    group: str
    op: str
    sent: int
    count: int
    seconds: float
    cpu: float


@dataclass(frozen=True, slots=True)
class EndRecord:
    """The last line, if the process could write one."""

    kind: ClassVar[str] = "end"
    reason: str


Record = RankRecord | ClockRecord | StepRecord | ErrorRecord | LinkRecord | BurstRecord | EndRecord
