"""How long do the ranks that are left need until their next step when one is killed?

A loop around DDP with ``recovery="in_process"`` runs under ``lightning-dist launch``; again and
again a rank, drawn at random, is killed. Measured from the signal: to the first step that all ranks
which are left have done without it, and to the first one with the process that is started in its
place; and of the latter the pause of the others.

    python -m benchmarks.restart.in_process --trials N --seed S --json FILE
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import exit_on_signals

_STEP_SECONDS = 0.02
_LIMIT = 120.0


class Job:
    """A training, and the steps that its workers have written down."""

    def __init__(self, folder: Path, *, ranks: int, codec: str, parameters: int) -> None:
        self._folder, self._ranks = folder, ranks
        options = ["--monitor-interval=0.05", "--standalone", f"--nproc-per-node={ranks}"]
        launcher = [sys.executable, "-m", "lightning_dist.elastic.agent", *options]
        training = ["-m", "benchmarks.restart.in_process", str(folder), codec, str(parameters)]
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                [*launcher, "--max-restarts=1000000", *training],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def steps(self) -> dict[str, list[dict[str, Any]]]:
        """By worker: steps with their time, and how many ranks took it."""
        found = {}
        for path in self._folder.glob("*.*.*.steps"):
            lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            found[path.stem] = [json.loads(line) for line in lines[-400:]]
        return found

    def workers(self) -> dict[str, int]:
        """Processes by the names of the workers that train now."""
        steps = {name: lines[-1] for name, lines in self.steps().items() if lines}
        newest = max((line["step"] for line in steps.values()), default=0)
        return {n: line["process"] for n, line in steps.items() if line["step"] > newest - 20}

    def wait_for(self, found: Callable[[], Any], what: str) -> Any:
        end = time.monotonic() + _LIMIT
        while not (thing := found()):
            if time.monotonic() > end or self.process.poll() is not None:
                said = (self._folder / "output").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{what} has not come: {said}")
            time.sleep(0.02)
        return thing

    def all_there(self) -> dict[str, int]:
        """Processes by name, once as many as wanted train together."""

        def found() -> dict[str, int] | None:
            last = [lines[-1] for lines in self.steps().values() if lines]
            newest = max(last, key=lambda line: line["step"], default=None)
            now = self.workers()
            whole = newest is not None and newest["world"] == self._ranks
            return now if whole and len(now) == self._ranks else None

        there: dict[str, int] = self.wait_for(found, "a step of all ranks")
        return there

    def kill(self, name: str, process: int) -> dict[str, float]:
        """Seconds until the others go on, and until another one is with them."""
        began = time.time()
        os.kill(process, signal.SIGKILL)

        def first(world: int, after: float) -> float | None:
            firsts = [
                min((line["time"] for line in lines if _is(line, world, after)), default=None)
                for worker, lines in self.steps().items()
                if worker != name and lines and lines[-1]["time"] > after
            ]
            known = [each for each in firsts if each is not None]
            return max(known) if len(known) == world else None

        left = self.wait_for(lambda: first(self._ranks - 1, began), "a step without it")
        joined = self.wait_for(lambda: first(self._ranks, left), "a step with another")
        before = [
            line["time"]
            for worker, lines in self.steps().items()
            for line in lines
            if worker != name and line["world"] == self._ranks - 1 and line["time"] < joined
        ]
        return {"left_s": left - began, "joined_s": joined - began, "pause_s": joined - max(before)}

    def close(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _is(line: dict[str, Any], world: int, after: float) -> bool:
    return bool(line["world"] == world and line["time"] > after)


def train(folder: str, codec: str, parameters: str) -> None:
    """Steps without an end."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_dist import ElasticLoop, compress_ddp, init_process_group

    torch.set_num_threads(1)
    init_process_group("gloo", recovery="in_process")
    width = max(8, int((int(parameters) / 2) ** 0.5))
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    model = DistributedDataParallel(net)
    compress_ddp(model, codec, commit="deferred", compile_kernels=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    worker = os.environ["LIGHTNING_DIST_WORKER"]
    file = Path(folder, f"{worker}.steps").open("w", buffering=1)  # noqa: SIM115
    data = TensorDataset(torch.randn(600_000, 1))
    state = {"model": model, "optimizer": optimizer}
    loader = DataLoader(data, batch_size=2)
    with ElasticLoop(
        Path(folder, "ckpt"), loader=loader, state=state, recovery="in_process"
    ) as loop:
        for _ in loop.epochs(1):
            for (x,) in loop.batches():
                before = loop.steps
                time.sleep(_STEP_SECONDS)
                loop.scale_loss(model(x.expand(-1, width)).square().mean()).backward()
                if not loop.sync_gradients:
                    continue
                world = torch.distributed.get_world_size()
                optimizer.step()
                optimizer.zero_grad()
                loop.step_done()
                if loop.steps > before:
                    line = {"step": loop.steps, "time": time.time(), "world": world}
                    print(json.dumps({**line, "process": os.getpid()}), file=file)


def summarize(trials: list[dict[str, Any]], **about: Any) -> list[dict[str, Any]]:
    """One row: medians and the worst."""
    row: dict[str, Any] = {**about, "kind": "in_process", "trials": len(trials)}
    for name in ("left_s", "joined_s", "pause_s"):
        values = [each[name] for each in trials]
        row |= {name: median(values), f"{name.removesuffix('_s')}_max_s": max(values)}
    return [row]


def main() -> None:
    if "LIGHTNING_DIST_WORKER" in os.environ:
        train(*sys.argv[1:])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw, done = random.Random(given.seed), []
    about = {"ranks": given.ranks, "codec": given.codec, "parameters": given.parameters}
    with (
        recording(given, seed=given.seed) as record,
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="in-process") as folder,
    ):
        job = Job(Path(folder), ranks=given.ranks, codec=given.codec, parameters=given.parameters)
        try:
            for number in range(1, given.trials + 1):
                there = job.all_there()
                victim = draw.choice(sorted(there))
                found = {"victim": victim, **job.kill(victim, there[victim])}
                done.append(found)
                print(number, "of", given.trials, found, flush=True)
                record.rows = summarize(done, **about)
                record.write()
        finally:
            job.close()


if __name__ == "__main__":
    main()
