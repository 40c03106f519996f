"""What a worker of a loop does from the loss of another one until it goes on."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_dist.elastic import rng
from lightning_dist.elastic.lifecycle import EXIT_EVICTED, EXIT_RESTART, is_of_a_peer
from lightning_dist.elastic.membership import Membership
from lightning_dist.elastic.recovery.groups import GenerationGroups
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Report
from lightning_dist.integrations.loop.objects import Objects
from lightning_dist.integrations.torch.ddp import describe_parameters, reducer_of
from lightning_dist.integrations.torch.regroup import (
    from_rank,
    network_of,
    regroup,
    require_recoverable,
    send_buffers,
)
from lightning_dist.onebit_adam import OneBitAdam
from lightning_dist.private import order_buckets
from lightning_dist.reducer.commit import untraced

log = logging.getLogger(__name__)

_TRIES = 5
"""Generations without a step and without a worker less, after which an error is the user's."""


class Ended(SystemExit):
    """This process cannot go on, and is started again."""


class LoopRecovery:
    """One worker of a loop: it holds back steps that fail, and enters generations.

    Args:
        objects: of the loop.
        steps: optimizer steps so far.

    Raises:
        ValueError: something whose step cannot be taken again.
    """

    def __init__(
        self, environment: RecoveryEnvironment, objects: Objects, *, steps: Callable[[], int]
    ) -> None:
        if len(objects.wrapped) != 1:
            raise ValueError(
                "recovery='in_process' is for one model in DistributedDataParallel, got "
                f"{len(objects.wrapped)}; use recovery='restart'"
            )
        if any(isinstance(each, OneBitAdam) for each in objects.optimizers):
            raise ValueError(
                "OneBitAdam exchanges in its step, which cannot be taken again; use another "
                "optimizer, or recovery='restart'"
            )
        self._objects, self._steps = objects, steps
        (self._model,) = objects.wrapped
        self._reducer = require_recoverable(self._model, reducer_of(self._model.module))
        self._reducer.leave_failures_to(self)
        self._buffers_are_sent = self._model.forward_sync_buffers
        self.groups = GenerationGroups()
        self._arrivals = 0
        self._member = Member(environment, on_broken=self._break, progress=self._progress)
        self._hook = register_optimizer_step_pre_hook(untraced(self._before_step))
        self._has_state = False
        self._next: Generation | None = None  # made while the reducer's thread has waited
        self._store_lost: StoreLostError | None = None
        self._tries = 0
        self.begin_step()

    def waits_for_another(self) -> bool:
        """Whether another member has not come as far as this one. From any thread."""
        return self._member.waits_for_another()

    def _progress(self) -> int:
        return self._arrivals + self._reducer.arrivals

    # What the reducer asks, on its thread.

    def pauses(self) -> bool:
        """Newcomers wait."""
        return self._member.has_waiting

    def failed(self, error: RuntimeError) -> None:
        """The exchange of this generation has failed."""
        self._member.break_off(str(error))

    def verdict(self) -> bool | None:
        """What the next generation knows of the step whose payloads are all here."""
        try:
            self._next = self._member.report(self._report(holds=True, failed=True))
        except StoreLostError as error:
            self._store_lost = error
            return None
        return self._next.verdict if self._member.name in self._next.commits else None

    # Steps, on the thread of the training.

    def begin_step(self) -> None:
        """Remember what a step changes before it is committed."""
        self._arrivals += 1
        self._begun = self._reducer.step
        self._generators = rng.capture()
        self._buffers = [(each, each.clone()) for each in self._model.module.buffers()]
        self._counters: dict[str, Any] | None = None

    @property
    def is_given_up(self) -> bool:
        """Whether the exchange of this step has failed, and nothing of it is committed."""
        return self._reducer.failure is not None and self._reducer.step == self._begun

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        if not any(optimizer is each for each in self._objects.optimizers):
            return
        if len(arguments) > 1 or named.get("closure") is not None:
            raise ValueError(
                "an optimizer that is given a closure computes gradients in its step, which "
                "recovery='in_process' cannot take again; call backward before step(), or use "
                "recovery='restart'"
            )
        if not self.is_given_up:
            return
        if self._counters is None:
            counters = self._objects.counters.items()
            self._counters = {name: copy.deepcopy(each.state_dict()) for name, each in counters}
            self._rates = [
                [{k: v for k, v in group.items() if k != "params"} for group in each.param_groups]
                for each in self._objects.optimizers
            ]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def undo(self) -> None:
        """Put everything as it was when the step began: its exchange has failed."""
        for parameter in self._model.module.parameters():
            parameter.grad = None
        for buffer, value in self._buffers:
            buffer.copy_(value)
        rng.restore(self._generators)
        for name, state in (self._counters or {}).items():
            self._objects.counters[name].load_state_dict(state)
        if self._counters is not None:
            for optimizer, groups in zip(self._objects.optimizers, self._rates, strict=True):
                for group, settings in zip(optimizer.param_groups, groups, strict=True):
                    group.update(settings)
        self._counters = None

    @property
    def must_change(self) -> bool:
        """Whether this generation is at its end here."""
        return (
            self._next is not None
            or self._store_lost is not None
            or self._member.is_broken
            or self._reducer.failure is not None
            or self._reducer.answer.pauses
        )

    def lost(self, error: RuntimeError) -> None:
        """A collective between steps has failed; raises ``error`` if that is nobody's loss."""
        if isinstance(error, StoreLostError):
            self._end(str(error), code=EXIT_RESTART)
        is_lost = is_of_a_peer(error) or isinstance(error, dist.DistError)
        if not (self._member.is_broken or is_lost):
            raise error
        self._member.break_off(str(error))

    def level(self) -> None:
        """What DDP would do in the next forward pass by collectives, which could fail there."""
        self._arrivals += 1
        order_buckets(self._model)
        if self._buffers_are_sent:
            send_buffers(self._model)

    # Generations.

    def begin(self) -> tuple[Generation, Membership]:
        """Wait for the first generation with this worker, and enter it."""
        try:
            generation = self._member.announce(self._fingerprint)
        except StoreLostError as error:
            self._end(str(error), code=EXIT_RESTART)
        return self._enter_one_from(generation)

    def change(self) -> tuple[Generation, Membership]:
        """End this generation here, and enter the next one."""
        if self._store_lost is not None:
            self._end(str(self._store_lost), code=EXIT_RESTART)
        generation, self._next = self._next, None
        if generation is None:
            failed = self._member.is_broken or self._reducer.failure is not None
            generation = self._after(self._report(failed=failed))
        return self._enter_one_from(generation)

    def _after(self, report: Report) -> Generation:
        try:
            return self._member.report(report)
        except StoreLostError as error:
            self._end(str(error), code=EXIT_RESTART)

    def _enter_one_from(self, generation: Generation) -> tuple[Generation, Membership]:
        while True:
            try:
                return generation, self._enter(generation)
            except RuntimeError as error:  # another worker is lost meanwhile
                self.lost(error)
                generation = self._after(self._report(failed=True))

    def _enter(self, generation: Generation) -> Membership:
        name = self._member.name
        if generation.ends:
            self._end(generation.ends, code=EXIT_RESTART)
        if name in generation.refused:
            raise ValueError(
                "this worker's model, settings or versions are not those of the training that it "
                "would join; start the same script with the same packages on all nodes"
            )
        if name not in generation.members:
            self._end("a generation has been made without this worker", code=EXIT_EVICTED)
        if name in generation.heals and self._has_state:
            self._end("this worker is behind the others", code=EXIT_RESTART)
        if not generation.newcomers and self._tries > _TRIES:
            raise RuntimeError(
                f"{_TRIES} generations of the same step have failed: {generation.reason}"
            ) from self._reducer.failure
        self._tries = 0 if generation.newcomers else self._tries + 1
        self._arrivals = -self._reducer.arrivals
        self._member.meet()
        rank, size = generation.members.index(name), len(generation.members)
        connect, number = self._member.connect, generation.number
        with self.groups.made(connect, number=number, rank=rank, world_size=size):
            data, control = self.groups.new(), self.groups.new()
            members = Membership(generation=number, make=self.groups.new)
        if self._member.is_broken:
            self.groups.shut()
            raise RuntimeError("a member is lost while groups were made")
        regroup(self._model, self._reducer, network_of(data, control))
        return members

    def took_step(self) -> None:
        """A step is done in this generation."""
        self._tries = 0

    def handed_over(self, generation: Generation, give: Callable[[], Any]) -> Any:
        """What ``give`` returns on the source of a generation. Collective.

        Returns None where this worker needs nothing.
        """
        if generation.source is None:  # all begin, from the weights of rank 0 as under DDP
            module = self._model.module
            module.load_state_dict(from_rank(module.state_dict(), rank=0))
            return None
        if not generation.heals:
            return None
        source, name = generation.source, self._member.name
        given = give() if name == source else None
        state = from_rank(given, rank=generation.members.index(source))
        return state if name in generation.heals else None

    def shared_state(self) -> dict[str, Any]:
        """Of the reducer, for newcomers."""
        return self._reducer.shared_state()

    def join(self, shared: Any) -> None:
        """Take over :meth:`shared_state` of another worker."""
        self._reducer.join(shared)

    def has_state(self) -> None:
        """This worker is where the training is."""
        self._has_state = True

    def _report(self, *, failed: bool, holds: bool = False) -> Report:
        failure = self._reducer.failure
        return Report(
            self._member.name,
            generation=self._member.generation.number,
            step=self._steps() if self._has_state else -1,
            holds=holds,
            verdict=self._reducer.answer.finite,
            failed=failed,
            reason="" if failure is None else str(failure)[:300],
            fingerprint=self._fingerprint,
        )

    @property
    def _fingerprint(self) -> str:
        settings = self._reducer.settings.fingerprint()
        facts = {**settings, "parameters": describe_parameters(self._model.module)}
        return repr(sorted(facts.items(), key=str))

    def _break(self) -> None:
        self.groups.shut()
        self._reducer.network.limit.give_up()

    def _end(self, reason: str, *, code: int) -> NoReturn:
        log.warning("elastic: this process ends (exit code %d): %s", code, reason)
        raise Ended(code)

    def close(self) -> None:
        """The training is over; this worker beats until its process ends."""
        self._hook.remove()
