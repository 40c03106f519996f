"""Pseudo-gradients and buffers of the workers, averaged."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.base.log import get_logger
from lightning_dist.exchange.rounds import bits_digest
from lightning_dist.ranks.failures import CollectiveError
from lightning_dist.ranks.traffic import ring_allreduce
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.plan.planner import Handle
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.settings.local_updates import Weight
from lightning_dist.sync.local.anchor import Anchor, Fragment, own_part
from lightning_dist.sync.local.worker_shards import WorkerShards

log = get_logger(__name__)


@torch.no_grad()
def average_buffers(buffers: Sequence[Tensor], network: Network, *, share: float) -> None:
    """Give every worker the mean of each buffer in which workers differ. Collective.

    The mean is over the workers whose own buffer is finite, in float64 if the buffer is and else in
    float32. A buffer that is equal on all workers is not sent and keeps its bits; integers stay the
    worker's own.

    Args:
        buffers: in an order that is equal on all workers.
        share: of a worker that this rank is.
    """
    floating = [buffer for buffer in buffers if buffer.is_floating_point() and buffer.numel()]
    differ = _differ(floating, network) if floating else []
    for dtype in (torch.float32, torch.float64):
        wide = dtype == torch.float64
        alike = [buffer for buffer in differ if (buffer.dtype == torch.float64) == wide]
        if alike:
            _average(alike, network, dtype=dtype, share=share)


def _differ(buffers: Sequence[Tensor], network: Network) -> list[Tensor]:
    """Buffers that are not the same bits on all workers."""
    digests = torch.tensor([bits_digest(buffer) for buffer in buffers], dtype=torch.int64)
    # If the largest digest is the smallest, all are equal; ~ is descending and does not overflow.
    extremes = torch.cat([digests, ~digests]).to(network.device)
    network.control.all_reduce(extremes, op=dist.ReduceOp.MAX).wait()
    largest, least = extremes.chunk(2)
    differs = (largest != ~least).tolist()
    return [buffer for buffer, is_different in zip(buffers, differs, strict=True) if is_different]


def _average(
    buffers: Sequence[Tensor], network: Network, *, dtype: torch.dtype, share: float
) -> None:
    finite = [buffer.isfinite().all() for buffer in buffers]
    shares = torch.stack(finite).to(network.device, dtype) * share
    flats = [
        buffer.reshape(-1).to(network.device, dtype) * share
        if known
        else shares.new_zeros(buffer.numel())
        for buffer, known in zip(buffers, finite, strict=True)
    ]
    flat = torch.cat([*flats, shares])  # the last ones count workers
    network.data.all_reduce(flat).wait()
    *totals, workers = torch.split(flat, [*map(len, flats), len(buffers)])
    for buffer, total, count in zip(buffers, totals, workers.tolist(), strict=True):
        if count:
            buffer.copy_((total / count).view_as(buffer))


@dataclass
class PendingMean:
    """A pseudo-gradient that is under way, or has landed and is not used yet."""

    number: int  # of the fragment among those that take turns
    fragment: Fragment
    due: int  # the local step after which its mean is used
    mean: Tensor  # flat; before it is there, this rank's pseudo-gradient
    share: float = 0.0  # of a worker that this rank is; 0: it takes no part
    weight: float = 0.0  # in the mean
    squares: float = 0.0  # this rank's summand of the sum over workers of weight**2 * norm**2
    usual: float = 1.0  # mean weight of all ranks, about; equal on all of them
    trained: Sequence[bool] | None = None  # parameters of the model, by any worker; None: unknown
    handle: Handle | None = None  # None: the mean is there
    step: int = 0  # of the reducer, before this exchange
    samples: float = 0.0  # of this worker so far
    totals: Callable[[], list[float]] | None = None  # waits for what the ranks agree on
    lost: bool = False  # this worker's weights are not finite: it begins again from the anchor


class PseudoGradients:
    """One exchange at a time of ``anchor - weights`` of a fragment, averaged over the workers.

    Args:
        anchor: of the model.
        reducer: which averages.
        weigh_by: what a worker counts by.
        ranks_per_worker: ranks of this rank's worker, which may differ between workers.
        shards: of this rank's worker; None: each rank of it has a whole pseudo-gradient.
    """

    def __init__(
        self,
        anchor: Anchor,
        reducer: Reducer,
        *,
        weigh_by: Weight,
        ranks_per_worker: int = 1,
        shards: WorkerShards | None = None,
    ) -> None:
        self._anchor, self._reducer, self._weigh_by = anchor, reducer, weigh_by
        self._shards = shards
        self.share = 1 / ranks_per_worker
        """Share of a worker that this rank is."""
        self._usual_share = self._mean_of(self.share)
        self.flat = self._zeros(max(fragment.numel for fragment in anchor.fragments))
        for fragment in anchor.fragments:
            reducer.reserve(fragment.slices, anchor.dtype)
        self.samples = 0.0
        """Samples of this worker so far."""
        self.is_new = False
        """Whether this worker has joined others and taken no step yet: it has no part in means."""
        self._sent_samples = [0.0] * len(anchor.fragments)  # of which each last exchange had some
        self._usual_samples = 0.0  # of a worker in the last exchange; 0: there was none
        self.under_way: PendingMean | None = None
        self.metrics: dict[str, float] = {}
        """Metrics of the last exchange."""

    @property
    def own_share(self) -> float:
        """Share of a worker that this rank is in means of buffers."""
        return 0.0 if self.is_new else self.share

    def _zeros(self, numel: int) -> Tensor:
        return torch.zeros(numel, dtype=self._anchor.dtype, device=self._reducer.network.device)

    def send(self, number: int, *, due: int, attempted: int) -> None:
        """Start to average a fragment's.

        Args:
            due: local step after which the mean is used.
            attempted: optimizer steps of this worker so far.
        """
        exchange = self._prepare(number, due=due, attempted=attempted)
        if self._reducer.recovers and exchange.totals is not None:
            exchange.totals()  # before the vote: who has the mean must have its weights
        exchange.step = self._reducer.step
        slices = exchange.fragment.slices
        exchange.handle = self._reducer.start(exchange.mean, slices, key=number)
        self._reducer.finish()
        self.under_way = exchange

    def average(self, number: int, *, attempted: int) -> PendingMean:
        """Average a fragment's now, uncompressed and without residuals."""
        exchange = self._prepare(number, due=0, attempted=attempted)
        flat = exchange.mean
        stats = self._reducer.stats
        network = self._reducer.network if self._shards is None else self._shards.between
        network.data.all_reduce(flat).wait()
        flat.div_(network.world_size)
        sent = ring_allreduce(flat.nbytes, network.topology)
        stats.record("none", sent.total, sent)
        stats.end_step()
        self._complete(exchange)
        return exchange

    def _prepare(self, number: int, *, due: int, attempted: int) -> PendingMean:
        """Pseudo-gradient of this rank for a fragment; the ranks begin to agree on its weight."""
        exchange = self._weighed(number, due=due, attempted=attempted)
        figures = [exchange.share, exchange.weight, exchange.squares, *(exchange.trained or ())]
        network = self._reducer.network
        sums = torch.tensor(figures, dtype=torch.float64).to(network.device)
        work = network.control.all_reduce(sums)

        @cache  # once they are known, a wait could still be given up
        def totals() -> list[float]:
            work.wait()
            summed: list[float] = sums.tolist()
            return summed

        exchange.totals = totals
        return exchange

    @torch.no_grad()
    def _weighed(self, number: int, *, due: int, attempted: int) -> PendingMean:
        """Pseudo-gradient of this rank for a fragment, times its weight over the usual one."""
        fragment = self._anchor.fragments[number]
        trained = self._anchor.begin_exchange(fragment)
        if fragment.numel > len(self.flat):
            self.flat = self._zeros(fragment.numel)
        flat = self.flat[: fragment.numel]
        exchange = PendingMean(number, fragment, due, flat, trained=trained)
        exchange.samples = self.samples
        for parameter, anchor, part in fragment.rows():
            difference = part.shaped(part.of(flat))
            there = anchor.to(difference.device)
            torch.sub(there, own_part(parameter).to(anchor.dtype), out=difference)
        weight, exchange.usual = self.share, self._usual_share
        if self._weigh_by == "samples":
            weight = self.samples - self._sent_samples[number]  # since its last exchange
            exchange.usual = self._usual_samples or self._mean_of(weight)
        squares = float(torch.linalg.vector_norm(flat, dtype=torch.float64)) ** 2
        if self._shards is not None:  # they have one weight, and all take part or none
            squares, samples = self._shards.total(squares, weight)
            if self._weigh_by == "samples":
                weight = samples / self._shards.size
        if not squares < float("inf"):  # or NaN
            flat.zero_()  # this worker goes on from the anchor, and the others without it
            log.warning(
                "The weights of this worker are not finite after %d optimizer steps: it skips this "
                "exchange and continues from the anchor, without the optimizer state that is not "
                "finite",
                attempted,
            )
            exchange.lost = True
            return exchange
        if self.is_new:
            flat.zero_()
            return exchange
        if weight != exchange.usual:
            flat.mul_(weight / exchange.usual)
        exchange.share, exchange.weight = self.share, weight
        # The ranks of a worker have the same pseudo-gradient, and sum up to its weight.
        exchange.squares = squares * weight**2 / self.share
        return exchange

    def wait(self) -> PendingMean:
        """Pseudo-gradients sent, with their mean over participating workers once it is there."""
        exchange = self.under_way
        assert exchange is not None
        if exchange.handle is not None:
            exchange.handle.done.wait()
            if self._reducer.recovers and self._reducer.step == exchange.step:
                raise CollectiveError(f"An exchange has failed: {self._reducer.failure}")
            self._complete(exchange)
            exchange.handle = None  # last: a mean whose weights did not arrive is not used
        return exchange

    def take(self) -> PendingMean:
        """:meth:`wait`, after which nothing is under way."""
        taken, self.under_way = self.wait(), None
        return taken

    def _complete(self, exchange: PendingMean) -> None:
        """Divide by the weights of the workers that are finite, and note the metrics."""
        network, mean = self._reducer.network, exchange.mean
        assert exchange.totals is not None
        shares, weight, squares, *trained = exchange.totals()
        self._sent_samples[exchange.number] = exchange.samples
        exchange.trained = [count > 0 for count in trained]
        workers = float(round(shares))  # a third of a worker is rounded
        expected = network.world_size * exchange.usual
        if weight not in (0.0, expected):
            mean.mul_(expected / weight)
        squares *= (shares / weight) ** 2 if weight else 0.0
        of_mean = float(torch.linalg.vector_norm(mean, dtype=torch.float64)) ** 2
        if self._shards is not None:
            (of_mean,) = self._shards.total(of_mean)
        self.metrics = {
            "outer/pseudo_gradient_norm": of_mean**0.5,
            "outer/drift": (squares / max(workers, 1)) ** 0.5,
            "outer/workers": workers,
        }
        if self._weigh_by == "samples":
            self.metrics["outer/samples"] = weight
            self._usual_samples = weight / network.world_size or exchange.usual
        if workers > 1 and squares:
            cosine = (workers**2 * of_mean - squares) / ((workers - 1) * squares)
            self.metrics["outer/cosine"] = cosine

    def _mean_of(self, figure: float) -> float:
        """The mean of a figure of all ranks; 1 where it is 0. Collective."""
        network = self._reducer.network
        total = torch.tensor([figure], dtype=torch.float64, device=network.device)
        network.control.all_reduce(total).wait()
        return float(total) / network.world_size or 1.0

    def state_dict(self) -> dict[str, Any]:
        """The mean that is not used yet, and samples of all workers; equal on all. Collective."""
        saved = None
        if self.under_way is not None:
            sent = self.wait()
            saved = {
                "fragment": sent.number,
                "names": [part.name for part in sent.fragment.slices],
                "due": sent.due,
                "mean": sent.mean.cpu().clone(),
            }
        return {"exchange": saved, "samples": self._gather_samples()}

    def state_for_newcomer(self) -> dict[str, Any]:
        """:meth:`state_dict` for a worker that joins, while nothing is under way."""
        rows = torch.zeros(0, 1 + len(self._sent_samples), dtype=torch.float64)
        return {"exchange": None, "samples": {"workers": rows, "usual": self._usual_samples}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; a worker that was not there has no samples."""
        network, rows = self._reducer.network, state["samples"]["workers"]
        count = len(self._anchor.fragments)
        self.samples, self._sent_samples = 0.0, [0.0] * count
        self._usual_samples = float(state["samples"]["usual"])
        if network.rank < len(rows) and rows.shape[1] == 1 + count:
            self.samples, *self._sent_samples = rows[network.rank].tolist()
        self.under_way, saved = None, state["exchange"]
        if saved is not None:
            fragment = self._anchor.fragment_of(saved["names"])
            mean = saved["mean"].to(self.flat, copy=True)
            self.under_way = PendingMean(int(saved["fragment"]), fragment, int(saved["due"]), mean)

    def _gather_samples(self) -> dict[str, Any]:
        """Counts of all workers, on all ranks. Collective."""
        network, counts = self._reducer.network, [self.samples, *self._sent_samples]
        rows = torch.zeros(network.world_size, len(counts), dtype=torch.float64)
        rows[network.rank] = torch.tensor(counts, dtype=torch.float64)
        rows = rows.to(network.device)
        network.control.all_reduce(rows).wait()
        return {"workers": rows.cpu(), "usual": self._usual_samples}
