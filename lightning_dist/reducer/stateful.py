"""State of a reducer between steps: allocated, saved, loaded, and given to ranks that join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_dist.log import get_logger
from lightning_dist.reducer.parts import Stripes
from lightning_dist.reducer.pipeline import Pipeline
from lightning_dist.reducer.plan.plans import future_on
from lightning_dist.reducer.plan.slices import (
    ParameterSlice,
    as_real,
    require_strides,
    strides_in_bucket,
)

log = get_logger(__name__)

STATE_VERSION = 1


class StatefulPipeline(Pipeline):
    """Pipeline whose state is saved and loaded by parameter name.

    Args:
        names: name of every parameter that a slice may be of.
        prefix: of the keys of :meth:`state_dict`.
        pipeline: arguments of :class:`Pipeline`.
    """

    def __init__(self, names: Mapping[Tensor, str], *, prefix: str, **pipeline: Any) -> None:
        super().__init__(**pipeline)
        self.names, self._prefix = names, prefix
        self.strides = {name: strides_in_bucket(parameter) for parameter, name in names.items()}
        self._reserved: list[tuple[Sequence[ParameterSlice], torch.dtype]] = []

    def reserve(self, slices: Sequence[ParameterSlice], dtype: torch.dtype) -> None:
        """Allocate the state of ``slices`` under the codecs of this step.

        State that is not reserved is allocated when it is first needed, at the peak of a backward
        pass.

        Args:
            dtype: of the tensors that they will be slices of.
        """
        self._reserved.append((slices, dtype))
        if self.network.world_size > 1:
            self._plans.reserve(slices, dtype, step=self.step)

    def _reserve_again(self) -> None:
        reserved, self._reserved = self._reserved, []
        for slices, dtype in reserved:
            with suppress(ValueError):  # state of another model: the next step says so
                self.reserve(slices, dtype)

    def wait(self) -> None:
        """Wait for the means of a step that are delayed; those of others are waited for.

        Raises:
            RuntimeError: the exchange has failed.
        """
        if not self._delayed.active or self.network.world_size == 1 or self.closed:
            return
        landed = future_on(self.network.device)
        # Of a tensor: a future waits for the streams of what is in it.
        self._executor.submit(partial(landed.set_result, self._scale))
        landed.wait()
        if self.failure is not None:
            raise RuntimeError(f"lightning_dist: {self.failure}") from self.failure

    @property
    def residuals(self) -> Mapping[str, Tensor]:
        """Residuals of this rank, by parameter name."""
        return self.state.residuals

    def residual_norm(self) -> float:
        """Norm of all residuals of this rank."""
        parts = [part for part in self.state.residuals.values() if part.numel()]
        norms = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return float(torch.stack(norms).norm()) if norms else 0.0

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes`` and the payloads' ``buffer_bytes``.

        With delayed means also ``delayed_bytes``.
        """
        delayed = {"delayed_bytes": self._delayed.nbytes} if self._delayed.active else {}
        return {
            "residual_bytes": self.state.nbytes,
            "buffer_bytes": self._plans.nbytes,
            **delayed,
        }

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all ranks on rank ``to``, None elsewhere. Collective; between backward passes.

        Tensors and plain values only: ``{"version", "world_size", "step", "residuals"}``, residuals
        as ``{parameter name: (W, numel)}`` on the CPU, unscaled; with a hierarchical exchange one
        row per outermost group. Rows lie as their parameter does in memory; ``"strides"`` has those
        of parameters that are not row-major. With ``dgc`` also ``"momenta"``, with ``powersgd``
        ``"factors"``, of shards by the element that each starts at, with ``delay`` the means
        ``"delayed"``, which the next step applies.
        """
        self.wait()
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state = self.state.gather(self.network, to=to)
        return None if state is None else self._described(state)

    def striped_state_dict(self) -> tuple[dict[str, Any], list[Stripes]]:
        """:meth:`state_dict` on every rank, with the tensors that differ between ranks left there.

        The tensors of the state are empty memory; the stripes are the parts that this rank has.
        """
        self.wait()
        if self._sharded or self.recovers:  # ranks have been in other worlds
            self.state.know_all(self.network)
        state, stripes = self.state.striped(self.network)
        return self._described(state), stripes

    def _described(self, state: dict[str, Any]) -> dict[str, Any]:
        strides = {name: list(found) for name, found in self.strides.items() if found is not None}
        about = {"world_size": self.network.world_size, "step": self.step, "strides": strides}
        delayed = {"delayed": self._delayed.state()} if self._delayed.active else {}
        described = {"version": STATE_VERSION, **about, **state, **delayed}
        return {self._prefix + key: value for key, value in described.items()}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh.

        With another number of rows every rank starts from the mean residual.
        """
        self.wait()
        self._plans.clear()  # they hold views of the old residuals
        found: Mapping[str, Any] = {"step": 0}
        if state is not None:
            found = _own_keys(state, self._prefix)
            require_strides(found, self.names)
        self.state.load(found, self.network.rows)
        self._load_delayed(found.get("delayed", {}))
        self.step = int(found["step"])
        self._reserve_again()

    def _load_delayed(self, means: Mapping[str, Tensor]) -> None:
        numel = {name: as_real(p).numel() for p, name in self.names.items()}
        self._delayed.load(means, numel=numel)
        if means and not self._delayed.active and self.network.rank == 0:
            log.warning(
                "The state has a mean gradient that was not applied yet; it is dropped. Set "
                "delay=1 to apply it"
            )

    def continue_from(self, before: StatefulPipeline) -> None:
        """Go on from the step that ``before`` was at when it was closed, with its means."""
        self.step = before.step
        self._load_delayed(before._delayed.state())

    def shared_state(self) -> dict[str, Any]:
        """State that is equal on all ranks between steps, for a rank that joins them."""
        return {"step": self.step, "factors": self.state.all_factors}

    def join(self, shared: Mapping[str, Any]) -> None:
        """Take over :meth:`shared_state` of another rank, without residuals or with the mean."""
        self._plans.clear()
        if not self.state.is_mean:
            self.state.load({}, self.network.rows)
        self.state.load_factors(shared["factors"])
        self.step = int(shared["step"])
        self._reserve_again()


def _own_keys(state: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    """State that a reducer with ``prefix`` has saved among others.

    Raises:
        ValueError: it is none that this version can read.
    """
    found = {key.removeprefix(prefix): state[key] for key in state if key.startswith(prefix)}
    version = found.get("version")
    if version != STATE_VERSION:
        raise ValueError(
            f"The compression state must be of version {STATE_VERSION}, got {version!r}; "
            + (
                "give what state_dict() returned on rank 0"
                if version is None
                else "it was written by another version of lightning_dist: resume with that one, "
                "or start without"
            )
        )
    return found
