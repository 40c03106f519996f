"""Local updates under Accelerate: as in a loop of plain PyTorch, saved and resumed, refused."""

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from replicas import of_all, require_equal
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("accelerate")

from safetensors.torch import load_file
from scenarios.accelerating import Run, own_batches
from scenarios.fitting import digest, parameters
from scenarios.models import Regression

import lightning_dist
from lightning_dist.accelerate import CompressedDDPPlugin, LocalUpdatesPlugin, local_updates

SCHEDULE: dict[str, Any] = {
    "method": "diloco",
    "sync_every": 3,
    "overlap_steps": 1,
    "mixing": 0.25,
    "codec": "int4",
    "min_compress_numel": 0,
}
BY_TWOS = {"gradient_accumulation_steps": 2, "optimizer": torch.optim.AdamW}
pytestmark = pytest.mark.on_ranks(2)


class Local(Run):
    """Two micro-batches in a step."""

    def __init__(self) -> None:
        super().__init__(None, **BY_TWOS)
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


def trained_in_a_loop(
    batches: list[Any],
    *,
    accumulate: int = 1,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    **settings: Any,
) -> tuple[list[str], dict[str, Tensor]]:
    """Digests after every step, and the parameters at the end."""
    net = Regression(hidden=256).net
    model = wrap(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    updates = lightning_dist.local_updates(model, optimizer, **settings)
    digests = []
    for index, (x, y) in enumerate(batches):
        (nn.functional.mse_loss(model(x), y) / accumulate).backward()
        if (index + 1) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
            updates.step()
            digests.append(digest(net))
    updates.finish()
    updates.close()
    return digests, parameters(net)


@cache
def expected() -> tuple[list[str], dict[str, Tensor]]:
    return trained_in_a_loop(own_batches() * 2, accumulate=2, **SCHEDULE)


def test_local_updates_are_those_of_a_loop_and_resume_bit_exact(tmp_path: Path) -> None:
    with Local() as whole:
        whole.train(8)
        whole.accelerator.save_state(str(tmp_path))
        anchor = whole.updates.anchor_state_dict()
        whole.train(8)
        digests = list(whole.digests)
        whole.updates.finish()
        end = parameters(whole.models[0].module)
    dist.barrier()
    with Local() as resumed:
        for _ in range(8):
            next(resumed.batches)
        resumed.accelerator.load_state(str(tmp_path))
        resumed.train(8)
        assert resumed.digests == digests[4:]
    assert digests == expected()[0]
    require_equal(end, expected()[1])
    require_equal(load_file(tmp_path / "model.safetensors"), anchor)
    first, second = of_all((digests[0], end))
    assert first[0] != second[0]
    require_equal(first[1], second[1])


def test_a_plugin_takes_local_steps_in_a_loop_that_knows_nothing_of_them() -> None:
    """Their method is a variable."""
    environ = {"LIGHTNING_DIST_METHOD": "diloco", "LIGHTNING_DIST_MIXING": "0.25"}
    given = {name: SCHEDULE[name] for name in SCHEDULE if name not in ("method", "mixing")}
    with patch.dict(os.environ, environ):
        plugin = LocalUpdatesPlugin(**given)
        with Run(None, attach=plugin.attach, **BY_TWOS) as run:
            run.train(16)
            assert run.digests == expected()[0]
            assert plugin.updates.attempted == len(run.digests) == 8
            anchor = run.accelerator.get_state_dict(run.models[0])
            for name, value in plugin.updates.anchor_state_dict().items():
                assert torch.equal(value, anchor[name]), name
            with pytest.raises(ValueError, match="by a LocalUpdatesPlugin"):
                local_updates(run.accelerator, run.models[0], run.optimizers[0])
            run.accelerator.end_training()
            require_equal(parameters(run.models[0].module), expected()[1])


def test_post_local_sgd_is_ddp_until_it_starts() -> None:
    """Two steps of DDP, of two batches each, and two local ones."""
    with Run(None, **BY_TWOS) as of_ddp:
        of_ddp.train(8)
    plugin = LocalUpdatesPlugin(
        method="post_local_sgd", ddp_steps=2, sync_every=2, codec="none", min_compress_numel=0
    )
    with Run(None, attach=plugin.attach, **BY_TWOS) as run:
        run.train(8)
        plugin._end(lambda: None)  # of end_training, which ends the group too
    assert run.digests[:2] == of_ddp.digests[:2]
    first, second = of_all(run.digests)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]


def test_a_step_that_a_scaler_skips_on_one_worker_counts() -> None:
    """The second step of rank 0."""
    is_first = dist.get_rank() == 0
    plugin = LocalUpdatesPlugin(**SCHEDULE)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with Run(None, attach=plugin.attach, scaler=scaler, optimizer=torch.optim.AdamW) as run:
        batches = own_batches()
        if is_first:
            batches[1] = batches[1][0], batches[1][1] * float("inf")
        run.batches = iter(batches)
        run.train(8)
        assert (run.digests[0] == run.digests[1]) == is_first
        assert plugin.updates.attempted == 8
        plugin._end(lambda: None)  # of end_training, which ends the group too
        assert scaler.get_scale() == (8.0 if is_first else 16.0)
        first, second = of_all(parameters(run.models[0].module))
    require_equal(first, second)
    assert all(each.isfinite().all() for each in first.values())


@pytest.mark.on_ranks(3)
def test_ranks_of_a_host_are_one_worker_as_in_a_loop() -> None:
    """Two ranks on one node, one on another; in the loop DDP is between the ranks of a node."""
    nodes = [[0, 1], [2]]
    settings = {"sync_every": 3, "codec": "int4", "min_compress_numel": 0, "rank_groups": nodes}
    plugin = LocalUpdatesPlugin(replicas="node", **settings)
    with Run(None, attach=plugin.attach, optimizer=torch.optim.AdamW) as run:
        run.train(8)
        assert plugin.updates.comm_stats()["steps"] == 2
        plugin._end(lambda: None)  # of end_training, which ends the group too
        end = parameters(run.models[0].module)
    own = [dist.new_group(each) for each in nodes][dist.get_rank() // 2]
    digests, _ = trained_in_a_loop(
        own_batches(),
        wrap=lambda model: DistributedDataParallel(model, process_group=own),
        **settings,
    )
    assert run.digests == digests
    first, second, third = of_all((digests, end))
    assert first[0] == second[0]
    assert first[0][0] != third[0][0]
    require_equal(first[1], second[1])
    require_equal(first[1], third[1])


def test_local_updates_refuse_what_cannot_work() -> None:
    compressed = CompressedDDPPlugin("int8", min_compress_numel=0)
    says = "compressed in every step by a CompressedDDPPlugin"
    with Run(compressed) as run, pytest.raises(ValueError, match=says):
        local_updates(run.accelerator, run.models[0], run.optimizers[0])
    both = {"replicas": "node", "method": "post_local_sgd", "ddp_steps": 2}
    delay = "delay is a setting of DDP and cannot take effect under local updates"
    for settings, outside, says in (
        ({"sync_evry": 3}, {}, r"did you mean 'sync_every'\?"),
        ({"method": "diloco"}, {"LIGHTNING_DIST_DELAY": "1"}, delay),
        ({"replicas": "node"}, {}, "replicas='node' needs several nodes"),
        (both, {}, "give one of the two"),
    ):
        with (
            Run(None) as run,
            patch.dict(os.environ, outside),
            pytest.raises(ValueError, match=says),
        ):
            local_updates(run.accelerator, run.models[0], run.optimizers[0], **settings)
    with Run(None) as run:
        with pytest.raises(ValueError, match="attach it right after"):
            LocalUpdatesPlugin().attach(run.accelerator)
        with (
            patch.dict(sys.modules, {"transformers.trainer": sys}),
            pytest.raises(ValueError, match="use CompressedDDPMixin"),
        ):
            LocalUpdatesPlugin().attach(run.accelerator)
        with pytest.raises(ValueError, match="launch several processes"):
            local_updates(run.accelerator, run.models[0].module, run.optimizers[0])
