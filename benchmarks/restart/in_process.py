"""How long do the ranks that are left need until their next step when one is lost?

Loops around DDP with ``recovery="in_process"`` under ``lightning-dist launch``:

- killed: a rank, drawn at random, again and again. From the signal to the first step that all ranks
  which are left have done without it, and to the first one with the process that is started in its
  place; and of the latter the pause of the others.
- stopped: the same with SIGSTOP, which only missing heartbeats show.
- cost: the time of a step without faults, beside recovery="restart" with either update of the
  state, in turns.
- goodput: ranks killed one after the other, and how many steps are done of those that another job
  does in the same time without kills; with steps of one micro-batch and of several.
- restart: a rank of two is killed and all are restarted, again and again: from the signal to the
  first step that had not been done before, and the time of a first start, with and without forks.
- others: a restart of all, torchrun, and torchft where it is installed: kill to the next step.

    python -m benchmarks.restart.in_process --trials N --seed S --json FILE
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.launch import start_job
from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import exit_on_signals

_RANKS, _CODEC, _PARAMETERS = 3, "int8", 1_000_000
_TRAINING = {"codec": _CODEC, "parameters": _PARAMETERS, "seconds": 0.02}
_RECOVERING = {**_TRAINING, "recovery": "in_process"}
_DETECTION = 5.0
"""Seconds without a beat, after which a rank counts as lost."""
_LIMIT = 120.0
_LINES = 400
"""Of a rank: looked at."""
_GOODPUT_RANKS, _KILL_EVERY, _JITTER = 4, 2.75, 0.25
"""A kill shifts the steps after it: with a fixed period all would come in the same part of one."""
_GOODPUT = ((1, 0.41), (4, 0.1))
"""Micro-batches of a step, and seconds of sleep in each: steps of 0.5 s, on 2 cores."""
_WARM_UP = 25.0
"""Seconds of steps in which the launcher's fork server imports."""
_EVERY_10 = {"codec": _CODEC, "parameters": _PARAMETERS, "seconds": 0.02, "every": 10}
_RESTARTS: dict[str, tuple[str, Line]] = {
    "Trainer": ("trainer", {**_EVERY_10, "sharded": False}),
    "Trainer, FSDP2": ("trainer", {**_EVERY_10, "sharded": True}),
    "ElasticLoop": ("ours", {**_EVERY_10, "recovery": "restart"}),
}
"""Trainings with a checkpoint every 10 steps."""
_COST = ((0.05, 150, 150), (0.5, 20, 40))
"""Seconds of sleep in a step, and steps while the fork server imports, and after."""
_TORCHFT = {"": {}, " (heartbeat_timeout_ms=1000)": {"heartbeat_timeout_ms": 1000}}

Line = dict[str, Any]


class Job:
    """A training, and the steps that its ranks have written down.

    Args:
        way: of ``training.py``.
        options: its settings.
        settings: variables of the launcher.
    """

    def __init__(
        self, way: str, folder: Path, *, ranks: int, options: dict[str, Any], **settings: str
    ) -> None:
        folder.mkdir()
        self._folder, self._ranks = folder, ranks
        module = "benchmarks.restart.training"
        self._training = ["-m", module, way, str(folder), json.dumps(options)]
        self._settings = settings
        agent = ["--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1000000"]
        ours = ["-m", "lightning_dist.elastic.launcher", "--monitor-interval=0.05", *agent]
        launcher = {
            "ours": ours,
            "trainer": ours,
            "torchrun": ["-m", "torch.distributed.run", *agent],
        }
        self.began = time.time()
        self._by_us = way not in launcher
        self._processes = (
            [self._start(self._training) for _ in range(ranks)]
            if self._by_us
            else [self._start([*launcher[way], *self._training])]
        )

    def _start(self, words: list[str]) -> subprocess.Popen[bytes]:
        # Or half of torchrun's restarts fail.
        settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **self._settings}
        return start_job(words, self._folder / "output", **settings)

    def steps(self) -> dict[int, list[Line]]:
        """By process: its last steps."""
        found = {}
        for path in self._folder.glob("*.steps"):
            lines = [line for line in path.read_text().splitlines(True) if line.endswith("\n")]
            if lines:
                found[int(path.stem)] = [json.loads(line) for line in lines[-_LINES:]]
        return found

    def ranks(self) -> list[int]:
        """Processes that train now."""
        last = {process: lines[-1] for process, lines in self.steps().items()}
        newest = max((line["step"] for line in last.values()), default=0)
        return [
            process
            for process, line in last.items()
            if line["step"] > newest - 20 and Path(f"/proc/{process}").exists()
        ]

    def wait_for(self, found: Callable[[], Any], what: str, *, every: float = 0.02) -> Any:
        """What is ``found``, looked for ``every`` so many seconds, which takes time of a core."""
        end = time.monotonic() + _LIMIT
        while not (thing := found()):
            ended = not self._by_us and self._processes[0].poll() is not None
            if time.monotonic() > end or ended:
                said = (self._folder / "output").read_text(errors="replace")[-3000:]
                raise RuntimeError(f"{what} has not come: {said}")
            time.sleep(every)
        return thing

    def times(self, count: int) -> list[float]:
        """Of the steps of a rank, once they are so many."""
        times = [line["time"] for line in next(iter(self.steps().values()), [])]
        return times if len(times) >= count else []

    def all_there(self) -> list[int]:
        """Processes, once as many as wanted train together."""

        def found() -> list[int] | None:
            now, steps = self.ranks(), self.steps()  # in which all of them are
            whole = all(steps[process][-1]["world"] == self._ranks for process in now)
            return sorted(now) if whole and len(now) == self._ranks else None

        there: list[int] = self.wait_for(found, "a step of all ranks")
        return there

    def strike(self, process: int, number: signal.Signals = signal.SIGKILL) -> dict[str, float]:
        """Seconds until the others go on, and until another one is with them."""
        began = time.time()
        os.kill(process, number)

        def first(world: int, after: float) -> float | None:
            firsts = [
                min((t for t in times_of(lines, world) if t > after), default=None)
                for each, lines in self.steps().items()
                if each != process and lines[-1]["time"] > after
            ]
            known = [each for each in firsts if each is not None]
            return max(known) if len(known) == world else None

        left = self.wait_for(lambda: first(self._ranks - 1, began), "a step without it")
        if self._by_us:
            self._processes.append(self._start(self._training))
        joined = self.wait_for(lambda: first(self._ranks, left), "a step with another")
        before = [
            t
            for each, lines in self.steps().items()
            for t in times_of(lines, self._ranks - 1)
            if each != process and t < joined
        ]
        return {"left_s": left - began, "joined_s": joined - began, "pause_s": joined - max(before)}

    def restart(self, process: int) -> float:
        """Seconds from the kill of a rank to a step that nobody had done, of new processes."""
        known, began = {*self.steps()}, time.time()
        os.kill(process, signal.SIGKILL)

        def new_step() -> float | None:
            steps = self.steps()
            done = max(line["step"] for each in known for line in steps[each])
            firsts = [
                next((line["time"] for line in lines if line["step"] > done), None)
                for each, lines in steps.items()
                if each not in known
            ]
            times = [each for each in firsts if each is not None]
            return max(times) if len(times) == self._ranks else None

        at: float = self.wait_for(new_step, "a step after the restart")
        return at - began

    def close(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def times_of(lines: list[Line], world: int) -> list[float]:
    """Times of the steps of so many ranks."""
    return [line["time"] for line in lines if line["world"] == world]


@contextmanager
def running(
    way: str, root: str, *, ranks: int, options: dict[str, Any], **settings: str
) -> Iterator[Job]:
    """A job in a folder of its own, which is ended."""
    folder = Path(tempfile.mkdtemp(dir=root)) / "job"
    job = Job(way, folder, ranks=ranks, options=options, **settings)
    try:
        yield job
    finally:
        job.close()


def measure_strikes(root: str, draw: random.Random, *, kills: int, stops: int) -> list[Line]:
    """Two rows: ranks that are killed, and stopped; medians and the worst."""
    killed, stopped = [], []
    settings = {"LIGHTNING_DIST_BEAT_TIMEOUT": f"{_DETECTION:g}"}
    with running("ours", root, ranks=_RANKS, options=_RECOVERING, **settings) as job:
        job.all_there()
        time.sleep(_WARM_UP)
        for number in range(kills + stops):
            is_kill = number < kills
            signal_ = signal.SIGKILL if is_kill else signal.SIGSTOP
            found = job.strike(draw.choice(job.all_there()), signal_)
            (killed if is_kill else stopped).append(found)
            print(number + 1, "of", kills + stops, signal_.name, found, flush=True)
    rows = []
    about: Line = {"codec": _CODEC, "parameters": _PARAMETERS, "ranks": _RANKS}
    if killed:
        row = {**about, "kind": "in_process", "trials": len(killed)}
        for name in ("left_s", "joined_s", "pause_s"):
            values = [each[name] for each in killed]
            row |= {name: median(values), f"{name.removesuffix('_s')}_max_s": max(values)}
        rows.append(row)
    if stopped:
        values = [each["left_s"] - _DETECTION for each in stopped]
        row = {**about, "kind": "stopped", "trials": len(stopped), "detection_s": _DETECTION}
        rows.append({**row, "undetected_s": median(values), "undetected_max_s": max(values)})
    return rows


def measure_cost(root: str, *, rounds: int) -> list[Line]:
    """A row for each length of a step: medians of 2 ranks without faults, in turns.

    Beside steps with ``recovery="restart"`` and the immediate update, those with the deferred one,
    which a recovery needs. Kernels are compiled, as those of large models are by default.
    """
    ways = {
        "without_ms": {"recovery": "restart"},
        "deferred_ms": {"recovery": "restart", "state_update": "deferred"},
        "with_ms": {"recovery": "in_process"},
    }
    rows = []
    for seconds, warmup, counted in _COST:
        found: dict[str, list[float]] = {name: [] for name in ways}
        for name in [*ways] * rounds:
            settings = {**_TRAINING, **ways[name], "seconds": seconds, "compile_kernels": True}
            with running("ours", root, ranks=2, options=settings) as job:
                job.all_there()
                enough = partial(job.times, warmup + counted)
                times = job.wait_for(enough, "enough steps", every=1.0)[warmup:]
            found[name].append(1e3 * median(after - before for before, after in pairwise(times)))
            print("cost:", seconds, name, f"{found[name][-1]:.3f}", flush=True)
        row = {name: median(values) for name, values in found.items()}
        row["cost"] = row["with_ms"] / row["without_ms"] - 1
        rows.append({"kind": "cost", "sleep_s": seconds, "trials": rounds, **row})
    return rows


def measure_goodput(root: str, draw: random.Random, *, kills: int) -> list[Line]:
    """Rows: steps while a rank is killed every few seconds, and in the same time without."""
    low, high, rows = _KILL_EVERY - _JITTER, _KILL_EVERY + _JITTER, []
    for micro_batches, sleep in _GOODPUT:
        options = {**_RECOVERING, "seconds": sleep, "micro_batches": micro_batches}
        moments = [*accumulate(draw.uniform(low, high) for _ in range(kills))]
        seconds = moments[-1] + _KILL_EVERY
        _, free = _steps_in(seconds, root, draw, options=options, kills=[])
        done, worlds = _steps_in(seconds, root, draw, options=options, kills=moments)
        step = seconds / len(free)
        row = {"kind": "goodput", "micro_batches": micro_batches, "trials": done}
        row |= {"seconds": seconds, "steps": len(worlds), "steps_without_kills": len(free)}
        row |= {"steps_share": len(worlds) / len(free), "step_s": step}
        row["mean_ranks"] = sum(worlds) / len(worlds)
        # Of each kill, a step is taken again up to the end of the micro-batch in which it came.
        row["bound"] = 1 - step * (1 + 1 / micro_batches) / 2 / _KILL_EVERY
        print(row, flush=True)
        rows.append(row)
    return rows


def _steps_in(
    seconds: float,
    root: str,
    draw: random.Random,
    *,
    options: dict[str, Any],
    kills: Sequence[float],
) -> tuple[int, Sequence[int]]:
    """Ranks that were killed, and the number of ranks of each step, in a job of its own.

    The last one left is spared. As many samples a rank as ever: a step takes as long with fewer.
    """
    settings = {**options, "policy": "fixed_micro_batch"}
    with running("ours", root, ranks=_GOODPUT_RANKS, options=settings) as job:
        job.all_there()
        time.sleep(_WARM_UP)
        began, done = time.time(), 0
        for at in kills:
            time.sleep(max(0.0, began + at - time.time()))
            if len(there := job.ranks()) > 1:
                with suppress(ProcessLookupError):
                    os.kill(draw.choice(sorted(there)), signal.SIGKILL)
                    done += 1
        end = began + seconds
        time.sleep(max(0.0, end - time.time()))
        lines = [x for every in job.steps().values() for x in every if began < x["time"] < end]
    return done, [*{line["step"]: line["world"] for line in lines}.values()]


def measure_restarts(root: str, draw: random.Random, *, trials: int, starts: int) -> list[Line]:
    """Rows: ways of training whose ranks are restarted, and first starts."""
    rows = []
    for name, (way, options) in _RESTARTS.items():
        with running(way, root, ranks=2, options=options) as job:
            job.all_there()
            time.sleep(_WARM_UP)
            found = []
            for _ in range(trials):
                found.append(job.restart(draw.choice(job.all_there())))
                time.sleep(draw.uniform(0, 1))
        print(name, [round(each, 2) for each in found], flush=True)
        row = {"kind": "restart", "way": name, "trials": trials, "new_s": median(found)}
        rows.append({**row, "new_max_s": max(found)})
    if not starts:
        return rows
    way, options = _RESTARTS["Trainer"]
    firsts: dict[str, list[float]] = {"": [], "0": []}
    for preload in [*firsts] * starts:
        with running(way, root, ranks=2, options=options, LIGHTNING_DIST_PRELOAD=preload) as job:
            job.all_there()
            first = min(line["time"] for lines in job.steps().values() for line in lines)
            firsts[preload].append(first - job.began)
    print(firsts, flush=True)
    row = {"kind": "first_start", "trials": starts, "recorded_s": median(firsts[""])}
    return [*rows, {**row, "usual_s": median(firsts["0"])}]


def measure_others(root: str, draw: random.Random, *, trials: int) -> list[Line]:
    """A row for each way: from the kill of a rank to the next step."""
    rows = []

    def add(way: str, values: list[float]) -> None:
        print(way, values, flush=True)
        row = {"kind": "others", "way": way, "trials": trials, "next_s": median(values)}
        rows.append({**row, "next_max_s": max(values)})

    for name, way in (("restart of all, ours", "ours"), ("torchrun, DDP", "torchrun")):
        with running(way, root, ranks=_RANKS, options={**_TRAINING, "recovery": "restart"}) as job:
            job.all_there()
            time.sleep(_WARM_UP)
            add(name, [job.restart(draw.choice(job.all_there())) for _ in range(trials)])
    if importlib.util.find_spec("torchft") is None:
        print("torchft is not installed, so it is left out: pip install torchft==0.2.0")
        return rows
    for label, settings in _TORCHFT.items():
        with ExitStack() as stack:
            server = stack.enter_context(running("lighthouse", root, ranks=1, options=settings))
            path = server._folder / "lighthouse"
            server.wait_for(path.exists, "the lighthouse")
            options = {**_TRAINING, "lighthouse": path.read_text()}
            job = stack.enter_context(running("torchft", root, ranks=_RANKS, options=options))
            found = [job.strike(draw.choice(job.all_there()))["left_s"] for _ in range(trials)]
            add(f"torchft 0.2{label}", found)
    return rows


def main() -> None:
    parser = parser_of(__doc__, renews=True)
    parser.add_argument("--trials", type=int, default=30, help="ranks killed")
    parser.add_argument("--stops", type=int, default=4, help="ranks stopped")
    parser.add_argument("--kills", type=int, default=12, help="ranks killed for the goodput")
    parser.add_argument("--rounds", type=int, default=2, help="of steps without faults")
    parser.add_argument("--restarts", type=int, default=30, help="ranks killed of each way")
    parser.add_argument(
        "--starts", type=int, default=5, help="first starts, with and without forks"
    )
    parser.add_argument("--others", type=int, default=3, help="ranks killed of each other way")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    draw = random.Random(given.seed)
    with (
        recording(given, seed=given.seed) as record,
        exit_on_signals(),
        tempfile.TemporaryDirectory(prefix="in-process") as root,
    ):
        if given.trials or given.stops:
            record.add(measure_strikes(root, draw, kills=given.trials, stops=given.stops))
        if given.rounds:
            record.add(measure_cost(root, rounds=given.rounds))
        if given.kills:
            record.add(measure_goodput(root, draw, kills=given.kills))
        if given.restarts:
            record.add(measure_restarts(root, draw, trials=given.restarts, starts=given.starts))
        if given.others:
            record.add(measure_others(root, draw, trials=given.others))


if __name__ == "__main__":
    main()
