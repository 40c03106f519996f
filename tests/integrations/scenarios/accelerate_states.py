"""AsyncStateCheckpointer on two ranks."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from lightning_dist.accelerate import AsyncStateCheckpointer
from scenarios.accelerating import Facts, Training, damage, names, no_room, writers
from scenarios.catalogue import alone, folder, rank, scenario


class _Texts(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What the package warns of meanwhile."""
    handler = _Texts()
    logger = logging.getLogger("lightning_dist")
    logger.addHandler(handler)
    try:
        yield handler.texts
    finally:
        logger.removeHandler(handler)


def error_of(action: Callable[[], object]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def base(path: str | None) -> str:
    return Path(path or "").name


@scenario
def uninterrupted() -> Facts:
    with Training(None) as training:
        history = training.train(6)
        return {"history": history, **training.facts()}


@scenario
def resumed() -> Facts:
    """From what the killed one has left."""
    with (
        Training(folder() / "killed", seed=5) as training,
        AsyncStateCheckpointer(training.accelerator) as st,
    ):
        loaded = st.load_state()
        done = training.schedule.scheduler.last_epoch // training.accelerator.num_processes
        history = training.train(6 - done)
        facts = {"history": history, "done": done, "loaded": base(loaded), **training.facts()}
        facts["saved"] = base(st.save_state())
        st.wait()
        return {**facts, "names": names(folder() / "killed")}


@scenario
def own_objects_are_needed() -> Facts:
    """What stock accelerate makes of the same folder: every rank gets rank 0's object."""
    dist.barrier()
    with Training(folder() / "killed", seed=5) as training:
        training.accelerator.load_state(str(folder() / "killed" / "checkpoints" / "checkpoint_0"))
        return training.facts()


@scenario
def limited() -> Facts:
    """Four saves of which two are kept, and on in another process."""
    project = folder() / "limited"
    with Training(project, total_limit=2) as training:
        with AsyncStateCheckpointer(training.accelerator) as st:
            saved = [base(st.save_state()) for _ in range(4)]
            st.wait()
            committed = base(st.last_committed.target)
        dist.barrier()
        first = names(project)
        training.accelerator.load_state()  # accelerate finds the newest by itself
    with (
        Training(project, total_limit=2) as training,
        AsyncStateCheckpointer(training.accelerator) as st,
    ):
        again = base(st.save_state())  # without loading
        st.wait()
        dist.barrier()
        second = names(project)
        loaded = base(st.load_state())
        iteration = training.accelerator.project_configuration.iteration
    return {
        "saved": saved,
        "committed": committed,
        "first": first,
        "again": again,
        "second": second,
        "loaded": loaded,
        "iteration": iteration,
    }


@scenario
def passed_over() -> Facts:
    """The newest is damaged, and one with a higher number is not even complete."""
    project = folder() / "passed_over"
    with Training(project) as training, AsyncStateCheckpointer(training.accelerator) as st:
        training.train(1)
        st.save_state()
        st.wait()
        before = training.facts()
        training.train(1)
        newest = st.save_state()
        st.wait()
        dist.barrier()
        if rank() == 0:
            damage(Path(newest) / "model.safetensors")
            incomplete = project / "checkpoints" / "checkpoint_9"
            incomplete.mkdir()
            (incomplete / "model.safetensors").write_bytes(b"")
        dist.barrier()
        touched = [p.detach().clone() for p in training.model.parameters()]
        explicit = error_of(lambda: st.load_state(newest))
        same = all(map(torch.equal, touched, training.model.parameters()))
        with warnings() as messages:
            loaded = base(st.load_state())
        after = training.facts()["parameters"]
        following = base(st.save_state())
    return {
        "before": before["parameters"],
        "after": after,
        "explicit": explicit,
        "same": same,
        "loaded": loaded,
        "messages": messages,
        "following": following,
    }


@scenario
def full() -> Facts:
    """The writer of rank 1 cannot write more than some bytes."""
    project = folder() / "full"
    with (
        Training(project, total_limit=1) as training,
        AsyncStateCheckpointer(training.accelerator) as st,
    ):
        st.save_state()
        st.wait()
        dist.barrier()
        (writer,) = writers()
        with no_room(500, pid=writer) if rank() == 1 else nullcontext():
            st.save_state()
            surfaced = error_of(st.save_state)
            kept = names(project)
        waited = error_of(st.wait)
        saved = base(st.save_state())
        st.wait()
        dist.barrier()
        metrics = st.metrics
        return {
            "surfaced": surfaced,
            "kept": kept,
            "waited": waited,
            "saved": saved,
            "names": names(project),
            "failed": metrics.failed,
        }


@scenario
def groups() -> Facts:
    """Process groups before, within and after a checkpointer."""
    with Training(None) as training:
        found = [len(distributed_c10d._world.pg_map)]
        with AsyncStateCheckpointer(training.accelerator) as st:
            found.append(len(distributed_c10d._world.pg_map))
            st.save_state(folder() / "groups")
        found.append(len(distributed_c10d._world.pg_map))
        st.close()
    return {"groups": found}


@scenario
def fewer_ranks() -> Facts:
    """One rank loads what two have saved."""
    target = folder() / "of_two"
    with Training(None) as training, AsyncStateCheckpointer(training.accelerator) as st:
        training.train(2)
        st.save_state(target)
        st.wait()
        first = training.facts()
    dist.barrier()
    with alone(), Training(None, seed=5) as training:
        with AsyncStateCheckpointer(training.accelerator) as st, warnings() as messages:
            st.load_state(target)
        facts = training.facts()
    return {"first": first, "facts": facts, "messages": messages}


@scenario
def refused_together() -> Facts:
    with Training(None) as training, AsyncStateCheckpointer(training.accelerator) as st:
        foreign = folder() / "foreign"
        foreign.mkdir(exist_ok=True)
        (foreign / "notes.txt").write_text("mine")
        dist.barrier()
        return {
            "foreign": error_of(lambda: st.save_state(foreign)),
            "different": error_of(lambda: st.save_state(folder() / f"of_{rank()}")),
            "missing": error_of(lambda: st.load_state(folder() / "nowhere")),
            "saved": base(st.save_state(folder() / "after_refusals")),
            "left": os.listdir(foreign),
        }
