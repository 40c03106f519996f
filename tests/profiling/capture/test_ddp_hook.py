"""The hooks on DDP: its own allreduce, to the bit, and evaluations within steps."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from planted import MS, Planted, phases_of
from threads import on_threads
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.ddp_hook import Promises, Watching, watch_allreduce
from lightning_dist.profiling.capture.events import StepRecord
from lightning_dist.profiling.capture.profile_session import ProfileSession, ProfileSessionSettings
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.capture.steps import PendingStep


def gradients(
    rank: Rank, recorder: Recorder | None, *, steps: int = 2, **settings: bool
) -> list[Tensor]:
    module = nn.Sequential(nn.Linear(33, 41), nn.Linear(41, 37), nn.Linear(37, 7))
    weights = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=weights))
    group = rank.group("payload")
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=0.005, **settings)
    if recorder is not None:
        watch_allreduce(model, recorder, crosses=False)
    generator = torch.Generator().manual_seed(rank.rank)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(5, 33, generator=generator)).square().mean().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def taken(recorder: Recorder) -> StepRecord:
    buckets, spans = recorder.take()
    return PendingStep(0, 0, buckets=buckets, spans=spans).read(recorder.device_clock)


@pytest.mark.parametrize(
    ("size", "is_on", "settings"),
    [
        *((size, is_on, {}) for size in (2, 3) for is_on in (True, False)),
        *((2, True, {name: True}) for name in ("static_graph", "gradient_as_bucket_view")),
    ],
)
def test_means_are_those_of_ddp_to_the_bit(
    size: int, is_on: bool, settings: dict[str, bool]
) -> None:
    def watched(rank: Rank) -> list[Tensor]:
        recorder = Recorder()
        recorder.is_on = is_on
        return gradients(rank, recorder, **settings)

    stock = run_threads(lambda rank: gradients(rank, None, **settings), size)
    for ours, theirs in zip(run_threads(watched, size), stock, strict=True):
        assert all(map(torch.equal, ours, theirs))


@on_threads(2)
def test_one_that_is_off_keeps_nothing(rank: Rank) -> None:
    recorder = Recorder()
    recorder.is_on = False
    gradients(rank, recorder, steps=5)
    recorder.is_on = True  # what was kept would be in the next step
    step = taken(recorder)
    assert len(step.buckets) == len(step.spans) == recorder.cost(1.0) == 0


@on_threads(2)
def test_every_bucket_has_its_collective(rank: Rank) -> None:
    recorder = Recorder()
    gradients(rank, recorder, steps=1)
    step = taken(recorder)
    assert [each.index for each in step.buckets] == [each.bucket for each in step.spans] != []
    for bucket, span in zip(step.buckets, step.spans, strict=True):
        assert bucket.ready <= span.begin < span.end <= bucket.done
        assert (bucket.raw, bucket.intra, bucket.inter) == (span.sent, span.sent, 0)


class Words(nn.Module):
    """DDP's buckets are in the order of gradients, as it guesses: from the last parameter on."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        if not first:
            self.rest = nn.Linear(4, 4)
        self.table = nn.Embedding(16, 4, sparse=True)
        if first:
            self.rest = nn.Linear(4, 4)
        for each in self.parameters():
            nn.init.ones_(each)

    def forward(self, words: Tensor) -> Tensor:
        return self.rest(self.table(words))


@pytest.mark.parametrize("first", [True, False])
def test_sparse_gradients(first: bool) -> None:
    def work(rank: Rank, recorder: Recorder | None) -> tuple[Tensor, list[int]]:
        model = DistributedDataParallel(Words(first=first), process_group=rank.group("payload"))
        if recorder is not None:
            watch_allreduce(model, recorder, crosses=False)
        model(torch.tensor([1, 3, 5 + rank.rank])).square().sum().backward()
        _, spans = ((), ()) if recorder is None else recorder.take()
        sent = sorted(row[6] for row in spans)
        return model.module.table.weight.grad.to_dense(), sent

    watched = run_threads(lambda rank: work(rank, Recorder()), 2)
    for ours, theirs in zip(watched, run_threads(lambda rank: work(rank, None), 2), strict=True):
        assert torch.equal(ours[0], theirs[0])
        # Rows: an index, and four floats; a matrix and its bias.
        assert ours[1] == [3 * (8 + 4 * 4), 4 * (4 * 4 + 4)]


MB = 1 << 20


class Bucket:
    """Gradients, and the collective that reduces them."""

    def __init__(self, size: int = 8) -> None:
        self.gradients = torch.zeros(size // 4)
        self._collective: Future[None] = Future()
        self._fails = False
        self.reduced = self._collective.then(self._value)

    def arrive(self, *, fails: bool = False) -> None:
        self._fails = fails
        self._collective.set_result(None)

    def _value(self, _: Future[None]) -> list[Tensor]:
        if self._fails:
            raise RuntimeError("peer is gone")
        return [self.gradients]


def promised(promises: Promises, buckets: list[Bucket], *, of: int) -> list[Future[Tensor]]:
    """Those of the first ``buckets`` of a pass of ``of``."""
    return [
        promises.make(
            bucket.gradients, bucket.reduced, is_first=index == 0, is_last=index == of - 1
        )
        for index, bucket in enumerate(buckets)
    ]


def done(promises: list[Future[Tensor]]) -> list[bool]:
    return [each.done() for each in promises]


def test_a_later_bucket_completes_those_that_have_arrived() -> None:
    buckets = [Bucket() for _ in range(4)]
    promises = Promises()
    made = promised(promises, buckets[:2], of=5)
    buckets[0].arrive()
    assert done(made) == [False, False]
    made += [
        promises.make(each.gradients, each.reduced, is_first=False, is_last=False)
        for each in buckets[2:]
    ]
    assert done(made) == [True, False, False, False]
    assert made[0].value() is buckets[0].gradients


def test_the_last_completes_the_rest() -> None:
    buckets = [Bucket() for _ in range(3)]
    made = promised(Promises(), buckets, of=3)
    for bucket in reversed(buckets):
        assert done(made) == [False] * 3
        bucket.arrive()
    assert [each.value().data_ptr() for each in made] == [b.gradients.data_ptr() for b in buckets]


@pytest.mark.parametrize("fails", [False, True])
def test_a_single_bucket(fails: bool) -> None:
    bucket = Bucket()
    (made,) = promised(Promises(), [bucket], of=1)
    assert not made.done()
    bucket.arrive(fails=fails)
    with pytest.raises(RuntimeError, match="peer is gone") if fails else nullcontext():
        assert made.value() is bucket.gradients


def test_what_is_large_waits_for_nobody() -> None:
    buckets = [Bucket(), Bucket(5 * MB), Bucket(3 * MB), Bucket(2 * MB), Bucket()]
    made = promised(Promises(), buckets, of=5)
    for index in (1, 3):
        assert not made[index].done()
        buckets[index].arrive()
    assert done(made) == [False, True, False, True, False]


def test_what_has_been_completed_makes_room() -> None:
    buckets = [Bucket(3 * MB) for _ in range(3)]
    promises = Promises()
    first, second = promised(promises, buckets[:2], of=4)
    buckets[0].arrive()
    third = promises.make(buckets[2].gradients, buckets[2].reduced, is_first=False, is_last=False)
    buckets[1].arrive()
    buckets[2].arrive()
    assert done([first, second, third]) == [True, True, False]


@pytest.mark.parametrize("when", ["during the pass", "at its end"])
def test_the_last_tells_of_a_failure_and_all_are_completed(when: str) -> None:
    buckets = [Bucket() for _ in range(3)]
    if when == "during the pass":
        buckets[0].arrive(fails=True)
    made = promised(Promises(), buckets, of=3)
    if when == "at its end":
        buckets[0].arrive(fails=True)
    assert done(made) == [True] * 3  # DDP waits for them in order
    with pytest.raises(RuntimeError, match="peer is gone"):
        made[2].value()


def test_the_next_pass_knows_nothing_of_one_that_was_cut_short() -> None:
    promises = Promises()
    promised(promises, [Bucket(3 * MB)], of=3)
    buckets = [Bucket(3 * MB), Bucket()]
    made = promised(promises, buckets, of=2)
    buckets[1].arrive()
    assert done(made) == [False, False]
    buckets[0].arrive()
    assert done(made) == [True, True]


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
        self.session = ProfileSession(
            None,
            about,
            settings=ProfileSessionSettings(error_every_n_steps=0),
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
    assert interrupted.phases == plain.phases
    assert phases_of(plain, unit=MS) == (
        "between_steps 0-2, forward 2-22, backward 22-42, between_steps 42-44, forward 44-64, "
        "backward 64-84, optimizer 84-89"
    )
    assert len(interrupted.buckets) == len(plain.buckets)


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
        told = "between_steps 0-2, forward 2-522, backward 522-542, optimizer 542-547"
        assert phases_of(step, unit=MS) == told
    assert phases_of(after, unit=MS).endswith(" forward 2-22, backward 22-42, optimizer 42-547")


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
    names = [phase.name for phase in step.phases]
    assert names == ["between_steps", "between_steps", "forward", "backward", "optimizer"]
