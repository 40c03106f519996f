"""What must hold when a job has ended, and what did not."""

import json
import re
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from recovering_loops import Net

from tests.campaigns import harness
from tests.campaigns.in_process.drawing import BATCH, EPOCH_STEPS, RANKS, SIZE, Strike
from tests.campaigns.in_process.twin import replay

PROBLEMS = ("hang", "end", "restart", "evicted", "ids", "hash", "weights", "growth", "report")
"""hang: beyond the bound; end: not ended with 0; restart: all were started again; evicted: a
straggler was; ids: an epoch whose committed samples are not those of the data, each once; hash:
ranks that differ after a step; weights: not those of the run without a fault, or not finite;
growth: of memory, descriptors or threads of the worker that is spared; report: the oracle itself
failed."""

TOLERANCE = 1e-6
"""Of weights, relative to the largest (codec none, float64)."""
GROWTH = {"resident_kb": 16_000, "fd": 8, "task": 4}
"""Of the worker that is spared, from a quarter of its generations on: what is allowed."""

LOCAL_STEPS: dict[str, Any] = {
    **{"method": "diloco", "sync_every": 2, "outer_lr": 0.7, "outer_momentum": 0.6}
}
"""Settings of the adapter of that name."""

Line = dict[str, Any]


@dataclass
class Verdict(harness.Verdict):
    """One job: its faults, what happened, and what should not have."""

    struck: dict[str, int] = field(default_factory=dict)
    """By kind: faults of which every strike was met."""
    drawn: dict[str, int] = field(default_factory=dict)
    generations: int = 0
    held: dict[str, tuple[int, int]] = field(default_factory=dict)
    """What the spared worker held after a quarter of its generations, and at the end."""
    error: float | None = None


def judge(
    verdict: Verdict,
    folder: Path,
    strikes: list[Strike],
    *,
    codec: str,
    spared: int | None,
    local: bool = False,
) -> None:
    """Look at all that a job has left in ``folder``.

    Args:
        local: workers take local steps. Commits are outer steps then.
    """
    lines = _read(folder)
    _count(verdict, folder, strikes)
    starts = {
        name: [x["process"] for x in found if "process" in x] for name, found in lines.items()
    }
    again = sorted(name for name, found in starts.items() if len(found) > 1)
    verdict.require(not again, "restart", f"started again: {again}")
    _check_stragglers(verdict, folder, strikes)
    every = [line for name, found in lines.items() if name != "alone" for line in found]
    committed = [line for line in every if "committed" in line]
    steps = max((each.step for each in strikes), default=0) + 1
    hashes = defaultdict(set)
    taken: dict[int, set[int]] = defaultdict(set)
    for line in committed:
        hashes[line["committed"]].add(line["hash"])
        taken[line["committed"]].add(line["generation"])
    every_n = LOCAL_STEPS["sync_every"] if local else 1
    expected = [*range(every_n, steps + 1, every_n)]
    verdict.require(sorted(hashes) == expected, "ids", f"steps {len(hashes)}/{len(expected)}")
    unequal = [step for step, found in hashes.items() if len(found) > 1]
    verdict.require(not unequal, "hash", f"ranks differ after steps {unequal[:5]}")
    torn = [step for step, found in taken.items() if len(found) > 1]
    verdict.require(not torn, "ids", f"steps of several generations: {torn[:5]}")
    if local:
        _check_local_samples(verdict, lines, lost=len(strikes))
    else:
        _check_samples(verdict, every, taken)
    ends = [line for line in every if "end" in line]
    same = len({(line["end"], line["hash"]) for line in ends}) == 1
    verdict.require(same, "end", f"workers ended differently: {ends}")
    verdict.require(all(line["finite"] for line in ends), "weights", "not finite")
    if codec == "none" and local:
        _compare_with_twin(verdict, folder, lines, steps)
    elif codec == "none":
        _compare(verdict, folder)
    verdict.generations = max((line["generation"] for line in committed), default=0)
    if spared is not None:
        _check_growth(verdict, lines.get(f"0.{spared}.0", []))


def _check_samples(verdict: Verdict, every: list[Line], taken: dict[int, set[int]]) -> None:
    ids = defaultdict(list)
    for line in every:
        if "computed" in line and line["generation"] in taken[line["computed"]]:
            ids[(line["computed"] - 1) // EPOCH_STEPS] += line["ids"]
    wrong = [epoch for epoch, found in ids.items() if sorted(found) != [*range(SIZE)]]
    verdict.require(not wrong, "ids", f"not every sample once in epochs {wrong[:5]}")


def _check_local_samples(verdict: Verdict, lines: dict[str, list[Line]], *, lost: int) -> None:
    """A worker that is lost takes those of two steps with it: others may be so far ahead.

    Or it was itself, and others use them.
    """
    ids, of_all = defaultdict(list), defaultdict(set)
    for found in lines.values():
        batches = [line for line in found if "batch" in line]
        is_lost = not any("end" in line for line in found)
        for line in batches:
            epoch = (line["batch"] - 1) // EPOCH_STEPS
            of_all[epoch] |= {*line["ids"]}
            if not is_lost or line["batch"] <= batches[-1]["batch"] - 2:
                ids[epoch] += line["ids"]
    twice = [epoch for epoch, used in ids.items() if len(used) > len({*used})]
    verdict.require(not twice, "ids", f"samples that were used twice in epochs {twice[:5]}")
    missing = sum(SIZE - len(used) for used in of_all.values())
    verdict.require(missing <= lost * 2 * BATCH * RANKS // 2, "ids", f"{missing} samples missing")


def _compare_with_twin(
    verdict: Verdict, folder: Path, lines: dict[str, list[Line]], last: int
) -> None:
    anchor = replay(lines, folder, settings=LOCAL_STEPS, size=SIZE, last=last)
    for path in folder.glob("weights-0.*.pt"):
        own = torch.load(path)
        mine = {key: own[key] for key, _ in Net().named_parameters()}
        theirs = dict(zip(mine, anchor, strict=True))
        verdict.error = max(verdict.error or 0.0, harness.relative_difference(mine, theirs))
    assert verdict.error is not None, "no worker has left its weights"
    verdict.require(verdict.error <= TOLERANCE, "weights", f"relative difference {verdict.error}")


def _read(folder: Path) -> dict[str, list[Line]]:
    found = {}
    for path in folder.glob("*.jsonl"):
        text = path.read_text().splitlines(True)
        found[path.stem] = [json.loads(line) for line in text if line.endswith("\n")]
    return found


def _count(verdict: Verdict, folder: Path, strikes: list[Strike]) -> None:
    missed = {each.fault for each in strikes if not (folder / f"struck-{each.number}").exists()}
    for fault, kind in {each.fault: each.kind for each in strikes}.items():
        verdict.drawn[kind] = verdict.drawn.get(kind, 0) + 1
        verdict.struck[kind] = verdict.struck.get(kind, 0) + (fault not in missed)


def _check_stragglers(verdict: Verdict, folder: Path, strikes: list[Strike]) -> None:
    """Workers that were paused for less than heartbeats may be absent, and not stopped too."""
    by_action = defaultdict(set)
    for each in strikes:
        if (marker := folder / f"struck-{each.number}").exists():
            by_action[each.action].add(marker.read_text())
    output = (folder / "output.txt").read_text(errors="replace")
    lost = re.findall(r"worker ([\d.]+) was lost: (?:no heartbeat|does not respond)", output)
    paused = by_action["pause"] - by_action["stop"] - by_action["stop for long"]
    evicted = sorted(paused & {*lost})
    verdict.require(not evicted, "evicted", f"stragglers: {evicted}")


def _compare(verdict: Verdict, folder: Path) -> None:
    """Beside the run of one process without a fault."""
    found = sorted(folder.glob("weights-0.*.pt"))
    if not found:
        verdict.require(False, "end", "no worker has left its weights")
        return
    mine, theirs = (torch.load(path) for path in (found[-1], folder / "weights-alone.pt"))
    theirs.pop("passes", None)  # of micro-batches, not of steps
    verdict.error = harness.relative_difference(mine, theirs)
    verdict.require(verdict.error <= TOLERANCE, "weights", f"relative difference {verdict.error}")


def _check_growth(verdict: Verdict, lines: list[Line]) -> None:
    """Between a quarter of the generations of whole worlds and the end: what comes stays away."""
    # Each rank has a connection to every other.
    held = [line for line in lines if line.get("world_size") == RANKS]
    verdict.require(len(held) > 3, "growth", f"{len(held)} whole worlds of the spared worker")
    quarter, window = len(held) // 4, max(3, len(held) // 8)  # one may be counted half made
    for what, allowed in GROWTH.items():
        early, late = (
            statistics.median_high(line[what] for line in part)
            for part in (held[quarter : quarter + window], held[-window:])
        )
        verdict.held[what] = early, late
        verdict.require(late - early <= allowed, "growth", f"{what}: {early} -> {late}")
