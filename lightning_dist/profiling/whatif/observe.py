"""Inputs of a simulation, read from a profile: when gradients are ready, and how fast links are."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median

import numpy as np

from lightning_dist.profiling.analysis.breakdown import Analysed, analyse, passes_of
from lightning_dist.profiling.analysis.intervals import length, union
from lightning_dist.profiling.analysis.tables import Array, sample, step_table
from lightning_dist.profiling.capture.events import GLOO_AT_ONCE, RankRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.scenarios import (
    ALL_RANKS,
    DDP,
    ELEMENT_BYTES,
    FLAT,
    FSDP,
    HIERARCHICAL,
    LEADER,
    Bucket,
    Link,
    Scenario,
)
from lightning_dist.profiling.whatif.shards import (
    NS,
    ObservedShards,
    main_codec,
    observe_shards,
    why_no_shards,
)
from lightning_dist.profiling.whatif.simulator import simulate_shards


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
    buckets: Sequence[Bucket]
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
            reduced = [each.elements for each in self.shards.collectives if not each.gathers]
            return sum(reduced) / self.scenario.world_size
        return sum(bucket.elements for bucket in self.buckets)


def observe(run: Run, *, skip: int = 2) -> Observed:
    """Inputs from a run, without its first ``skip`` steps.

    Ranks begin a step together: times of several ranks count from the begin of each.

    Raises:
        ValueError: something is missing in the profile, with what it is.
    """
    chosen = sample(run, warmup_steps=skip)
    steps = [analyse(run, step) for step in chosen.detailed]
    every = [each for ranks in steps for each in ranks]
    abouts = [each.metadata for each in run.ranks.values()]
    missing = ", ".join(map(str, run.beside(chosen.ranks)))
    table = step_table(run, chosen.detailed, steps)
    sent, moving = table.link_uses()
    used = (sent > 0) & (moving > 0)
    nodes = Counter(run.nodes.values())
    all_ranks = any(each.fsdp == "all_ranks" for each in abouts)
    is_fsdp = any(each.fsdp for each in abouts) and not all_ranks
    why_not = why_no_shards(every) if all_ranks else ""
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
            is_fsdp and not all(_reaches_each_node(run, each, nodes) for each in abouts),
            "its model is sharded, and there is not one replica on each node",
        ),
        (not any(each.record.buckets for each in every), "no gradient bucket was observed"),
        (
            not all_ranks and any(len(passes_of(each.record)) > 1 for each in every),
            "its steps exchange gradients several times",
        ),
        (not used.any(), "no exchange was recorded"),
    )
    if problem := next((reason for holds, reason in reasons if holds), None):
        raise ValueError(f"Nothing can be predicted from this profile: {problem}")
    codec = main_codec(bucket for each in every for bucket in each.record.buckets)
    device = run.ranks[min(run.ranks)].metadata.device or "cpu"
    across = ["inter" in each.groups for each in abouts]
    link, inside = _link(run, sent[used] / moving[used] * NS), _inside(every)
    form = FLAT if not any(across) else HIERARCHICAL if all(across) else LEADER
    if is_fsdp:
        form, inside = FSDP, None
    elif all_ranks:
        form, inside = ALL_RANKS, None
    at_once = GLOO_AT_ONCE if device == "cpu" else 1
    immediate = all(about.commit == "immediate" for about in abouts) or codec == DDP
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
    ranks = chosen.ranks.values()
    durations = np.array([[each.head(step).duration for each in ranks] for step in chosen.steps])
    encode, decode, tail = (
        float(np.median(table.of(name).mean(axis=1))) / NS for name in ("encode", "decode", "after")
    )
    found = Observed(
        scenario,
        _buckets(steps, len(nodes) if is_fsdp else run.world_size),
        tail=tail,
        step=float(np.median(durations.mean(axis=1))) / NS,
        sent=median(sent.max(axis=1).tolist()),
        encode=None if codec == DDP else encode,
        decode=None if codec == DDP else decode,
        unavailable={name: reason for name, is_known, reason in unknown if not is_known},
        one_core=any(
            0 < about.cores < 2 * nodes[about.node] and about.device in ("", "cpu")
            for about in abouts
        ),
        device=device,
        crowded=max(
            [1.0, *(nodes[about.node] / about.cores for about in abouts if about.cores > 0)]
        ),
    )
    return _of_shards(found, every) if all_ranks else found


def _of_shards(found: Observed, every: Sequence[Analysed]) -> Observed:
    """``found`` with the collectives of a model that is sharded over all ranks, and their rate."""
    shards = observe_shards(every, ranks=found.scenario.world_size)
    scenario = replace(
        found.scenario, codec=shards.gradients.name, parameters=shards.parameters.name
    )
    costs = {"parameters": shards.parameters, "gradients": shards.gradients}
    alone = replace(scenario, link=replace(scenario.link, rate=inf))
    nothing = [replace(each, compute=0.0) for each in shards.collectives]
    free = {name: replace(cost, encode=0.0, decode=0.0) for name, cost in costs.items()}
    waiting, sent = simulate_shards(nothing, alone, **free)
    # One after the other: what is not the time of their rounds is that of their bytes.
    moving = max(shards.transfer - waiting, shards.transfer / 2)
    scenario = replace(scenario, link=replace(scenario.link, rate=sent / moving))
    return replace(found, scenario=scenario, shards=shards, tail=shards.tail, sent=sent)


def _reaches_each_node(run: Run, about: RankRecord, nodes: Counter[str]) -> bool:
    """Whether a rank of a sharded model exchanges its shard with one rank of each other node."""
    line = about.groups.get("inter") or about.groups.get("flat") or []
    found = Counter(run.ranks[rank].metadata.node for rank in line if rank in run.ranks)
    return found == Counter(list(nodes))


def _buckets(steps: Sequence[Sequence[Analysed]], ring: int) -> list[Bucket]:
    """Buckets in the order of time; ``ring``: number of ranks that exchange them."""
    ready: dict[int, list[int]] = defaultdict(list)
    raw: dict[int, list[int]] = defaultdict(list)
    for ranks in steps:
        of_step: dict[int, int] = {}
        for bucket in (bucket for each in ranks for bucket in each.record.buckets):
            of_step[bucket.index] = max(of_step.get(bucket.index, 0), bucket.ready)
            raw[bucket.index].append(bucket.raw)
        for index, time in of_step.items():
            ready[index].append(time)
    elements = ring / (2 * (ring - 1) * ELEMENT_BYTES)  # of a byte in a ring
    found = [Bucket(median(ready[i]) / NS, median(raw[i]) * elements) for i in ready]
    return sorted(found, key=lambda bucket: bucket.ready)


def _link(run: Run, rates: Array) -> Link:
    """Link between nodes, of bytes per second on every link and step that sent something."""
    alone, nodes = [0.0], {*run.nodes.values()}
    if len(nodes) in (1, len(run.ranks)):  # else a collective of all says less than their sum
        links = (link for each in run.ranks.values() for link in each.links if link.peer is None)
        alone = [link.sent / link.seconds for link in links if link.seconds > 0] or alone
    # Small exchanges leave a link idle between them, and reach less than it can do.
    rate = float(max(median(rates.tolist()), median(alone)))
    bursts = [burst for each in run.ranks.values() for burst in each.bursts]
    single = [burst.seconds for burst in bursts if burst.count == 1]
    if single and (several := [burst for burst in bursts if burst.count > 1]):
        return Link(
            rate,
            latency=median(single) / (run.world_size - 1),
            overhead=median(burst.seconds / burst.count for burst in several),
            cpu=median(burst.cpu / burst.count for burst in several),
        )
    return Link(rate)


def _inside(every: Sequence[Analysed]) -> Link | None:
    rates = []
    for each in every:
        exchanges = [exchange for exchange in each.exchanges if exchange.group == "intra"]
        sent = sum(exchange.sent for exchange in exchanges)
        if sent and (moving := length(union(exchange.transfer for exchange in exchanges))):
            rates.append(sent / moving * NS)
    return Link(median(rates)) if rates else None
