"""`CompressedDDPPlugin` on two ranks: training, settings of DDP, trackers, saved states."""

from __future__ import annotations

import json
import os
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs
from replicas import of_all, require_compressed, require_equal, require_replicas, world_of
from scenarios.accelerating import Facts, Run, forget_accelerators
from scenarios.models import WIDTH
from scenarios.world import warnings
from torch import Tensor, nn
from wandb_runs import config, history

from lightning_dist import OneBitAdam
from lightning_dist.accelerate import AsyncStateCheckpointer, CompressedDDPPlugin, local_updates
from lightning_dist.base.versions import release
from lightning_dist.frameworks.accelerate import compression as roll_call
from lightning_dist.ranks import channel

pytest.importorskip("accelerate")


WEIGHT, BIAS = 16 * 256, 256  # elements; the bias stays uncompressed
INT8 = CompressedDDPPlugin("int8")
pytestmark = pytest.mark.on_ranks(2)


def trained(plugin: CompressedDDPPlugin | None = INT8, **given: Any) -> Facts:
    with Run(plugin, **given) as run:
        run.train(8)
        return run.facts()


def test_replicas_train_with_the_bytes_of_int8() -> None:
    """Attached by hand or in kwargs_handlers."""
    of_ddp, of_none = trained(None), trained(CompressedDDPPlugin("none"))
    by_hand, given = trained(), trained(by_hand=False)
    require_equal(of_none["parameters"], of_ddp["parameters"])
    require_equal(given["parameters"], by_hand["parameters"])
    stats = by_hand["stats"]
    assert stats["raw_bytes"] == 8 * 4 * (2 * WEIGHT + BIAS)
    assert stats["per_codec"]["int8"]["wire_bytes"] == 8 * 2 * (WEIGHT + 16 * 2)
    for name, value in of_ddp["parameters"].items():
        torch.testing.assert_close(by_hand["parameters"][name], value, rtol=0, atol=1e-2)
    for each in (by_hand, given):
        require_compressed(each, steps=8)


@pytest.mark.parametrize(
    ("given", "steps"),
    [({"gradient_accumulation_steps": 2}, 4), ({"mixed_precision": "bf16"}, 8)],
    ids=["accumulated", "bf16"],
)
def test_there_is_an_exchange_in_every_step(given: dict[str, Any], steps: int) -> None:
    require_compressed(trained(**given), steps=steps)


def test_residuals_are_unscaled() -> None:
    """A GradScaler whose scale doubles at every step gives the bits of a constant one."""
    found = []
    for growth_interval, scale in ((1000, 2.0**10), (1, 2.0**18)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        found.append(trained(scaler=scaler))
        assert scaler.get_scale() == scale
    constant, growing = found
    require_equal(growing["residuals"], constant["residuals"])
    require_equal(growing["parameters"], constant["parameters"])
    require_compressed(growing, steps=8)


@pytest.mark.parametrize("by_hand", [True, False])
def test_the_users_arguments_of_ddp_stay(by_hand: bool) -> None:
    given = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    with Run(handlers=[given], by_hand=by_hand) as run:
        run.train(2)
        (model,) = run.models
        assert model.find_unused_parameters
        assert model.gradient_as_bucket_view
        assert model.bucket_bytes_cap == 1 << 20
        assert len(model._comm_hooks) == 1


def test_optimizers_are_connected() -> None:
    def onebit(parameters: Any, lr: float) -> OneBitAdam:
        return OneBitAdam(parameters, lr=0.01, freeze_step=2)

    def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    refused = "codec 'dgc' gives the gradients momentum, and SGD has its own"
    with pytest.raises(ValueError, match=refused):
        Run(CompressedDDPPlugin("dgc"), by_hand=False, optimizer=momentum)
    with Run(CompressedDDPPlugin("sign"), by_hand=False, optimizer=onebit) as run:
        assert run.compression.reducers[0].adjustment is run.optimizers[0].optimizer
        run.train(4)
        require_replicas(run.facts())
        for clip in (run.accelerator.clip_grad_norm_, run.accelerator.clip_grad_value_):
            with pytest.raises(ValueError, match="clipping would clip OneBitAdam's momenta"):
                clip(run.models[0].parameters(), 1.0)


def test_a_model_may_be_prepared_again() -> None:
    with Run(by_hand=False) as run:
        run.train(1)
        (first,) = run.compression.reducers
        (model,), (optimizer,) = run.models, run.optimizers
        plain = run.accelerator.unwrap_model(model)
        run.accelerator.free_memory()
        run.models = [run.accelerator.prepare(plain)]
        run.optimizers = [run.accelerator.prepare(optimizer.optimizer)]
        run.train(2)
        assert first.closed
        found = run.facts()
    require_compressed(found, steps=2)


def test_several_processes_that_would_train_for_themselves() -> None:
    """On CPU without ACCELERATE_USE_CPU: Accelerate, of late, sees one process in each."""
    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=torch.cuda.is_available())
    if release(accelerate.__version__) < (1, 15) and accelerator.num_processes == 2:
        pytest.skip("this Accelerate takes the number of processes from the launcher")
    assert accelerator.num_processes == 1, "they know of each other"
    says = "WORLD_SIZE=2 and this Accelerator has num_processes=1"
    with pytest.raises(ValueError, match=says):
        CompressedDDPPlugin().attach(accelerator)
    forget_accelerators()


def test_what_accelerate_does_not_document_is_still_there() -> None:
    asked: list[type] = []

    class Handler(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: nn.Module) -> None:
            asked.append(type(model))

    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.ddp_handler is None, "where none was given"
    accelerator.ddp_handler = Handler(bucket_cap_mb=3)
    modules = [nn.Linear(WIDTH, 2) for _ in range(2)]
    prepared = accelerator.prepare(*modules)
    assert asked == [nn.parallel.DistributedDataParallel] * 2, "once for every prepared model"
    assert [model.bucket_bytes_cap for model in prepared] == [3 << 20] * 2
    for of_accelerator, module in zip(accelerator._models, modules, strict=True):
        assert of_accelerator is module, "_models are the modules before DDP wraps them"
    assert accelerator.init_handler is None
    assert accelerator.scaler is None
    assert accelerator.parallelism_config is None
    # Once Accelerate takes subclasses in kwargs_handlers, ours needs no subclass any more.
    with pytest.raises(KeyError):
        accelerate.Accelerator(cpu=True, kwargs_handlers=[Handler()])
    forget_accelerators()


class Notes(GeneralTracker):
    """A tracker that remembers."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.configuration: Facts = {}
        self.logged: list[tuple[int | None, Facts]] = []

    @property
    def tracker(self) -> Notes:
        return self

    def store_init_configuration(self, values: Facts) -> None:
        self.configuration |= values

    def log(self, values: Facts, step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


@pytest.mark.parametrize("by_hand", [True, False])
def test_trackers_get_bytes_and_configuration_from_rank_0(by_hand: bool) -> None:
    """The configuration is that of the other frameworks."""
    forget_accelerators()
    before = INT8.attach(accelerate.Accelerator(cpu=True)).configuration()
    notes = Notes()
    with Run(INT8, by_hand=by_hand, log_with=notes) as run:
        given = {"lr": 0.1, **(run.compression.configuration() if by_hand else {})}
        run.accelerator.init_trackers("project", config=given)
        run.compression.log(0)  # nothing was sent so far
        run.train(2)
        run.compression.log(step=2)
        (stats,) = run.compression.comm_stats()
        nested = dict(run.compression.reducers[0].comm_config())
    if dist.get_rank() == 1:
        assert (notes.logged, notes.configuration) == ([], {})
        return
    ((step, logged),), last = notes.logged, stats["last_step"]
    assert step == 2
    assert logged["comm/wire_bytes"] == last["wire_bytes"] > 0
    assert logged["comm/total_wire_bytes"] == stats["wire_bytes"] == 2 * last["wire_bytes"]
    assert logged["comm/compression_ratio"] == last["ratio"] > 1
    configuration = notes.configuration
    known = {"codec": "int8", "world_size": 2, "topology": "1 node x 2 ranks"}
    known["versions/torch"] = version("torch")
    given = {"lr": 0.1, **{f"lightning_dist/{name}": value for name, value in known.items()}}
    assert configuration | given == configuration
    assert {type(value) for value in configuration.values()} <= {str, int, float, bool}
    of_ranks = {f"lightning_dist/{n}" for n in ("exchange", "topology", "nodes", "world_size")}
    assert set(before) == {*configuration} - of_ranks - {"lr"}
    names = [*(f"versions/{name}" for name in nested.pop("versions")), *nested]
    assert set(configuration) == {f"lightning_dist/{name}" for name in names} | {"lr"}


@pytest.mark.slow
def test_wandb_through_accelerate(tmp_path: Path) -> None:
    """Accelerate's own tracker, offline."""
    wandb = pytest.importorskip("wandb")
    options = {"dir": str(tmp_path), "mode": "offline", "settings": {"silent": True}}
    with Run(INT8, by_hand=False, log_with="wandb") as run:
        run.accelerator.init_trackers("p", config={"lr": 0.1}, init_kwargs={"wandb": options})
        for step in range(2):
            run.train(1)
            run.compression.log(step)
        wanted, metrics = run.compression.reducers[0].comm_config(), run.compression.metrics()
        assert of_all(metrics) == [metrics] * 2, "rank 1 sends as much and logs nothing"
        if dist.get_rank() == 1:
            return
        run.accelerator.get_tracker("wandb").finish()
        wandb.teardown()
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found, logged = config(path), history(path)
    assert found["lr"] == 0.1
    assert found["lightning_dist/min_compress_numel"] == "None"
    for name in ("codec", "world_size"):
        assert found[f"lightning_dist/{name}"] == wanted[name]
    assert found["lightning_dist/versions/lightning_dist"] == wanted["versions"]["lightning_dist"]
    last = {name: json.loads(values[-1]) for name, values in logged.items() if "comm/" in name}
    assert last == metrics
    total = [json.loads(value) for value in logged["comm/total_wire_bytes"]]
    assert total == [metrics["comm/wire_bytes"] * steps for steps in (1, 2)]


pytest.importorskip("accelerate")


def saving(way: str, accelerator: Any) -> AbstractContextManager[Any]:
    """What saves and loads."""
    if way == "save_state":
        return nullcontext(accelerator)
    return AsyncStateCheckpointer(accelerator)


@pytest.mark.parametrize("way", ["save_state", "AsyncStateCheckpointer"])
def test_residuals_of_every_rank_and_model_come_back(way: str, tmp_path: Path) -> None:
    """4 + 4 steps with a load between are 8 steps, bit for bit."""
    target = str(tmp_path / "checkpoint")
    with Run(models=2) as whole:
        whole.train(4)
        with saving(way, whole.accelerator) as state:
            state.save_state(target)
        whole.train(4)
        expected = whole.facts()
    dist.barrier()
    with Run(models=2, by_hand=False) as resumed:
        for _ in range(4):
            next(resumed.batches)
        with saving(way, resumed.accelerator) as state:
            with warnings() as messages:
                state.load_state(target)
            resumed.train(4)
        found = resumed.facts()
    require_equal(found["parameters"], expected["parameters"])
    require_equal(found["residuals"], expected["residuals"])
    assert found["step"] == expected["step"] == [8, 8]
    assert any(residual.any() for residual in expected["residuals"].values())
    assert messages == []
    owed = of_all(expected["residuals"]["0.0.weight"])
    assert not torch.equal(*owed), "every rank owes something of its own"
    files = set(os.listdir(target))
    assert {"lightning_dist_reducer_0.bin", "lightning_dist_reducer_1.bin"} <= files
    assert "lightning_dist_reducer_2.bin" not in files


class Adversaries(Run):
    """A generator and a critic with an optimizer each, trained in turn."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        generator = nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH))
        critic = nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 1))
        super().__init__(by_hand=False, models=[generator, critic], optimizer=torch.optim.Adam)

    def learn(self, batches: list[Tensor], *, quiet: bool = True) -> None:
        """quiet: nothing of the critic travels while the generator learns."""
        generator, critic = self.models
        of_generator, of_critic = self.optimizers
        for real in batches:
            made = generator(real.flip(0))
            judged = critic(torch.cat([real, made.detach()]))
            self.accelerator.backward(judged[8:].mean() - judged[:8].mean())
            of_critic.step()
            of_critic.zero_grad()
            with self.accelerator.no_sync(critic) if quiet else nullcontext():
                self.accelerator.backward(-critic(made).mean())
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()


def test_adversaries_have_a_compression_each(tmp_path: Path) -> None:
    """A generator and a critic, two optimizers, in turn; bit for bit through a checkpoint."""
    draws = torch.Generator().manual_seed(dist.get_rank())
    batches = [torch.randn(8, WIDTH, generator=draws) for _ in range(4)]
    with Adversaries() as adversaries:
        adversaries.learn(batches)
        whole, stats = adversaries.facts(), adversaries.compression.comm_stats()
        total = adversaries.compression.metrics()["comm/total_wire_bytes"]
    with Adversaries() as first:
        first.learn(batches[:2])
        first.accelerator.save_state(str(tmp_path))
    dist.barrier()
    with Adversaries() as second:
        second.accelerator.load_state(str(tmp_path))
        second.learn(batches[2:])
        resumed = second.facts()
    numel = [WEIGHT + BIAS + WEIGHT + 16, 16 * 512 + 512 + 512 + 1]
    assert [each["steps"] for each in stats] == [4, 4]
    assert [each["raw_bytes"] for each in stats] == [4 * 4 * n for n in numel]
    assert all(each["ratio"] > 2 for each in stats)
    assert total == sum(each["wire_bytes"] for each in stats)
    assert whole["residuals"]["0.2.weight"].any()
    assert whole["residuals"]["1.2.weight"].any()
    require_equal(resumed["parameters"], whole["parameters"])
    require_equal(resumed["residuals"], whole["residuals"])
    first, second = of_all(whole)
    require_equal(first["parameters"], second["parameters"])
    for name in ("0.0.weight", "1.0.weight"):
        assert not torch.equal(first["residuals"][name], second["residuals"][name])


def test_without_no_sync_the_critic_exchanges_while_the_generator_learns() -> None:
    with Adversaries() as loud:
        loud.learn([torch.randn(8, WIDTH) for _ in range(4)], quiet=False)
        assert [each["steps"] for each in loud.compression.comm_stats()] == [4, 8]


def test_checkpoints_of_plain_ddp_load_and_ours_load_there(tmp_path: Path) -> None:
    plain, ours = str(tmp_path / "plain"), str(tmp_path / "ours")
    with Run(None) as run:
        run.train(2)
        run.accelerator.save_state(plain)
    dist.barrier()
    with Run() as run:
        run.train(2)
        owed = run.facts()["residuals"]
        with warnings() as messages:
            run.accelerator.load_state(plain)
        loaded = run.facts()
        run.train(2)
        run.accelerator.save_state(ours)
        saved = run.facts()
    dist.barrier()
    with Run(None) as run:
        run.accelerator.load_state(ours)
        require_equal(run.facts()["parameters"], saved["parameters"])
    assert any(residual.any() for residual in owed.values())
    assert not any(residual.any() for residual in loaded["residuals"].values())
    assert loaded["step"] == [0]
    if dist.get_rank() == 0:
        assert "holds no residuals for compressed model 0" in messages[0]
    else:
        assert messages == []


def test_a_folder_that_one_rank_sees_is_refused_by_all(tmp_path: Path) -> None:
    """Rank 1 has a folder of its own, without the residuals of all ranks."""
    target = str(tmp_path / str(dist.get_rank()))
    with Run() as run:
        run.train(1)
        run.accelerator.save_state(target)
        says = r"ranks \[1\] do not see the files that rank 0 sees"
        with pytest.raises(ValueError, match=says):
            run.accelerator.load_state(target)
        run.accelerator.project_configuration.save_on_each_node = True
        with pytest.raises(ValueError, match="save_on_each_node=True cannot take effect"):
            run.accelerator.save_state(target)


def test_end_training_waits_for_checkpoints_and_stops_threads(tmp_path: Path) -> None:
    with Run(by_hand=False) as run:
        state = AsyncStateCheckpointer(run.accelerator)
        run.train(1)
        state.save_state(tmp_path / "at_the_end")
        (reducer,) = run.compression.reducers
        run.accelerator.end_training()
        assert state.last_committed is not None
        assert (tmp_path / "at_the_end" / "manifest.json").exists()
        assert reducer.closed


@pytest.mark.slow
@pytest.mark.on_ranks(3)
def test_three_ranks_go_on_with_what_two_owe(tmp_path: Path) -> None:
    saved = None
    with world_of(2) as is_of_two:
        if is_of_two:
            with Run() as run:
                run.train(3)
                run.accelerator.save_state(str(tmp_path / "of_two"))
                saved = run.facts()
    first, second, _ = of_all(saved)
    with Run() as run:
        run.accelerator.load_state(str(tmp_path / "of_two"))
        found = run.facts()
        run.train(1)
    require_equal(found["parameters"], first["parameters"])
    assert found["step"] == [3]
    for name, residual in found["residuals"].items():
        mean = (first["residuals"][name] + second["residuals"][name]) / 2
        torch.testing.assert_close(residual, mean)
        assert name != "0.0.weight" or residual.any()
    require_replicas({**found, "digests": ["", *run.digests]})


@pytest.mark.parametrize("codec", ["int8", "bf16", "local steps"])
def test_a_state_that_rank_0_saves_alone(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without residuals that works, as without a plugin; with them it is said, and no hang."""
    monkeypatch.setattr(channel, "_LONG", 0.2)
    monkeypatch.setattr(roll_call, "_SURE", 0.2)
    limit: dict[str, Any] = {"exchange_timeout": 5.0}
    is_local = codec == "local steps"
    with Run(None if is_local else CompressedDDPPlugin(codec, **limit)) as run:
        step = run.train
        if is_local:
            settings = {"method": "local_sgd", "sync_every": 1, **limit}
            updates = local_updates(run.accelerator, *run.models, *run.optimizers, **settings)

            def step(batches: int) -> None:
                for _ in range(batches):
                    run.train(1)
                    updates.step()

        step(2)
        if dist.get_rank() == 0 and codec != "bf16":
            each = "a worker" if is_local else "residuals"
            with pytest.raises(ValueError, match=f"each has {each} to save; rank 1 trains on"):
                run.accelerator.save_state(str(tmp_path))
        elif dist.get_rank() == 0:
            run.accelerator.save_state(str(tmp_path))
        if codec == "bf16":
            step(3)
        elif dist.get_rank() == 1:
            with pytest.raises(RuntimeError, match=r"within 5 s|closed by peer"):
                step(1)
        if is_local:
            updates.close()


@pytest.mark.on_ranks(1)
def test_one_process_is_warned_of_once() -> None:
    with warnings() as found:
        trained()
    (warned,) = found
    assert "One process: nothing is exchanged or compressed; int8 takes effect" in warned
