"""Metrics of compression in ``self.log``, of two ranks."""

from __future__ import annotations

from statistics import fmean

import pytest
import torch
from results import Facts, Results

from lightning_dist import CompressionError, ExchangedVolume
from lightning_dist.profiling.capture.events import ErrorRecord

STEPS = 4


def test_logged_values_are_means_over_ranks_and_steps_of_the_epoch(two: Results) -> None:
    ranks = two("metrics_in_log")
    assert [facts["stats"]["steps"] for facts in ranks] == [STEPS, STEPS]
    sent, raw = (
        fmean(facts["stats"][name] / STEPS for facts in ranks)
        for name in ("wire_bytes", "raw_bytes")
    )
    assert len(ranks[0]["rows"]) == len(ranks[0]["of epochs"]) == 2
    assert ranks[0]["errors"] != ranks[1]["errors"]
    for epoch, row in enumerate(ranks[0]["rows"]):
        assert row["volume"] == pytest.approx(sent)  # every step sends the same
        assert row["ratio"] == pytest.approx(raw / sent)
        errors = [error for facts in ranks for error in of_epoch(facts, epoch)]
        assert errors
        assert row["error"] == pytest.approx(fmean(errors))


def of_epoch(facts: Facts, epoch: int) -> list[float]:
    begin, end = [0, *facts["of epochs"]][epoch : epoch + 2]
    return facts["errors"][begin:end]


def test_volume_of_another_training_counts_from_its_start() -> None:
    metric = ExchangedVolume()
    metric.update({})
    metric.update({"steps": 2, "raw_bytes": 80, "wire_bytes": 20})
    metric.update({"steps": 4, "raw_bytes": 160, "wire_bytes": 60})
    assert metric.compute() == 15
    metric.reset()
    metric.update({"steps": 1, "raw_bytes": 40, "wire_bytes": 7})
    assert metric.compute() == 7
    assert metric(dict(steps=3, raw_bytes=80, wire_bytes=17)) == 5  # of this call alone
    assert metric.compute() == pytest.approx(17 / 3)


def test_a_sample_counts_once() -> None:
    metric, errors = CompressionError(), [ErrorRecord(step, 0, step / 10, None) for step in (2, 4)]
    metric.update(errors[:1])
    metric.update(errors[:1])
    metric.update(errors)
    assert metric.compute() == pytest.approx(0.3)
    metric.reset()
    metric.update(errors)
    assert torch.isnan(metric.compute())
    metric.update([])
    metric.update([ErrorRecord(2, 0, 0.5, None)])
    assert metric.compute() == pytest.approx(0.5)
