"""Futures of means: who completes them, and when."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.futures import Future

from lightning_dist.profiling.capture.ddp_hook import Promises

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
