"""A worker in one generation after the other: it waits for the next one and makes its groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import torch.distributed as dist

from lightning_dist.base.log import get_logger
from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART, is_of_a_peer
from lightning_dist.elastic.recovery.groups import GenerationGroups
from lightning_dist.elastic.recovery.member import Member, RecoveryEnvironment, StoreLostError
from lightning_dist.elastic.recovery.protocol import Generation, Report
from lightning_dist.ranks.membership import Membership

log = get_logger(__name__)

_TRIES = 5
"""Generations of the same members without a step, after which an error is the user's."""


class Ended(SystemExit):
    """This process cannot go on, and is started again."""


class Generations:
    """This worker among those that train together.

    Args:
        environment: of the worker.
    """

    def __init__(self, environment: RecoveryEnvironment) -> None:
        self.on_broken: Callable[[], None] = lambda: None
        """Called from a thread when this generation is known to be at its end, maybe repeatedly."""
        self.progress: Callable[[], int] = lambda: 0
        """Number of waits of this worker for others, in this generation."""
        self.groups = GenerationGroups()
        self._members: Membership | None = None
        try:
            self._member = Member(
                environment, on_broken=self._break, progress=lambda: self.progress()
            )
        except StoreLostError as error:
            self.end(str(error), code=EXIT_RESTART)
        self._tries = self._size = 0

    @property
    def name(self) -> str:
        """Of this worker."""
        return self._member.name

    @property
    def now(self) -> Generation:
        """The present one."""
        return self._member.generation

    @property
    def is_broken(self) -> bool:
        """Whether this generation is known to be at its end."""
        return self._member.is_broken

    @property
    def waiting(self) -> int:
        """Newcomers that the next generation admits, so that all should pause."""
        return self._member.waiting

    def waits_for_another(self) -> bool:
        """Whether another member has not come as far as this one. From any thread."""
        return self._member.waits_for_another()

    def lapsed(self) -> str:
        """Reason why another rank may write in the place of this one. From any thread."""
        return self._member.lapsed()

    def finds_others(self) -> bool:
        """Whether there is a generation already, so that this worker joins others."""
        try:
            return self._member.finds_others()
        except StoreLostError as error:
            self.end(str(error), code=EXIT_RESTART)

    def announce(self, fingerprint: str) -> Generation:
        """Say that this worker is ready, and wait for the first generation with it."""
        try:
            return self._member.announce(fingerprint)
        except StoreLostError as error:
            self.end(str(error), code=EXIT_RESTART)

    def report(self, report: Report) -> Generation:
        """End this generation here, and wait for the next one.

        Raises:
            StoreLostError: the store is gone.
        """
        return self._member.report(report)

    def after(self, report: Report) -> Generation:
        """The same, and the end of this process where there can be none."""
        try:
            return self._member.report(report)
        except StoreLostError as error:
            self.end(str(error), code=EXIT_RESTART)

    def break_off(self, reason: str) -> None:
        """Let all members of this generation know that it cannot go on. Returns at once."""
        self._member.break_off(reason)

    def lost(self, error: RuntimeError) -> None:
        """A collective has failed; raises ``error`` if that is nobody's loss."""
        if isinstance(error, StoreLostError):
            self.end(str(error), code=EXIT_RESTART)
        is_lost = is_of_a_peer(error) or isinstance(error, dist.DistError)
        if not (self._member.is_broken or is_lost):
            raise error
        self._member.break_off(str(error))

    def enter(
        self, generation: Generation, *, has_state: bool, failure: BaseException | None = None
    ) -> tuple[Membership, dist.ProcessGroup, dist.ProcessGroup]:
        """Make the groups of ``generation``: the members', and two more of all. Collective.

        Args:
            has_state: this worker is where the training is.
            failure: what has ended the generation before here.

        Raises:
            ValueError: this worker is of another training.
            RuntimeError: a member is lost meanwhile.
        """
        self._require_place(generation, has_state=has_state)
        rank, size = generation.members.index(self.name), len(generation.members)
        self._tries = 0 if generation.newcomers or size < self._size else self._tries + 1
        self._size = size
        if self._tries > _TRIES:
            raise RuntimeError(
                f"{_TRIES} generations of the same step have failed: {generation.reason}"
            ) from failure
        self._members = None
        self._member.meet()
        number, member = generation.number, self._member
        with self.groups.made(
            member.connect, port=member.port, number=number, rank=rank, world_size=size
        ):
            data, control = self.groups.new(), self.groups.new()
            members = self._members = Membership(generation=number, make=self.groups.new)
        if self._member.is_broken:
            self.groups.shut()
            raise RuntimeError("a member was lost while process groups were created")
        return members, data, control

    def _require_place(self, generation: Generation, *, has_state: bool) -> None:
        if generation.ends:
            self.end(generation.ends, code=EXIT_RESTART)
        if self.name in generation.refused:
            raise ValueError(
                "this worker's model, settings or versions differ from those of the training that "
                "it would join; start the same script with the same packages on all nodes"
            )
        if self.name not in generation.members:
            self.end("a generation was formed without this worker", code=EXIT_EVICTED)
        if self.name in generation.heals and has_state:
            self.end("this worker is behind the others", code=EXIT_RESTART)

    def took_step(self) -> None:
        """A step is done in this generation."""
        self._tries = 0

    def _break(self) -> None:
        self.groups.shut()
        if (members := self._members) is not None:
            # gloo has been seen to wait on, in a collective that began as its sockets were shut.
            members.ranks.give_up()
        self.on_broken()

    def end(self, reason: str, *, code: int) -> NoReturn:
        """End this process, and say why."""
        log.warning("elastic: this process exits with code %d: %s", code, reason)
        raise Ended(code)
