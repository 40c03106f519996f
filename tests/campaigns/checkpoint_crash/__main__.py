"""What is lost when training, its writer or the disk dies at any moment.

A small real training saves checkpoints every few steps and keeps one, while faults strike at random
moments that the seed decides; without torch, a writer is killed, or meets a disk that fails, at
every single system call of a few saves. After each trial an oracle looks at the folder, and a new
trainer goes on to the end, where its weights must be those of an uninterrupted run, to the bit.

Counted, and wanted to be 0 (oracle.py says what each means): lost, undetected,
inexact, hang, torn, leak, touched, report.

    python -m tests.campaigns.checkpoint_crash --trials N --seed S --json FILE [--every K]
"""

import logging
import os
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.results import recording
from tests.campaigns.checkpoint_crash import damage, trials, writer
from tests.campaigns.checkpoint_crash.oracle import PROBLEMS, Verdict, pretrained
from tests.campaigns.checkpoint_crash.trainer import reference
from tests.campaigns.checkpoint_crash.writer import ERRORS, KILLS, SCENARIOS
from tests.campaigns.harness import parser_of_trials, run_trials

_SHARES = {
    "kill the trainer": 26,
    "kill the writer": 14,
    "kill trainer and writer": 18,
    "slow disk (thread)": 6,
    "stopped writer process": 6,
    "dropped snapshot": 6,
    "full disk": 5,
    "full disk, writer alone": 5,
    "damaged on disk": 15,
    "stock: kill the trainer": 3,
    "stock: slow disk": 2,
}
"""Of the random trials, by weight."""

_RUN = {"damaged on disk": damage.run_trial, "full disk, writer alone": writer.run_full_disk}
_BOUNDARY = {name: f"{name} every system call" for name in KILLS} | {
    name: f"{name} at every system call" for name in ERRORS
}
_EVERY_BIT = "every bit flipped"
_SHOWN = 5


@dataclass(frozen=True)
class Task:
    """One trial; ``arguments`` are of those that are enumerated."""

    number: int
    kind: str
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Campaign:
    """What all trials share."""

    seed: int
    root: str
    memory: str
    """A folder in memory, for enumerated trials: they kill processes, and simulate power cuts."""

    def run(self, task: Task) -> Verdict:
        """Run one trial; its chance is that of the seed and its number."""
        logging.disable(logging.WARNING)  # damaged checkpoints are what this is about
        verdict = Verdict(task.kind, task.number)
        chance = random.Random(f"{self.seed}/{task.number}")
        place = Path(self.memory if task.arguments else self.root) / str(task.number)
        with verdict.judging():
            if task.arguments:
                run_every_bit = task.kind == _EVERY_BIT
                run = damage.run_every_bit if run_every_bit else writer.run_trial
                run(verdict, *task.arguments, place)
            else:
                _RUN.get(task.kind, trials.run_trial)(verdict, chance, place)
        shutil.rmtree(place, ignore_errors=True)
        return verdict


def random_tasks(trials: int, *, seed: int, kinds: Iterable[str]) -> Iterator[Task]:
    """One trial of every kind, and then kinds drawn by weight."""
    chance = random.Random(seed)
    drawn = [kind for kind in _SHARES if kind in set(kinds)]
    weights = [_SHARES[kind] for kind in drawn]
    for number in range(trials if drawn else 0):
        kind = chance.choices(drawn, weights)[0]
        yield Task(number, drawn[number] if number < len(drawn) else kind)


def enumerated_tasks(
    first: int, place: Path, *, every: int, kinds: Iterable[str]
) -> Iterator[Task]:
    """Every fault at every boundary of every scenario, or of each fault every ``every``-th."""
    faults = [fault for fault, kind in _BOUNDARY.items() if kind in set(kinds)]
    points = [
        (scenario, rank, at)
        for index, scenario in enumerate(SCENARIOS if faults else ())
        for rank, at in writer.boundaries(scenario, place / f"count{index}")
    ]
    number = first
    for shift, fault in enumerate(faults):  # so that few trials are not all of the same points
        for scenario, rank, at in points[shift % every :: every]:
            yield Task(number, _BOUNDARY[fault], (scenario, fault, rank, at))
            number += 1
    for layout in ("single", "folder") if _EVERY_BIT in kinds else ():
        yield Task(number, _EVERY_BIT, (layout,))
        number += 1


def figures(found: list[Verdict]) -> dict[str, Any]:
    """The row of a kind: some failures, of which those come first that few trials have."""
    counts = Counter(name for verdict in found for name, _ in verdict.problems)
    failed = [verdict for verdict in found if verdict.problems]
    for verdict in failed:  # of a traceback its last line
        lines = [(name, what.strip().split("\n")[-1]) for name, what in verdict.problems]
        verdict.problems = lines
    failed.sort(key=lambda verdict: min(counts[name] for name, _ in verdict.problems))
    return {
        "trials": sum(verdict.trials for verdict in found),
        "mean_s": sum(verdict.seconds for verdict in found) / len(found),
        "failures": [asdict(verdict) for verdict in failed[:_SHOWN]],
    }


def main() -> None:
    kinds = [*_SHARES, *_BOUNDARY.values(), _EVERY_BIT]
    where = "where to write; default the system's temporary folder"
    parser = parser_of_trials(__doc__, folder=where)
    parser.add_argument("--trials", type=int, default=1000, help="random ones")
    parser.add_argument("--kind", action="append", choices=kinds, help="repeatable; default all")
    parser.add_argument("--every", type=int, default=1, help="of the boundaries, each n-th")
    given = parser.parse_args()
    torch.set_num_threads(1)
    chosen = set(given.kind or kinds)
    if os.geteuid() != 0:
        chosen -= {kind for kind in chosen if kind.startswith("full disk")}  # cannot mount
    with recording(given, seed=given.seed) as record, ExitStack() as stack:
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else given.folder
        root, memory = (
            stack.enter_context(tempfile.TemporaryDirectory(dir=folder, prefix="crash"))
            for folder in (given.folder, memory)
        )
        reference(), pretrained()  # once: workers are forks
        tasks = list(random_tasks(given.trials, seed=given.seed, kinds=chosen))
        tasks += enumerated_tasks(len(tasks), Path(memory), every=given.every, kinds=chosen)
        run_trials(
            "crashes",
            Campaign(given.seed, root, memory).run,
            tasks,
            given=given,
            record=record,
            problems=PROBLEMS,
            figures=figures,
        )


if __name__ == "__main__":
    main()
