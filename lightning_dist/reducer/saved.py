"""Saved state of a reducer: whether it is that of all ranks, and of this model."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor

from lightning_dist.base.private import tensors_in
from lightning_dist.exchange.replicate import bits_digest
from lightning_dist.ranks.facts import all_facts, differences
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.parts import Held

_NAMED = ("residuals", "momenta", "factors", "delayed")


def require_mapping(state: object) -> None:
    """Raise ValueError unless it is what ``state_dict`` has returned."""
    if state is not None and not isinstance(state, Mapping):
        raise ValueError(
            "load_state_dict takes the dictionary that state_dict() has returned, or None, got "
            f"{state!r:.80}; read a file with torch.load(path, weights_only=True)"
        )


def require_one_state(
    state: Mapping[str, Any] | None, network: Network, *, prefix: str, sharded: bool
) -> None:
    """Raise ValueError if ranks were given different states, or some none. Collective.

    Args:
        prefix: of the keys of ``state``.
        sharded: each rank was given its part of the factors.
    """
    own = "none"
    if state is not None:
        equal = () if sharded else ("factors", "delayed")
        tensors = tensors_in([state.get(prefix + key, {}) for key in equal])
        content = [*_names(state, prefix)], [*map(bits_digest, tensors)]
        digest = hashlib.sha256(repr(content).encode()).hexdigest()[:12]
        own = f"one of step {state.get(prefix + 'step')} ({digest})"
    group, limit = network.data.group, network.limit
    facts = all_facts({"state": own}, group=group, device=network.device, limit=limit)
    if lines := differences(facts):
        raise ValueError(
            f"load_state_dict must be given the same on all ranks, got\n{lines[0]}\n"
            "state_dict() returns it on rank 0 alone: save it there and load the file on all ranks"
        )


def require_names(state: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise ValueError if ``state`` has parameters that are not among ``names``."""
    foreign = sorted({name for name, _ in _names(state, "")}.difference(names))
    if foreign:
        raise ValueError(
            f"The state must be of this model, and has {', '.join(map(repr, foreign[:3]))}"
            f"{' ...' if len(foreign) > 3 else ''}, which are not among its parameters; load the "
            "state that was saved with it, or None to start without residuals"
        )


def _names(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, int]]:
    """Parameters of which ``state`` has something, with their elements or 0."""
    for kind in _NAMED:
        for name, found in sorted(state.get(prefix + kind, {}).items()):
            has_rows = isinstance(found, Tensor) and found.dim() == 2
            yield (
                name,
                found.numel if isinstance(found, Held) else found.shape[1] if has_rows else 0,
            )
