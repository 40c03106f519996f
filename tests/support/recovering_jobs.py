"""Jobs of ranks that recover, and what they have written down."""

import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from processes import run
from recovering_loops import EPOCHS, SIZE, train

STEP = 6
"""The step in whose course a rank is killed, counted from 0; that of an epoch has 5."""


@cache
def weights_alone(ranks: int) -> dict[str, torch.Tensor]:
    """Weights of a run of one process without a fault, which does the work of so many."""
    with TemporaryDirectory() as folder:
        return dict(train(Path(folder), {"accumulate": ranks}).state_dict())


class Written:
    """What so many ranks have written down, one line for each micro-batch and step."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.folder, self.ranks = folder, ranks

    @property
    def lines(self) -> dict[str, list[dict[str, Any]]]:
        """Of every worker; the last one may be about to be written."""
        found = {}
        for path in self.folder.glob("*.*.*.jsonl"):
            lines = path.read_text().splitlines(keepends=True)
            found[path.stem] = [json.loads(line) for line in lines if line.endswith("\n")]
        return found

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [line for lines in self.lines.values() for line in lines if kind in line]

    def by_step(self, fact: str) -> dict[int, Any]:
        """What ranks have noted of a step with its last commit."""
        return {line["committed"]: line[fact] for line in self.last("committed")}

    def last(self, kind: str) -> list[dict[str, Any]]:
        """Those of a step that the last start has noted which has come to it, by time."""
        lines = sorted(self.of(kind), key=lambda line: line["time"])
        starts = {line[kind]: line["start"] for line in lines}
        return [line for line in lines if line["start"] == starts[line[kind]]]

    def steps_of(self, worker: str) -> set[int]:
        """Those that a worker has committed."""
        return {line["committed"] for line in self.lines[worker] if "committed" in line}

    def samples(self) -> dict[int, list[int]]:
        """Those of every epoch that are in the weights."""
        starts, taken = self.by_step("start"), self.by_step("generation")
        found = defaultdict(list)
        for line in self.of("computed"):
            step, number = line["computed"], line["generation"]
            if (starts.get(step), taken.get(step)) == (line["start"], number):
                found[line["epoch"]] += line["ids"]
        return {epoch: sorted(ids) for epoch, ids in found.items()}

    def require_exact(self) -> None:
        """Every sample once in each epoch, and equal weights on all ranks after every step."""
        assert self.samples() == {epoch: list(range(SIZE)) for epoch in range(EPOCHS)}
        hashes, rates = defaultdict(set), defaultdict(set)
        for line in self.last("committed"):
            hashes[line["committed"]].add(line["hash"])
            rates[line["committed"]].add(line["lr"])
        steps = EPOCHS * -(-SIZE // (4 * self.ranks))
        assert sorted(hashes) == list(range(1, steps + 1))
        assert all(len(found) == 1 for found in (*hashes.values(), *rates.values()))
        assert len({line["hash"] for line in self.of("end")}) == 1

    def weights(self) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = torch.load(max(self.folder.glob("weights-0.*.pt")))
        return found

    def require_weights(self, expected: dict[str, torch.Tensor]) -> None:
        """At the end; how many passes there were is not the same with fewer ranks."""
        for name, weight in self.weights().items():
            if name != "passes":
                torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-9)


class LoopJob(Written):
    """Three ranks, or as many as told, under our launcher.

    Without a codec and what changes the training itself, their weights are those of one process.

    beats: seconds without one after which a rank is dead; a busy machine is not a hang.
    """

    script = Path(__file__).with_name("recovering_loops.py")

    def __init__(self, folder: Path, python: list[str], *, beats: str = "60", **told: Any) -> None:
        super().__init__(folder, told.get("ranks", 3))
        self._told = told
        folder.mkdir(exist_ok=True)
        options = ["--monitor-interval=0.05", "--standalone", f"--nproc-per-node={self.ranks}"]
        launcher = [*python, "-m", "lightning_dist.elastic.launcher", *options]
        launcher.append(f"--max-restarts={told.get('restarts', 3)}")
        script = ["--no-python", *python, self.script, folder, json.dumps(told)]
        done = run([*launcher, *script], limit=300, LIGHTNING_DIST_BEAT_TIMEOUT=beats)
        self.output = (done if told.get("fails") else done.require_success()).output

    def require_exact(self, *, again: bool = False) -> None:
        """``again``: all have been started again, with the names of those before."""
        super().require_exact()
        assert len(self.of("end")) == self.ranks
        if not {"codec", "clip", "dropout"} & self._told.keys():
            self.require_weights(weights_alone(self.ranks))

    def members(self) -> dict[int, set[str]]:
        """Those of every generation that have computed something in it."""
        found: dict[int, set[str]] = defaultdict(set)
        for name, lines in self.lines.items():
            for line in lines:
                found[line.get("generation", -1)].add(name)
        return found

    def passes(self) -> int:
        """Of all steps that were committed: one, or two where two ranks do the work of three."""
        members = self.members()
        taken = self.by_step("generation").values()
        return sum(1 if len(members[generation]) == 3 else 2 for generation in taken)

    def redone(self) -> set[int]:
        """Steps that the first members have computed and not committed."""
        first = {
            kind: {line[kind] for line in self.of(kind) if line["generation"] == 0}
            for kind in ("computed", "committed")
        }
        return first["computed"] - first["committed"]

    def metrics(self) -> dict[str, float]:
        """Of the leader of a loop, at the end."""
        (found,) = [line["metrics"] for line in self.of("end") if line["metrics"]]
        return dict(found)


class TrainerJob(LoopJob):
    """The same under Trainers, which log."""

    script = Path(__file__).with_name("recovering_trainers.py")

    def require_exact(self, *, again: bool = False) -> None:
        """What a rank has logged in an epoch is what it has computed for weights, too."""
        super().require_exact(again=again)
        if again:
            return
        for lines in self.lines.values():
            taken = {
                (line["committed"], line["generation"]) for line in lines if "committed" in line
            }
            computed = [line for line in lines if "computed" in line]
            for told in (line for line in lines if "logged" in line):
                of_epoch = [line for line in computed if line["epoch"] == told["epoch"]]
                done = [
                    each for each in of_epoch if (each["computed"], each["generation"]) in taken
                ]
                assert told["logged"] == sum(len(each["ids"]) for each in done), told
