"""CompressedDDPPlugin on two ranks: training."""

from __future__ import annotations

from typing import Any

import accelerate
import torch
from accelerate.utils import DistributedDataParallelKwargs
from torch import nn

from lightning_dist import OneBitAdam
from lightning_dist.accelerate import CompressedDDPPlugin
from scenarios.accelerate_runs import TOPK, Run
from scenarios.accelerate_states import error_of
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, scenario
from scenarios.models import WIDTH


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
