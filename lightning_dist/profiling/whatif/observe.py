"""A recorded run as the simulator needs it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import numpy as np

from lightning_dist.measurement import CodecCost
from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of
from lightning_dist.profiling.analysis.parts import TimelineSpan, length, union
from lightning_dist.profiling.analysis.tables import Array, sample, step_table
from lightning_dist.profiling.capture.events import (
    GLOO_AT_ONCE,
    OF_NO_BUCKET,
    BucketTimes,
    RankRecord,
    Span,
)
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.scenarios import (
    ALL_RANKS,
    DDP,
    ELEMENT_BYTES,
    FLAT,
    FSDP,
    HIERARCHICAL,
    LEADER,
    LinkSpeed,
    Scenario,
    ScenarioBucket,
    ShardCollective,
)
from lightning_dist.profiling.whatif.simulator import simulate_shards

NS = 1e9
"""Nanoseconds in a second."""

IN_RUN = "as in this run, while training"
"""Source of the cost of a run's own codec."""


@dataclass(frozen=True)
class ObservedShards:
    """Collectives of a step in their order; seconds, medians over steps of the mean over ranks.

    Args:
        parameters, gradients: costs of the codecs, with the bytes and times of the run.
        transfer: of all collectives, from the launch on the last rank.
        tail: from the end of the last collective to that of the step, without codecs.
    """

    collectives: Sequence[ShardCollective]
    parameters: CodecCost
    gradients: CodecCost
    transfer: float
    tail: float


def why_no_shards(rank_steps: Sequence[Analysed]) -> str:
    """Reason why the collectives of these steps cannot be simulated; empty if they can."""
    spans = [span for step in rank_steps for span in step.exchanges]
    reasons = {
        "its model is sharded over all ranks, and what an accelerator computes meanwhile is not "
        "recorded": any(not span.blocks for span in spans),
        "its collectives have no sizes; profile it again with this version": any(
            not span.numel for span in spans
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def main_codec(exchanged: Iterable[BucketTimes | Span]) -> str:
    """Codec of the most bytes: small tensors travel as they are, beside it."""
    weights: Counter[str] = Counter()
    for exchange in exchanged:
        names = [name for name in exchange.codec.split("+") if name != "none"]
        weights[names[0] if names else "none"] += exchange.raw
    return max(weights, key=lambda name: weights[name])


def observe_shards(rank_steps: Sequence[Analysed], *, ranks: int) -> ObservedShards:
    """Inputs from steps, those of all ranks; of steps with the most frequent collectives."""
    sequences = Counter(_sequence(step) for step in rank_steps)
    common = max(sequences, key=lambda sequence: sequences[sequence])
    chosen = [step for step in rank_steps if _sequence(step) == common]
    computing = np.array([_computing(step) for step in chosen]) / NS
    *before, tail = _typical(chosen, computing)
    moving = np.array([[step.ns["moved"]] for step in chosen]) / NS
    return ObservedShards(
        [
            ShardCollective(gathers, compute, numel * ranks, raw / numel / (ranks - 1))
            for (gathers, numel, raw), compute in zip(common, before, strict=True)
        ],
        _cost(chosen, gathers=True, ranks=ranks),
        _cost(chosen, gathers=False, ranks=ranks),
        transfer=_typical(chosen, moving)[0],
        tail=tail,
    )


def _sequence(step: Analysed) -> tuple[tuple[bool, int, int], ...]:
    return tuple((span.bucket == OF_NO_BUCKET, span.numel, span.raw) for span in step.exchanges)


def _computing(step: Analysed) -> list[float]:
    """Nanoseconds before each collective and after the last: no codec, and nothing on its way."""
    codec = [span for span in step.spans if span.phase != "exchange"]
    seconds, now = [], 0
    for span in step.exchanges:
        seconds.append(span.transfer[0] - now - _within(codec, now, span.transfer[0]))
        now = span.end
    return [*seconds, step.duration - now - _within(codec, now, step.duration)]


def _within(codec: Sequence[TimelineSpan], begin: int, end: int) -> int:
    return sum(span.end - span.begin for span in codec if begin <= span.begin < end)


def _typical(steps: Sequence[Analysed], values: Array) -> list[float]:
    """Medians over steps of the means over ranks; ``values (steps and ranks, columns)``."""
    numbers = np.array([step.record.step for step in steps])
    means = [values[numbers == number].mean(axis=0) for number in np.unique(numbers)]
    return [float(median) for median in np.median(means, axis=0)]


def _cost(steps: Sequence[Analysed], *, gathers: bool, ranks: int) -> CodecCost:
    """Cost of the codec of the parameters, or of the gradients, as measured in the run."""
    chosen = [
        [span for span in step.spans if (span.bucket == OF_NO_BUCKET) == gathers] for step in steps
    ]
    exchanges = [span for spans in chosen for span in spans if span.phase == "exchange"]
    times = [
        [sum(s.end - s.begin for s in spans if s.phase == phase) for phase in ("encode", "decode")]
        for spans in chosen
    ]
    encode, decode = _typical(steps, np.array(times) / NS)
    numel = sum(span.numel for span in exchanges)
    of_step = numel / len(steps)
    return CodecCost(
        main_codec(exchanges),
        "two_shot",
        sum(span.sent for span in exchanges) / (ranks - 1) / numel,
        encode=encode / of_step / (1 if gathers else ranks),
        decode=decode / of_step / ranks,
        store=0.0,
        source=IN_RUN,
    )


@dataclass(frozen=True)
class Observed:
    """Inputs of a simulation; seconds, medians over steps.

    Args:
        buckets: ready when the last rank has its gradients, in that order.
        tail: from the mean of all gradients to the end of the step.
        sent: bytes over the link of the busiest node.
        encode, decode: of the codec on a rank in a step; None: there is none.
        unavailable: figures that are not known, and why.
        one_core: a codec has to share a core with the backward pass.
        device: kind of device that trains, and compresses.
        shards: of a model that is sharded over all ranks, in the place of buckets.
        crowded: ranks of a node that share a core, at least 1.
    """

    scenario: Scenario
    buckets: Sequence[ScenarioBucket]
    tail: float
    step: float
    sent: float
    encode: float | None
    decode: float | None
    unavailable: Mapping[str, str]
    one_core: bool = False
    device: str = "cpu"
    shards: ObservedShards | None = None
    crowded: float = 1.0

    @property
    def elements(self) -> float:
        """Elements of all gradients, or of the shards of a rank."""
        if self.shards is not None:
            reduced = (unit for unit in self.shards.collectives if not unit.gathers)
            return sum(unit.elements for unit in reduced) / self.scenario.world_size
        return sum(bucket.elements for bucket in self.buckets)


def observe(run: Run) -> Observed:
    """Inputs from a run, without its first two steps.

    Ranks begin a step together: times of several ranks count from the begin of each.

    Raises:
        ValueError: something is missing in the profile, with what it is.
    """
    chosen = sample(run, warmup_steps=2)
    steps = [analyse(run, step) for step in chosen.detailed]
    rank_steps = [analysed for ranks in steps for analysed in ranks]
    first_lines = run.metadata
    missing = ", ".join(map(str, run.beside(chosen.ranks)))
    table = step_table(run, chosen.detailed, steps)
    sent, moving = table.link_uses()
    used = (sent > 0) & (moving > 0)
    nodes = Counter(run.nodes.values())
    all_ranks = any(line.fsdp == "all_ranks" for line in first_lines)
    is_fsdp = any(line.fsdp for line in first_lines) and not all_ranks
    why_not = why_no_shards(rank_steps) if all_ranks else ""
    reasons = (
        (
            run.sync_every > 0,
            f"it is of local steps (sync_every={run.sync_every}), which exchange no gradients; "
            "profile some steps of DDP, `compress_ddp` or not, and give whatif --local-steps "
            f"{run.sync_every}",
        ),
        (chosen.reason, chosen.reason),
        (run.world_size < 2, "one rank exchanges nothing"),
        (missing, f"it has no step of rank {missing}"),
        (why_not, why_not),
        (
            is_fsdp and not all(_reaches_each_node(run, line, nodes) for line in first_lines),
            "its model is sharded, and there is not one replica on each node",
        ),
        (not any(step.record.buckets for step in rank_steps), "no gradient bucket was observed"),
        (
            not all_ranks and any(len(passes_of(step.record)) > 1 for step in rank_steps),
            "its steps exchange gradients several times",
        ),
        (not used.any(), "no exchange was recorded"),
    )
    if problem := next((reason for holds, reason in reasons if holds), None):
        raise ValueError(f"Nothing can be predicted from this profile: {problem}")
    codec = main_codec(bucket for step in rank_steps for bucket in step.record.buckets)
    device = run.ranks[min(run.ranks)].metadata.device or "cpu"
    across = ["inter" in line.groups for line in first_lines]
    link, inside = _link(run, sent[used] / moving[used] * NS), _inside(rank_steps)
    form = FLAT if not any(across) else HIERARCHICAL if all(across) else LEADER
    if is_fsdp:
        form, inside = FSDP, None
    elif all_ranks:
        form, inside = ALL_RANKS, None
    at_once = GLOO_AT_ONCE if device == "cpu" else 1
    immediate = all(line.state_update == "immediate" for line in first_lines) or codec == DDP
    counts = tuple(nodes.values())
    scenario = Scenario(codec, form, counts, link, inside, at_once=at_once, immediate=immediate)
    unknown = (
        (
            "latency",
            link.latency is not None,
            "small collectives were not measured; latency is taken as 0",
        ),
        ("inside", inside or is_fsdp or all_ranks, "no exchange inside a node was measured"),
    )
    durations = np.array([chosen.durations(step) for step in chosen.steps])
    encode, decode, tail = (
        float(np.median(table.of(name).mean(axis=1))) / NS for name in ("encode", "decode", "after")
    )
    observed = Observed(
        scenario,
        _buckets(steps, len(nodes) if is_fsdp else run.world_size),
        tail=tail,
        step=float(np.median(durations.mean(axis=1))) / NS,
        sent=median(sent.max(axis=1).tolist()),
        encode=None if codec == DDP else encode,
        decode=None if codec == DDP else decode,
        unavailable={name: reason for name, is_known, reason in unknown if not is_known},
        one_core=any(
            0 < line.cores < 2 * nodes[line.node] and line.device in ("", "cpu")
            for line in first_lines
        ),
        device=device,
        crowded=max(
            [1.0, *(nodes[line.node] / line.cores for line in first_lines if line.cores > 0)]
        ),
    )
    return _of_shards(observed, rank_steps) if all_ranks else observed


def _of_shards(observed: Observed, rank_steps: Sequence[Analysed]) -> Observed:
    """Inputs with the collectives of a model that is sharded over all ranks, and their rate."""
    shards = observe_shards(rank_steps, ranks=observed.scenario.world_size)
    scenario = replace(
        observed.scenario, codec=shards.gradients.name, parameters=shards.parameters.name
    )
    costs = {"parameters": shards.parameters, "gradients": shards.gradients}
    alone = replace(scenario, link=replace(scenario.link, rate=inf))
    nothing = [replace(collective, compute=0.0) for collective in shards.collectives]
    free = {name: cost.scaled(0.0) for name, cost in costs.items()}
    waiting, sent = simulate_shards(nothing, alone, **free)
    # One after the other: what is not the time of their rounds is that of their bytes.
    moving = max(shards.transfer - waiting, shards.transfer / 2)
    scenario = replace(scenario, link=replace(scenario.link, rate=sent / moving))
    return replace(observed, scenario=scenario, shards=shards, tail=shards.tail, sent=sent)


def _reaches_each_node(run: Run, first_line: RankRecord, nodes: Counter[str]) -> bool:
    """Whether a rank of a sharded model exchanges its shard with one rank of each other node."""
    line = first_line.groups.get("inter") or first_line.groups.get("flat") or []
    reached = Counter(run.ranks[rank].metadata.node for rank in line if rank in run.ranks)
    return reached == Counter(list(nodes))


def _buckets(steps: Sequence[Sequence[Analysed]], ring: int) -> list[ScenarioBucket]:
    """Buckets in the order of time; ``ring``: number of ranks that exchange them."""
    ready: dict[int, list[int]] = defaultdict(list)
    raw: dict[int, list[int]] = defaultdict(list)
    for ranks in steps:
        of_step: dict[int, int] = {}
        for bucket in (bucket for analysed in ranks for bucket in analysed.record.buckets):
            of_step[bucket.index] = max(of_step.get(bucket.index, 0), bucket.ready)
            raw[bucket.index].append(bucket.raw)
        for index, time in of_step.items():
            ready[index].append(time)
    elements = ring / (2 * (ring - 1) * ELEMENT_BYTES)  # of a byte in a ring
    buckets = [ScenarioBucket(median(ready[i]) / NS, median(raw[i]) * elements) for i in ready]
    return sorted(buckets, key=lambda bucket: bucket.ready)


def _link(run: Run, rates: Array) -> LinkSpeed:
    """Link between nodes, of bytes per second on every link and step that sent something."""
    alone, nodes = [0.0], {*run.nodes.values()}
    if len(nodes) in (1, len(run.ranks)):  # else a collective of all says less than their sum
        links = (link for rank_run in run.ranks.values() for link in rank_run.links)
        whole = [link for link in links if link.peer is None and link.seconds > 0]
        alone = [link.sent / link.seconds for link in whole] or alone
    # Small exchanges leave a link idle between them, and reach less than it can do.
    rate = float(max(median(rates.tolist()), median(alone)))
    bursts = [burst for rank_run in run.ranks.values() for burst in rank_run.bursts]
    single = [burst.seconds for burst in bursts if burst.count == 1]
    if single and (several := [burst for burst in bursts if burst.count > 1]):
        return LinkSpeed(
            rate,
            latency=median(single) / (run.world_size - 1),
            overhead=median(burst.seconds / burst.count for burst in several),
            cpu=median(burst.cpu / burst.count for burst in several),
        )
    return LinkSpeed(rate)


def _inside(rank_steps: Sequence[Analysed]) -> LinkSpeed | None:
    rates = []
    for step in rank_steps:
        exchanges = [exchange for exchange in step.exchanges if exchange.group == "intra"]
        sent = sum(exchange.sent for exchange in exchanges)
        if sent and (moving := length(union(exchange.transfer for exchange in exchanges))):
            rates.append(sent / moving * NS)
    return LinkSpeed(median(rates)) if rates else None
