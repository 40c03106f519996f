"""FSDP2 through Accelerate, on two nodes of two ranks."""

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
from fsdp_models import weights
from model_parallel_runs import same
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_dist.accelerate import CompressedFSDPPlugin
from lightning_dist.frameworks.accelerate.patch import attached_everywhere

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(4, hosts=2)]
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
        return weights(self.net)


def test_uncompressed_it_has_the_bits_of_accelerate() -> None:
    """Of its own HSDP; each rank gets its part of the batches."""
    expected = Run(None).train()
    got = Run("none")
    assert same(expected, got.train())
    assert len(got.loader) == 8


@pytest.mark.parametrize(
    "settings",
    [
        {"codec": "int4"},
        pytest.param(
            {"codec": "qsgd:bits=4,block_size=64", "parameters": "int8"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=["replicas", "one"],
)
def test_a_training_goes_on_from_a_checkpoint(settings: dict[str, Any], tmp_path: Path) -> None:
    """Of two replicas, and sharded over all ranks."""
    straight = Run(**settings)
    straight.train()
    whole = straight.train()
    first = Run(**settings)  # not before: Accelerators share what they count
    first.train()
    first.accelerator.save_state(str(tmp_path / "saved"))
    if "parameters" not in settings:
        assert first.compression.reducers[0].residuals
    first.train()  # to be forgotten
    first.accelerator.load_state(str(tmp_path / "saved"))
    (stats,) = first.compression.comm_stats()
    assert same(whole, first.train())
    if "parameters" in settings:
        assert stats["ratio"] > 2
        assert stats["steps"] == 16
        assert first.compression.metrics()["comm/total_wire_bytes"] > stats["wire_bytes"]


def test_only_the_last_micro_batch_is_exchanged() -> None:
    run = Run("int8", accumulate=4)
    run.train()
    with run.accelerator.no_sync(model=run.net):  # as transformers' Trainer calls it
        run.accelerator.backward(run.net(torch.ones(1, WIDTH)).sum())
    (stats,) = run.compression.comm_stats()
    assert stats["steps"] == 2
    assert stats["inter_bytes"] < 0.4 * stats["raw_bytes"]
    assert run.compression.metrics()["comm/inter_bytes"] > 0


def test_the_reducer_knows_of_the_grad_scaler() -> None:
    (reducer,) = Run("int8", scaler=torch.amp.GradScaler("cpu")).compression.reducers
    assert reducer.has_grad_scaler


def test_a_script_that_knows_nothing_of_compression_is_compressed_by_variables() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_DIST_CODEC", "int4")
        patch.setenv("LIGHTNING_DIST_MIN_COMPRESS_NUMEL", "0")
        with attached_everywhere(lambda each: CompressedFSDPPlugin().attach(each)):
            found = Run(None).train()
    assert same(found, Run("int4").train())


def test_what_cannot_work_is_refused() -> None:
    one_replica = {"parallelism_config": ParallelismConfig(dp_shard_size=4)}
    unsharded = {"fsdp_plugin": None, "parallelism_config": None}
    for says, given, settings in (
        ("there is one", one_replica, {"codec": "int8"}),
        ("fsdp_version=2", unsharded, {"codec": "int8"}),
        ("dp_replicate_size=2", {}, {"codec": "qsgd", "parameters": "int8"}),
    ):
        found = accelerator(**given)
        with pytest.raises(ValueError, match=says):
            CompressedFSDPPlugin(**settings).attach(found)
    twice = accelerator()
    CompressedFSDPPlugin("int8").attach(twice)
    with pytest.raises(ValueError, match="attach it once"):
        CompressedFSDPPlugin("int8").attach(twice)
