"""Saves without torch: what a writer is given, step by step, with known bytes."""

import errno
import multiprocessing
import os
import random
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from lightning_dist.checkpoint.disk.folder_owner import own
from lightning_dist.checkpoint.disk.format import NAME, Manifest, Origin
from lightning_dist.checkpoint.disk.jobs import (
    Committed,
    Event,
    Failed,
    Link,
    RecordRange,
    Remove,
    Save,
    SaveFile,
    SaveFolder,
)
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.checkpoint.disk.storage import Storage, storage_of
from lightning_dist.checkpoint.disk.writer import Writer
from tests.campaigns.checkpoint_crash.child import BOUND_S, Child, Report
from tests.campaigns.checkpoint_crash.disk import (
    Boundaries,
    Fault,
    PowerCut,
    UncountedStorage,
    fail,
    fill,
    kill,
    no_fault,
    small_disk,
    write_short,
)
from tests.campaigns.checkpoint_crash.oracle import Ledger, Oracle, Verdict, step_of
from tests.campaigns.checkpoint_crash.trainer import LAST, torn
from tests.campaigns.harness import Hang

RECORDS = ("data.pkl", "byteorder", "data/0", "data/1")
_PEER_TIMEOUT_S = 0.5
_ALIGNMENT = 64


@dataclass(frozen=True)
class Scenario:
    """What is written and how.

    ``layout``: one file, a folder of one rank, or one of two ranks. ``same_name``: a save replaces
    the one before. ``link``: also shown as ``last.ckpt``. ``exchange``: of the file system.
    """

    layout: str = "single"
    same_name: bool = False
    link: str = ""
    exchange: bool = True
    nbytes: int = 1500

    @property
    def ranks(self) -> int:
        return 2 if self.layout == "ranks" else 1

    def target(self, folder: str, step: int) -> str:
        return f"{folder}/{'model' if self.same_name else f'step={step}'}.ckpt"

    def names(self, step: int) -> set[str]:
        """What is in the folder when ``step`` was the last to be saved."""
        return {os.path.basename(self.target("", step))} | ({LAST} if self.link else set())


_SHOWN = ((False, ""), (True, ""), (False, "hard"), (False, "symbolic"))  # same_name, link
SCENARIOS = (
    *(Scenario(layout, *shown) for layout in ("single", "folder", "ranks") for shown in _SHOWN),
    Scenario("folder", same_name=True, exchange=False),
    Scenario("folder", link="hard", exchange=False),
)


def contents(step: int, nbytes: int) -> dict[str, bytes]:
    """The records of a save."""
    chance = random.Random(step)
    sizes = (200, 6, nbytes, nbytes // 3)
    return {name: chance.randbytes(size) for name, size in zip(RECORDS, sizes, strict=True)}


def saves_of(
    scenario: Scenario, folder: str, step: int, rank: int, *, peer_timeout: float = BOUND_S / 2
) -> tuple[Save, memoryview]:
    """The job of one rank, and the snapshot for it. Every rank has a part of every record."""
    origin = Origin(f"{step:016x}", step, 10**18 + step, scenario.ranks)
    ranges, snapshot = [], b""
    for record, content in contents(step, scenario.nbytes).items():
        low, high = (len(content) * r // scenario.ranks for r in (rank, rank + 1))
        ranges.append(RecordRange(record, high - low, len(snapshot), low))
        snapshot += content[low:high]
        snapshot += bytes(-len(snapshot) % _ALIGNMENT)
    target = scenario.target(folder, step)
    if scenario.layout == "single":
        return SaveFile(origin, target, tuple(ranges)), memoryview(snapshot)
    save = SaveFolder(origin, target, tuple(ranges), rank, RECORDS, peer_timeout=peer_timeout)
    return save, memoryview(snapshot)


@dataclass(frozen=True)
class Script:
    """What one rank's writer does in a process of its own: steps, one after the other.

    ``fault`` acts on this rank in step ``armed``. With ``resume`` it first becomes the owner of the
    folder. ``superseded`` is removed after the first save.
    """

    scenario: Scenario
    folder: str
    steps: Sequence[int]
    rank: int = 0
    armed: int = 0
    fault: Fault = no_fault
    resume: bool = False
    superseded: Sequence[str] = ()
    before_step: Callable[[int], None] = lambda step: None
    find_storage: Callable[[str], tuple[Storage, str]] = storage_of

    def run(self, report: Report) -> None:
        step = 0

        def tell(event: Event) -> None:
            if isinstance(event, Committed):
                report("committed", step=event.origin.step, target=event.target, rank=self.rank)
            elif isinstance(event, Failed):
                failed = None if event.origin is None else event.origin.step
                report("failed", step=failed, target=event.target, reason=event.reason,
                       rank=self.rank, phase=step)  # fmt: skip

        if self.resume and self.rank == 0:
            lock = own(self.folder)
            found = newest_valid(self.folder)
            report("opened", step=step_of(found), seconds=0.0, torn=torn(self.folder))
        boundaries = Boundaries(self.fault, exchange=self.scenario.exchange)
        writer = Writer(report=tell, find_storage=self.find_storage)
        superseded = list(self.superseded)
        for step in self.steps:
            self.before_step(step)
            boundaries.armed = step == self.armed
            # Where no fault is, a rank that a busy machine lets wait is not given up.
            patience = {"peer_timeout": _PEER_TIMEOUT_S} if boundaries.armed else {}
            writer.do(*saves_of(self.scenario, self.folder, step, self.rank, **patience))
            if self.rank == 0:
                superseded = self._after_save(writer, step, superseded)
            boundaries.armed = False
            newest = step_of(newest_valid(self.folder)) if self.rank == 0 else None
            report("done", step=step, newest=newest, operations=len(boundaries.names))
        if self.resume and self.rank == 0 and lock is not None:
            lock.release()
        report("end")

    def _after_save(self, writer: Writer, step: int, superseded: list[str]) -> list[str]:
        """As a callback that keeps one checkpoint asks for it."""
        scenario, nothing = self.scenario, memoryview(b"")
        target = scenario.target(self.folder, step)
        if scenario.link:
            symbolic = scenario.link == "symbolic"
            writer.do(Link(target, f"{self.folder}/{LAST}", symbolic), nothing)
        for path in superseded:
            if path != target:
                writer.do(Remove(path), nothing)
        return [target]


def is_content(path: str, step: int, nbytes: int) -> bool:
    """Whether the checkpoint at ``path`` holds, to the byte, what was saved at ``step``."""
    return _records(path) == contents(step, nbytes)


def _records(path: str) -> dict[str, bytes]:
    if not os.path.isdir(path):
        with zipfile.ZipFile(path) as archive:
            return {name: archive.read(f"archive/{name}") for name in RECORDS}
    with open(f"{path}/{NAME}", "rb") as file:
        manifest = Manifest.from_json(file.read(), path=path)
    found = {}
    for record, parts in manifest.records.items():
        found[record] = b""
        for part in parts:
            with open(f"{path}/{part.file}", "rb") as shard:
                shard.seek(part.offset)
                found[record] += shard.read(part.nbytes)
    return found


_OLD, _STRUCK, _NEXT = 3, 6, 9
"""Steps: written before the fault, during it, after it."""

KILLS = ("kill before", "kill after", "power cut, names lost", "power cut, names kept")
ERRORS = ("EIO", "ENOSPC", "EIO for good", "ENOSPC for good", "short writes")


def fault_of(name: str, at: int, attic: str) -> Fault:
    """The fault of this name, at the operation ``at``."""
    if name.startswith("kill"):
        return kill(at, after=name.endswith("after"))
    if name.startswith("power"):
        return PowerCut(at, forget=name.endswith("lost"), attic=attic)
    if name == "short writes":
        return write_short(at)
    return fail(at, getattr(errno, name.split()[0]), for_good=name.endswith("for good"))


def boundaries(scenario: Scenario, place: Path) -> Iterator[tuple[int, int]]:
    """Every rank of a scenario and each of its system calls in the step that is struck."""
    place.mkdir()
    script = Script(scenario, str(place), (_OLD, _STRUCK), armed=_STRUCK)
    found = _run([replace(script, rank=rank) for rank in range(scenario.ranks)], Ledger())
    for rank, ledger in enumerate(found):
        count = ledger.of("done")[-1]["operations"]
        yield from ((rank, at) for at in range(1, count + 1))


def run_trial(
    verdict: Verdict, scenario: Scenario, fault: str, rank: int, at: int, place: Path
) -> None:
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
    check(verdict, scripts, folder, goes_on=goes_on, for_good=fault.endswith("for good"))


def check(
    verdict: Verdict,
    scripts: Sequence[Script],
    folder: Path,
    *,
    goes_on: bool,
    for_good: bool = False,
) -> None:
    """Run the scripts and see whether all holds that must."""
    scenario, ledger = scripts[0].scenario, Ledger()
    oracle = Oracle(folder, verdict)
    same = partial(is_content, nbytes=scenario.nbytes)
    found = _run(scripts, ledger)
    ledger.require_no_error(verdict)
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
    _run(again, resumed)
    resumed.require_no_error(verdict)
    names = scenario.names(_NEXT)
    oracle.check_resumed(ledger, resumed, last=_NEXT, names=names, is_content=same)


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


def run_full_disk(verdict: Verdict, chance: random.Random, place: Path) -> None:
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
        check(verdict, [script], folder, goes_on=True)


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
