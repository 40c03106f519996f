"""Bytes that a step will send, before there is one: the plan of a step without its memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from lightning_dist.codecs.base import Codec, Shape
from lightning_dist.ranks.traffic import Sent
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import (
    ParameterSlice,
    as_real,
    by_codec,
    matrices,
    slices_of,
)
from lightning_dist.reducer.state import ReducerState
from lightning_dist.settings.exchange import ExchangeSettings

_META = torch.device("meta")
_LARGE = 1 << 16
"""Elements from which on parameters are planned once for all of the same shape."""
_ENOUGH = 1 << 22
"""Elements of which the bytes of more follow: padding is next to nothing there."""


@dataclass(frozen=True)
class Expected:
    """Bytes of this rank in a step of the policy's last stage.

    ``sent`` is None where a codec sends as much as the gradients make it (``threshold``). ``raw``
    is what plain DDP would send. ``since``: the synchronised step from which on it holds.
    """

    raw: int
    sent: Sent | None
    since: int


def first_compressed_step(policy: Codec, shapes: Mapping[str, Shape]) -> int | None:
    """The first synchronised step at which ``policy`` compresses a parameter; None: it never does.

    Args:
        shapes: of the trained parameters, by name.
    """
    for step in policy.boundaries():
        if any(not policy.for_tensor(n, s, step=step).lossless for n, s in shapes.items()):
            return step
    return None


def expected_traffic(
    names: Mapping[Tensor, str], settings: ExchangeSettings, network: Network
) -> Expected:
    """Traffic that :class:`~lightning_dist.reducer.reducer.Reducer` will count. Not collective.

    DDP's buckets are not known yet, so padding at their ends is left out.
    """
    policy = settings.policy
    since = policy.boundaries()[-1]
    trained = {name: p for p, name in names.items() if p.requires_grad}
    planner = Planner(
        _without_memory(network, network.device),
        ReducerState(),
        memory_of=settings.memory_of,
        intra_codec=settings.intra,
        whole=matrices(policy, {name: tuple(p.shape) for name, p in trained.items()}),
    )
    raw, intra, inter, known = 0.0, 0.0, 0.0, True
    for codec, slices, dtype, times in _alike(trained, policy, step=since, planner=planner):
        bucket = torch.empty(slices[-1].offset + slices[-1].numel, dtype=dtype, device=_META)
        (group,) = planner.groups({codec: slices}, bucket)
        raw += times * group.raw_bytes
        intra, inter = intra + times * group.sent.intra, inter + times * group.sent.inter
        known = known and codec.payload_bytes(slices[0].shape) is not None
    return Expected(round(raw), Sent(round(intra), round(inter)) if known else None, since)


def _alike(
    trained: Mapping[str, Tensor], policy: Codec, *, step: int, planner: Planner
) -> Iterator[tuple[Codec, Sequence[ParameterSlice], torch.dtype, float]]:
    """Parameters to plan together, and how many times their bytes count."""
    small: dict[torch.dtype, list[Tensor]] = {}
    large: dict[tuple[Codec, torch.dtype, Shape], list[str]] = {}
    names = {parameter: name for name, parameter in trained.items()}
    for name, parameter in reversed(list(trained.items())):  # the order of DDP's buckets
        real = as_real(parameter)
        if real.numel() < _LARGE:
            small.setdefault(real.dtype, []).append(parameter)
        else:
            codec = policy.for_tensor(name, tuple(parameter.shape), step=step)
            key = codec, real.dtype, tuple(real.shape)
            large.setdefault(key, []).append(name)
    for dtype, parameters in small.items():
        cut = by_codec(
            policy,
            slices_of([names[parameter] for parameter in parameters], parameters),
            {names[parameter]: tuple(parameter.shape) for parameter in parameters},
            step=step,
            affordable=partial(planner.affordable, dtype=dtype),
        )
        for codec, slices in cut.items():
            yield codec, slices, dtype, 1
    for (codec, dtype, shape), alike in large.items():
        whole = ParameterSlice(alike[0], 0, shape)
        codec = planner.affordable(codec, whole, dtype)
        enough = not codec.whole_tensors and whole.numel > _ENOUGH
        part = ParameterSlice(alike[0], 0, (_ENOUGH,)) if enough else whole
        yield codec, [part], dtype, len(alike) * whole.numel / part.numel


def _without_memory(network: Network, device: torch.device) -> Network:
    intra = network.intra
    if intra is not None and intra.inter is not None:
        intra = replace(intra, inter=_without_memory(intra.inter, device))
    return replace(network, device=_META, intra=intra, plans_for=device)
