"""The hook that watches DDP's own allreduce: its means, to the bit, and what it leaves behind."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.profiling.capture.ddp_hook import WatchedAllReduce, watch_allreduce
from lightning_dist.profiling.capture.recorder import Recorder


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
        watched = WatchedAllReduce(recorder, group, crosses=False)
        watch_allreduce(model, watched)
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
        buckets, spans = recorder.take().read(recorder.moments, since=0)
        return len(buckets) + len(spans) + recorder.cost(1.0)

    assert run_threads(work, 2) == [0, 0]


def test_every_bucket_has_its_collective() -> None:
    def work(rank: Rank) -> None:
        recorder = Recorder()
        gradients(rank, recorder, steps=1)
        buckets, spans = recorder.take().read(recorder.moments, since=0)
        assert [each.index for each in buckets] == [each.bucket for each in spans] != []
        for bucket, span in zip(buckets, spans, strict=True):
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
            watch_allreduce(model, WatchedAllReduce(recorder, group, crosses=False))
        model(torch.tensor([1, 3, 5 + rank.rank])).square().sum().backward()
        spans = () if recorder is None else recorder.take().spans
        return module.weight.grad.to_dense(), [row[6] for row in spans]

    watched = run_threads(lambda rank: work(rank, Recorder()), 2)
    for ours, theirs in zip(watched, run_threads(lambda rank: work(rank, None), 2), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[1] == [3 * (8 + 4 * 4)]  # rows: an index, and four floats
