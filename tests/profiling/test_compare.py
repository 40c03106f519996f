"""What two runs differ by, and when that is no more than their steps do."""

from __future__ import annotations

import random

import pytest
from planted import Planted, bare, replace

from lightning_dist.profiling.analysis.compare import (
    NAMES,
    Difference,
    Figures,
    compare,
    measured,
    verdict,
)
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import OF_NO_BUCKET, Span
from lightning_dist.profiling.run import Run

UNEVEN = {step: 1 + step % 5 / 10 for step in range(42)}
BASE = Planted(steps=42, slow_steps=UNEVEN)


def of(run: Run) -> Figures:
    return measured(run, summarize(run))


def differences(a: Planted | Run, b: Planted | Run) -> dict[str, Difference]:
    runs = [each.run() if isinstance(each, Planted) else each for each in (a, b)]
    found = compare(*map(of, runs))
    assert tuple(each.name for each in found) == NAMES
    return {each.name: each for each in found}


def said(a: Planted, b: Planted) -> str:
    return verdict(list(differences(a, b).values()))


def test_planted_differences_are_found() -> None:
    found = differences(BASE, replace(BASE, forward=30, sent=500_000))
    assert found["forward_ms"].a == 20
    assert found["forward_ms"].b == 30
    assert found["sent_mb"].difference == -2
    real = {name for name, each in found.items() if each.is_explained is False}
    assert real == {"step_ms", "forward_ms", "sent_mb", "all_steps_ms"}
    assert found["step_ms"].difference == 10


def test_bytes_of_fsdp_are_those_of_the_report() -> None:
    all_gather = "exchange", OF_NO_BUCKET, 1, 9, "all_gather", "flat", 16_000_000
    run = bare(BASE.run(), spans=[Span(*all_gather)])
    summary, found = summarize(run), differences(BASE, run)
    assert summary.traffic is not None
    assert found["sent_mb"].b == summary.traffic.wire_bytes / 1e6 == 20
    assert found["sent_mb"].a == 4


def test_the_spread_is_that_of_both_notches() -> None:
    values = [float(value) for value in range(9)]  # quartiles 2 and 6
    twice = [2 * value + 1 for value in values]
    (found, *_) = compare({"step_ms": values}, {"step_ms": twice})
    assert found.spread == pytest.approx(1.58 * 4 / 3 + 1.58 * 8 / 3)
    assert (found.difference, found.is_explained) == (5.0, True)
    (found, *_) = compare({"step_ms": values}, {"step_ms": [7.0] * 9})
    assert found.spread == pytest.approx(1.58 * 4 / 3)
    assert (found.difference, found.is_explained) == (3.0, False)


def test_rounding_is_no_difference() -> None:
    sums = {"step_ms": [0.1 + 0.2] * 6}, {"step_ms": [0.3] * 6}
    assert verdict(compare(*sums)).startswith("There is no difference")


def test_two_halves_of_one_run_do_not_differ() -> None:
    rng = random.Random(7)
    slow = {step: rng.uniform(1, 2) for step in range(40)}
    a, b = (Planted(steps=40, slow_steps=each) for each in (slow, {s: slow[39 - s] for s in slow}))
    assert said(a, b) == "There is no difference beyond the spread of the steps."


def test_the_verdict_names_what_differs_most() -> None:
    assert said(BASE, replace(BASE, forward=60, data=1)) == (
        "The step of B is 39.0 ms (35 %) longer: forward +40.0 ms, between steps -1.00 ms."
    )
    assert said(BASE, replace(BASE, data=1)) == (
        "Step time: no difference beyond the spread of the steps; but between steps -1.00 ms."
    )
    assert said(BASE, replace(BASE, sent=250_000)).endswith(
        "spread of the steps; but sent -3.00 MB."
    )


def test_few_steps_have_no_spread() -> None:
    assert said(BASE, replace(BASE, steps=7)) == (
        "The steps cannot be compared: the spread of 5 steps is not enough, 6 are needed."
    )
    assert "cannot" not in said(BASE, replace(BASE, steps=8))


def test_what_was_not_measured_has_a_reason_and_no_figure() -> None:
    coarse = BASE.run()
    coarse = Run(
        {
            rank: replace(
                each,
                steps={
                    step: replace(record, detailed=False, buckets=(), spans=())
                    for step, record in each.steps.items()
                },
            )
            for rank, each in coarse.ranks.items()
        }
    )
    found = differences(BASE, coarse)
    assert found["step_ms"].difference == 0
    for name in ("exposed_wait_ms", "exposed_transfer_ms", "exposed_ms", "sent_mb"):
        assert (found[name].b, found[name].difference, found[name].spread) == (None, None, None)
        assert found[name].a is not None
        assert found[name].reason == "B: no step was recorded in detail on all ranks"


def test_ddp_has_no_time_of_a_codec() -> None:
    found = differences(BASE, replace(BASE, codec="ddp", encode=0, decode=0))
    assert (found["exposed_codec_ms"].b, found["exposed_codec_ms"].difference) == (None, None)
    assert found["exposed_codec_ms"].reason == (
        "B: DDP itself exchanges the gradients, without a codec"
    )
    assert found["exposed_ms"].b is not None


def test_what_goes_where_the_step_went_is_named_first() -> None:
    shorter = said(replace(BASE, forward=60, optimizer=5), replace(BASE, optimizer=21))
    assert shorter.endswith("ms (16 %) shorter: forward -40.0 ms, optimizer +16.0 ms.")
    less = said(replace(BASE, forward=30, data=20), replace(BASE, optimizer=21))
    assert less.endswith("shorter: between steps -18.0 ms, forward -10.0 ms, optimizer +16.0 ms.")


def test_all_steps_are_compared_apart_from_those_in_detail() -> None:
    slow = replace(BASE, slow_steps={step: 2 for step in range(0, 42, 2)}).run()
    bare = {
        rank: replace(
            each,
            steps={
                step: replace(record, detailed=False, buckets=(), spans=()) if step % 4 else record
                for step, record in each.steps.items()
            },
        )
        for rank, each in slow.ranks.items()
    }
    summary = summarize(Run(bare))
    found = differences(BASE, Run(bare))
    assert found["step_ms"].b == pytest.approx(summary.detailed_step_ms) == pytest.approx(160)
    assert found["all_steps_ms"].b == pytest.approx(summary.step_ms["median"]) == pytest.approx(130)


def test_waiting_that_nobody_knows_is_not_zero() -> None:
    run = BASE.run()
    found = differences(BASE, Run({0: run.ranks[0]}))
    assert found["exposed_wait_ms"].b is None
    assert "without a record of rank 1" in found["exposed_wait_ms"].reason
    assert found["exposed_ms"].b is not None


def test_no_steps() -> None:
    assert said(BASE, Planted(steps=0)).startswith("The steps cannot be compared: B: no step")
