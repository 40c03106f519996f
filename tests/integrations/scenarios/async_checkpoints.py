"""AsyncCheckpoint on several ranks: resume, failures, refusals."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_dist import AsyncCheckpoint, AsyncTorchCheckpointIO
from lightning_dist.checkpoint.disk.errors import CheckpointError
from lightning_dist.checkpoint.disk.folder_owner import LOCK
from scenarios.catalogue import Facts, folder, rank, scenario
from scenarios.fitting import compressed, digest, make_trainer, plain, residuals
from scenarios.models import WIDTH, Regression

STRATEGIES: dict[str, Callable[[], Any]] = {
    "ddp": plain,
    "int8": lambda: compressed(min_compress_numel=100, bucket_cap_mb=0.001),
}
FORMATS = ("single", "sharded")
STEPS, HALF = 6, 3  # of 4 batches an epoch: the half is in mid-epoch


class ByStep(Regression):
    """The data of a step depend on its number and the rank, so that any step can be the first."""

    def __init__(self) -> None:
        super().__init__(optimizer="adam")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * self.global_step + rank())
        x = torch.randn(8, WIDTH, generator=generator)
        return nn.functional.mse_loss(self(x), x.flip(1))


class Steps(L.Callback):
    """A digest of the parameters and of the optimizer after every step; and what to do then."""

    def __init__(self, actions: dict[int, Callable[[], None]] | None = None) -> None:
        self.actions = actions or {}
        self.digests: dict[int, str] = {}

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.actions.get(trainer.global_step, lambda: None)()

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        moments = nn.ParameterList(
            value
            for state in trainer.optimizers[0].state.values()
            for value in state.values()
            if value.is_floating_point()
        )
        self.digests[trainer.global_step] = digest(module) + digest(moments)


def fit(
    strategy: Any,
    *callbacks: L.Callback,
    model: L.LightningModule | None = None,
    ckpt_path: Any = None,
    steps: int = STEPS,
    **arguments: Any,
) -> Facts:
    """Fit; what every step left, and what is owed at the end."""
    observed = next((c for c in callbacks if isinstance(c, Steps)), None) or Steps()
    others = [c for c in callbacks if c is not observed]
    trainer = make_trainer(
        strategy,
        max_steps=steps,
        max_epochs=-1,
        callbacks=[observed, *others],
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in others),
        **arguments,
    )
    trainer.fit(model or ByStep(), ckpt_path=ckpt_path)
    owed = residuals(trainer.strategy) if hasattr(trainer.strategy, "_reducer") else {}
    return {"digests": observed.digests, "residuals": owed, "from": str(trainer.ckpt_path)}


def names(where: Path) -> list[str]:
    return sorted(name for name in os.listdir(where) if name != LOCK)


def checkpoint(where: Path, **arguments: Any) -> AsyncCheckpoint:
    arguments = {"every_n_train_steps": HALF, "save_top_k": -1, "writer": "process", **arguments}
    return AsyncCheckpoint(where, "{step}", **arguments)


@scenario
def async_resume() -> Facts:
    """6 steps in one go, and its checkpoint of step 3 resumed by path and as the last one."""
    facts: Facts = {}
    for name, strategy in STRATEGIES.items():
        for format in FORMATS:
            where = folder() / f"async-{name}-{format}"
            whole = fit(strategy(), checkpoint(where, format=format))
            path = where / f"step={HALF}.ckpt"
            resumed = fit(strategy(), checkpoint(where / "again", format=format), ckpt_path=path)
            facts[f"{name} {format}"] = {
                "whole": whole,
                "resumed": resumed,
                "names": names(where),
                "shards": sorted(file.stat().st_size for file in path.glob("shard-*")),
            }
            torch.distributed.barrier()
    last = checkpoint(folder() / "async-int8-sharded")
    facts["last"] = fit(compressed(), last, ckpt_path="last", steps=STEPS + 2)
    return facts


@scenario
def async_books() -> Facts:
    """A disk that is full for a while: what every rank knows of it, with either policy."""
    facts: Facts = {}
    for format in FORMATS:
        for breaks in range(2 if format == "sharded" else 1):
            for on_error in ("warn", "raise"):
                name = f"{format} {breaks} {on_error}"
                facts[name] = _full_for_a_while(name, format, on_error, breaks=breaks)
                torch.distributed.barrier()
    return facts


def _full_for_a_while(name: str, format: Any, on_error: Any, *, breaks: int) -> Facts:
    """Step 2 is not written, and with "warn" 3 and 4 are, and the last one, 5, is not.

    With "raise" 2 is the last one: between the steps rank 0 raises alone.
    """
    where = folder() / f"async-full-{name.replace(' ', '-')}"
    callback = checkpoint(
        where, every_n_train_steps=1, save_top_k=1, save_last=True, format=format, on_error=on_error
    )
    books: list[list[str]] = []

    def limit(nbytes: int) -> None:
        callback.wait()
        torch.distributed.barrier()
        if rank() == breaks:
            assert callback._session is not None
            assert callback._session._checkpointer is not None
            writer: Any = callback._session._checkpointer._delivery.writer
            limits = (nbytes, resource.RLIM_INFINITY)
            resource.prlimit(writer.pid, resource.RLIMIT_FSIZE, limits)

    def note() -> None:
        callback.wait()
        torch.distributed.barrier()
        found = (callback.best_model_path, callback.last_model_path)
        books.append([*(Path(path).name for path in found), *names(where)])

    def mend() -> None:
        limit(resource.RLIM_INFINITY)

    def full() -> None:
        limit(2000)

    actions = {1: full, 2: mend, 3: note, 4: full}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error, steps = "", Steps(actions)
        try:
            fit(plain(), steps, callback, steps=5 if on_error == "warn" else 2)
        except CheckpointError as raised:
            error = str(raised)
    note() if on_error == "warn" else None
    said = [str(each.message) for each in caught if "was not written" in str(each.message)]
    return {
        "books": books,
        "error": error.replace(str(where), "FOLDER"),
        "said": [text.replace(str(where), "FOLDER") for text in said],
        "steps": list(steps.digests),
        "names": names(where),
    }


@scenario
def async_refusals() -> Facts:
    """On all ranks, and before anything has changed."""
    facts: Facts = {}
    path = folder() / "async-a-file"
    path.write_text("a file")
    for format in FORMATS:
        facts[f"file {format}"] = _refused(plain(), checkpoint(path, format=format))
    saved = folder() / "async-ddp-sharded" / f"step={HALF}.ckpt"
    model = Regression(hidden=7)
    before = digest(model)
    callback = checkpoint(folder() / "async-other")
    facts["other model"] = _refused(plain(), callback, model=model, ckpt_path=saved)
    facts["changed"] = digest(model) != before
    return facts


def _refused(*arguments: Any, **keywords: Any) -> str:
    try:
        fit(*arguments, **keywords)
    except ValueError as error:
        return str(error).replace(str(folder()), "FOLDER")
    return "nobody refused it"


@scenario
def async_io() -> Facts:
    """AsyncTorchCheckpointIO with DDPStrategy and ModelCheckpoint, as Lightning has them."""
    where, plain_where = folder() / "async-io", folder() / "sync-io"
    for place, plugins in ((where, [AsyncTorchCheckpointIO()]), (plain_where, [])):
        callback = ModelCheckpoint(place, "{step}", every_n_train_steps=HALF, save_top_k=1)
        whole = fit(plain(), callback, plugins=plugins)
    path = where / f"step={STEPS}.ckpt"
    resumed = fit(plain(), ckpt_path=path, plugins=[AsyncTorchCheckpointIO()], steps=STEPS + 2)
    stock = fit(plain(), ckpt_path=plain_where / f"step={STEPS}.ckpt", plugins=[], steps=STEPS + 2)
    return {"whole": whole, "resumed": resumed, "stock": stock, "names": names(where)}
