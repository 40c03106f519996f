"""Three ranks and one rank go on from what `async_resume` of two ranks left."""

from __future__ import annotations

import torch

from scenarios.async_checkpoints import (
    FORMATS,
    HALF,
    STEPS,
    STRATEGIES,
    Steps,
    checkpoint,
    fit,
)
from scenarios.catalogue import Facts, alone, folder, rank, scenario
from scenarios.fitting import digest
from scenarios.lifecycle import AtStart


class Begin(Steps):
    """The parameters before the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first = ""

    def on_train_start(self, trainer: object, module: torch.nn.Module) -> None:
        self.first = digest(module)


def _from_two(tag: str) -> Facts:
    facts: Facts = {}
    for name, strategy in STRATEGIES.items():
        for format in FORMATS:
            path = folder() / f"async-{name}-{format}" / f"step={HALF}.ckpt"
            callback = checkpoint(folder() / f"async-{tag}-{name}-{format}", format=format)
            begin, start = Begin(), AtStart()
            callbacks = [begin, callback, *([start] if name == "int8" else [])]
            facts[f"{name} {format}"] = {
                **fit(strategy(), *callbacks, ckpt_path=path),
                "first": begin.first,
                "start": start.residuals,
            }
    return facts


@scenario
def async_two_to_three() -> Facts:
    facts = _from_two("three")
    torch.distributed.barrier()
    path = folder() / "async-three-ddp-sharded" / f"step={STEPS}.ckpt"
    return {**facts, "shards": sorted(file.stat().st_size for file in path.glob("shard-*"))}


@scenario
def async_two_to_one() -> Facts:
    if rank() != 0:
        return {}
    with alone():
        facts = _from_two("one")
    return facts
