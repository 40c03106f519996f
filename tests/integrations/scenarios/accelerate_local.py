"""Local updates under Accelerate: as in a loop of plain torch, saved and resumed, refused."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lightning_dist
from lightning_dist.accelerate import CompressedDDPPlugin, local_updates
from scenarios.accelerate_runs import Run
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
def accelerate_local_refused() -> Facts:
    found = {}
    plugin = CompressedDDPPlugin("int8", min_compress_numel=0)
    for name, given, settings in (
        ("plugin", plugin, {}),
        ("unknown", None, {"sync_evry": 3}),
    ):
        with Run(given) as run:
            try:
                local_updates(run.accelerator, run.models[0], run.optimizers[0], **settings)
            except ValueError as error:
                found[name] = str(error)
    with Run(None) as run:
        try:
            local_updates(run.accelerator, run.models[0].module, run.optimizers[0])
        except ValueError as error:
            found["bare"] = str(error)
    return found
