"""What one rank alone finds, or cannot do: all ranks of AsyncCheckpoint hear of it, or none."""

from __future__ import annotations

import resource
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import distributed_c10d

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.disk.folder_owner import owner_of
from lightning_dist.checkpoint.disk.verify import describe
from lightning_dist.integrations.lightning.checkpoint import resume
from scenarios.async_checkpoints import Steps, checkpoint, fit
from scenarios.catalogue import TIMEOUT, Facts, folder, rank, scenario, world_size
from scenarios.fitting import plain


def _error(*arguments: Any, **keywords: Any) -> tuple[str, str]:
    found = "", "no error"
    torch.distributed.barrier()
    try:
        fit(plain(), *arguments, **keywords)
    except Exception as error:
        found = type(error).__name__, str(error).replace(str(folder()), "FOLDER")
    torch.distributed.barrier()  # rank 0 has given the folder back
    return found


def _flip(path: Path) -> None:
    if rank() == 0:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    torch.distributed.barrier()


@scenario
def async_one_rank_knows() -> Facts:
    """Damage that only rank 0 reads, and folders that only one rank sees."""
    facts: Facts = {}
    where = folder() / "async-agreement"
    fit(plain(), checkpoint(where))
    newest, oldest = where / "step=6.ckpt", where / "step=3.ckpt"
    _flip(newest)
    with patch.object(resume, "verify", wraps=resume.verify) as verify:
        facts["path"] = _error(checkpoint(where), ckpt_path=newest)
    facts["verified"] = verify.call_count
    facts["missing"] = _error(checkpoint(where), ckpt_path=where / "none.ckpt")
    facts["last"] = fit(plain(), checkpoint(where / "."), ckpt_path="last", steps=5)["from"]
    _flip(oldest)
    facts["all"] = _error(checkpoint(where), ckpt_path="last")
    facts["free"] = owner_of(str(where)) is None
    alone = folder() / f"async-agreement-of-{rank()}"
    fit(plain(), checkpoint(folder() / "async-agreement-of-0"), steps=3)
    facts["unseen"] = _error(checkpoint(alone), ckpt_path="last")
    return facts


@scenario
def async_rank_1_cannot_open() -> Facts:
    where = folder() / "async-half-open"
    usual = Checkpointer.open

    def open_(self: Checkpointer, path: str, **keywords: Any) -> None:
        if rank() == 1:
            raise OSError(28, "No space left on device")
        usual(self, path, **keywords)

    with patch.object(Checkpointer, "open", open_):
        facts: Facts = {"error": _error(checkpoint(where, format="sharded"))}
    facts["free"] = owner_of(str(where)) is None
    return facts


@scenario
def async_io_ranks() -> Facts:
    """The record of a stock ModelCheckpoint under the CheckpointIO."""
    where = folder() / "async-io-ranks"
    callback = ModelCheckpoint(where, "{step}", every_n_train_steps=3)
    fit(plain(), callback, plugins=[AsyncTorchCheckpointIO()], steps=3)
    torch.distributed.barrier()
    origin = describe(str(where / "step=3.ckpt")).origin
    return {"ranks": None if origin is None else origin.ranks}


@scenario
def async_displaced() -> Facts:
    """A best save is not written: what it displaced is the best again, on both ranks."""
    where = folder() / "async-displaced"
    callback = checkpoint(
        where, every_n_train_steps=1, monitor="step", mode="max", save_top_k=1, on_error="warn"
    )
    assert isinstance(callback, AsyncCheckpoint)
    books: list[list[str]] = []

    def limit(nbytes: int) -> None:
        callback.wait()
        torch.distributed.barrier()
        if rank() == 0:
            assert callback._session is not None
            assert callback._session._checkpointer is not None
            writer: Any = callback._session._checkpointer._delivery.writer
            limits = (nbytes, resource.RLIM_INFINITY)
            resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limits)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(plain(), Steps({2: lambda: limit(2000)}), callback, steps=3)
    books.append([Path(path).name for path in callback.best_k_models])
    return {"books": books, "best": Path(callback.best_model_path).name}


@scenario
def async_groups() -> Facts:
    """One sharded callback in two fits, each with a default process group of its own."""
    where, groups = folder() / "async-groups", [len(distributed_c10d._world.pg_map)]
    callback = checkpoint(where, format="sharded")
    fit(plain(), callback, steps=3)
    groups.append(len(distributed_c10d._world.pg_map))
    store = distributed_c10d._get_default_store()
    dist.barrier()
    dist.destroy_process_group()
    store = dist.PrefixStore("again", store)
    dist.init_process_group(
        "gloo", store=store, rank=rank(), world_size=world_size(), timeout=TIMEOUT
    )
    fit(plain(), callback, steps=6, ckpt_path=where / "step=3.ckpt")
    groups.append(len(distributed_c10d._world.pg_map))
    dist.barrier()
    return {"groups": groups, "names": sorted(path.name for path in where.iterdir())}
