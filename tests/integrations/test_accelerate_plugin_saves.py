"""`CompressedDDPPlugin`: what ranks save and load, of one model and of two."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from replicas import of_all, require_equal, require_replicas, world_of
from torch import Tensor, nn

pytest.importorskip("accelerate")

from scenarios.accelerating import Run
from scenarios.models import WIDTH
from scenarios.world import warnings

from lightning_dist.accelerate import AsyncStateCheckpointer

WEIGHT, BIAS = 16 * 256, 256  # elements of the generator's first layer
pytestmark = pytest.mark.on_ranks(2)


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
