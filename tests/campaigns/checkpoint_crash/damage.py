"""Checkpoints that are damaged on disk, and whether somebody notices."""

import os
import random
import shutil
from pathlib import Path

from lightning_dist.checkpoint.disk.format import CheckpointError, CorruptCheckpointError
from lightning_dist.checkpoint.disk.jobs import Event
from lightning_dist.checkpoint.disk.scan import newest_valid, verify
from lightning_dist.checkpoint.disk.writer import Writer
from tests.campaigns.checkpoint_crash.oracle import Oracle, Verdict, step_of
from tests.campaigns.checkpoint_crash.writer import Scenario, is_content, saves_of

_STEPS = (3, 6, 9, 12)


def write_all(scenario: Scenario, folder: Path, steps: tuple[int, ...] = _STEPS) -> list[Path]:
    """Checkpoints of these steps, all kept."""
    events: list[Event] = []
    writer = Writer(report=events.append)
    for step in steps:
        writer.do(*saves_of(scenario, str(folder), step, 0))
    return [Path(scenario.target(str(folder), step)) for step in steps]


def flip(path: Path, bit: int) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def damage(path: Path, chance: random.Random) -> str:
    """Damage a checkpoint in one way; says how."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    file = chance.choice(files)
    nbytes = file.stat().st_size
    choices = ["a bit", "a bit", "truncated", "zeros", "longer"]
    if path.is_dir():
        choices += ["missing file", "empty folder"]
    how = chance.choice(choices)
    if how == "a bit":
        flip(file, chance.randrange(8 * nbytes))
    elif how == "truncated":
        os.truncate(file, chance.randrange(nbytes))
    elif how == "zeros":
        start = chance.randrange(nbytes - 1)
        with file.open("r+b") as opened:
            opened.seek(start)
            count = min(512, nbytes - start)
            before = opened.read(count)
            opened.seek(start)
            opened.write(bytes(count) if any(before) else b"\1" * count)
    elif how == "longer":
        with file.open("ab") as opened:
            opened.write(b"x" + chance.randbytes(chance.randrange(100)))
    elif how == "missing file":
        file.unlink()
    else:
        shutil.rmtree(path)
        path.mkdir()
    return f"{how}: {file.name}"


def run_trial(verdict: Verdict, chance: random.Random, place: Path) -> None:
    """Damage the newest, the two newest, or others; exactly the newest whole one is found."""
    folder = place / "checkpoints"
    folder.mkdir(parents=True)
    scenario = Scenario(chance.choice(("single", "folder")))
    paths = write_all(scenario, folder)
    oracle = Oracle(folder, verdict)
    count = chance.choice((1, 1, 2, 2, 3, 4))
    damaged = paths[-count:] if chance.random() < 0.8 else chance.sample(paths, count)
    verdict.details["damage"] = {path.name: damage(path, chance) for path in damaged}
    verdict.details["layout"] = scenario.layout
    for path in damaged:
        _require_detected(verdict, path, str(verdict.details["damage"]))
    whole = [step for step, path in zip(_STEPS, paths, strict=True) if path not in damaged]
    try:
        found = newest_valid(str(folder))
    except CheckpointError as error:  # rather than to start afresh
        verdict.require(not whole, "lost", f"newest_valid: {error!r}")
        found = None
    except Exception as error:  # whatever comes out of it, a resume would have ended here
        verdict.require(False, "lost", f"newest_valid: {error!r}")
        return
    step = step_of(found)
    newest = max(whole, default=0)
    verdict.require(step == newest, "lost", f"found {step}, the newest whole one is {newest}")
    if found is not None:
        verdict.require(is_content(found.path, step, scenario.nbytes), "undetected", "wrong bytes")
    oracle.check_foreign()


def run_every_bit(verdict: Verdict, layout: str, place: Path) -> None:
    """Every single bit of a small checkpoint, one after the other."""
    folder = place / "checkpoints"
    folder.mkdir(parents=True)
    (path,) = write_all(Scenario(layout, nbytes=100), folder, (3,))
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    verdict.trials = 0
    for file in files:
        for bit in range(8 * file.stat().st_size):
            flip(file, bit)
            _require_detected(verdict, path, f"bit {bit} of {file.name}")
            flip(file, bit)
            verdict.trials += 1
    verify(str(path))


def _require_detected(verdict: Verdict, path: Path, what: str) -> None:
    try:
        verify(str(path))
    except CorruptCheckpointError:
        return
    except Exception as error:
        verdict.require(False, "report", f"{what}: {error!r} instead of CorruptCheckpointError")
    else:
        verdict.require(False, "undetected", what)
