"""Evaluations before, between and within training steps: a real DDP, on a clock that it moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from planted import MS, Planted
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.ddp_hook import Watching
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.session import Session, SessionSettings

DATA = 2
PASS = 20
OPTIMIZER = 5
EVALUATION = 500


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now

    def passes(self, milliseconds: int) -> None:
        self.now += milliseconds * MS


class Model(nn.Module):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.linear, self._clock = nn.Linear(4, 4), clock

    def forward(self, x: Tensor) -> Tensor:
        self._clock.passes(PASS if torch.is_grad_enabled() else EVALUATION)
        return BackwardTicks.apply(self.linear(x), self._clock)


class BackwardTicks(torch.autograd.Function):
    """Nothing; backward takes ``PASS`` ms."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, clock: Clock) -> Tensor:
        ctx.clock = clock
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.clock.passes(PASS)
        return gradient, None


class Loop:
    """A training loop on one rank of two, and the steps that a profile has of it."""

    def __init__(self, rank: Rank) -> None:
        self.clock, self.steps = Clock(), list[StepRecord]()
        self.model = rank.ddp(Model(self.clock))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        about = Planted(steps=0).run().ranks[rank.rank].metadata
        self.session = Session(
            None,
            about,
            settings=SessionSettings(error_every_n_steps=0),
            on_step=self.steps.append,
            clock=self.clock,
        )
        self.watching = Watching(self.model, self.session.timer)

    def forward(self) -> Tensor:
        self.clock.passes(DATA)
        return self.model(torch.ones(2, 4)).sum()

    def micro_batch(self, *, synchronises: bool = True) -> None:
        with nullcontext() if synchronises else self.model.no_sync():
            self.forward().backward()

    def optimize(self) -> None:
        self.clock.passes(OPTIMIZER)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def evaluate(self, *, batches: int = 1, mode: bool = False) -> None:
        self.model.train(mode)
        with torch.no_grad():
            for _ in range(batches):
                self.model(torch.ones(2, 4))
        self.model.train()


def steps_of(train: Callable[[Loop], None]) -> list[StepRecord]:
    """Those that rank 0 of two has written down, when all are over."""

    def one(rank: Rank) -> list[StepRecord]:
        loop = Loop(rank)
        train(loop)
        loop.watching.stop()
        loop.session.end("finished")
        return loop.steps

    return run_threads(one, 2)[0]


def phases(step: StepRecord) -> list[tuple[str, int, int]]:
    return [(each.name, each.begin // MS, each.end // MS) for each in step.phases]


def test_what_is_before_an_evaluation_in_the_middle_of_an_accumulation_counts() -> None:
    def train(loop: Loop) -> None:
        for number in range(2):
            loop.micro_batch(synchronises=False)
            loop.evaluate(batches=3 * number)
            if number:
                loop.session.timer.exclude_interval()  # Lightning's, after a validation
            loop.micro_batch()
            loop.optimize()

    plain, interrupted = steps_of(train)
    assert plain.duration == interrupted.duration == 89 * MS
    assert interrupted.begin == 89 * MS + 3 * EVALUATION * MS
    assert (
        phases(interrupted)
        == phases(plain)
        == [
            ("between_steps", 0, 2),
            ("forward", 2, 22),
            ("backward", 22, 42),
            ("between_steps", 42, 44),
            ("forward", 44, 64),
            ("backward", 64, 84),
            ("optimizer", 84, 89),
        ]
    )
    assert len(interrupted.buckets) == len(plain.buckets)


def test_several_evaluations_within_an_accumulation() -> None:
    def train(loop: Loop) -> None:
        for _ in range(3):
            loop.micro_batch(synchronises=False)
            loop.evaluate()
        loop.micro_batch()
        loop.optimize()

    (step,) = steps_of(train)
    assert (step.begin, step.duration) == (
        3 * EVALUATION * MS,
        (4 * (DATA + 2 * PASS) + OPTIMIZER) * MS,
    )
    assert [begin for name, begin, _ in phases(step) if name == "forward"] == [2, 44, 86, 128]


def test_a_pass_without_gradients_within_a_step_is_of_that_step() -> None:
    """A target of the same model, in training mode or not, before the backward pass or after it."""

    def train(loop: Loop) -> None:
        for mode in (True, False):
            loss = loop.forward()
            loop.evaluate(mode=mode)
            loss.backward()
            loop.optimize()
        loop.micro_batch()
        loop.evaluate()
        loop.optimize()

    *within, after = steps_of(train)
    for step in within:
        assert phases(step) == [
            ("between_steps", 0, 2),
            ("forward", 2, 522),
            ("backward", 522, 542),
            ("optimizer", 542, 547),
        ]
    assert phases(after)[2:] == [("backward", 22, 42), ("optimizer", 42, 547)]


def test_an_evaluation_after_a_step_that_was_skipped_is_of_none() -> None:
    def train(loop: Loop) -> None:
        loop.micro_batch()  # its step was skipped, by a GradScaler
        loop.evaluate()
        loop.forward()  # and this loss was left out
        loop.evaluate()
        loop.micro_batch()
        loop.optimize()
        loop.micro_batch()

    skipped, step, last = steps_of(train)
    assert [skipped.duration, step.duration, last.duration] == [42 * MS, 49 * MS, 42 * MS]
    assert step.begin == (42 + 2 * EVALUATION + PASS) * MS
    assert [name for name, *_ in phases(step)] == [
        "between_steps",
        "between_steps",
        "forward",
        "backward",
        "optimizer",
    ]


def test_an_evaluation_between_steps_is_of_none() -> None:
    def train(loop: Loop) -> None:
        for _ in range(2):
            loop.micro_batch()
            loop.optimize()
            loop.evaluate(batches=2)

    first, second = steps_of(train)
    assert first.duration == second.duration == 47 * MS
    assert second.begin == 47 * MS + 2 * EVALUATION * MS
