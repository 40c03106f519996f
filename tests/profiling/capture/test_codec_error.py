"""What a profile says of compression errors and of replicas that diverge."""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
import torch
from planted import Planted, replace
from torch import Tensor

from lightning_dist.profiling.analysis.imbalance import ResidualAlarm, growth_of
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import ErrorRecord, RankRecord
from lightning_dist.profiling.capture.profile_session import ProfileSession, ProfileSessionSettings
from lightning_dist.profiling.capture.recorder import MOST_SAMPLED, CompressionErrorSampler
from lightning_dist.profiling.session.live import of_errors
from lightning_dist.reducer.codec_sample import CodecSample, Sampler

MS = 1_000_000


@dataclass(frozen=True)
class PlantedBucket:
    """A bucket whose way is known: no reducer is behind it."""

    bucket: int = 0
    scale: Tensor = field(default_factory=lambda: torch.ones(()))
    gradient: Tensor = field(default_factory=lambda: torch.tensor([3.0, 4.0]))
    compensated: Tensor = field(default_factory=lambda: torch.tensor([6.0, 8.0]))
    sent: Tensor = field(default_factory=lambda: torch.tensor([6.0, 0.0]))
    owed: Callable[[], Tensor] | None = None
    seeds: list[int] = field(default_factory=list)
    parts: int = 1

    def samples(self, sampler: Sampler) -> Iterator[CodecSample]:
        at = sampler.drawn(len(self.gradient), of=1)
        self.seeds.append(len(at))
        owed = None if self.owed is None else self.owed()
        yield CodecSample(self.gradient[at], self.compensated[at], self.sent[at], owed)

    def shown_to(self, inspect: Callable[..., None]) -> None:
        for _ in range(self.parts):
            inspect(self.bucket, self.samples, numel=len(self.gradient), scale=self.scale)


class Unseen(PlantedBucket):
    """Its elements are few, and none of them was drawn."""

    def samples(self, sampler: Sampler) -> Iterator[CodecSample]:
        return iter(())


def losses() -> CompressionErrorSampler:
    ticks = count(0, 10)
    return CompressionErrorSampler(lambda: next(ticks))


def looked(
    taking: CompressionErrorSampler, buckets: Sequence[PlantedBucket], step: int = 5
) -> ErrorRecord | None:
    taking.ask(step)
    for bucket in buckets:
        bucket.shown_to(taking.inspect)
    found, _ = taking.take()
    return found and found()


def test_by_hand() -> None:
    owed = torch.tensor([0.0, 8.0])
    assert looked(losses(), [PlantedBucket(bucket=3, owed=lambda: owed)]) == ErrorRecord(
        5, 3, relative_l2=0.8, cosine=pytest.approx(0.6), residual_ratio=pytest.approx(1.6)
    )


def test_residuals_do_not_carry_the_scale_of_a_grad_scaler() -> None:
    encoded = PlantedBucket(scale=torch.tensor(4.0), owed=lambda: torch.tensor([0.0, 2.0]))
    found = looked(losses(), [encoded])
    assert found is not None
    assert found.residual_ratio == pytest.approx(1.6)


def test_what_cannot_be_said_is_none() -> None:
    nothing, zeros = torch.zeros(0), torch.zeros(2)
    assert looked(losses(), [PlantedBucket(gradient=zeros, compensated=zeros, sent=zeros)]) is None
    assert (
        looked(losses(), [PlantedBucket(gradient=nothing, compensated=nothing, sent=nothing)])
        is None
    )
    assert looked(losses(), [Unseen()]) is None
    inf = torch.tensor([1.0, math.inf])
    assert looked(losses(), [PlantedBucket(gradient=inf, compensated=inf, sent=inf)]) is None
    assert looked(losses(), [PlantedBucket(sent=torch.tensor([math.nan, 0]))]) is None
    assert looked(losses(), [PlantedBucket(sent=zeros)]) == ErrorRecord(5, 0, 1.0, None, None)
    only_residual = PlantedBucket(gradient=zeros, owed=lambda: torch.ones(2))
    found = looked(losses(), [only_residual])
    assert found is not None
    assert (found.relative_l2, found.residual_ratio) == (0.8, None)


@pytest.mark.parametrize("size", [1e-140, 1e-42, 1e30, 1e140])
def test_tiny_and_huge_gradients(size: float) -> None:
    pending = torch.tensor([3.0, 4.0], dtype=torch.float64) * size
    sent = torch.tensor([3.0, 0.0], dtype=torch.float64) * size
    found = looked(losses(), [PlantedBucket(gradient=pending, compensated=pending, sent=sent)])
    assert found is not None
    assert found.relative_l2 == pytest.approx(0.8)
    assert found.cosine == pytest.approx(0.6)


def test_nobody_looks_unasked_and_once_where_asked() -> None:
    taking, encoded, other = losses(), PlantedBucket(), PlantedBucket(bucket=1)
    encoded.shown_to(taking.inspect)
    assert taking.take() == (None, 0)
    taking.ask(7)
    encoded.shown_to(taking.inspect)
    other.shown_to(taking.inspect)
    found, cost = taking.take()
    assert found is not None
    taking.ask(8)  # on an accelerator the numbers are there steps later
    encoded.shown_to(taking.inspect)
    other.shown_to(taking.inspect)
    assert found() == ErrorRecord(7, 0, 0.8, pytest.approx(0.6), None)
    assert taking.take()[0]().bucket == 1
    taking.ask(9)
    assert (len(encoded.seeds), len(other.seeds)) == (1, 1)
    assert cost == 10
    assert taking.take() == (None, 0)


def test_a_bucket_may_come_in_parts() -> None:
    owed = torch.tensor([0.0, 8.0])
    found = [looked(losses(), [PlantedBucket(owed=lambda: owed, parts=n)]) for n in (1, 3)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[1].relative_l2 == pytest.approx(found[0].relative_l2)
    assert found[1].residual_ratio == pytest.approx(found[0].residual_ratio)


def test_buckets_take_turns() -> None:
    taking = losses()
    encoded_buckets = [PlantedBucket(bucket=index) for index in (0, 2, 5)]
    found = [looked(taking, encoded_buckets, step) for step in range(5)]
    assert [each and each.bucket for each in found] == [0, 2, 5, 0, 2]
    few = [looked(taking, encoded_buckets[:2], step) for step in range(5, 8)]
    assert [each and each.bucket for each in few] == [None, 2, 0]  # how many there are is learnt


def test_a_large_bucket_is_sampled() -> None:
    generator = torch.Generator().manual_seed(0)
    gradient = torch.randn(20 * MOST_SAMPLED, generator=generator)
    sent = torch.where(gradient.abs() > 1, gradient, 0)
    encoded = PlantedBucket(gradient=gradient, compensated=gradient, sent=sent)
    found = [looked(losses(), [encoded], step) for step in (5, 5, 6)]
    assert all(0.9 * MOST_SAMPLED < seen < 1.1 * MOST_SAMPLED for seen in encoded.seeds)
    assert found[0] == found[1]  # the seed is the step
    assert found[0] != found[2]
    exact = float((gradient - sent).double().norm() / gradient.double().norm())
    for each in found:
        assert each is not None
        assert each.relative_l2 == pytest.approx(exact, rel=0.02)
        assert each.cosine == pytest.approx(math.sqrt(1 - exact**2), rel=0.02)


class Steps:
    """A session whose steps take 10 ms each, and in which looking costs ``cost``."""

    def __init__(self, cost: int, **settings: object) -> None:
        self.now = 0
        self.cost = cost
        self.errors: list[ErrorRecord] = []
        self.overheads: list[int] = []
        about = RankRecord(0, 2, "a", {"flat": [0, 1]}, clock=0, unix=0.0)
        self.session = ProfileSession(
            None,
            about,
            settings=ProfileSessionSettings(**settings),
            on_step=lambda step: self.overheads.append(step.overhead),
            on_error=self.errors.append,
            clock=lambda: self.now,
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.session.timer.forward()
            self.session.timer.backward()
            PlantedBucket(owed=self.takes_time).shown_to(self.session.recorder.encodes)
            self.now += 10 * MS
            self.session.timer.backward_ended(synchronised=True)
            self.session.timer.stepped()
        self.session.timer.forward()

    def takes_time(self) -> Tensor:
        self.now += self.cost
        return torch.ones(2)


def test_every_so_many_steps_from_the_third_on() -> None:
    steps = Steps(cost=0)
    steps.run(120)
    assert [each.step for each in steps.errors] == [2, 52, 102]
    often = Steps(cost=0, error_every_n_steps=1)
    often.run(5)
    assert [each.step for each in often.errors] == [0, 1, 2, 3, 4]
    never = Steps(cost=0, error_every_n_steps=0)
    never.run(60)
    coarse = Steps(cost=0, in_detail=False)
    coarse.run(60)
    assert never.errors == coarse.errors == []


def test_what_it_costs_is_counted_and_bounded() -> None:
    steps = Steps(cost=1 * MS, error_every_n_steps=10, max_overhead=0.01)
    steps.run(4000)
    assert sum(steps.overheads) >= len(steps.errors) * MS
    late = [each for each in steps.errors if each.step >= 2000]
    assert 0 < len(late) * MS / (2000 * 10 * MS) <= 0.01 / 4
    cheap = Steps(cost=1000, error_every_n_steps=10, max_overhead=0.01)
    cheap.run(400)
    assert len(cheap.errors) == 40


def test_settings_out_of_range() -> None:
    with pytest.raises(ValueError, match="0 for never; got -1"):
        ProfileSessionSettings(error_every_n_steps=-1)


def errors(ratio: Callable[[int], float | None], count: int, bucket: int = 0) -> list[ErrorRecord]:
    return [ErrorRecord(50 * i, bucket, 0.5, 0.5, ratio(i)) for i in range(count)]


@pytest.mark.parametrize(
    "ratio",
    [
        lambda i: 50.0 * (1 - 0.8**i),  # fills, and levels off
        lambda i: 5.0 * i,  # as a sparse codec's does at first
        lambda i: 0.01 * 1.3**i if i < 25 else 7.0,  # small
        lambda i: 20 + random.Random(i).random() * 30,
        lambda i: 100.0 if i == 39 else 2.0,  # one bad batch
        lambda i: None,
    ],
    ids=["levels off", "fills", "small", "noise", "one", "no residual"],
)
def test_a_healthy_residual(ratio: Callable[[int], float | None]) -> None:
    assert growth_of(errors(ratio, 40)) is None


@pytest.mark.parametrize("start", [0, 30])
def test_one_that_diverges(start: int) -> None:
    alarm = ResidualAlarm()
    found = [alarm.add(each) for each in errors(lambda i: 2.0 * 1.3 ** max(0, i - start), 60)]
    first = next(i for i, growth in enumerate(found) if growth is not None)
    growth = found[first]
    assert growth is not None
    assert start < first < start + 20
    assert growth.step == 50 * first
    assert growth.now > max(10, 3 * growth.before)


def test_buckets_are_not_mixed() -> None:
    mixed = [
        each
        for pair in zip(
            errors(lambda i: 1.0, 30), errors(lambda i: 40.0, 30, bucket=1), strict=True
        )
        for each in pair
    ]
    assert growth_of(sorted(mixed, key=lambda each: each.bucket)) is None


def run_with(of_ranks: Sequence[Sequence[ErrorRecord]]) -> list[str]:
    run = Planted().run()
    ranks = {rank: replace(run.ranks[rank], errors=of) for rank, of in enumerate(of_ranks)}
    return [note for note in summarize(replace(run, ranks=ranks)).notes if "residual" in note]


def test_the_summary_has_the_worst_rank() -> None:
    calm = errors(lambda i: 2.0, 20)
    assert run_with([calm, calm]) == []
    mild, wild = errors(lambda i: 2 * 1.3**i, 20), errors(lambda i: 2 * 1.5**i, 20, bucket=4)
    (note,) = run_with([mild, wild])
    assert note.startswith("rank 1: the residual of bucket 4 has grown from ")
    assert "Use a codec or options that lose less" in note


def test_reasons_for_having_none() -> None:
    assert summarize(Planted(codec="ddp").run()).unavailable["errors"].startswith("DDP itself")
    assert summarize(Planted(codec="none").run()).unavailable["errors"] == "nothing is compressed"
    assert summarize(Planted().run()).unavailable["errors"] == "none was sampled"


def test_metrics_are_medians_of_what_there_is() -> None:
    rows = [
        {"relative_l2": value, "cosine": None, "residual_ratio": ratio}
        for value, ratio in ((0.1, None), (0.3, 4.0), (9.0, 6.0))
    ]
    assert of_errors(rows) == {"error_relative_l2": 0.3, "residual_ratio": 5.0}
    assert of_errors([]) == {}
