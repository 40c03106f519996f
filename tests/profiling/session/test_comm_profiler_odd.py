"""CommProfiler where a rank is late or alone, or has no folder; twice, traced by torch."""

import gc
import gzip
import json
import os
import shutil
import signal
import time
import warnings
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from comm_profiles import (
    LIMIT,
    STEPS,
    ddp,
    digest,
    network,
    printed,
    profile,
    profiled,
    require_no_prediction,
    require_report_without_a_rank,
    require_sums,
    train,
)
from rank_loop import meet
from replicas import alone, of_all
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.profiling.analysis.breakdown import analyse, passes_of
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.session import profile_run

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(2)]


def test_a_late_rank_costs_no_report_and_is_not_waited_for_without_end(tmp_path: Path) -> None:
    """Rank 1 leaves by an error that is its own, and goes on."""
    begin = time.monotonic()
    with (
        ExitStack() as stack,
        printed() as output,
        suppress(ArithmeticError),
        profiled(model := ddp(), tmp_path, print_summary=True),
    ):
        train(model)
        stack.enter_context(patch.object(profile_run, "_TIMEOUT", 1.0))
        if dist.get_rank() == 1:
            raise ArithmeticError("of this rank alone")
    if dist.get_rank() == 0:
        assert time.monotonic() - begin < 20  # gloo's own patience, in this test: 30
        require_report_without_a_rank(tmp_path, output.getvalue())
    dist.monitored_barrier(timeout=LIMIT)  # rank 1 is late, and does not leave


def test_a_hang_leaves_the_flight_record_beside_the_report(tmp_path: Path) -> None:
    """Rank 1 does not come to one collective of the model."""
    model = ddp(process_group=(group := dist.new_group()))

    def hang() -> None:
        with profiled(model, tmp_path, html=True):
            train(model, steps=4)
            if dist.get_rank():
                raise TimeoutError("as if it hung here")
            _set_pg_timeout(timedelta(seconds=0.5), group)
            train(model, steps=1)

    with pytest.raises((RuntimeError, TimeoutError)):
        hang()
    dist.monitored_barrier(timeout=LIMIT)
    found = tmp_path / "run-0"
    assert len(read_run(found).common_steps) == 4
    assert (found / "report.html").is_file()
    for rank in range(2):
        entries = json.loads((found / f"flight-rank{rank}.json").read_text())["entries"]
        assert any("all_reduce" in entry["profiling_name"] for entry in entries)


def sockets() -> int:
    """That this process has open."""
    links = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return sum(os.readlink(link).startswith("socket:") for link in links)


def test_a_model_can_be_profiled_again(tmp_path: Path) -> None:
    """One run after the other; on two nodes, as far as the ranks can tell."""
    model = ddp()
    gc.collect()  # groups of other tests
    opened, says = sockets(), "^This model is profiled already, and one CommProfiler"
    with patch.object(profile_run, "host_name", lambda: f"node-{dist.get_rank()}"):
        for number in range(2):
            with profiled(model, tmp_path):
                train(model, steps=3)
                with pytest.raises(ValueError, match=says), profiled(model, tmp_path / "other"):
                    pass
                train(model, steps=STEPS - 3)
            assert sockets() == opened
            run, summary = profile(tmp_path, number)
            assert run.common_steps == list(range(STEPS))
            assert summary["traffic"]["wire_bytes"] > 0
            assert {link["peer"] for link in summary["links"]} == {None, 0, 1}
    assert not (tmp_path / "other").exists()
    require_no_prediction(tmp_path, "the training was shorter than 30 s")


def test_a_compiled_ddp_has_its_steps_in_detail_and_no_word_of_the_compiler(
    tmp_path: Path,
) -> None:
    """DDP and all is given to torch.compile, which traces what hooks on a module do."""
    whole = DistributedDataParallel(network(), bucket_cap_mb=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", UserWarning)
        with profiled(whole, tmp_path):
            train(torch.compile(whole, backend="aot_eager"))
    assert [each for each in said if "Dynamo" in str(each.message)] == []
    run, summary = profile(tmp_path)
    assert run.common_steps == list(range(STEPS))
    assert all(step.buckets for step in run.ranks[0].steps.values())
    for part in ("forward", "backward", "exposed_transfer"):
        assert summary["breakdown_ms"][part] > 0
    first, second = of_all(digest(whole))
    assert first == second


def test_an_optimizer_with_a_closure_has_one_step_with_all_of_its_exchanges(
    tmp_path: Path,
) -> None:
    """LBFGS asks for several passes in a step, and gradients travel in each."""
    model = ddp()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, max_eval=3)
    data = torch.randn(8, 256, generator=torch.Generator().manual_seed(dist.get_rank()))
    asked = 0

    def closure() -> torch.Tensor:
        nonlocal asked
        asked += 1
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        return loss

    with profiled(model, tmp_path):
        for _ in range(STEPS):
            optimizer.step(closure)
    run, summary = profile(tmp_path)
    assert run.common_steps == list(range(STEPS))
    steps = run.ranks[0].steps.values()
    passes = [len(passes_of(each)) for each in steps]
    assert sum(passes) == asked > STEPS
    for step, of_step in zip(steps, passes, strict=True):
        exchanges = [span for span in step.spans if span.phase == "exchange"]
        assert len(step.buckets) == len(exchanges)
        assert {each.name for each in step.phases} >= {"forward", "backward", "optimizer"}
        if step.step:  # the first has other buckets, which are built anew after it
            assert sum(each.raw for each in step.buckets) == of_step * 4 * (256 * 256 + 256) * 4
    require_sums(run)
    assert all(each.ns["exposed"] > 0 for step in run.common_steps for each in analyse(run, step))
    (note,) = (note for note in summary["notes"] if "gradients are exchanged" in note)
    assert "passes that only accumulate gradients need no exchange" in note
    assert "exchange gradients several times" in summary["unavailable"]["predictions"] or (
        "shorter than 30 s" in summary["unavailable"]["predictions"]
    )


def test_a_process_group_that_is_gone_costs_the_last_comparison_of_clocks(tmp_path: Path) -> None:
    """The training function destroys it at its end."""
    rank, again = dist.get_rank(), dist.FileStore(str(tmp_path / "store"), 2)
    with printed() as output, profiled(model := ddp(), tmp_path):
        train(model)
        dist.barrier()
        dist.destroy_process_group()
    assert "the process group was destroyed before the profile was over" in output.getvalue()
    meet(again, rank, 2)
    run, _ = profile(tmp_path)
    assert run.common_steps == list(range(STEPS))
    assert all(each.end.reason == "finished" for each in run.ranks.values())


def test_lines_of_ranks_that_fail_together_are_waited_for(tmp_path: Path) -> None:
    """All leave by the same error; rank 1 writes its last lines after rank 0."""

    def fail() -> None:
        with profiled(model := ddp(), tmp_path) as profiler:
            train(model, steps=8)
            if dist.get_rank() == 1:
                of_session = profiler._run._session.end

                def later(reason: str) -> None:
                    while '"end"' not in (tmp_path / "run-0" / "rank0.jsonl").read_text():
                        time.sleep(0.01)  # the test has a limit
                    of_session(reason)

                profiler._run._session.end = later
            raise ArithmeticError("the loss is odd")

    with pytest.raises(ArithmeticError):
        fail()
    _, summary = profile(tmp_path)
    assert "Partial data" not in summary["headline"]
    assert summary["notes"][0] == "the training ended by ArithmeticError: the loss is odd"
    assert summary["steps"] == 6


def test_the_hook_of_optimizers_that_step_in_the_backward_pass_is_left_to_ddp(
    tmp_path: Path,
) -> None:
    module = network()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.01})
    model = DistributedDataParallel(module)
    with printed() as output, profiled(model, tmp_path):
        pass  # DDP takes its own hook at the first pass, where there is an accelerator
    model.register_comm_hook(None, lambda state, bucket: None)  # as it does
    if dist.get_rank() == 0:
        assert "buckets: n/a, optimizers step in the backward pass" in output.getvalue()


def test_torch_traces_steps_that_are_left_out(tmp_path: Path) -> None:
    """A range of steps, those after a signal, and a run that ends within a range, or before it."""
    model = ddp()
    for traced, steps in ((range(3, 5), STEPS), (range(3, 5), 4), (range(4, 6), 4)):
        with profiled(model, tmp_path, torch_profiler=traced):
            train(model, steps=steps)
    with profiled(model, tmp_path, torch_profiler=signal.SIGUSR2):
        train(model, steps=4)
        os.kill(os.getpid(), signal.SIGUSR2)
        train(model)
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    kept = [{0, 1, 2, *range(6, STEPS)}, {0, 1, 2}, {0, 1, 2, 3}, {*range(4), *range(8, STEPS + 4)}]
    for number, (steps, first) in enumerate(zip(kept, (3, 3, None, 4), strict=True)):
        run, _ = profile(tmp_path, number)
        assert set(run.common_steps) == steps
        traces = sorted((tmp_path / f"run-{number}").glob("torch-trace-*"))
        names = [f"torch-trace-rank{rank}-step{first}.json.gz" for rank in range(2)]
        assert [path.name for path in traces] == ([] if first is None else names)
        for path in traces:
            with gzip.open(path) as trace:
                events = json.load(trace)["traceEvents"]
            assert any("AddmmBackward" in event.get("name", "") for event in events)


def test_one_rank_has_nothing_to_exchange(tmp_path: Path) -> None:
    """In a group of its own, as on a machine with one device."""
    folder = tmp_path / str(dist.get_rank())
    with alone(), profiled(model := ddp(), folder, html=True):
        train(model)
    _, summary = profile(folder)
    assert summary["traffic"] is None
    assert summary["unavailable"]["traffic"] == "one rank sends nothing"
    assert summary["step_ms"]["mean"] > 0


def test_what_is_not_measured_has_its_reason(tmp_path: Path) -> None:
    model = ddp()
    model.register_comm_hook(None, fp16_compress_hook)
    with printed() as output, profiled(model, tmp_path, html=True):
        train(model)
    _, summary = profile(tmp_path)
    reason = "buckets: n/a, the model has a communication hook already"
    if dist.get_rank() == 0:
        assert f"{reason} (fp16_compress_hook)" in output.getvalue()
    assert summary["traffic"] is None
    assert summary["notes"][0].startswith(reason)
    for name in ("buckets", "exposed_codec", "exposed_ms", "errors"):
        assert "fp16_compress_hook" in summary["unavailable"][name]
    assert not any("gradients of ddp" in note for note in summary["notes"])
    assert summary["unavailable"]["traffic"]
    assert summary["step_ms"]["mean"] > 0


def test_a_folder_that_cannot_be_made_is_another_one(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        (tmp_path / "taken").touch()
    with printed() as output, profiled(model := ddp(), tmp_path / "taken") as profiler:
        train(model)
    other, of_neighbour = of_all(profiler.folder)
    assert other == of_neighbour
    if dist.get_rank() == 0:
        assert read_run(other).common_steps
        assert f"the profile is in {other}" in output.getvalue()
        shutil.rmtree(other)


def test_a_rank_without_a_folder_keeps_nothing_and_says_so(tmp_path: Path) -> None:
    """Rank 1 is on a node where the path of rank 0 cannot be made."""
    is_first = dist.get_rank() == 0
    os.chdir(tmp_path)
    if not is_first:
        os.mkdir("elsewhere")
        os.chdir("elsewhere")
        Path("profiles").touch()
    with printed() as output, profiled(model := ddp(), "profiles") as profiler:
        train(model)
    assert (profiler.summary is not None) == is_first
    run, _ = profile(tmp_path / "profiles")
    assert list(run.ranks) == [0]
    assert "nothing of rank 1" in run.notes
    if not is_first:
        told = "CommProfiler, rank 1: profiles/run-0: Not a directory; steps of this rank are not"
        assert told in output.getvalue()


def test_lines_of_other_disks_reach_rank_0(tmp_path: Path) -> None:
    """Each rank has a disk of its own, as on nodes without a shared one.

    That of rank 1 has been part of another run, of which rank 0's has nothing.
    """
    disks = [tmp_path / f"disk-{rank}" for rank in range(2)]
    own = disks[dist.get_rank()]
    own.mkdir()
    if dist.get_rank() == 1:
        (own / "profiles" / "run-0").mkdir(parents=True)
        (own / "profiles" / "run-0" / "rank1.jsonl").write_text("of an older run\n")
    os.chdir(own)
    model = ddp()
    gc.collect()  # groups of other tests
    before = sockets()
    with profiled(model, "profiles") as profiler:
        train(model, steps=230)
    assert sockets() == before
    names = sorted(path.name for path in profiler.folder.glob("rank*"))
    assert of_all(names) == [["rank0.jsonl", "rank1.jsonl"], ["rank1.jsonl"]]
    first, second = (disk / "profiles" / "run-0" for disk in disks)
    assert (first / "rank1.jsonl").read_bytes() == (second / "rank1.jsonl").read_bytes()
    gathered = read_run(first)
    assert len(gathered.common_steps) == 230
    assert gathered.notes == []


def test_how_to_copy_lines_of_other_disks_is_said_where_the_training_fails(tmp_path: Path) -> None:
    own = tmp_path / f"disk-{dist.get_rank()}"
    own.mkdir()
    os.chdir(own)
    with (
        printed() as output,
        pytest.raises(ArithmeticError),
        profiled(model := ddp(), "failed"),
    ):
        train(model, steps=5, fails_at=3)
    assert "were not gathered; copy rank1.jsonl of" in output.getvalue()
    assert "into failed/run-0 of" in output.getvalue()
    assert "lightning-dist profile report failed/run-0" in output.getvalue()
