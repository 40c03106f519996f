"""torch's own tools beside a profile: when they let go, and what they leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run

from lightning_dist.profiling.capture.torch_tools import TorchTracer


def test_a_trace_that_cannot_be_written_is_reported_and_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    told: list[str] = []
    folder = tmp_path / "taken" / "run-0"
    tracer = TorchTracer(folder, rank=2, wanted=range(1), on_problem=told.append)
    tracer.begin_step(0)
    tracer.begin_step(1)
    tracer.close()
    assert told == [
        f"{folder / 'torch-trace-rank2-step0.json.gz'} was not written: Not a directory"
    ]


def test_the_step_in_which_the_trace_is_written_is_disturbed_too(tmp_path: Path) -> None:
    tracer = TorchTracer(tmp_path, rank=0, wanted=range(1, 3))
    disturbed = [tracer.begin_step(step) for step in range(6)]
    assert disturbed == [False, True, True, True, False, False]
    assert (tmp_path / "torch-trace-rank0-step1.json.gz").is_file()


def test_steps_that_never_come_are_reported(tmp_path: Path) -> None:
    told: list[str] = []
    tracer = TorchTracer(tmp_path, rank=0, wanted=range(100, 103), on_problem=told.append)
    assert not any(tracer.begin_step(step) for step in range(6))
    tracer.close()
    assert told == [
        "torch_profiler=range(100, 103): none of these steps was run; no trace was written"
    ]


RECORDED = """
import sys, torch, torch.distributed as dist
from pathlib import Path
from lightning_dist.profiling.capture.torch_tools import dump_flight_record
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for _ in range(30):
    dist.all_reduce(torch.ones(2))
print(dump_flight_record(Path(sys.argv[1]) / "run-0", rank=3))
dist.destroy_process_group()  # torch's threads may abort a process that ends without
"""


@pytest.mark.parametrize(("size", "kept"), [(None, 30), ("20", 20), ("0", 0)])
def test_what_torch_keeps_is_written(
    size: str | None,
    kept: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_python: list[str],
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"):
        monkeypatch.delenv(name, raising=False)
    environment = {} if size is None else {"TORCH_FR_BUFFER_SIZE": size}
    done = run([*quick_python, "-c", RECORDED, tmp_path], limit=100, **environment)
    path = tmp_path / "run-0" / "flight-rank3.json"
    last = done.require_success().output.splitlines()[-1]
    assert last == (str(path) if kept else "None")
    entries = json.loads(path.read_text())["entries"] if kept else []
    assert [each["profiling_name"] for each in entries] == ["gloo:all_reduce"] * kept
    assert path.exists() == bool(kept)
