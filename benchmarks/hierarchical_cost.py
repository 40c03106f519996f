"""How much a step's exchange has to do on each level: bytes, rounds and elements, by formula.

The formulas of bytes and rounds are those of `lightning-dist profile whatif`. Nothing here is
measured or fitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.allreduce_settings import NO_FEEDBACK_SUFFIX, is_torch_row
from benchmarks.hierarchical_settings import FLAT, LEADER, levels
from benchmarks.layouts import Layout
from lightning_dist.profiling.whatif.simulator import Collective, collectives, inside


@dataclass(frozen=True, kw_only=True)
class CodecFacts:
    """What the model has to know of a codec."""

    name: str
    bytes_per_element: float
    linear: bool  # the network adds the payloads: a ring allreduce


PLAIN = CodecFacts(name="none", bytes_per_element=4.0, linear=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One step of the busiest rank, or of the busiest host where it says so."""

    inter_bytes: float  # over one host's link
    inter_rounds: int
    intra_bytes: float = 0.0  # into or out of one rank
    intra_rounds: int = 0
    elements: dict[str, float] = field(default_factory=dict)  # through each codec, in one rank
    busy_ranks: int  # that run the codec between hosts at once, on all hosts


def codec_facts(codec: str) -> CodecFacts | None:
    """The facts of a codec of this package; None where its bytes are not fixed per element."""
    if is_torch_row(codec):
        return None
    import torch

    from lightning_dist.codecs import BlockCodec, resolve_codec

    resolved = resolve_codec(codec.removesuffix(NO_FEEDBACK_SUFFIX))
    if not isinstance(resolved, BlockCodec) or resolved.exchange == "gather":
        return None
    row = sum(plane.bytes_per_block for plane in resolved.planes(torch.float32))
    return CodecFacts(
        name=codec,
        bytes_per_element=row / resolved.block,
        linear=resolved.exchange == "allreduce",
    )


def facts_of(codec: str) -> tuple[CodecFacts, CodecFacts] | None:
    """The codecs within and between hosts of a row's `codec`."""
    intra, inter = levels(codec)
    found = (PLAIN if intra is None else codec_facts(intra), codec_facts(inter))
    return None if found[0] is None or found[1] is None else (found[0], found[1])


def work(
    form: str,
    layout: Layout,
    *,
    inter: CodecFacts,
    intra: CodecFacts = PLAIN,
    elements: float,
) -> Work:
    """What a form has to do for `elements` gradients, with these codecs between and within hosts.

    form: as in `hierarchical_settings.FORMS`; the sharded one needs an even layout.
    """
    size = elements * inter.bytes_per_element
    exchange = "allreduce" if inter.linear else "two_shot"
    if form == FLAT:
        whole = _total(collectives(exchange, size, layout.counts))
        return Work(
            inter_bytes=whole.nbytes,
            inter_rounds=whole.rounds,
            elements=_through((inter, elements)),
            busy_ranks=layout.world_size,
        )
    local = max(layout.counts)
    leader = form == LEADER
    if not leader and not layout.even:
        raise ValueError(f"the sharded form needs hosts of equal size, got {layout.name}")
    share = 1 if leader else local
    across = _total(collectives(exchange, size, (1,) * layout.hosts))
    way = inside(elements * intra.bytes_per_element, local, leader=leader)
    return Work(
        # L ranks of a host exchange an L-th each, or one of them exchanges all.
        inter_bytes=across.nbytes,
        inter_rounds=across.rounds,
        intra_bytes=2 * way.nbytes,
        intra_rounds=2 * way.rounds,
        elements=_through((inter, elements / share), (intra, elements)),
        busy_ranks=layout.hosts if leader else layout.world_size,
    )


def _total(parts: Sequence[Collective]) -> Collective:
    return Collective(sum(each.nbytes for each in parts), sum(each.rounds for each in parts))


def _through(*passes: tuple[CodecFacts, float]) -> dict[str, float]:
    """Elements by codec; what travels as it is costs nothing."""
    elements: dict[str, float] = {}
    for codec, count in passes:
        if codec.name != PLAIN.name:
            elements[codec.name] = elements.get(codec.name, 0.0) + count
    return elements
