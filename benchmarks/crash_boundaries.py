"""Trials without a trainer: a writer is killed, or the disk fails, at its n-th system call."""

from __future__ import annotations

import errno
import multiprocessing
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from benchmarks.crash_disk import (
    Fail,
    Fault,
    Kill,
    PowerCut,
    Short,
    UncountedStorage,
    fill,
    no_fault,
    small_disk,
)
from benchmarks.crash_oracle import Foreign, Ledger, Oracle, Verdict
from benchmarks.crash_process import BOUND_S, Child, Hang
from benchmarks.crash_writer import Scenario, Script, is_content

_OLD, _STRUCK, _NEXT = 3, 6, 9
"""Steps: written before the fault, during it, after it."""

KILLS = ("kill before", "kill after", "power cut, names lost", "power cut, names kept")
ERRORS = ("EIO", "ENOSPC", "EIO for good", "ENOSPC for good", "short writes")


def fault_of(name: str, at: int, attic: str) -> Fault:
    """The fault of this name, at the operation ``at``."""
    if name.startswith("kill"):
        return Kill(at, after=name.endswith("after"))
    if name.startswith("power"):
        return PowerCut(at, forget=name.endswith("lost"), attic=attic)
    if name == "short writes":
        return Short(at)
    return Fail(at, getattr(errno, name.split()[0]), for_good=name.endswith("for good"))


def count_operations(scenario: Scenario, place: Path) -> list[int]:
    """System calls of every rank in the step that is struck."""
    place.mkdir()
    script = Script(scenario, str(place), (_OLD, _STRUCK), armed=_STRUCK)
    found = _run([replace(script, rank=rank) for rank in range(scenario.ranks)], Ledger())
    return [of_rank.of("done")[-1]["operations"] for of_rank in found]


def boundaries(scenario: Scenario, place: Path) -> Iterator[tuple[int, int]]:
    """Every rank and operation of a scenario that a fault can strike."""
    for rank, count in enumerate(count_operations(scenario, place)):
        yield from ((rank, at) for at in range(1, count + 1))


def run_trial(
    verdict: Verdict, scenario: Scenario, fault: str, rank: int, at: int, place: Path,
    *, foreign: bytes,
) -> None:  # fmt: skip
    """Save, save with a fault at one operation of one rank, look, recover, save."""
    verdict.details |= {"scenario": asdict(scenario), "fault": fault, "rank": rank, "at": at}
    folder, attic = place / "checkpoints", place / "attic"
    folder.mkdir(parents=True)
    attic.mkdir()
    acting = fault_of(fault, at, str(attic))
    goes_on = fault in ERRORS
    steps = (_OLD, _STRUCK, _NEXT) if goes_on else (_OLD, _STRUCK)
    together = multiprocessing.get_context("fork").Barrier(scenario.ranks, timeout=BOUND_S)

    def before_step(step: int) -> None:  # as all ranks of a training save at the same step
        if step == _NEXT:
            together.wait()

    script = Script(scenario, str(folder), steps, armed=_STRUCK, before_step=before_step)
    scripts = [
        replace(script, rank=r, fault=acting if r == rank else no_fault)
        for r in range(scenario.ranks)
    ]
    check(verdict, scripts, folder, foreign=foreign, goes_on=goes_on,
          for_good=fault.endswith("for good"), power="power" in fault)  # fmt: skip


def check(
    verdict: Verdict, scripts: Sequence[Script], folder: Path,
    *, foreign: bytes, goes_on: bool, for_good: bool = False, power: bool = False,
) -> None:  # fmt: skip
    """Run the scripts and see whether all holds that must."""
    scenario, ledger = scripts[0].scenario, Ledger()
    others = Foreign(folder, checkpoint=foreign)
    oracle = Oracle(folder, verdict, others)
    same = partial(is_content, nbytes=scenario.nbytes)
    try:
        found = _run(scripts, ledger)
    except Hang as hang:
        verdict.require(False, "hang", str(hang))
        return
    for error in ledger.of("error"):
        verdict.require(False, "report", error["reason"])
    oracle.check_newest(ledger, moment="after the fault", is_content=same)
    oracle.check_all_whole(moment="after the fault")
    if goes_on:
        for of_rank in found:
            _check_reports(verdict, of_rank)
        for done in found[0].of("done"):
            least = max(step for step in ledger.committed if step <= done["step"])
            what = f"after step {done['step']}: found {done['newest']}, committed {least}"
            verdict.require(done["newest"] >= least, "lost", what)
        verdict.require(_NEXT in ledger.committed, "lost", "the next save failed")
        if not for_good:
            oracle.check_end(scenario.names(_NEXT), moment="after the next save", leftovers="trash")
        return
    superseded = [scenario.target(str(folder), step) for step in (_OLD, _STRUCK)]
    resumed = Ledger()
    again = [
        replace(script, steps=(_NEXT,), armed=0, fault=no_fault, resume=True, superseded=superseded)
        for script in scripts
    ]
    try:
        _run(again, resumed)
    except Hang as hang:
        verdict.require(False, "hang", str(hang))
        return
    for error in resumed.of("error"):
        verdict.require(False, "report", error["reason"])
    for opened in resumed.of("opened"):
        step = opened["step"]
        verdict.require(not opened["torn"], "torn", f"recovered: {opened['torn']}")
        verdict.require(step >= ledger.newest, "lost", f"resumed from {step} of {ledger.newest}")
    verdict.require(_NEXT in resumed.committed, "lost", "the save after the resume failed")
    oracle.check_newest(resumed, moment="at the end", is_content=same)
    oracle.check_all_whole(moment="at the end")
    oracle.check_end(scenario.names(_NEXT), moment="at the end")


def _check_reports(verdict: Verdict, ledger: Ledger) -> None:
    """Every save is told to be committed or to have failed, once; every error once."""
    for step in (_OLD, _STRUCK, _NEXT):
        told = [m["event"] for m in ledger.events if m.get("step") == step and m["event"] in
                ("committed", "failed")]  # fmt: skip
        verdict.require(len(told) == 1, "report", f"step {step}: {told}")
    failed = [m for m in ledger.of("failed") if m["phase"] == _STRUCK]
    reasons = [(m["target"], m["reason"]) for m in failed]
    verdict.require(len(set(reasons)) == len(reasons), "report", f"told twice: {reasons}")
    late = [m["reason"] for m in ledger.of("failed") if m["phase"] != _STRUCK]
    verdict.require(not late, "report", f"told late: {late}")


def run_full_disk(verdict: Verdict, chance: random.Random, place: Path, *, foreign: bytes) -> None:
    """Space for a part of the checkpoint only; then somebody makes room."""
    layout = chance.choice(("single", "folder"))
    scenario = Scenario(layout, chance.random() < 0.5, "", nbytes=60_000)
    leave = chance.randrange(90_000)
    uncounted = chance.random() < 0.7
    verdict.details |= {"scenario": asdict(scenario), "leave": leave, "uncounted": uncounted}
    place.mkdir()
    with ExitStack() as stack:
        disk = stack.enter_context(small_disk(place / "disk", nbytes=1 << 20))
        folder, filler = disk / "checkpoints", disk / "filler"
        folder.mkdir()

        def before_step(step: int) -> None:
            if step == _STRUCK:
                fill(filler, leave=leave)
            elif step == _NEXT:
                filler.unlink()

        script = Script(
            scenario, str(folder), (_OLD, _STRUCK, _NEXT), armed=_STRUCK, before_step=before_step
        )
        if uncounted:
            script = replace(script, find_storage=UncountedStorage().find)
        check(verdict, [script], folder, foreign=foreign, goes_on=True)


def _run(scripts: Sequence[Script], ledger: Ledger) -> list[Ledger]:
    """Run all ranks side by side; what each has said, and all of it in ``ledger``."""
    found = [Ledger() for _ in scripts]
    children: list[Child] = []
    try:
        for script in scripts:
            children.append(Child(script.run))
        for child, of_rank in zip(children, found, strict=True):
            while not child.ended:
                message = child.receive(BOUND_S)
                if message is not None:
                    of_rank.note(message)
                    ledger.note(message)
                elif not child.ended:
                    raise Hang(f"a writer said nothing for {BOUND_S:.0f} s: {of_rank.events[-1:]}")
    finally:
        for child in children:
            child.close()
    return found
