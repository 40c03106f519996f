"""The hook that watches DDP's own allreduce: means to the bit, and their futures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.ddp_hook import Promises, watch_allreduce
from lightning_dist.profiling.capture.events import StepRecord
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


def assert_same_as_ddp(size: int, *, is_on: bool = True, **settings: bool) -> None:
    def watched(rank: Rank) -> list[Tensor]:
        recorder = Recorder()
        recorder.is_on = is_on
        return gradients(rank, recorder, **settings)

    stock = run_threads(lambda rank: gradients(rank, None, **settings), size)
    for ours, theirs in zip(run_threads(watched, size), stock, strict=True):
        assert all(map(torch.equal, ours, theirs))


def taken(recorder: Recorder) -> StepRecord:
    buckets, spans = recorder.take()
    return PendingStep(0, 0, buckets=buckets, spans=spans).read(recorder.device_clock)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("is_on", [True, False])
def test_means_are_those_of_ddp_to_the_bit(is_on: bool, size: int) -> None:
    assert_same_as_ddp(size, is_on=is_on)


@pytest.mark.parametrize("setting", ["static_graph", "gradient_as_bucket_view"])
def test_however_ddp_is_set(setting: str) -> None:
    assert_same_as_ddp(2, **{setting: True})


def test_one_that_is_off_keeps_nothing() -> None:
    def work(rank: Rank) -> int:
        recorder = Recorder()
        recorder.is_on = False
        gradients(rank, recorder, steps=5)
        recorder.is_on = True  # what was kept would be in the next step
        step = taken(recorder)
        return len(step.buckets) + len(step.spans) + recorder.cost(1.0)

    assert run_threads(work, 2) == [0, 0]


def test_every_bucket_has_its_collective() -> None:
    def work(rank: Rank) -> None:
        recorder = Recorder()
        gradients(rank, recorder, steps=1)
        step = taken(recorder)
        assert [each.index for each in step.buckets] == [each.bucket for each in step.spans] != []
        for bucket, span in zip(step.buckets, step.spans, strict=True):
            assert bucket.ready <= span.begin < span.end <= bucket.done
            assert (bucket.raw, bucket.intra, bucket.inter) == (span.sent, span.sent, 0)

    run_threads(work, 2)


def test_sparse_gradients() -> None:
    def work(rank: Rank, recorder: Recorder | None) -> tuple[Tensor, list[int]]:
        group = rank.group("payload")
        module = nn.Embedding(16, 4, sparse=True)
        nn.init.ones_(module.weight)
        model = DistributedDataParallel(module, process_group=group)
        if recorder is not None:
            watch_allreduce(model, recorder, crosses=False)
        model(torch.tensor([1, 3, 5 + rank.rank])).square().sum().backward()
        _, spans = ((), ()) if recorder is None else recorder.take()
        return module.weight.grad.to_dense(), [row[6] for row in spans]

    watched = run_threads(lambda rank: work(rank, Recorder()), 2)
    for ours, theirs in zip(watched, run_threads(lambda rank: work(rank, None), 2), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == [3 * (8 + 4 * 4)]  # rows: an index, and four floats


MB = 1 << 20


class Bucket:
    """Gradients, and the collective that reduces them."""

    def __init__(self, size: int = 8) -> None:
        self.gradients = torch.zeros(size // 4)
        self._collective: Future[None] = Future()
        self._fails = False
        self.reduced = self._collective.then(self._value)

    def arrive(self) -> None:
        self._collective.set_result(None)

    def fail(self) -> None:
        self._fails = True
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


def test_a_single_bucket() -> None:
    bucket = Bucket()
    (made,) = promised(Promises(), [bucket], of=1)
    assert not made.done()
    bucket.arrive()
    assert made.value() is bucket.gradients


def test_a_single_bucket_that_fails() -> None:
    bucket = Bucket()
    (made,) = promised(Promises(), [bucket], of=1)
    bucket.fail()
    with pytest.raises(RuntimeError, match="peer is gone"):
        made.value()


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
        buckets[0].fail()
    made = promised(Promises(), buckets, of=3)
    if when == "at its end":
        buckets[0].fail()
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
