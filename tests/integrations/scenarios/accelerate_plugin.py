"""CompressedDDPPlugin on two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.tracking import GeneralTracker
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from lightning_dist import OneBitAdam
from lightning_dist.accelerate import Accelerator, AsyncState, CompressedDDPPlugin
from scenarios.accelerate_states import error_of, warnings
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, folder, rank, scenario, world_size
from scenarios.fitting import digest, parameters
from scenarios.models import WIDTH, Regression, loader

TOPK = CompressedDDPPlugin("topk:ratio=0.1", min_compress_numel=0)


class Run:
    """Models under Accelerate, trained step by step on rank-dependent data.

    Args:
        plugin: None for plain DDP.
        by_hand: attach it to Accelerate's own Accelerator.
    """

    def __init__(
        self,
        plugin: CompressedDDPPlugin | None = TOPK,
        *,
        by_hand: bool = True,
        handlers: Sequence[Any] = (),
        scaler: Any = None,
        models: int = 1,
        optimizer: Any = torch.optim.SGD,
        **arguments: Any,
    ) -> None:
        forget_accelerators()
        given = {"cpu": True, **arguments}
        if by_hand:
            self.accelerator = accelerate.Accelerator(kwargs_handlers=list(handlers), **given)
            self.compression = None if plugin is None else plugin.attach(self.accelerator)
        else:
            self.accelerator = Accelerator(kwargs_handlers=[*handlers, plugin], **given)
            self.compression = self.accelerator.compression
        if scaler is not None:
            self.accelerator.scaler = scaler  # Accelerate makes one on GPUs only
        plain = [Regression(hidden=256).net for _ in range(models)]
        steps = [optimizer(model.parameters(), lr=0.1) for model in plain]
        prepared = self.accelerator.prepare(*plain, *steps)
        self.models, self.optimizers = prepared[:models], prepared[models:]
        batches = list(loader(8))
        self.batches = iter(batches[rank() :: world_size()] + batches[rank() :: world_size()])
        self.digests: list[str] = []

    def train(self, batches: int) -> None:
        for _ in range(batches):
            x, y = next(self.batches)
            with self.accelerator.accumulate(*self.models):
                loss = sum(nn.functional.mse_loss(model(x), y) for model in self.models)
                self.accelerator.backward(loss)
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.digests.append("".join(map(digest, self.models)))

    def facts(self) -> Facts:
        ours = self.compression is not None
        reducers = self.compression.reducers if ours else []
        return {
            "parameters": {
                f"{index}.{name}": value
                for index, model in enumerate(self.models)
                for name, value in parameters(self.accelerator.unwrap_model(model)).items()
            },
            "digests": self.digests,
            "stats": dict(self.compression.comm_stats()[0]) if ours else None,
            "residuals": {
                f"{index}.{name}": reducer.residuals[name].clone()
                for index, reducer in enumerate(reducers)
                for name in reducer.residuals.names()
            },
            "step": [reducer.step for reducer in reducers],
        }

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self.compression is not None:
            self.compression.close()
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


@scenario
def plugin_trains() -> Facts:
    facts: Facts = {}
    for name, plugin, by_hand in (
        ("ddp", None, True),
        ("none", CompressedDDPPlugin("none"), True),
        ("int8", CompressedDDPPlugin("int8"), True),
        ("in kwargs_handlers", CompressedDDPPlugin("int8"), False),
    ):
        with Run(plugin, by_hand=by_hand) as run:
            run.train(8)
            facts[name] = run.facts()
    return facts


@scenario
def plugin_accumulates() -> Facts:
    with Run(CompressedDDPPlugin("int8"), gradient_accumulation_steps=2) as run:
        run.train(8)
        return run.facts()


@scenario
def plugin_scaler() -> Facts:
    facts = {}
    for name, growth_interval in {"constant": 1000, "growing": 1}.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        with Run(CompressedDDPPlugin("int8"), scaler=scaler) as run:
            run.train(8)
            facts[name] = run.facts() | {"scale": scaler.get_scale()}
    return facts


@scenario
def plugin_bf16() -> Facts:
    with Run(CompressedDDPPlugin("int8"), mixed_precision="bf16") as run:
        run.train(8)
        return run.facts()


@scenario
def plugin_resumes() -> Facts:
    """By save_state, and by AsyncState; two models each."""
    facts: Facts = {}
    for way in ("save_state", "AsyncState"):
        target = str(folder() / f"plugin_{way}")
        with Run(models=2) as whole:
            whole.train(4)
            state = whole.accelerator if way == "save_state" else AsyncState(whole.accelerator)
            state.save_state(target)
            if way == "AsyncState":
                state.close()
            whole.train(4)
            facts[way] = {"whole": whole.facts()}
        dist.barrier()
        with Run(models=2, by_hand=False) as resumed:
            for _ in range(4):
                next(resumed.batches)
            state = resumed.accelerator if way == "save_state" else AsyncState(resumed.accelerator)
            with warnings() as messages:
                state.load_state(target)
            resumed.train(4)
            if way == "AsyncState":
                state.close()
            facts[way] |= {"resumed": resumed.facts(), "messages": messages}
    return facts


@scenario
def plugin_other_checkpoints() -> Facts:
    """Of plain DDP, under the plugin; and of the plugin, without it."""
    target = str(folder() / "plain_accelerate")
    with Run(None) as plain:
        plain.train(2)
        plain.accelerator.save_state(target)
    dist.barrier()
    with Run() as ours:
        ours.train(2)
        owed = ours.facts()
        with warnings() as messages:
            ours.accelerator.load_state(target)
        facts = {"owed": owed, "loaded": ours.facts(), "messages": messages}
        ours.train(2)
        ours.accelerator.save_state(str(folder() / "of_plugin"))
        saved = ours.facts()
    dist.barrier()
    with Run(None) as plain:
        plain.accelerator.load_state(str(folder() / "of_plugin"))
        return {**facts, "saved": saved, "plain": plain.facts()}


@scenario
def plugin_folder_of_one_rank() -> Facts:
    """Rank 1 has a folder of its own, without the residuals of all ranks."""
    target = folder() / f"plugin_own_{rank()}"
    with Run() as run:
        run.train(1)
        run.accelerator.save_state(str(target))
        loading = error_of(lambda: run.accelerator.load_state(str(target)))
        run.accelerator.project_configuration.save_on_each_node = True
        return {"loading": loading, "saving": error_of(lambda: run.accelerator.save_state(target))}


@scenario
def plugin_for_others() -> Facts:
    """What `plugin_of_three` loads."""
    with Run() as run:
        run.train(3)
        run.accelerator.save_state(str(folder() / "of_two_plugins"))
        return run.facts()


@scenario
def plugin_ddp_arguments() -> Facts:
    given = DistributedDataParallelKwargs(
        find_unused_parameters=True, bucket_cap_mb=1, gradient_as_bucket_view=True
    )
    facts = {}
    for by_hand in (True, False):
        with Run(handlers=[given], by_hand=by_hand) as run:
            run.train(2)
            (model,) = run.models
            facts[str(by_hand)] = {
                "unused": model.find_unused_parameters,
                "views": model.gradient_as_bucket_view,
                "bucket": model.bucket_bytes_cap,
                "hooks": len(model._comm_hooks),
            }
    return facts


@scenario
def plugin_tells_trackers() -> Facts:
    facts: Facts = {}
    for by_hand in (True, False):
        notes = Notes()
        with Run(CompressedDDPPlugin("int8"), by_hand=by_hand, log_with=notes) as run:
            config = {"lr": 0.1}
            if by_hand:
                config |= run.compression.configuration()
            run.accelerator.init_trackers("project", config=config)
            run.compression.log(0)  # nothing was sent so far
            run.train(2)
            run.compression.log(step=2)
            stats = dict(run.compression.comm_stats()[0])
        facts[str(by_hand)] = {
            "configuration": notes.configuration,
            "logged": notes.logged,
            "stats": stats,
        }
    return facts


@scenario
def plugin_connects_optimizers() -> Facts:
    def onebit(parameters: Any, lr: float) -> OneBitAdam:
        return OneBitAdam(parameters, lr=0.01, freeze_step=2)

    def momentum(parameters: Any, lr: float) -> torch.optim.SGD:
        return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

    with Run(CompressedDDPPlugin("sign"), by_hand=False, optimizer=onebit) as run:
        connected = run.compression.reducers[0].adjustment is run.optimizers[0].optimizer
        run.train(4)
        facts = run.facts()
    dgc = CompressedDDPPlugin("dgc")
    refused = error_of(lambda: Run(dgc, by_hand=False, optimizer=momentum))
    return {**facts, "connected": connected, "refused": refused}


@scenario
def plugin_end_training() -> Facts:
    """The last save is durable when `end_training` returns, and threads are gone."""
    with Run(by_hand=False) as run:
        state = AsyncState(run.accelerator)
        run.train(1)
        state.save_state(folder() / "at_the_end")
        reducers = run.compression.reducers
        run.accelerator.state.destroy_process_group = dist.barrier  # the scenarios share theirs
        run.accelerator.end_training()
        return {
            "committed": state.last_committed is not None,
            "manifest": (folder() / "at_the_end" / "manifest.json").exists(),
            "closed": [reducer.closed for reducer in reducers],
        }


@scenario
def plugin_prepared_again() -> Facts:
    with Run(by_hand=False) as run:
        run.train(1)
        (first,) = run.compression.reducers
        (model,), (optimizer,) = run.models, run.optimizers
        plain = run.accelerator.unwrap_model(model)
        run.accelerator.free_memory()
        run.models = [run.accelerator.prepare(plain)]
        run.optimizers = [run.accelerator.prepare(optimizer.optimizer)]
        run.train(2)
        return run.facts() | {"closed": first.closed}


@scenario
def plugin_refused_in_a_world() -> Facts:
    with Run() as run:
        twice = error_of(lambda: TOPK.attach(run.accelerator))
    with Run(None) as run:
        late = error_of(lambda: TOPK.attach(run.accelerator))
    return {"twice": twice, "late": late}


@scenario
def canary_of_ddp_handler() -> Facts:
    """What the plugin relies on and Accelerate does not document."""
    asked: list[type] = []

    class Handler(DistributedDataParallelKwargs):
        def register_comm_hook(self, model: nn.Module) -> None:
            asked.append(type(model))

    forget_accelerators()
    accelerator = accelerate.Accelerator(cpu=True)
    before = accelerator.ddp_handler
    accelerator.ddp_handler = Handler(bucket_cap_mb=3)
    modules = [nn.Linear(WIDTH, 2) for _ in range(2)]
    prepared = accelerator.prepare(*modules)
    facts = {
        "before": before is None,
        "asked": [kind.__name__ for kind in asked],
        "bucket": [model.bucket_bytes_cap for model in prepared],
        "models": [a is b for a, b in zip(accelerator._models, modules, strict=True)],
        "others": [accelerator.init_handler, accelerator.scaler, accelerator.parallelism_config],
        "rejected": error_of(lambda: accelerate.Accelerator(cpu=True, kwargs_handlers=[Handler()])),
    }
    forget_accelerators()
    return facts
