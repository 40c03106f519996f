"""Records of one rank, each a line of JSON.

Times are nanoseconds of the rank's own monotonic clock; inside a step they count from its begin.
Parts of a step, of which a line has many, are arrays of values in the order of the fields.
Readers skip kinds and fields that they do not know, so that old and new folders keep loading.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta, Raw, Struct, field

SCHEMA = 3
"""Raised when a field changes its meaning; a new field or kind does not raise it."""

OF_NO_BUCKET = -1
"""Bucket of a collective that FSDP calls itself, and that is of a whole parameter group."""

GLOO_AT_ONCE = 2
"""Collectives of a group that gloo runs at once: its number of threads. Others queue."""

PHASES = ("between_steps", "forward", "backward", "optimizer")
"""Phases of a step."""

FINISHED = "finished"
"""Reason of the end of a training that came to its end."""


class _Record(Struct, frozen=True, tag_field="kind"):
    """One line: an object whose ``kind`` says which record it is."""


class RankRecord(_Record, frozen=True, tag="rank"):
    """Rank that writes this file; the first line. Empty or 0: not known.

    Args:
        groups: ranks of each process group that exchanges gradients, by name: ``"flat"``, or
            ``"intra"`` and ``"inter"``.
        clock: monotonic nanoseconds when it was ``unix`` seconds since 1970.
        codec: as the user would write it; ``"ddp"`` where gradients are not ours to compress.
        cores: that the processes of this node may use.
        unseen: why no bucket of this model can be seen; empty: they can.
        state_update: of residuals, ``"immediate"`` or ``"deferred"``.
        fsdp: of a model that ``fully_shard`` has sharded: ``"replicas"`` exchange gradients, or
            ``"all_ranks"`` hold one, and what FSDP itself sends is quantised. Else empty.
        sync_every: local steps between two outer ones; 0: gradients are exchanged in every step.
        worker: name of the process where lost ranks are replaced by others, which then go on with
            the file and its ``rank``.
    """

    rank: int
    world_size: int
    node: str
    groups: Mapping[str, list[int]]
    clock: int
    unix: float
    codec: str = ""
    backend: str = ""
    device: str = ""
    pid: int = 0
    cores: int = 0
    unseen: str = ""
    schema: int = SCHEMA
    versions: Mapping[str, str] = field(default_factory=dict)
    script: str = ""
    state_update: str = field(default="", name="commit")
    worker: str = ""
    fsdp: str = ""
    sync_every: int = 0

    @property
    def started(self) -> str | None:
        """UTC time at which the profile began, in ISO 8601; None where the line has none."""
        try:
            return datetime.fromtimestamp(self.unix, UTC).isoformat(timespec="seconds")
        except (ValueError, OverflowError, OSError):  # a line may say anything
            return None


class ClockRecord(_Record, frozen=True, tag="clock"):
    """At ``at``, rank 0's clock was ``at + offset``, give or take ``uncertainty``."""

    at: int
    offset: int
    uncertainty: int


class Phase(Struct, frozen=True, array_like=True, gc=False):
    """One of :data:`PHASES`; the backward pass ends when the mean of the gradients is there."""

    name: str
    begin: int
    end: int


class BucketTimes(Struct, frozen=True, array_like=True, gc=False):
    """A bucket of gradients in a step: ready with its last gradient, done when the mean is there.

    Args:
        raw: bytes that uncompressed DDP would have sent from this rank.
        intra, inter: bytes sent to ranks of the same node, and to other nodes.
        codec: of its parameters, ``"int8"``; several as ``"int8+none"``.
    """

    index: int
    ready: int
    done: int
    raw: int
    intra: int
    inter: int
    codec: str = ""


class Span(Struct, frozen=True, array_like=True, gc=False):
    """Work for a bucket, or a collective of :data:`OF_NO_BUCKET`.

    Args:
        phase: ``"encode"``; ``"decode"``; or ``"exchange"``: one collective from its launch on this
            rank to its completion here.
        op: of an exchange: ``"all_reduce"``, ``"all_gather"``, ``"reduce_scatter"``,
            ``"all_to_all"``, ``"broadcast"``.
        group: of an exchange: a name in :attr:`RankRecord.groups`.
        sent: of an exchange: bytes that this rank sends.
        order: of an exchange: its number in this step on this group, the same on every member.
        blocks: the thread that trains waits for its end.
        raw: of a collective of :data:`OF_NO_BUCKET`: bytes that it would send uncompressed; 0: as
            many as it sends.
        numel, codec: of a quantised collective of FSDP: elements of each rank's shard, and as of
            :class:`BucketTimes`.
    """

    phase: str
    bucket: int
    begin: int
    end: int
    op: str = ""
    group: str = ""
    sent: int = 0
    order: int = -1
    blocks: bool = False
    raw: int = 0
    numel: int = 0
    codec: str = ""


_Nanoseconds: TypeAlias = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class StepRecord(_Record, frozen=True, tag="step"):
    """One optimizer step, from the end of the one before, without evaluations in between.

    Args:
        step: number of the step, equal on all ranks.
        phases: in order, without overlap; what they leave out is nobody's.
        buckets, spans: in order of time; none with ``detailed=False``.
        overhead: nanoseconds of this step that the profiler itself took.
    """

    step: int
    begin: _Nanoseconds
    duration: _Nanoseconds
    phases: tuple[Phase, ...] = ()
    buckets: tuple[BucketTimes, ...] = ()
    spans: tuple[Span, ...] = ()
    detailed: bool = True
    overhead: int = 0


class ErrorRecord(_Record, frozen=True, tag="error"):
    """Compression error of one bucket on this rank, of a sample of its elements.

    ``p`` is what was encoded: the gradient of this rank, and the residual where one is kept (with
    ``dgc`` the momentum too); ``C(p)`` what the payload of this rank says of it. Parameters that
    travel uncompressed are left out. In a hierarchical exchange the gradient is the mean of the
    node, on the share of this rank.

    Args:
        relative_l2: ``|p - C(p)| / |p|``.
        cosine: of ``p`` and ``C(p)``; None: nothing was sent.
        residual_ratio: ``|e| / |g|`` of the residual before the step and the gradient; None
            without residual.
    """

    step: int
    bucket: int
    relative_l2: float
    cosine: float | None
    residual_ratio: float | None = None


class LinkRecord(_Record, frozen=True, tag="link"):
    """A measured transfer with nothing else on the link: bytes that this rank sent, and seconds.

    Args:
        group: a name in :attr:`RankRecord.groups`.
        peer: the rank at the other end; None: a collective of the group.
    """

    group: str
    sent: int
    seconds: float
    peer: int | None = None


class BurstRecord(_Record, frozen=True, tag="burst"):
    """Collectives of a few bytes, issued at once, with nothing else on the link.

    Args:
        sent: bytes that this rank sent in each.
        seconds: from the call of the first to the end of all, on the rank where it took longest.
        cpu: seconds of all threads of this process meanwhile.
    """

    group: str
    op: str
    sent: int
    count: int
    seconds: float
    cpu: float


class GenerationRecord(_Record, frozen=True, tag="generation"):
    """Ranks were lost or have joined within the process, and training went on.

    Args:
        number: of the generation.
        step: the first one of it.
        at: on this rank's clock.
        reason: who is gone and why, and who has joined.
    """

    number: int
    step: int
    at: int
    reason: str = ""


class EndRecord(_Record, frozen=True, tag="end"):
    """The last line, if the process could write one.

    Args:
        reason: :data:`FINISHED`, or what ended the training.
        at: when the training ended, on this rank's clock; None: not known.
    """

    reason: str
    at: int | None = None


Record: TypeAlias = (
    RankRecord
    | ClockRecord
    | StepRecord
    | ErrorRecord
    | LinkRecord
    | BurstRecord
    | GenerationRecord
    | EndRecord
)


_KINDS = frozenset(record.__struct_config__.tag for record in _Record.__subclasses__())
_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)
_OBJECT_DECODER = msgspec.json.Decoder(dict[str, Raw])


def to_line(record: Record) -> bytes:
    """One line of JSON, without its end."""
    return _ENCODER.encode(record)


def from_line(line: bytes | str) -> Record | None:
    """The record that :func:`to_line` made a line of; None for a kind of a later version.

    Raises:
        ValueError: it is not such a line.
    """
    try:
        return _DECODER.decode(line)
    except (ValueError, RecursionError) as error:  # the latter of many brackets
        with suppress(KeyError, ValueError, RecursionError):
            kind = _OBJECT_DECODER.decode(line)["kind"]
            if msgspec.json.decode(kind, type=str) not in _KINDS:
                return None
        problem = f"not a record of a communication profile: {error}: {line[:80]!r}"
        raise ValueError(problem) from None
