"""Faults of every kind, again and again, in trainings that recover within their processes.

Jobs of 4 ranks under our launcher, in an ElasticLoop around DDP or (--adapter trainer) under a
Lightning Trainer, with real processes and signals: killed, stopped, with an exception, alone or
two at once, in every place of a step, while checkpoints are saved, groups are made and newcomers
healed. Four fifths of the faults are met by one
job (codec none, float64) whose last worker is spared and must not grow; the others by one with
codec int8. Every job is judged: it ends with 0 without a restart of all, no straggler is evicted,
every sample is committed once in each epoch, ranks have the same bits after every step, and the
weights are those of one process without a fault to 1e-6 of the largest (codec none). In local
steps (--adapter local_steps) samples are used once but for those of lost workers, and weights are
those of workers that one process computes. oracle.py says what is counted. struck: faults that
were met.

    python -m tests.campaigns.in_process --adapter A --trials N --seed S --json FILE
"""

import json
import shlex
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forks import EVERYTHING, fork_server
from processes import run

from benchmarks.harness.results import recording
from tests.campaigns.harness import Hang, parser_of_trials, run_trials
from tests.campaigns.in_process.drawing import ADAPTERS, EPOCH_STEPS, RANKS, draw
from tests.campaigns.in_process.oracle import PROBLEMS, Verdict, judge

SCRIPTS = {name: Path(__file__).with_name(f"{name}_training.py") for name in ADAPTERS}
SECONDS_PER_FAULT, SECONDS = 8.0, 60.0
"""Of a job: at most."""
_OUTPUT_LINES = 80


@dataclass(frozen=True)
class Trial:
    """One job."""

    number: int
    adapter: str
    faults: int
    codec: str
    spared: int | None
    seed: int
    beat_timeout: float

    @property
    def bound(self) -> float:
        return SECONDS + SECONDS_PER_FAULT * self.faults


@dataclass(frozen=True)
class Campaign:
    """What all jobs share."""

    root: Path
    python: list[str]

    def run(self, trial: Trial) -> Verdict:
        """One job, judged."""
        verdict = Verdict(trial.codec, trial.number)
        folder = self.root / str(trial.number)
        strikes, steps = draw(trial.faults, seed=trial.seed, spared=trial.spared)
        plan = {
            "codec": trial.codec,
            "epochs": steps // EPOCH_STEPS,
            "strikes": [asdict(each) for each in strikes],
            "spared": trial.spared,
            "limit": trial.bound - 15.0,
        }
        folder.mkdir(parents=True)
        (folder / "plan.json").write_text(json.dumps(plan))
        began = time.monotonic()
        with verdict.judging():
            local = trial.adapter == "local_steps"
            if not local:
                alone = [*self.python, str(SCRIPTS["loop"]), str(folder)]
                _run(alone, folder / "alone.txt", {}, trial.bound)
            options = ["--monitor-interval=0.05", "--standalone", f"--nproc-per-node={RANKS}"]
            launcher = [*self.python, "-m", "lightning_dist.elastic.launcher", *options]
            script = ["--no-python", *self.python, str(SCRIPTS[trial.adapter]), str(folder)]
            settings = {"LIGHTNING_DIST_BEAT_TIMEOUT": str(trial.beat_timeout)}
            began = time.monotonic()
            restarts = "--max-restarts=1000000"
            try:
                _run([*launcher, restarts, *script], folder / "output.txt", settings, trial.bound)
            except RuntimeError as error:
                verdict.require(False, "hang" if isinstance(error, Hang) else "end", str(error))
            of_job = {"codec": trial.codec, "spared": trial.spared, "local": local}
            judge(verdict, folder, strikes, **of_job)
        verdict.seconds = time.monotonic() - began
        if verdict.problems:
            print(f"{trial}: {verdict.problems[:5]}; see {folder}")
        return verdict


def _run(command: list[str], log: Path, settings: dict[str, str], limit: float) -> None:
    """Until it has ended with 0.

    Raises:
        Hang: it has not ended in time.
        RuntimeError: it has ended with another code.
    """
    done = run(command, limit=limit, **settings)
    log.write_text(done.output)
    if done.returncode is None:
        raise Hang(f"had not ended after {limit:.0f} s")
    if done.returncode:
        tail = "\n".join(done.output.splitlines()[-_OUTPUT_LINES:])
        raise RuntimeError(f"exit code {done.returncode}: {tail}")


def trials_of(count: int, *, adapter: str, seed: int, beat_timeout: float) -> list[Trial]:
    """Two jobs that have ``count`` faults together."""
    few = count // 5
    jobs = [(count - few, "none", RANKS - 1), (few, "int8", None)]
    return [
        Trial(number, adapter, faults, codec, spared, seed + number, beat_timeout)
        for number, (faults, codec, spared) in enumerate(jobs)
        if faults
    ]


def figures_of_kind(found: Sequence[Verdict]) -> dict[str, Any]:
    """The row of a codec."""
    (verdict,) = found
    return {
        "faults": sum(verdict.drawn.values()),
        "struck": sum(verdict.struck.values()),
        "generations": verdict.generations,
        "seconds": round(verdict.seconds, 1),
        "error": verdict.error,
        "held": [[what, *sizes] for what, sizes in verdict.held.items()],
        "kinds": [[kind, verdict.struck[kind], count] for kind, count in verdict.drawn.items()],
        "problems": [list(each) for each in verdict.problems],
    }


def main() -> int:
    parser = parser_of_trials(__doc__, folder="where to write, and to keep it")
    parser.add_argument("--trials", type=int, default=250, help="faults")
    parser.add_argument("--adapter", choices=ADAPTERS, default="loop")
    parser.add_argument("--beat-timeout", type=float, default=2.0)
    parser.add_argument("--python", help="words of a fork server; without: one is started")
    given = parser.parse_args()
    words = vars(given).pop("python")  # they name this machine's paths, so no record has them
    server = nullcontext(shlex.split(words)) if words else fork_server(*EVERYTHING)
    trials = trials_of(
        given.trials, adapter=given.adapter, seed=given.seed, beat_timeout=given.beat_timeout
    )
    with (
        recording(given, seed=given.seed) as record,
        tempfile.TemporaryDirectory(prefix="in-process") as temporary,
        server as python,
    ):
        root = given.folder or Path(temporary)
        return run_trials(
            f"recovery within the process ({given.adapter})",
            Campaign(root, python).run,
            trials,
            given=given,
            record=record,
            problems=PROBLEMS,
            figures=figures_of_kind,
        )


if __name__ == "__main__":
    raise SystemExit(main())
