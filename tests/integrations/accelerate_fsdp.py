"""FSDP2 through Accelerate, on two hosts of two ranks; a part of `model_parallel_ranks.py`."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    DistributedType,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.accelerate import CompressedFSDPPlugin
from lightning_dist.integrations.accelerate.patch import attached_everywhere

WIDTH = 18


def accelerator(**given: Any) -> Accelerator:
    """One with HSDP. Accelerate shards on no CPU, so it is told that this is none."""
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    plugin.cpu_ram_efficient_loading = False
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    return Accelerator(
        **{"fsdp_plugin": plugin, "parallelism_config": config, "cpu": True, **given}
    )


class Run:
    def __init__(
        self,
        codec: str | None,
        *,
        accumulate: int = 1,
        parameters: str | None = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.accelerator = accelerator(
            gradient_accumulation_steps=accumulate,
            **({} if parameters is None else {"parallelism_config": None}),
        )
        self.accelerator.scaler = scaler
        self.compression = None
        if codec is not None:
            plugin = CompressedFSDPPlugin(codec, parameters=parameters, min_compress_numel=0)
            self.compression = plugin.attach(self.accelerator)
        torch.manual_seed(3)
        net = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise((WIDTH, 2 * WIDTH, WIDTH))))
        data = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
        loader = DataLoader(TensorDataset(data), batch_size=2)
        optimizer = torch.optim.Adam(net.parameters())
        self.net, self.optimizer, self.loader = self.accelerator.prepare(net, optimizer, loader)

    def train(self) -> list[Tensor]:
        """One pass over the data."""
        for (x,) in self.loader:
            with self.accelerator.accumulate(self.net):
                self.accelerator.backward((self.net(x) - x.flip(-1)).square().mean())
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.net.parameters(), 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
        return [p.detach().to_local().clone() for p in self.net.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def facts() -> dict[str, bool]:
    """Codec none against Accelerate's own HSDP."""
    expected = Run(None).train()
    got = Run("none")
    equal = same(expected, got.train())
    return {
        "batches of all ranks": len(got.loader) == 8,
        "equal to native": equal,
        "refusals": refusals(),
    }


def resume(folder: Path) -> dict[str, bool]:
    """A run that goes on from a checkpoint, and what is told of accumulation."""
    straight = Run("int4")
    straight.train()
    whole = straight.train()
    first = Run("int4")  # not before: Accelerators share what they count
    first.train()
    first.accelerator.save_state(str(folder / "accelerate"))
    owed = dict(first.compression.reducers[0].residuals)
    first.train()  # to be forgotten
    first.accelerator.load_state(str(folder / "accelerate"))
    resumed = same(whole, first.train())
    several = Run("int8", accumulate=4)
    several.train()
    with several.accelerator.no_sync(model=several.net):  # as transformers' Trainer calls it
        several.accelerator.backward(several.net(torch.ones(1, WIDTH)).sum())
    (stats,) = several.compression.comm_stats()
    (scaled,) = Run("int8", scaler=torch.amp.GradScaler("cpu")).compression.reducers
    return {
        "resumed": resumed,
        "grad scaler": scaled.has_grad_scaler,
        "residuals": bool(owed),
        "accumulates": stats["steps"] == 2,
        "bytes": stats["inter_bytes"] < 0.4 * stats["raw_bytes"],
        "set outside": same(set_outside(), Run("int4").train()),
        "metrics": several.compression.metrics()["comm/inter_bytes"] > 0,
    }


def shards(folder: Path) -> dict[str, bool]:
    """Sharded over all ranks: a run that goes on from a checkpoint, and its bytes."""
    codec = {"codec": "qsgd:bits=4,block_size=64", "parameters": "int8"}
    straight = Run(**codec)
    straight.train()
    whole = straight.train()
    first = Run(**codec)
    first.train()
    first.accelerator.save_state(str(folder / "shards"))
    first.train()  # to be forgotten
    first.accelerator.load_state(str(folder / "shards"))
    (stats,) = first.compression.comm_stats()
    return {
        "resumed": same(whole, first.train()),
        "bytes": stats["ratio"] > 2,
        "steps": stats["steps"] == 16,
        "metrics": first.compression.metrics()["comm/total_wire_bytes"] > stats["wire_bytes"],
    }


def set_outside() -> list[Tensor]:
    """One pass of a script that knows nothing of compression; its settings are variables."""
    found = {"LIGHTNING_DIST_CODEC": "int4", "LIGHTNING_DIST_MIN_COMPRESS_NUMEL": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        with attached_everywhere(lambda each: CompressedFSDPPlugin().attach(each)):
            return Run(None).train()


def refusals() -> bool:
    """Whether each is refused with its reason."""
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"parallelism_config": ParallelismConfig(dp_shard_size=4)}, "there is one"),
        ({"fsdp_plugin": None, "parallelism_config": None}, "fsdp_version=2"),
    )
    found = [says in refusal(accelerator(**given)) for given, says in cases]
    found.append("dp_replicate_size=2" in refusal(accelerator(), "qsgd", parameters="int8"))
    twice = accelerator()
    CompressedFSDPPlugin("int8").attach(twice)
    return all([*found, "attach it once" in refusal(twice)])


def refusal(found: Accelerator, codec: str = "int8", **given: Any) -> str:
    try:
        CompressedFSDPPlugin(codec, **given).attach(found)
    except ValueError as error:
        return str(error)
    return ""
