"""Local updates under Accelerate: as in a loop of plain torch, saved and resumed, refused."""

from __future__ import annotations

import os
import sys
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import lightning_dist
from lightning_dist.accelerate import CompressedDDPPlugin, LocalUpdatesPlugin, local_updates
from scenarios.accelerate_runs import Run
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, folder, rank, scenario, world_size
from scenarios.fitting import digest, parameters
from scenarios.models import Regression, loader

SCHEDULE: dict[str, Any] = {
    "method": "diloco",
    "sync_every": 3,
    "overlap_steps": 1,
    "mixing": 0.25,
    "codec": "int4",
    "min_compress_numel": 0,
}


class Local(Run):
    """Two micro-batches in a step."""

    def __init__(self) -> None:
        super().__init__(None, gradient_accumulation_steps=2, optimizer=torch.optim.AdamW)
        (model,), (optimizer,) = self.models, self.optimizers
        self.updates = local_updates(self.accelerator, model, optimizer, **SCHEDULE)

    def train(self, batches: int) -> None:
        for _ in range(batches // 2):
            super().train(2)
            self.updates.step()
            self.digests[-1] = digest(self.models[0])

    def __exit__(self, *error: object) -> None:
        self.updates.close()
        super().__exit__(*error)


@scenario
def accelerate_local() -> Facts:
    with Local() as whole:
        whole.train(8)
        whole.accelerator.save_state(str(folder() / "accelerate_local"))
        saved = whole.updates.anchor_state_dict()
        whole.train(8)
        found = {"whole": list(whole.digests)}
        whole.updates.finish()
        found["end"] = parameters(whole.models[0].module)
    dist.barrier()
    with Local() as resumed:
        for _ in range(8):
            next(resumed.batches)
        resumed.accelerator.load_state(str(folder() / "accelerate_local"))
        resumed.train(8)
        found["resumed"] = resumed.digests
    model = Regression(hidden=256).net
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    updates = lightning_dist.local_updates(model, optimizer, **SCHEDULE)
    batches = list(loader(8))[rank() :: world_size()] * 2
    found["loop"] = []
    for index, (x, y) in enumerate(batches[:16]):
        (nn.functional.mse_loss(model(x), y) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
            updates.step()
            found["loop"].append(digest(model))
    updates.close()
    file = folder() / "accelerate_local" / "model.safetensors"
    from safetensors.torch import load_file

    return {**found, "anchor": saved, "weights": load_file(file)}


@scenario
def accelerate_local_plugin() -> Facts:
    """A loop that knows nothing of local updates; their method is a variable."""
    environ = {"LIGHTNING_DIST_METHOD": "diloco", "LIGHTNING_DIST_MIXING": "0.25"}
    with patch.dict(os.environ, environ):
        plugin = LocalUpdatesPlugin(
            **{k: SCHEDULE[k] for k in SCHEDULE if k not in ("method", "mixing")}
        )
        settings = {"gradient_accumulation_steps": 2, "optimizer": torch.optim.AdamW}
        forget_accelerators()
        with Run(None, attach=plugin.attach, **settings) as run:
            run.train(16)
            anchor = run.accelerator.get_state_dict(run.models[0])
            found = {"own": run.digests, "attempted": plugin.updates.attempted}
            equal = {
                k: torch.equal(v, anchor[k]) for k, v in plugin.updates.anchor_state_dict().items()
            }
            try:
                local_updates(run.accelerator, run.models[0], run.optimizers[0])
            except ValueError as error:
                found["twice"] = str(error)
            plugin._end(lambda: None)  # of end_training; others follow in this process
            return {**found, "anchor": all(equal.values()), "end": parameters(run.models[0].module)}


@scenario
def accelerate_local_after_ddp() -> Facts:
    """Two steps of DDP, of two batches each, and two local ones; beside DDP alone."""
    found = {}
    for name in ("ddp", "local"):
        plugin = LocalUpdatesPlugin(
            method="post_local_sgd", ddp_steps=2, sync_every=2, codec="none", min_compress_numel=0
        )
        attach = plugin.attach if name == "local" else lambda accelerator: None
        settings = {"gradient_accumulation_steps": 2, "optimizer": torch.optim.AdamW}
        with Run(None, attach=attach, **settings) as run:
            run.train(8)
            found[name] = run.digests
            plugin._end(lambda: None)
    return found


@scenario
def accelerate_local_skips() -> Facts:
    """A GradScaler skips the second step of rank 0."""
    plugin = LocalUpdatesPlugin(**SCHEDULE)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with Run(None, attach=plugin.attach, scaler=scaler, optimizer=torch.optim.AdamW) as run:
        batches = list(run.batches)
        if rank() == 0:
            batches[1] = batches[1][0], batches[1][1] * float("inf")
        run.batches = iter(batches)
        run.train(8)
        found = {"own": run.digests, "attempted": plugin.updates.attempted}
        plugin._end(lambda: None)
        end = parameters(run.models[0].module)
        return {**found, "parameters": end, "scale": scaler.get_scale()}


@scenario
def accelerate_local_refused() -> Facts:
    found = {}
    plugin = CompressedDDPPlugin("int8", min_compress_numel=0)
    for name, given, settings in (
        ("plugin", plugin, {}),
        ("unknown", None, {"sync_evry": 3}),
        ("outside", None, {"method": "diloco"}),
        ("one host", None, {"replicas": "host"}),
        ("both", None, {"replicas": "host", "method": "post_local_sgd", "ddp_steps": 2}),
    ):
        with Run(given) as run:
            outside = {"LIGHTNING_DIST_DELAY": "1"} if name == "outside" else {}
            try:
                with patch.dict(os.environ, outside):
                    local_updates(run.accelerator, run.models[0], run.optimizers[0], **settings)
            except ValueError as error:
                found[name] = str(error)
    with Run(None) as run:
        try:
            LocalUpdatesPlugin().attach(run.accelerator)
        except ValueError as error:
            found["late"] = str(error)
        try:
            with patch.dict(sys.modules, {"transformers.trainer": sys}):
                LocalUpdatesPlugin().attach(run.accelerator)
        except ValueError as error:
            found["transformers"] = str(error)
        try:
            local_updates(run.accelerator, run.models[0].module, run.optimizers[0])
        except ValueError as error:
            found["bare"] = str(error)
    return found
