"""Process group, devices and nodes as the launcher has them, whatever the script says.

A job that goes on with fewer or more ranks runs the same script, in which ``devices`` and
``num_nodes`` are those of the first start. Of a fit by spawn or fork the report comes back.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_dist.elastic.rendezvous import attempt_store
from lightning_dist.frameworks.lightning import rank_zero
from lightning_dist.frameworks.lightning.private import (
    MultiProcessingLauncher,
    group_timeout,
    init_process_group_over,
)
from lightning_dist.ranks.launch import Launch
from lightning_dist.sync.arguments import Reports

_KEY = "lightning_dist"


class FitResults:
    """Report of a fit that is over. Its topology is without its groups."""

    def __init__(self, reports: Reports) -> None:
        self.topology = replace(reports.topology, intra_group=None, inter_group=None)
        self._stats, self._config = reports.comm_stats(), reports.comm_config()

    def comm_stats(self) -> Mapping[str, Any]:
        return self._stats

    def comm_config(self) -> dict[str, Any]:
        return self._config


class ResultsLauncher(MultiProcessingLauncher):
    """Sends the report of local rank 0 to the process that called ``trainer.fit``."""

    @override
    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        extra = super().get_extra_results(trainer)
        if trainer.strategy.sync is not None:
            # As bytes: Lightning looks for tensors in all else, and changes it.
            extra[_KEY] = pickle.dumps(FitResults(trainer.strategy.sync))
        return extra

    @override
    def update_main_process_results(self, trainer: Any, extra: dict[str, Any]) -> None:
        if _KEY in extra:
            trainer.strategy.ended = pickle.loads(extra.pop(_KEY))
        super().update_main_process_results(trainer, extra)


class ElasticEnvironment(TorchElasticEnvironment):
    """torchrun's variables, for a job whose number of ranks may change between starts.

    For strategies other than ours: ``Trainer(strategy="ddp", plugins=[ElasticEnvironment()])``. The
    script's ``devices`` must be enough for the ranks of a node. ``compressed_ddp`` needs no plugin.
    """

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Warn where Lightning refuses: ``num_devices * num_nodes`` is not the world size."""
        if num_devices * num_nodes != self.world_size():
            rank_zero.warn(
                f"The launcher started {self.world_size()} ranks, and devices * num_nodes is "
                f"{num_devices} * {num_nodes}. Lightning's own distributed sampler shards the data "
                "by the latter, so samples are skipped or repeated: use a sampler of your "
                'own, or strategy="compressed_ddp", which follows the launcher.'
            )


class FollowedEnvironment(ElasticEnvironment):
    """The environment of a strategy that follows the launcher: nothing is left to check."""

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nodes may have different numbers of ranks, so the product says nothing."""


class MembersEnvironment(FollowedEnvironment):
    """The ranks of the default process group, whose members may change within the process."""

    leader = 0
    """The rank of the group that is rank 0 here, which logs and writes."""
    is_apart = False
    """Whether this process is alone so far, and will be one of several. It is not rank 0 then."""

    @override
    def world_size(self) -> int:
        return dist.get_world_size()

    @override
    def global_rank(self) -> int:
        world_size = dist.get_world_size()
        return 1 if self.is_apart else (dist.get_rank() - self.leader) % world_size


def launch_of(environment: ClusterEnvironment | None) -> Launch | None:
    """Environment of the launcher, where ranks are torchrun's and Lightning takes them from it."""
    if not isinstance(environment, TorchElasticEnvironment):
        return None
    launch = Launch.from_env()
    return launch if launch.is_elastic else None


def follow(strategy: Any) -> None:
    """Give a strategy of ours the launcher's ranks, before it makes its own launcher.

    Devices, nodes and environment are there when the trainer is built, and unused yet.
    """
    launch = launch_of(strategy.cluster_environment)
    if launch is not None and launch.local_world_size is not None:
        follow_launcher(strategy)
        if type(strategy.cluster_environment) in (TorchElasticEnvironment, ElasticEnvironment):
            strategy.cluster_environment = FollowedEnvironment()


def sampler_arguments(environment: ClusterEnvironment | None) -> dict[str, Any] | None:
    """Arguments of a sampler for the launcher's ranks; None where there is no launcher."""
    launch = launch_of(environment)
    if launch is None or isinstance(environment, MembersEnvironment):
        return None
    return {"num_replicas": launch.world_size, "rank": launch.rank}


def follow_launcher(strategy: Any) -> None:
    """Give a ``DDPStrategy`` the launcher's devices and nodes; no change where it says neither.

    For a strategy that is not ours, after it was built: its sampler then counts the ranks right
    where all nodes have equally many.

    Raises:
        ValueError: there are fewer GPUs than ranks on this node.
    """
    launch = launch_of(getattr(strategy, "cluster_environment", None))
    if launch is not None and launch.local_world_size is not None:
        given = strategy.parallel_devices or []
        strategy.parallel_devices = local_devices(given, launch)
        _report(given, strategy.num_nodes, launch)
        strategy.num_nodes = launch.nodes


def local_devices(given: list[torch.device], launch: Launch) -> list[torch.device]:
    """One device for every rank of this node: the ``given`` ones, and then those of their kind.

    Raises:
        ValueError: there are not enough for this rank.
    """
    assert launch.local_world_size is not None
    devices = given[: launch.local_world_size]
    missing = launch.local_world_size - len(devices)
    if all(device.type == "cpu" for device in devices):
        return devices + [torch.device("cpu")] * missing
    kind = devices[0].type
    free = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
    devices += [device for device in free if device not in devices][:missing]
    if launch.local_rank >= len(devices):
        raise ValueError(
            f"The launcher started {launch.local_world_size} ranks on this node, and local rank "
            f"{launch.local_rank} needs a {kind} device of its own, of which {len(devices)} are "
            f"visible: start it with --nproc-per-node={len(devices)}"
        )
    return devices


def _report(given: list[torch.device], num_nodes: int, launch: Launch) -> None:
    """Log settings that differ from the launcher's, and cannot be defaults (1, or all GPUs)."""
    every_gpu = given and given[0].type != "cpu" and len(given) == torch.accelerator.device_count()
    differing = []
    if len(given) not in (1, launch.local_world_size) and not every_gpu:
        differing.append(f"{launch.local_world_size} ranks on this node, not devices={len(given)}")
    if num_nodes not in (1, launch.nodes):
        differing.append(f"{launch.nodes} nodes, not num_nodes={num_nodes}")
    if differing:
        rank_zero.info(f"lightning_dist follows the launcher: {' and '.join(differing)}.")


def init_process_group(strategy: Any) -> None:
    """Make the group as ``strategy`` would, over a store of this start's own.

    Nothing happens where torchrun did not start this rank, or where the group is there. Call it
    before the strategy's own set-up, which does nothing once there is a group.

    Raises:
        TimeoutError: ranks did not come within the strategy's ``timeout``.
    """
    launch = launch_of(strategy.cluster_environment)
    if launch is None or dist.is_initialized():
        return
    assert strategy.cluster_environment is not None
    timeout = group_timeout(strategy) or default_pg_timeout
    init_process_group_over(attempt_store(launch, timeout=timeout), strategy)
