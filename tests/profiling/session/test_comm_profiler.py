"""CommProfiler in real training loops of two ranks: what was planted is what it says."""

import itertools
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from comm_profiles import (
    MS,
    STEPS,
    busy,
    ddp,
    digest,
    one_bucket,
    printed,
    profile,
    profiled,
    require_no_prediction,
    require_parts,
    require_report_of_failure,
    train,
)
from replicas import of_all
from worlds import ALL_GATHER

from lightning_dist import compress_ddp
from lightning_dist.codecs import Int8
from lightning_dist.profiling.analysis.breakdown import analyse
from lightning_dist.profiling.capture.recorder import Recorder
from lightning_dist.profiling.run import Run
from lightning_dist.reducer.units.block import BlockUnit

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(2)]
PLANTED = {4: 50, 6: 100, 8: 100}
"""Milliseconds by which rank 1 comes late, by step."""


def noted(
    call: Callable[..., Any], before: list[int], launched: list[tuple[int, int]]
) -> Callable[..., Any]:
    """``call``, which notes when it is called for gradients; of a group or torch.distributed.

    And when the profiler was asked ``before``: what it records is between the two.
    """

    def noting(*given: Any, **named: Any) -> Any:
        if isinstance(given[0], dist.ProcessGroup):
            _, (tensor,), options = given
            is_async = options.asyncOp
        else:
            tensor, is_async = given[0], named.get("async_op")
        if tensor.numel() > 1000 and is_async:
            launched.append((before[-1], time.monotonic_ns()))
        return call(*given, **named)

    return noting


@pytest.mark.parametrize("codec", ["ddp", "int8"])
def test_planted_skew_is_waiting_for_that_rank(codec: str, tmp_path: Path) -> None:
    """There is one collective in each step, whose launch is seen here too."""
    model = one_bucket()
    if codec != "ddp":
        compress_ddp(model, codec, compile_kernels=False)
    late = PLANTED if dist.get_rank() == 1 else {}
    before, launched = list[int](), list[tuple[int, int]]()
    launches = Recorder.launches

    def asked(*given: Any, **named: Any) -> Any:
        before.append(time.monotonic_ns())
        return launches(*given, **named)

    with ExitStack() as stack:
        stack.enter_context(patch.object(Recorder, "launches", asked))
        for owner, name in ((dist.ProcessGroup, "allreduce"), (dist, ALL_GATHER)):
            noting = noted(vars(owner)[name], before, launched)
            stack.enter_context(patch.object(owner, name, noting))
        # Links would be measured with the functions that are watched.
        with profiled(model, tmp_path, measure_links=False):
            train(model, late=lambda step: late.get(step, 0) / 1e3)
    known = of_all(launched)
    run, _ = profile(tmp_path)
    lates = {}  # at least, at most: a busy machine may stop a rank while it launches
    for step in PLANTED:
        (first_begin, first_end), (second_begin, second_end) = known[0][step], known[1][step]
        lates[step] = (second_begin - first_end) / MS, (second_end - first_begin) / MS
    # A machine with something else to do may hold up rank 0 as well, in some of the steps.
    assert any(lates[step][0] > planted / 2 for step, planted in PLANTED.items()), lates
    for step, (least, most) in lates.items():
        first, second = analyse(run, step)
        assert max(0.0, least) - 2 < first.waited_for.get(1, 0) / MS < max(0.0, most) + 2
        assert sum(second.waited_for.values()) / MS < 2 + max(0.0, -least)
    require_parts(run)


def require_meta(folder: Path, codec: str) -> None:
    """What a run is of, and that clocks were compared at both ends."""
    run, summary = profile(folder)
    meta = json.loads((folder / "run-0" / "meta.json").read_text())
    assert (meta["schema"], meta["world_size"], meta["backend"]) == (3, 2, "gloo")
    assert meta["nodes"] == summary["run"]["nodes"]
    assert meta["codec"] == run.ranks[0].metadata.codec
    assert codec in meta["codec"].lower()
    assert (meta["compression"] is None) == (codec == "ddp")
    parameters = meta["gradients"]["parameters"]
    assert meta["gradients"]["bytes"] == 4 * parameters
    raw = sum(bucket["raw_mb"] for bucket in summary["buckets"])
    assert raw == pytest.approx(4 * parameters / 1e6, rel=1e-3), "2 ranks: each sends all of it"
    assert meta["profiler"]["max_overhead"] == 0.01
    assert meta["versions"]["torch"] == run.ranks[0].metadata.versions["torch"]
    for each in run.ranks.values():
        last = max(step.begin for step in each.steps.values())
        assert [reading.at > last for reading in each.clocks] == [False, True]


def timed(call: Callable[..., Any], planted: float, spent: list[float]) -> Callable[..., Any]:
    """``call``, which takes so many seconds longer and notes how long it took."""

    def timing(*given: Any, **named: Any) -> Any:
        begin = time.perf_counter()
        busy(planted)
        found = call(*given, **named)
        spent.append(time.perf_counter() - begin)
        return found

    return timing


def test_planted_codec_time_is_codec_time(tmp_path: Path) -> None:
    """The encoding of the one bucket takes longer; what comes before the exchange is timed here."""
    model, spent = one_bucket(), list[float]()
    compress_ddp(model, "int8", compile_kernels=False)
    with ExitStack() as stack:
        for name, planted in (("encode", 0.01), ("finite", 0.0), ("start", 0.0)):
            timing = timed(getattr(BlockUnit, name), planted, spent)
            stack.enter_context(patch.object(BlockUnit, name, timing))
        with profiled(model, tmp_path):
            train(model)
    calls = len(spent) // STEPS
    known = [int(1e9 * sum(spent[at : at + calls])) for at in range(0, len(spent), calls)]
    assert min(known) > 10 * MS
    run, _ = profile(tmp_path)
    errors = []
    for of_rank, encoded in zip(run.ranks.values(), of_all(known), strict=True):
        for (_, step), of_step in zip(sorted(of_rank.steps.items()), encoded, strict=True):
            spans = [span for span in step.spans if span.phase == "encode"]
            errors.append(sum(span.end - span.begin for span in spans) - of_step)
    # What is measured encloses what is known; a busy machine may stop a rank in between.
    assert min(errors) >= 0
    assert statistics.median(errors) / MS < 2
    require_parts(run)
    require_meta(tmp_path, "int8")


def test_weights_are_those_without_it(tmp_path: Path) -> None:
    found = {}
    for codec, is_profiled in itertools.product((None, "int8"), (False, True)):
        model = ddp()
        if codec is not None:
            compress_ddp(model, codec, compile_kernels=False)
        with profiled(model, tmp_path, error_every_n_steps=1) if is_profiled else nullcontext():
            train(model)
        found[codec, is_profiled] = digest(model)
    assert found[None, True] == found[None, False]
    assert found["int8", True] == found["int8", False]
    assert found[None, True] != found["int8", True]


@dataclass(frozen=True)
class Losing(Int8):
    """Says the opposite of a fifth of what it is given: a residual grows by that in each step."""

    def decode(self, payload: Any, dtype: torch.dtype, keys: Any = None) -> torch.Tensor:
        return -0.2 * super().decode(payload, dtype, keys)


def profile_of_residuals(folder: Path, codec: str | Int8) -> tuple[Run, dict[str, Any], str]:
    """And what was printed. There is one bucket, so that it is looked at often."""
    model = one_bucket()
    compress_ddp(model, codec, error_feedback=True, compile_kernels=False)
    with (
        printed() as output,
        profiled(model, folder, error_every_n_steps=1, print_summary=True),
    ):
        train(model, steps=150)
    return *profile(folder), output.getvalue()


def test_a_residual_that_grows_without_end_is_reported_once(tmp_path: Path) -> None:
    run, summary, output = profile_of_residuals(tmp_path, Losing())
    (note,) = [note for note in summary["notes"] if "residual of bucket" in note]
    assert "has grown from" in note
    assert output.count(f"CommProfiler, rank {dist.get_rank()}: the residual of bucket") == 1
    assert "Use a codec or options that lose less" in output
    for of_rank in run.ranks.values():
        assert len(of_rank.errors) == 150
        assert all(each.relative_l2 == pytest.approx(1.2, abs=0.01) for each in of_rank.errors)
        assert all(each.cosine == pytest.approx(-1, abs=0.01) for each in of_rank.errors)


def test_a_residual_that_levels_off_is_no_reason_to_warn(tmp_path: Path) -> None:
    run, summary, output = profile_of_residuals(tmp_path, "topk:ratio=0.05")
    assert not [note for note in summary["notes"] if "residual" in note]
    assert "the residual of" not in output
    for of_rank in run.ranks.values():
        assert len(of_rank.errors) == 150
        assert all(0 < each.relative_l2 < 1 and 0 < each.cosine < 1 for each in of_rank.errors)
        assert max(each.residual_ratio for each in of_rank.errors) > 1


def test_accumulated_passes_are_one_step_and_evaluation_is_none(tmp_path: Path) -> None:
    model = ddp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profiled(model, tmp_path):
        for _ in range(6):
            with model.no_sync():
                model(torch.ones(2, 256)).sum().backward()
            model(torch.ones(2, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(torch.ones(2, 256))
                busy(0.05)
                model(torch.ones(2, 256))
    run, _ = profile(tmp_path)
    assert run.common_steps == list(range(6))
    steps = run.ranks[0].steps
    for step in steps.values():
        names = [phase.name for phase in step.phases]
        assert names.count("forward") == names.count("backward") == 2
        assert names.count("optimizer") == 1
    for number in range(5):
        apart = steps[number + 1].begin - steps[number].begin - steps[number].duration
        assert apart / MS >= 50, "what an evaluation took"
    require_parts(run)
    require_meta(tmp_path, "ddp")


def test_a_run_that_failed_has_a_report_and_what_would_help_is_not_measured(tmp_path: Path) -> None:
    with (
        pytest.raises(ArithmeticError, match="the loss is odd"),
        profiled(model := ddp(), tmp_path, html=True),
    ):
        train(model, fails_at=7)
    require_report_of_failure(tmp_path, "ArithmeticError: the loss is odd")
    require_no_prediction(tmp_path, "the training did not end by itself")


def test_sigterm_is_an_exception_until_the_report_is_made(tmp_path: Path) -> None:
    """By the launcher, which ends all ranks when one has failed."""

    def train_and_end() -> None:
        with profiled(model := ddp(), tmp_path, html=True):
            train(model, steps=8)
            os.kill(os.getpid(), signal.SIGTERM)
            train(model)

    with pytest.raises(SystemExit) as ended:
        train_and_end()
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    require_report_of_failure(tmp_path, "SIGTERM")
