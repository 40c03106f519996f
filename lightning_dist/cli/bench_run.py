"""Ranks of ``lightning-dist bench``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.filesize import decimal

from lightning_dist.base.private import destroy_group
from lightning_dist.profiling.links import Measurement, measure, pairs
from lightning_dist.ranks import Topology, host_name

Scope = Literal["flat", "intra", "inter"]


@dataclass(frozen=True)
class BenchSettings:
    """Collectives to measure. ``pairs``: the matrix of all pairs, instead of ``ops``."""

    sizes: tuple[int, ...]
    ops: tuple[str, ...]
    iterations: int
    scope: Scope = "flat"
    pairs: bool = False
    device: str = "cpu"
    timeout: float = 300.0


@dataclass(frozen=True)
class BenchReport:
    """Measurements of a group. The rates of the pairs are in Gbit/s, of ``ranks`` in their order.

    Args:
        nodes: of every rank.
        ranks: the members of the group.
    """

    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    scope: str
    backend: str
    device: str
    rows: tuple[Measurement, ...] = ()
    pair_nbytes: int | None = None
    pair_gbps: tuple[tuple[float | None, ...], ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        derived = ("count", "algbw_gbps", "busbw_gbps")
        rows = [
            {
                **asdict(row),
                "median_seconds": row.median,
                **{name: getattr(row, name) for name in derived},
            }
            for row in self.rows
        ]
        return {**asdict(self), "rows": rows}


def run(settings: BenchSettings) -> list[BenchReport]:
    """Be one rank of a launcher's world. Reports of the groups, the same on all ranks.

    Raises:
        ValueError: the ranks cannot form the group.
    """
    device, backend = torch.device("cpu"), "gloo"
    if settings.device == "cuda":
        device, backend = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), "nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=settings.timeout)
    dist.init_process_group(backend, timeout=timeout)
    try:
        nodes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(nodes, host_name())
        scope = settings.scope
        if settings.pairs and scope == "flat" and len(set(nodes)) > 1:
            scope = "inter"  # the links are what is looked for, and a node has one
        members = members_of(scope, nodes)
        # A new group has torch's own timeout otherwise.
        groups = [(ranks, dist.new_group(list(ranks), timeout=timeout)) for ranks in members]
        own_report: BenchReport | None = None
        for ranks, group in groups:
            if dist.get_rank() in ranks:
                report = BenchReport(tuple(nodes), ranks, scope, backend, device.type)
                own_report = _measured(report, settings, group=group, device=device)
        reports: list[BenchReport | None] = [None] * len(nodes)
        dist.all_gather_object(reports, own_report)  # also: nobody leaves before all are done
    finally:
        destroy_group()
    of_first = (reports[ranks[0]] for ranks in members)
    return [report for report in of_first if report is not None]


def members_of(scope: str, nodes: Sequence[str]) -> list[tuple[int, ...]]:
    """Members of the groups that are measured at the same time.

    Raises:
        ValueError: with these nodes there is none.
    """
    if len(nodes) < 2:
        raise ValueError("A bandwidth needs 2 ranks or more, got 1; start more")
    by_node = Topology(tuple(nodes), 0).by_node()
    if scope == "flat":
        return [tuple(range(len(nodes)))]
    if scope == "inter":
        if len(by_node) < 2:
            raise ValueError(
                f"--group inter needs 2 nodes or more, and all {len(nodes)} ranks are on "
                f"{nodes[0]}: start it on every node with torchrun; where nodes have the same "
                "name, give each its own LIGHTNING_DIST_HOSTNAME"
            )
        return [tuple(ranks[0] for ranks in by_node)]
    of_nodes = [ranks for ranks in by_node if len(ranks) > 1]
    if not of_nodes:
        raise ValueError(
            "--group intra needs a node with 2 ranks or more, and every node has one: start more "
            "with --nproc-per-node"
        )
    return of_nodes


def _measured(
    report: BenchReport, settings: BenchSettings, *, group: dist.ProcessGroup, device: torch.device
) -> BenchReport:
    console = Console(stderr=True, quiet=dist.get_rank() != 0)
    with console.status("") as status:
        if settings.pairs:
            nbytes = max(settings.sizes)
            status.update(f"{len(report.ranks)} ranks in pairs, {decimal(nbytes)}")
            rates = pairs(group, nbytes, iterations=settings.iterations, device=device)
            return replace(report, pair_nbytes=nbytes, pair_gbps=rates)
        rows = []
        for op in settings.ops:
            for nbytes in settings.sizes:
                status.update(f"{op} {decimal(nbytes)}")
                rows.append(measure(group, op, nbytes, settings.iterations, device))
    return replace(report, rows=tuple(rows))
