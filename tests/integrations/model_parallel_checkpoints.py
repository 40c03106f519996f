"""What ranks save and load of sharded models: started by `test_model_parallel_checkpoints.py`.

torchrun model_parallel_checkpoints.py FOLDER SCENARIO...; leaves facts of every scenario.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from elastic_data import LOADERS
from elastic_runs import FailAt, Fault, Numbered, ShardedNet, make_loader
from elastic_runs import fit as elastic_fit
from lightning.pytorch.callbacks import LambdaCallback
from model_parallel_ranks import (
    WIDTH,
    Module,
    dist_size,
    fitted,
    held,
    ours,
    same,
    weights,
)
from model_parallel_ranks import trainer as make_trainer
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_dist import AsyncCheckpoint
from lightning_dist.checkpoint.reading import consolidate
from lightning_dist.checkpoint.reading import load as load_checkpoint
from lightning_dist.checkpoint.snapshot.plan import Plan
from lightning_dist.checkpoint.snapshot.shards import LazyState
from lightning_dist.checkpoint.snapshot.snapshot import Snapshots

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")  # tests import this module too
SAVED = FOLDER / "epoch"
"""Checkpoints of two replicas of two shards; other worlds load them."""


class Seen(L.Callback):
    """What a training begins with: whole weights, optimizer states and residuals."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        states = trainer.optimizers[0].state
        self.weights = {n: whole(p) for n, p in pl_module.named_parameters()}
        self.exp_avg = {n: whole(states[p]["exp_avg"]) for n, p in pl_module.named_parameters()}
        self.steps = sorted({float(each["step"]) for each in states.values()})
        strategy: Any = trainer.strategy
        state = None if strategy._exchange is None else strategy._exchange.state_dict()
        self.residuals = None if state is None else dict(state["residuals"])


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.detach().full_tensor().clone()
    return found


def saving(folder: Path, **given: Any) -> AsyncCheckpoint:
    settings = {"format": "sharded", "save_top_k": -1, "filename": "{epoch}", **given}
    return AsyncCheckpoint(folder, **settings)


def fit(strategy: Any, *callbacks: Any, **given: Any) -> tuple[L.Trainer, Module]:
    return fitted(strategy, enable_checkpointing=True, callbacks=[*callbacks], **given)


def resume() -> dict[str, Any]:
    """Two epochs in one go, and with a checkpoint between them."""
    straight, expected = fitted(ours("int4"))
    with pytest.MonkeyPatch.context() as patch:
        copied = watch_copies(patch)
        fit(ours("int4"), saving(SAVED), max_epochs=1)
        read = watch_reads(patch)
        again, got = fitted(ours("int4"), ckpt_path=SAVED / NAME)  # no AsyncCheckpoint is needed
    before, after = held(straight.strategy), held(again.strategy)
    manifest = json.loads((SAVED / NAME / "manifest.json").read_text())["body"]
    return {
        "equal": same(weights(expected), weights(got)),
        "residuals": same(before, after) and any(bool(part.any()) for part in after),
        "steps": again.strategy._reducer.step,
        "copied": copied,
        "read": sum(read),
        "bytes": [file["nbytes"] for file in manifest["files"]],
    }


NAME = "epoch=0.ckpt"


def watch_copies(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes that each save copies at the trigger, and while training goes on."""
    copied: list[tuple[int, int]] = []
    usual = Snapshots.take

    def take(self: Snapshots, save: Any, divided: Plan, owned: Any) -> None:
        runs = divided.now, divided.later
        copied.append(tuple(sum(run.piece.nbytes for run in each) for each in runs))
        usual(self, save, divided, owned)

    patch.setattr(Snapshots, "take", take)
    return copied


def watch_reads(patch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each part of a tensor that is read by itself."""
    read: list[int] = []
    usual = LazyState.run

    def run(self: LazyState, value: Tensor, start: int, numel: int) -> Tensor:
        read.append(numel * value.element_size())
        return usual(self, value, start, numel)

    patch.setattr(LazyState, "run", run)
    return read


def load(*replicas_of: int) -> dict[int, Any]:
    """What this world begins with, from what two replicas of two shards have saved."""
    found = {}
    for replicas in replicas_of or (4,):
        seen = Seen()
        strategy = ours("int4", replicate_size=replicas)
        fit(strategy, saving(FOLDER / "other"), seen, ckpt_path=SAVED / NAME)
        found[replicas] = {key: vars(seen)[key] for key in ("weights", "exp_avg", "steps")}
        found[replicas]["residuals"] = seen.residuals
    return found


def load_others() -> dict[int, Any]:
    return load(1, 2)


def tensor_parallel() -> dict[str, Any]:
    """Layers divided in both dimensions: what is saved, and what other meshes begin with.

    Of replicas and tensor-parallel ranks.
    """
    found: dict[str, Any] = {}
    others = {(1, 2): [(2, 2)], (2, 2): [(2, 1), (4, 1)], (2, 1): [(2, 2)]}
    for mesh, loaded_by in others.items():
        folder = FOLDER / f"tensor_parallel-{mesh}"
        _, module = fit(on(*mesh), saving(folder))
        expected = {name: whole(p) for name, p in module.named_parameters()}
        states = module.optimizers().optimizer.state
        exp_avg = {n: whole(states[p]["exp_avg"]) for n, p in module.named_parameters()}
        saved = load_checkpoint(str(folder / "epoch=1.ckpt"))
        found[f"saved by {mesh}"] = equal(saved["state_dict"], expected)
        for other in loaded_by:
            seen, case = Seen(), f"saved by {mesh}, loaded by {other}"
            given = {"max_epochs": 3, "ckpt_path": folder / "epoch=1.ckpt"}
            fitted(on(*other), callbacks=[seen], **given)
            found[case] = equal(seen.weights, expected) and equal(seen.exp_avg, exp_avg)
            if mesh[0] == 2 and seen.residuals is not None:
                before = saved["lightning_dist"]["residuals"]
                assert seen.residuals.keys() == before.keys() == expected.keys()
                found[f"{case}, residuals"] = all(
                    rows.any() and (torch.equal if other[0] == 2 else near_in_mean)(rows, before[n])
                    for n, rows in seen.residuals.items()
                )
    return found


def on(replicas: int, tensors: int) -> Any:
    return ours("int4", replicate_size=replicas, tensor_parallel_size=tensors)


def near_in_mean(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.mean(0), b.mean(0))


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


class Tied(Module):
    """Its first and last layer have one weight."""

    def configure_model(self) -> None:
        if self.blocks is not None:
            return
        torch.manual_seed(3)
        first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        last.weight = first.weight
        self.blocks = nn.Sequential(first, nn.BatchNorm1d(WIDTH), last)
        fully_shard(self.blocks, mesh=self.device_mesh["data_parallel"])


class AfterSteps(L.Callback):
    """Whole weights after every step."""

    def __init__(self) -> None:
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
        parameters = pl_module.named_parameters(remove_duplicate=False)
        self.weights[trainer.global_step] = {name: whole(p) for name, p in parameters}


def tied() -> dict[str, bool]:
    """Tied weights and buffers, copied while training goes on and at once."""
    straight = Tied()
    fitted(ours(), straight)
    found = {}
    for snapshot in ("overlap", "blocking"):
        folder, steps = FOLDER / f"tied-{snapshot}", AfterSteps()
        kept = saving(folder, snapshot=snapshot, every_n_train_steps=1, filename="{step}")
        fit(ours(), steps, kept, module=Tied())
        saved = {n: load_checkpoint(str(folder / f"step={n}.ckpt")) for n in steps.weights}
        names = [name for name in saved[1]["state_dict"] if name in steps.weights[1]]
        found[f"{snapshot}: weights"] = len(names) == 5 and all(
            equal({name: saved[n]["state_dict"][name] for name in names}, steps.weights[n])
            for n in saved
        )
        first, last = (saved[1]["state_dict"][f"blocks.{n}.weight"] for n in (0, 2))
        found[f"{snapshot}: tied"] = first.data_ptr() == last.data_ptr()
        found[f"{snapshot}: buffers"] = "blocks.1.running_mean" in saved[1]["state_dict"]
        again = Tied()
        fit(ours(), saving(FOLDER / "again"), module=again, ckpt_path=folder / "step=4.ckpt")
        found[f"{snapshot}: goes on"] = same(weights(straight), weights(again))
    return found


def others() -> dict[str, bool]:
    """What else a strategy loads, and sharded checkpoints where there is no AsyncCheckpoint."""
    first, module = fit(ours("int4"), saving(FOLDER / "own"), max_epochs=1)
    expected = {name: whole(p) for name, p in module.named_parameters()}
    straight, _ = fitted(ours("int4"))
    own = FOLDER / "own" / NAME
    first.save_checkpoint(FOLDER / "theirs.ckpt")  # by torch.distributed.checkpoint
    if dist.get_rank() == 0:
        consolidate(str(own), str(FOLDER / "single.ckpt"))
    dist.barrier()
    found = {}
    for name in ("theirs.ckpt", "single.ckpt"):
        seen = Seen()
        fit(ours("int4"), saving(FOLDER / "again"), seen, ckpt_path=FOLDER / name)
        found[name] = equal(seen.weights, expected) and seen.steps == [4.0]
    alone = Module()
    make_trainer(ours("int4"), limit_val_batches=1).validate(alone, ckpt_path=own, verbose=False)
    loaded = {name: whole(p) for name, p in alone.named_parameters()}
    found["validation"] = equal(loaded, expected)
    _, again = fit(ours("int4"), saving(FOLDER / "again"), ckpt_path=own)
    found["goes on"] = same(weights(straight.lightning_module), weights(again))
    return found


FAULTS = {
    "on_after_backward": 1,
    "on_before_optimizer_step": 3,
    "on_train_batch_end": 5,
    "on_validation_batch_end": 6,
    "on_train_epoch_end": 6,
    "on_train_end": 9,
}
"""Optimizer steps before each hook at which a run fails, on all ranks."""


def elastic_run(
    name: str, *, codec: str, fault: str = "", loader: Any = None, **given: Any
) -> dict[str, Any]:
    """A start of a run; weights and residuals at its end."""
    noisy, tensors = codec != "none", given.get("tensor_parallel_size", 1)
    strategy = ours(codec, **given)
    module = ShardedNet(noisy=noisy)
    callbacks = [FailAt(fault, FAULTS[fault])] if fault else []
    expected = pytest.raises(Fault, match=f"^{fault} at step") if fault else nullcontext()
    with expected:
        elastic_fit(
            FOLDER / name,
            *callbacks,
            loader=loader or (lambda: make_loader(Numbered(noisy=noisy), batch_size=4 * tensors)),
            module=module,
            strategy=strategy,
            devices=dist_size(),
            elastic={"format": "sharded"},
        )
    dist.barrier()
    if fault:
        return {}
    found = {n: whole(p) for n, p in module.named_parameters()}
    states: Any = module.optimizers().optimizer.state
    moments = [whole(each["momentum_buffer"]) for each in states.values()]
    residuals = held_here(strategy)
    return {"weights": found, "momenta": moments, "residuals": residuals}


def held_here(strategy: Any) -> dict[str, Tensor]:
    """Residuals of this rank, those in 8 bits as their scales and codes."""
    if strategy.shards is None:
        return dict(strategy._reducer.residuals)
    found = strategy.shards._errors.items()
    return {f"{name} {kind}": x.clone() for name, (_, of) in found for kind, x in enumerate(of)}


def restarts() -> dict[str, Any]:
    """Runs that fail at one hook after the other, on the same mesh."""
    return restarted("", codec="int8", replicate_size=2)


def restarts_of_parts() -> dict[str, Any]:
    """The same with a part of each layer on each rank of a replica."""
    given = {"replicate_size": 2, "tensor_parallel_size": 2}
    return restarted(" parts", codec="powersgd:rank=1", **given)


def restarts_of_shards() -> dict[str, Any]:
    """The same with one replica, quantised over all ranks."""
    codec = "int8:block_size=16"
    return restarted(" shards", codec=codec, parameters=codec, error_feedback=True)


def restarted(name: str, **given: Any) -> dict[str, Any]:
    straight = elastic_run(f"straight{name}", **given)
    for hook in FAULTS:
        elastic_run(f"restarted{name}", fault=hook, **given)
    return {"straight": straight, "restarted": elastic_run(f"restarted{name}", **given)}


def own_positions() -> dict[str, Any]:
    """Parts of layers, and loaders that keep their position on each data-parallel rank."""
    given = {"codec": "int8", "replicate_size": 2, "tensor_parallel_size": 2}
    given["loader"] = LOADERS["stateful stream"]
    straight = elastic_run("own straight", **given)
    elastic_run("own", fault="on_train_batch_end", **given)
    return {"straight": straight["weights"], "restarted": elastic_run("own", **given)["weights"]}


def meshes() -> dict[str, Any]:
    """Runs that go on with other numbers of replicas and shards; four ranks begin, two end them.

    One has parts of layers on two ranks, until whole layers end it.
    """
    given = {"codec": "none", "replicate_size": 2}
    parts = {**given, "tensor_parallel_size": 2}
    if dist_size() == 4:
        straight = elastic_run("exact", **given)
        elastic_run("meshes", fault="on_train_batch_end", **given)
        elastic_run("meshes of parts", fault="on_train_batch_end", **parts)
        return {"straight": straight}
    for name, of in (("meshes", given), ("meshes of parts", parts)):
        elastic_run(name, fault="on_validation_batch_end", **{**of, "replicate_size": 1})
    return {name: elastic_run(name, **given) for name in ("meshes", "meshes of parts")}


def shards_elsewhere() -> dict[str, bool]:
    """Whether two ranks begin with the mean error of each weight that four have saved."""
    given = {"parameters": "int8", "error_feedback": True}
    if dist_size() == 4:
        fit(ours("int4", **given), saving(FOLDER / "shards"), max_epochs=1)
        return {}
    path, begun = FOLDER / "shards" / NAME, []
    seen = LambdaCallback(on_train_start=lambda t, _: begun.append(t.strategy.shards.state_dict()))
    fit(ours("int4", **given), saving(FOLDER / "other"), seen, ckpt_path=path)
    if begun[0] is None:
        return {}
    saved, found = load_checkpoint(str(path)), begun[0]["errors"]
    before = saved["lightning_dist"]["errors"]
    return {n: owe_the_same(saved["state_dict"][n], before[n], found[n]) for n in before}


def owe_the_same(weight: Tensor, *states: list[Tensor]) -> bool:
    """Whether errors of different ranks have one mean, to the rounding to 8 bits."""
    before, after = (codes.double() * scales.double() for scales, codes in states)
    a, b = (
        error.mean(0).flatten(1)[:, : -(-len(weight) // error.shape[1]) * weight.shape[1]]
        for error in (before, after)
    )
    near = (a.flatten()[: weight.numel()] - b.flatten()[: weight.numel()]).abs()
    return bool(a.any()) and bool((near <= 0.0041 * after.abs().max()).all())


class Reshaped(torch.optim.SGD):
    """Keeps something of another shape than its parameter."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["column"] = parameter.detach().unsqueeze(-1)
        return loss


def refusals() -> dict[str, str]:
    """Messages by what is wrong."""
    cases: dict[str, Any] = {
        "single": lambda: fit(ours(), AsyncCheckpoint(FOLDER / "single")),
        "shapes": lambda: fit(ours(), saving(FOLDER / "x"), module=Module(optimizer=Reshaped)),
        "damaged": lambda: fit(ours(), saving(FOLDER / "x"), ckpt_path=damaged()),
    }
    found = {}
    for name, case in cases.items():
        try:
            case()
            found[name] = ""
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def damaged() -> Path:
    """A copy with one bit of the last rank's shard turned over."""
    copy = FOLDER / "damaged.ckpt"
    if dist.get_rank() == 0:
        shutil.copytree(SAVED / NAME, copy)
        shard = sorted(copy.glob("shard-*"))[-1]
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    dist.barrier()
    return copy


def main() -> None:
    torch.set_num_threads(1)
    for name in sys.argv[2:]:
        facts = globals()[name]()
        torch.save(facts, FOLDER / f"{name}.{os.environ['WORLD_SIZE']}.{os.environ['RANK']}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
