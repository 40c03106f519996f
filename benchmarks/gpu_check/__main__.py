"""What holds on the GPU of this machine, in at most eight minutes, with what is installed.

    python -m benchmarks.gpu_check [--json FILE] [--page FILE]      # or `make gpu-check`

Runs one part after the other, each a process of its own with a limit: the tests that are marked
`gpu`, the passes of every codec beside its definition, their speed beside a copy, compute-sanitizer
where it is installed, steps of a GPT, and a checkpoint of weights that change meanwhile. Ends with
a sentence for each claim: holds, fails, or not run. The exit status is 1 if one fails.

Needs torch 2.11, Triton 3.6, pytest and the packages of a training; no network. On a machine
without CUDA it says so and ends with 0.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check.claims import CLAIMS, page_of
from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.results import is_missing, parser_of, recording, say

_MINUTES = 8.0
_TAIL = 15  # lines


@dataclass(frozen=True)
class Part:
    """A program that writes rows.

    Args:
        name: of the part; ``"part"`` of its rows.
        words: of its command line, after Python; ``{json}`` is the file for its rows.
        limit: seconds.
        before: a program that runs it, if it is installed.
    """

    name: str
    words: Sequence[str]
    limit: float
    before: str | None = None


def _parts(device: str) -> Iterator[Part]:
    def of(module: str, limit: float, *words: str, name: str = "", before: str = "") -> Part:
        command = ("-m", f"benchmarks.{module}", "--json", "{json}", "--device", device, *words)
        return Part(name or module.rpartition(".")[2], command, limit, before or None)

    yield of("gpu_check.passes", 90)
    yield of("gpu_check.step", 120)
    yield of("gpu_check.checkpoint", 40)
    yield of("codecs", 90, "--only", "kernels", "--rounds", "5", name="speed")
    few = ("--codec", "int8", "--codec", "topk")
    yield of("gpu_check.passes", 60, *few, name="sanitizer", before="compute-sanitizer")
    if device == "cuda":
        yield Part("tests", ("-m", "benchmarks.gpu_check.marked", "--json", "{json}"), 150)


def run(part: Part, *, left: float) -> list[dict[str, Any]]:
    """Rows of a part; one with its ``error`` where it has failed, or did not run."""
    before = [] if part.before is None else [shutil.which(part.before)]
    if None in before:
        return [{"part": part.name, "not_run": f"{part.before} is not installed"}]
    if left < part.limit / 4:
        return [{"part": part.name, "not_run": f"{_MINUTES:g} minutes are over"}]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        words = [word.format(json=path) for word in part.words]
        checks = ["--error-exitcode", "9"] if before else []
        begin = time.monotonic()
        try:
            done = subprocess.run(
                [*before, *checks, sys.executable, *words],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=min(part.limit, left),
            )
        except subprocess.TimeoutExpired as late:
            error = f"not over within {late.timeout:.0f} s"
        else:
            lines = done.stdout.splitlines()[-_TAIL:]
            error = "\n".join([f"exit code {done.returncode}", *lines]) if done.returncode else ""
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
    ended = {"part": part.name, "seconds": time.monotonic() - begin}
    return [
        *({**row, "part": part.name} for row in rows),
        ended | ({"error": error} if error else {}),
    ]


def main() -> None:
    """Run all parts, and judge."""
    parser = parser_of(__doc__)
    parser.add_argument("--page", type=Path, metavar="PATH", help="write the report here, Markdown")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="cpu: a rehearsal"
    )
    given = parser.parse_args()
    if is_missing(given.device):
        return
    begin = time.monotonic()
    with recording(given) as record:
        record.meta["machine"] |= machine(given.device)
        for part in _parts(given.device):
            say(f"{part.name} ...")
            record.add(run(part, left=60 * _MINUTES - (time.monotonic() - begin)))
    judged = [(claim, *claim.judge(record.rows)) for claim in CLAIMS]
    page = page_of(record.meta, record.rows, judged)
    print(page)
    if given.page is not None:
        given.page.write_text(page)
    if any(verdict == "fails" for _, verdict, _ in judged):
        sys.exit(1)


def machine(device: str) -> dict[str, Any]:
    """The GPU and the versions that decide what it does."""
    found: dict[str, Any] = {"gpu": "none"}
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found = {"gpu": about.name, "memory_gb": about.total_memory / 1e9}
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    try:
        import triton
    except ImportError:
        return {**found, "triton": None}
    return {**found, "triton": triton.__version__}


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
