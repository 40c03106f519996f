"""Parameters of a model that a codec compresses; ValueError where it would never compress one."""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_dist.base.log import get_logger
from lightning_dist.codecs import Codec
from lightning_dist.codecs.policies import NORMS_BIASES_EMBEDDINGS, patterns_of
from lightning_dist.measurement.exposure import first_compressed_step
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real
from lightning_dist.reducer.units.by_codec import require_units
from lightning_dist.settings.exchange import ExchangeSettings

log = get_logger(__name__)


def require_effect(
    settings: ExchangeSettings,
    names: Mapping[Tensor, str],
    *,
    says: bool,
    one_of_several: bool = False,
) -> int | None:
    """The first synchronised step that compresses a parameter; None: none does, said once.

    Args:
        one_of_several: other models may have what a rule of `by_name` is for: warn, do not raise.

    Raises:
        ValueError: the codec fits no parameter of the model, or a rule of `by_name` none, or it
            has no communication units.
    """
    for problem in _unmatched(settings.inter, list(names.values())):
        if not one_of_several:
            raise ValueError(problem)
        if says:
            log.warning("%s; ignore this if it is for another model", problem)
    trained = {name: tuple(p.shape) for p, name in names.items() if p.requires_grad}
    for leaf in settings.inter.leaves():
        require_units(leaf)
    wanted = [leaf for leaf in settings.inter.leaves() if not leaf.lossless]
    begins = first_compressed_step(settings.policy, trained)
    if not wanted or begins is not None:
        return begins
    choosy = [(leaf, *leaf.accepts) for leaf in wanted if leaf.accepts]
    if choosy and all(
        codec.for_tensor("", shape, step=0).lossless
        for codec, _, _ in choosy
        for shape in trained.values()
    ):
        codec, accepted, remedy = choosy[0]
        raise ValueError(
            f"codec {codec} compresses {accepted}, and none of the model's {len(trained)} "
            f"parameters is one: {remedy}, or use int8"
        )
    if says:
        log.warning(
            "Nothing is compressed: all %d parameters are 1-D or small for codec %s; lower "
            "min_compress_numel (0 compresses all)",
            len(trained),
            settings.inter,
        )
    return None


def _unmatched(codec: Codec, names: Sequence[str]) -> Iterator[str]:
    """Errors in patterns of the user's that are found in no name, frozen ones too."""
    for pattern in patterns_of(codec):
        if pattern != NORMS_BIASES_EMBEDDINGS and not any(re.search(pattern, n) for n in names):
            text = re.sub(r"[^\w.]", "", pattern.replace("\\.", ".")) or pattern
            near = heapq.nlargest(3, names, key=lambda name: _likeness(text, name))
            yield (
                f"by_name: a pattern must be found in the name of a parameter, got {pattern!r}, "
                f"which is found in none of {len(names)}; the nearest are "
                f"{', '.join(map(repr, near))}"
            )


def _likeness(text: str, name: str) -> float:
    """Of a text and a name, or a part of it between dots."""
    parts = {name, *name.split(".")}
    return max(difflib.SequenceMatcher(None, text, part).ratio() for part in parts)


def compresses_fewer_bytes(
    settings: ExchangeSettings, names: Mapping[Tensor, str], planner: Planner
) -> bool:
    """Whether the codec sends fewer bytes of some parameter; for a small model says once if not.

    Raises:
        ValueError: it would send more than uncompressed gradients, whatever their size.
    """
    codec, wanted = None, list(_lossy(settings, names))
    for codec, part, dtype in wanted:
        if not planner.affordable(codec, part, dtype).lossless:
            return True
    if codec is None:
        return False
    ranks, count = planner.network.rows.count, len({part.name for _, part, _ in wanted})
    if planner.affordable(codec, ParameterSlice("", 0, (1 << 24,)), torch.float32).lossless:
        raise ValueError(
            f"codec {codec} between {ranks} ranks sends more than uncompressed gradients: its "
            "bytes grow with the number of ranks; lower the ratio, reduce inside nodes first "
            "(hierarchical=True), or use 'int4' or 'powersgd'"
        )
    if planner.network.rank == 0:
        log.warning(
            "Nothing is compressed: all %d parameters that codec %s is for are so small that it "
            "would send more bytes between %d ranks",
            count,
            codec,
            ranks,
        )
    return False


def _lossy(
    settings: ExchangeSettings, names: Mapping[Tensor, str]
) -> Iterator[tuple[Codec, ParameterSlice, torch.dtype]]:
    """Parameters that are compressed at some step, with the codec."""
    for step in settings.policy.boundaries():
        for parameter, name in names.items():
            shape = tuple(parameter.shape)
            codec = settings.policy.for_tensor(name, shape, step=step)
            if parameter.requires_grad and parameter.numel() and not codec.lossless:
                real = as_real(parameter)
                yield codec, ParameterSlice(name, 0, tuple(real.shape)), real.dtype
