"""Planted runs for predictions, and what codecs cost in them."""

from typing import Any

from planted import MS, Planted, replace, replaced

from lightning_dist.base.exchanges import UNIT_ELEMENTS
from lightning_dist.measurement import CodecCost
from lightning_dist.profiling.capture.events import (
    OF_NO_BUCKET,
    BucketTimes,
    BurstRecord,
    Span,
)
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.scenarios import Prediction, Predictions, elsewhere

DDP = Planted(steps=8, codec="ddp", encode=0, decode=0, sent=4_000_000, transfer=40)
INT8 = replace(DDP, codec="int8", encode=1, decode=2, sent=1_000_000, transfer=10)
CHUNK = replace(INT8, raw=4 * UNIT_ELEMENTS, sent=UNIT_ELEMENTS)
"""Buckets of one chunk each, as planted ones are; larger ones overlap with themselves."""

COSTS = {
    # of a bucket of a million elements 1 ms and, with two payloads, 2 ms
    "int8": CodecCost("int8", "two_shot", 1.0, encode=1e-9, decode=5e-10, store=1e-9),
    "fp16": CodecCost("fp16", "allreduce", 2.0, encode=0.0, decode=0.0, store=0.0, source="here"),
    "none": CodecCost("none", "allreduce", 4.0, encode=0.0, decode=0.0, store=0.0),
}


def asked(of: Planted | Run, *changes: dict[str, Any], **place: Any) -> Predictions:
    """Predictions of the run with ``changes``, on the links and nodes of ``place``."""
    observed = observe(of.run() if isinstance(of, Planted) else of)
    there = elsewhere(observed.scenario, **place)
    return predict(observed, [replace(there, **each) for each in changes], costs=COSTS)


def only(of: Planted | Run, change: dict[str, Any] | None = None, **place: Any) -> Prediction:
    """The one prediction of :func:`asked`."""
    (found,) = asked(of, change or {}, **place).scenarios
    return found


def duration(planted: Planted) -> float:
    return planted.run().ranks[0].steps[4].duration / MS


def about(run: Run, **changes: object) -> Run:
    """``run``, where all ranks say something else of themselves."""
    for rank, each in run.ranks.items():
        run = replaced(run, rank, metadata=replace(each.metadata, **changes))
    return run


def with_bursts(run: Run, latency_ms: float) -> Run:
    """Small collectives were measured before the first step."""
    bursts = [
        BurstRecord("flat", "all_gather", 4096, count, seconds=latency_ms / 1e3 * each, cpu=0.0)
        for count, each in ((1, 1), (16, 0))
    ]
    return replaced(run, 1, bursts=bursts)


SQUARE = replace(CHUNK, world_size=4, nodes=("a", "a", "b", "b"))
"""Each rank sends 1 byte of every element of its shard, to the same shard on the other node."""

NUMEL = 250_000
"""Elements of a rank's shard of each of two parameter groups."""
RATE = 50_000.0
"""Bytes in a millisecond, over the link of a node."""
GATHER, SCATTER, ALLREDUCE = 3 * NUMEL, 4 * NUMEL, 6 * NUMEL
"""Elements that leave a node of two in a collective of four ranks."""
COMPUTE, LATE, TAIL = 5, 3, 7
"""Milliseconds before each collective, more of them on rank 1, and after the last."""
CODEC = {"all_gather": (1, 2), "all_to_all": (4, 3)}
"""Milliseconds of encoding and decoding int8 in a collective."""
ORDER = [("all_gather", 0), ("all_gather", 1), ("all_gather", 1), ("all_to_all", 1)]
ORDER += [("all_gather", 0), ("all_to_all", 0)]
"""What is gathered forward and, with what is reduced, backward; by group."""
COMPUTING = len(ORDER) * (COMPUTE + LATE) + TAIL


def all_ranks(**changes: object) -> Run:
    """A run with parameters and gradients in int8, of one byte; ``changes``: of its exchanges."""
    run = SQUARE.run()
    for rank, each in run.ranks.items():
        now, spans, buckets = 0.0, [], []
        for number, (op, index) in enumerate(ORDER):
            is_gather = op == "all_gather"
            bucket = OF_NO_BUCKET if is_gather else index
            sent = 3 * NUMEL  # in either
            encode, decode = CODEC[op]
            ready = now + COMPUTE + LATE * (rank == 1)
            moves = now + COMPUTE + LATE + encode
            over = moves + (GATHER if is_gather else SCATTER) / RATE
            times = [round(at * MS) for at in (ready, ready + encode, over, over + decode)]
            how = {"order": number, "blocks": True, "raw": 4 * sent, "numel": NUMEL}
            span = Span("exchange", bucket, *times[1:3], op, "flat", sent, codec="int8", **how)
            spans += [
                Span("encode", bucket, *times[:2], blocks=True),
                replace(span, **changes),
                Span("decode", bucket, *times[2:], blocks=True),
            ]
            if not is_gather:
                volume = 4 * sent, sent // 3, 2 * sent // 3, "int8"
                buckets.append(BucketTimes(index, times[0], times[3], *volume))
            now = over + decode
        length = round((now + TAIL) * MS)
        steps = {
            number: replace(
                step, begin=number * length, duration=length, spans=spans, buckets=buckets
            )
            for number, step in each.steps.items()
        }
        metadata = replace(each.metadata, fsdp="all_ranks")
        run = replaced(run, rank, metadata=metadata, steps=steps)
    return run
