"""The check on a GPU, on a machine without one: its parts on the CPU, and how it judges."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import codecs
from benchmarks.gpu_check import __main__ as gpu_check
from benchmarks.gpu_check import checkpoint, step
from benchmarks.gpu_check.claims import CLAIMS, page_of
from benchmarks.harness.results import collect_meta

GOOD: list[dict[str, Any]] = [
    {"part": "tests", "tests": 90, "skipped": 0, "failed": {}},
    {"part": "passes", "codec": "int8", "differing": 0},
    {"part": "speed", "kind": "kernels", "codec": "int8", "mode": "fused", "limit_pct": 80.0},
    {"part": "sanitizer", "codec": "int8", "differing": 0},
    {"part": "step", "codec": "ddp", "ranks": 1, "host_waits": 1, "overlap": None},
    {"part": "step", "codec": "int8", "ranks": 8, "host_waits": 1, "overlap": 0.9},
    {"part": "checkpoint", "differing": 0},
]


def verdicts(rows: list[dict[str, Any]]) -> dict[str, str]:
    return {claim.sentence: claim.judge(rows)[0] for claim in CLAIMS}


def changed(number: int, **values: Any) -> list[dict[str, Any]]:
    return [{**row, **values} if i == number else row for i, row in enumerate(GOOD)]


def test_claims_hold_until_a_row_speaks_against_them() -> None:
    assert set(verdicts(GOOD).values()) == {"holds"}
    faults: list[tuple[int, dict[str, Any]]] = [
        *[(0, {"failed": {"a::b": "why"}}), (1, {"differing": 3}), (2, {"limit_pct": 20.0})],
        *[(3, {"error": "exit code 9"}), (5, {"host_waits": 2}), (5, {"overlap": 0.1})],
        (6, {"differing": 1}),
    ]
    failing = [
        [
            name
            for name, verdict in verdicts(changed(number, **values)).items()
            if verdict != "holds"
        ]
        for number, values in faults
    ]
    assert failing == [[claim.sentence] for claim in CLAIMS]


def test_what_has_not_run_is_not_said_to_hold() -> None:
    assert set(verdicts([]).values()) == {"not run"}
    rows = [{"part": "sanitizer", "not_run": "compute-sanitizer is not installed"}]
    on_cpu = [{**row, "launches": 0} for row in GOOD if row["part"] == "step"]
    assert {claim.judge(on_cpu)[0] for claim in CLAIMS if claim.part == "step"} == {"not run"}
    (claim,) = [each for each in CLAIMS if each.part == "sanitizer"]
    assert claim.judge(rows) == ("not run", "compute-sanitizer is not installed")


@pytest.mark.on_ranks(1)
def test_the_page_has_a_line_for_each_claim_and_the_steps() -> None:
    judged = [(claim, *claim.judge(GOOD)) for claim in CLAIMS]
    forms = (("ddp", 1), ("int8", 8))
    rows = [step.measure(*each, device=torch.device("cpu"), **step.SIZES["cpu"]) for each in forms]
    page = page_of(collect_meta(seed=0, arguments={}), rows, judged)
    assert all(f"| {claim.sentence} | holds |" in page for claim in CLAIMS)
    assert "| `ddp`, fp32 | 1 |" in page
    assert "| `int8` | 8 |" in page


def test_overlap_is_with_the_busiest_stream() -> None:
    def kernel(stream: int, begin: float, length: float) -> dict[str, Any]:
        return {"ts": begin, "dur": length, "args": {"stream": stream}}

    busiest = [kernel(7, 0, 10), kernel(7, 20, 10)]
    assert step.overlap([*busiest, kernel(9, 5, 4), kernel(9, 12, 4), kernel(11, 28, 8)]) == 6 / 16
    assert step.overlap(busiest) is None


@pytest.mark.parametrize("main", [gpu_check.main, codecs.main])
def test_without_cuda_it_says_so(
    main: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["command", "--device", "cuda"])
    main()
    assert "There is no CUDA here" in capsys.readouterr().out


def test_a_checkpoint_of_weights_that_change(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoint, "_NUMEL", 1000)
    row = checkpoint.measure(torch.device("cpu"), tmp_path)
    assert row["differing"] == 0
    assert row["changes"] > 0


@pytest.mark.on_ranks(1)
@pytest.mark.parametrize(("codec", "ranks"), [("ddp", 1), ("int8", 8), ("topk", 8)])
def test_a_step_among_copies(codec: str, ranks: int) -> None:
    row = step.measure(codec, ranks, device=torch.device("cpu"), **step.SIZES["cpu"])
    assert row["step_ms"] > 0
    assert ((row["residuals_gb"] or 0.0) > 0) == (ranks > 1)
