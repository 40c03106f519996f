"""Sharded models under AsyncCheckpoint and ElasticRestart: saved by all ranks, for any mesh."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from elastic_data import LOADERS
from elastic_runs import committed
from fsdp_models import require_same_debt, weights
from lightning.pytorch.callbacks import LambdaCallback
from model_parallel_runs import (
    BATCHES,
    FAULTS,
    WIDTH,
    Module,
    Reshaped,
    elastic_start,
    fitted,
    held,
    ours,
    same,
    trainer,
    watch_reads,
    whole,
)
from needs import needs
from replicas import world_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from typer.testing import CliRunner

from lightning_dist import AsyncCheckpoint
from lightning_dist.base.features import FSDP
from lightning_dist.base.versions import release
from lightning_dist.checkpoint.disk.format import CorruptCheckpointError
from lightning_dist.checkpoint.reading import consolidate
from lightning_dist.checkpoint.reading import load as load_checkpoint
from lightning_dist.checkpoint.snapshot.plan import SnapshotPlan
from lightning_dist.checkpoint.snapshot.snapshot import Snapshots
from lightning_dist.cli import app

pytestmark = [needs(FSDP), pytest.mark.slow, pytest.mark.on_ranks(4, hosts=2)]
NAME = "epoch=0.ckpt"
INT8 = "int8:block_size=16"


class Seen(L.Callback):
    """What a training begins with: whole weights, optimizer states and residuals."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        states = trainer.optimizers[0].state
        self.weights = {n: whole(p) for n, p in pl_module.named_parameters()}
        self.exp_avg = {n: whole(states[p]["exp_avg"]) for n, p in pl_module.named_parameters()}
        self.steps = sorted({float(each["step"]) for each in states.values()})
        strategy: Any = trainer.strategy
        state = None if strategy.sync is None else strategy.sync.state_dict()
        self.residuals = None if state is None else dict(state["residuals"])


def saving(folder: Path, **given: Any) -> AsyncCheckpoint:
    settings = {"format": "sharded", "save_top_k": -1, "filename": "{epoch}", **given}
    return AsyncCheckpoint(folder, **settings)


def fit(strategy: Any, *callbacks: Any, **given: Any) -> tuple[L.Trainer, Module]:
    return fitted(strategy, enable_checkpointing=True, callbacks=[*callbacks], **given)


def saved(folder: Path) -> Path:
    """A checkpoint of two replicas of two shards, after an epoch."""
    fit(ours("int4"), saving(folder), max_epochs=1)
    return folder / NAME


def in_one_file(path: Path) -> Path:
    single = path.with_name("single.ckpt")
    if dist.get_rank() == 0:
        consolidate(str(path), str(single))
    dist.barrier()
    return single


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def watch_copies(patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Bytes that each save copies at the trigger, and while training goes on."""
    copied: list[tuple[int, int]] = []
    usual = Snapshots.take

    def take(self: Snapshots, save: Any, divided: SnapshotPlan, owned: Any) -> None:
        runs = divided.now, divided.later
        copied.append(
            tuple(sum(storage_range.target.nbytes for storage_range in each) for each in runs)
        )
        usual(self, save, divided, owned)

    patch.setattr(Snapshots, "take", take)
    return copied


def test_a_resumed_training_is_that_without_a_pause(tmp_path: Path) -> None:
    """What a rank copies, writes and reads is its share."""
    straight, expected = fitted(ours("int4"))
    with pytest.MonkeyPatch.context() as patch:
        copied = watch_copies(patch)
        path = saved(tmp_path)
        read = watch_reads(patch)
        again, got = fitted(ours("int4"), ckpt_path=path)  # no AsyncCheckpoint is needed
    assert same(weights(expected), weights(got))
    before, after = held(straight.strategy), held(again.strategy)
    assert same(before, after)
    assert any(part.any() for part in after)
    assert again.strategy.sync.reducer.step == 8
    numel, shards, steps = 2700, 2, 8
    assert sum(read) == 4 * 4 * numel // shards, "parameters, two of Adam, and residuals"
    states = 3 * 4 * numel + 4 * steps  # parameters, two of Adam, and its step of each
    ((now, later),) = copied
    assert abs(later - states / 4) < 64, "while training goes on"
    assert now < states / 4, "residuals"
    manifest = json.loads((path / "manifest.json").read_text())["body"]
    first, *others = (file["nbytes"] for file in manifest["files"])
    assert max(others) - min(others) < 100
    assert first - max(others) < 8000, "and rank 0 what is not of tensors"


def test_damage_is_found_by_the_program_and_by_ranks_that_load(tmp_path: Path) -> None:
    """One bit of the last rank's shard is turned over."""
    path, damaged, shard = saved(tmp_path), tmp_path / "damaged.ckpt", "shard-00003-of-00004-"
    single = in_one_file(path)
    if dist.get_rank() == 0:
        shutil.copytree(path, damaged)
        (last,) = damaged.glob(f"{shard}*")
        content = bytearray(last.read_bytes())
        content[len(content) // 2] ^= 1
        last.write_bytes(content)
        for each, says in ((path, f"ok {path}:"), (single, f"ok {single}:"), (damaged, shard)):
            result = CliRunner().invoke(app, ["ckpt", "verify", str(each)])
            assert result.exit_code == (each == damaged)
            assert says in " ".join(result.stdout.split())
    dist.barrier()
    with pytest.raises(CorruptCheckpointError, match=shard):
        fit(ours(), saving(tmp_path / "x"), ckpt_path=damaged)


def test_one_file_loads_into_the_plain_module(tmp_path: Path) -> None:
    single = in_one_file(saved(tmp_path))
    with world_of(1) as is_here:
        if is_here:
            found, _ = fitted("auto", Module(is_whole=True), ckpt_path=single)
            assert found.global_step == 4 + 4 * BATCHES


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mesh", "others"),
    [
        ((2, 1), [(4, 1), (2, 1), (1, 1), (2, 2)]),
        ((1, 2), [(2, 2)]),
        ((2, 2), [(2, 1), (4, 1)]),
    ],
    ids=["replicas", "tensors", "both"],
)
def test_any_mesh_loads_it(
    mesh: tuple[int, int], others: list[tuple[int, int]], tmp_path: Path
) -> None:
    """Of replicas and tensor-parallel ranks, with layers that are divided in both dimensions."""
    _, module = fit(on_mesh(*mesh), saving(tmp_path), max_epochs=1)
    state = torch.load(in_one_file(tmp_path / NAME), weights_only=True)
    assert equal(state["state_dict"], {name: whole(p) for name, p in module.named_parameters()})
    moments: Any = [whole(each["exp_avg"]) for each in module.optimizers().state.values()]
    assert same([each["exp_avg"] for each in optimizer_states(state)], moments)
    assert ("lightning_dist" in state) == (mesh[0] > 1)
    for other in others:
        require_loaded(tmp_path / NAME, state, *other)
    if mesh == (2, 1):
        with world_of(2) as is_here:
            for replicas in (2, 1) if is_here else ():
                require_loaded(tmp_path / NAME, state, replicas, 1)


def on_mesh(replicas: int, tensors: int) -> Any:
    return ours("int4", replicate_size=replicas, tensor_parallel_size=tensors)


def optimizer_states(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [*state["optimizer_states"][0]["state"].values()]


def require_loaded(path: Path, state: dict[str, Any], replicas: int, tensors: int) -> None:
    """Weights and optimizer states to the bit; replicas owe together what they owed."""
    seen, case = Seen(), f"{replicas} x {tensors} of {dist.get_world_size()} ranks"
    strategy = on_mesh(replicas, tensors)
    fit(strategy, saving(path.with_name("other")), seen, ckpt_path=path)
    assert equal(seen.weights, state["state_dict"]), case
    states = optimizer_states(state)
    assert seen.steps == [float(states[0]["step"])]
    assert same([*seen.exp_avg.values()], [each["exp_avg"] for each in states]), case
    if dist.get_rank() == 0:
        assert (seen.residuals is None) == (replicas == 1), "one replica compresses nothing"
    if "lightning_dist" not in state or seen.residuals is None:
        return
    before = state["lightning_dist"]["residuals"]
    assert seen.residuals.keys() == before.keys() == seen.weights.keys()
    for name, rows in seen.residuals.items():
        assert len(rows) == replicas
        assert rows.any(), (case, name)
        if replicas == len(before[name]):
            assert torch.equal(rows, before[name]), (case, name)
        else:
            torch.testing.assert_close(rows.mean(0), before[name].mean(0))


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


@pytest.mark.exhaustive
@pytest.mark.parametrize("snapshot", ["overlap", "blocking"])
def test_tied_weights_and_buffers_are_in_every_checkpoint(snapshot: str, tmp_path: Path) -> None:
    """Copied while training goes on, and at once."""
    straight, again, after = Tied(), Tied(), list[dict[str, Tensor]]()

    def note(_: L.Trainer, module: Any, *__: Any) -> None:
        parameters = module.named_parameters(remove_duplicate=False)
        after.append({name: whole(p) for name, p in parameters})

    fitted(ours(), straight)
    kept = saving(tmp_path, snapshot=snapshot, every_n_train_steps=1, filename="{step}")
    fit(ours(), LambdaCallback(on_train_batch_end=note), kept, module=Tied())
    states = {n: load_checkpoint(str(tmp_path / f"step={n}.ckpt")) for n in range(1, 9)}
    for state, own in zip(states.values(), after, strict=True):
        assert len(own) == 5
        assert equal({name: state["state_dict"][name] for name in own}, own)
    first, last = (states[1]["state_dict"][f"blocks.{n}.weight"] for n in (0, 2))
    assert first.data_ptr() == last.data_ptr()
    assert "blocks.1.running_mean" in states[1]["state_dict"]
    fit(ours(), saving(tmp_path / "again"), module=again, ckpt_path=tmp_path / "step=4.ckpt")
    assert same(weights(straight), weights(again))


@pytest.mark.exhaustive
def test_what_else_a_strategy_loads(tmp_path: Path) -> None:
    """And sharded checkpoints where there is no AsyncCheckpoint."""
    first, module = fit(ours("int4"), saving(tmp_path), max_epochs=1)
    expected = {name: whole(p) for name, p in module.named_parameters()}
    own, again = tmp_path / NAME, tmp_path / "again"
    first.save_checkpoint(tmp_path / "theirs.ckpt")  # by torch.distributed.checkpoint
    for path in (tmp_path / "theirs.ckpt", in_one_file(own)):
        seen = Seen()
        fit(ours("int4"), saving(again), seen, ckpt_path=path)
        assert equal(seen.weights, expected), path
        assert seen.steps == [4.0], path
    alone = Module()
    trainer(ours("int4"), limit_val_batches=1).validate(alone, ckpt_path=own, verbose=False)
    assert equal({name: whole(p) for name, p in alone.named_parameters()}, expected)


def test_errors_of_shards_go_to_another_number_of_ranks(tmp_path: Path) -> None:
    """Two ranks begin with the mean error of each weight that four have saved."""
    given = {"parameters": "int8", "error_feedback": True}
    fit(ours("int4", **given), saving(tmp_path), max_epochs=1)
    path, begun = tmp_path / NAME, []
    seen = LambdaCallback(on_train_start=lambda t, _: begun.append(t.strategy.shards.state_dict()))
    with world_of(2) as is_here:
        if is_here:
            fit(ours("int4", **given), saving(tmp_path / "other"), seen, ckpt_path=path)
    if dist.get_rank() > 0:
        assert not any(begun)
        return
    state = load_checkpoint(str(path))
    before, after = state["lightning_dist"]["errors"], begun[0]["errors"]
    assert len(before) == 4
    for name, errors in before.items():
        require_same_debt(state["state_dict"][name], errors, after[name])


def test_what_cannot_work_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="set format='sharded'"):
        fit(ours(), AsyncCheckpoint(tmp_path / "single"))
    says = "The state of Reshaped must have the shapes of its sharded parameters"
    with pytest.raises(ValueError, match=says):
        fit(ours(), saving(tmp_path / "x"), module=Module(optimizer=Reshaped))


def elastic_run(
    folder: Path, *, codec: str, fault: str = "", loader: Any = None, **given: Any
) -> dict[str, Any]:
    """A start of a run; weights, momenta and residuals at its end."""
    strategy, size = ours(codec, **given), 4 * given.get("tensor_parallel_size", 1)
    how = {"noisy": codec != "none", "loader": loader, "batch_size": size}
    module = elastic_start(folder, strategy, fault=fault, **how)
    if fault:
        return {}
    found = {n: whole(p) for n, p in module.named_parameters()}
    states: Any = module.optimizers().optimizer.state
    moments = [whole(each["momentum_buffer"]) for each in states.values()]
    return {"weights": found, "momenta": moments, "residuals": held_here(strategy)}


def held_here(strategy: Any) -> dict[str, Tensor]:
    """Residuals of this rank, those in 8 bits as their scales and codes."""
    if strategy.shards is None:
        return dict(strategy.sync.reducer.residuals)
    found = strategy.shards._errors.items()
    return {f"{name} {kind}": x.clone() for name, (_, of) in found for kind, x in enumerate(of)}


@pytest.mark.parametrize(
    "given",
    [
        {"codec": "int8", "replicate_size": 2},
        {"codec": INT8, "parameters": INT8, "error_feedback": True},
        pytest.param(
            {"codec": "powersgd:rank=1", "replicate_size": 2, "tensor_parallel_size": 2},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["replicas", "shards", "parts of layers"],
)
def test_a_restarted_run_is_that_without_a_fault(given: dict[str, Any], tmp_path: Path) -> None:
    """Failed at six hooks: samples, weights, momenta and residuals to the bit."""
    straight = elastic_run(tmp_path / "straight", **given)
    for hook in FAULTS:
        elastic_run(tmp_path / "restarted", fault=hook, **given)
    restarted = elastic_run(tmp_path / "restarted", **given)
    assert straight["residuals"]
    assert all(residual.any() for residual in straight["residuals"].values())
    assert equal(restarted["residuals"], straight["residuals"])
    assert equal(restarted["weights"], straight["weights"])
    assert len(straight["momenta"]) == 4
    assert all(map(torch.equal, restarted["momenta"], straight["momenta"]))
    require_same_samples(tmp_path / "restarted", tmp_path / "straight", worlds=[4] * 9)


@pytest.mark.exhaustive
def test_loaders_of_tensor_parallel_ranks_go_on(tmp_path: Path) -> None:
    """Those that keep their position on each data-parallel rank."""
    given = {"codec": "int8", "replicate_size": 2, "tensor_parallel_size": 2}
    given["loader"] = LOADERS["stateful stream"]
    straight = elastic_run(tmp_path / "straight", **given)
    elastic_run(tmp_path / "restarted", fault="on_train_batch_end", **given)
    restarted = elastic_run(tmp_path / "restarted", **given)
    assert equal(restarted["weights"], straight["weights"])
    require_same_samples(tmp_path / "restarted", tmp_path / "straight", worlds=[4] * 36)


@pytest.mark.skipif(
    release(torch.__version__) < (2, 11),
    reason="DTensor of this torch takes another mesh's group, where one process makes several",
)
def test_other_meshes_go_on(tmp_path: Path) -> None:
    """Two replicas of two ranks, then one of two, then two of one: rounded otherwise at most.

    One run has parts of layers on two ranks, until whole layers end it.
    """
    given = {"codec": "none", "replicate_size": 2}
    runs = {"whole layers": given, "parts of layers": {**given, "tensor_parallel_size": 2}}
    expected = elastic_run(tmp_path / "straight", **given)
    for name, of in runs.items():
        elastic_run(tmp_path / name, fault="on_train_batch_end", **of)
    os.environ["TORCHELASTIC_RUN_ID"] = "of two"
    with world_of(2) as is_here:
        for name, of in runs.items() if is_here else ():
            one = {**of, "replicate_size": 1}
            elastic_run(tmp_path / name, fault="on_validation_batch_end", **one)
            changed = elastic_run(tmp_path / name, **given)
            for kind in ("weights", "momenta"):
                torch.testing.assert_close(changed[kind], expected[kind], rtol=1e-5, atol=1e-6)
            require_same_samples(tmp_path / name, tmp_path / "straight", worlds=[4] * 4 + [2] * 5)


def require_same_samples(folder: Path, straight: Path, *, worlds: list[int]) -> None:
    found, expected = (committed(each / "account") for each in (folder, straight))
    assert [step.ids for step in found.values()] == [step.ids for step in expected.values()]
    assert [step.world for step in found.values()] == worlds
    assert all(len(step.hashes) == 1 for step in found.values()), "equal on all ranks"
