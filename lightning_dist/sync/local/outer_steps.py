"""Outer steps of a model that is trained in local ones: when, and what they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_dist.base.log import get_logger
from lightning_dist.ranks.failures import is_of_collective
from lightning_dist.reducer.network import Network
from lightning_dist.reducer.stats import untraced
from lightning_dist.settings.local_updates import LocalUpdateSettings
from lightning_dist.sync.base import Sync
from lightning_dist.sync.fsdp.checks import require_all_sharded, reshard, sharded_groups
from lightning_dist.sync.fsdp.replicas import local_of
from lightning_dist.sync.local.anchor import require_stepped
from lightning_dist.sync.local.anchored import AnchoredModel, take_anchor
from lightning_dist.sync.local.pseudo_gradients import PendingMean, average_buffers

log = get_logger(__name__)


class NotAppliedError(RuntimeError):
    """An outer step that counts on all workers could not be applied on this one."""


class LocalUpdates(AnchoredModel):
    """The outer steps of a model that is trained in local ones; see :func:`local_updates`."""

    sync: Sync
    """Part of it that frameworks use."""

    def __init__(
        self, module: nn.Module, settings: LocalUpdateSettings, *, network: Network, **worker: Any
    ) -> None:
        """Begin with weights that are equal on all ranks; collective.

        Args:
            module: see :class:`.AnchoredModel`.
            settings: see there.
            network: see there.
            **worker: see there.
        """
        super().__init__(module, settings, network=network, **worker)
        self.total_steps: int | None = None
        """Optimizer steps of the whole training, if known; equal on all ranks.

        After the last of them :meth:`step` calls :meth:`finish` in the place of an outer step. A
        Trainer sets it.
        """
        self.after_step: list[Callable[[], None]] = []
        """Called at the end of every :meth:`step`."""
        self.is_in_ddp = False
        """Whether the model was given in DistributedDataParallel."""
        self._exposed = 0.0  # seconds in exchanges since the anchor has moved
        self._has_stepped = self._has_finished = False
        self._optimizers: list[Optimizer] = []

    def connect(self, optimizer: Optimizer) -> None:
        """Take an optimizer of the local steps."""
        self._optimizers.append(optimizer)
        hook = optimizer.register_step_pre_hook(untraced(self._before_optimizer))
        self.reducer.at_close.append(hook.remove)

    def _look(self) -> None:
        """Note which parameters are trained now."""
        if self.anchor.look() and self.shards is not None:
            require_all_sharded(self.module, list(sharded_groups(self.module)))

    def step(self, samples: float | None = None) -> bool:
        """Count an attempted optimizer step; at the end of a window exchange. Collective then.

        Every rank calls it as often, also where the optimizer was not stepped: a GradScaler that
        has skipped a step, a worker without a batch.

        Args:
            samples: that this worker's step has used, or tokens; 0 where it was not stepped. For
                ``weigh_by="samples"``.

        Returns:
            Whether the anchor has moved.

        Raises:
            ValueError: samples are needed and not given, or the other way round; or gradients are
                there and no optimizer has stepped, as in the middle of accumulation.
            RuntimeError: a peer is lost. Anchor, outer optimizer and weights are as before. Under
                a recovery it is not raised, see :meth:`exchange_again`.
        """
        if not self._has_stepped:
            grads = (p.grad for p in self.trained.values() if p.grad is not None)
            held = (g.coalesce().values() if g.is_sparse else local_of(g) for g in grads)
            gradients = sum(float(torch.linalg.vector_norm(gradient)) for gradient in held)
            if self.shards is not None:
                (gradients,) = self.shards.total(gradients)
            require_stepped(gradients)
        self._look()  # a worker without a batch has no step of an optimizer
        if (samples is None) == (self.settings.weigh_by == "samples"):
            raise ValueError(
                "step(samples=) must be given with weigh_by='samples', and only then, got "
                f"{samples!r} with weigh_by={self.settings.weigh_by!r}"
            )
        self._gradients.samples += samples or 0.0
        self.attempted += 1
        self._gradients.is_new = False
        begin = perf_counter()
        if self.attempted == self.total_steps:
            self.finish()
            moved = True
        else:
            moved = self._exchange()
        self._count_exposed(begin, moved=moved)
        for call in self.after_step:
            call()
        return moved

    def _exchange(self) -> bool:
        local = self.attempted - self.settings.ddp_steps
        if self._due is not None:
            raise RuntimeError(
                "The exchange of the outer step before has failed, so workers would drift apart; "
                "start again from a checkpoint"
            )
        if local < 0:
            return False
        if local == 0:  # the last step of plain DDP is over: the anchor is what all ranks have now
            assert self._synced is not None
            self._synced.require_backward_grad_sync = False
            self.anchor_from_weights()
            self.anchor.agree()
            return False
        number, under_way = self.settings.fragment_at(local), self._gradients.under_way
        # One that was saved under another schedule may be due after the next one begins.
        moved = under_way is not None and (under_way.due <= local or number is not None)
        if moved:
            exchange = self._gradients.take()
            self._average_buffers(exchange.number)
            self._apply(exchange)
        if number is not None and self.anchor.fragments[number].parameters:
            if not self.settings.overlap_steps:
                try:
                    self._exchange_now(number, local)
                except RuntimeError as error:
                    if not self.reducer.recovers or not is_of_collective(error):
                        raise
                    return False
                return True
            due = local + self.settings.overlap_steps
            self._gradients.send(number, due=due, attempted=self.attempted)
        return moved

    def _exchange_now(self, number: int, local: int) -> None:
        """Take the outer step of a fragment. Collective."""
        trained = self.anchor.trained()
        try:
            self._average_buffers(number)
            self._gradients.send(number, due=local, attempted=self.attempted)
            exchange = self._gradients.take()
        except BaseException:
            self._gradients.under_way, self._due = None, number
            self.anchor.mark_trained(trained)
            raise
        self._due = None  # the step counts, on all workers
        try:
            self._apply(exchange)
        except RuntimeError as error:
            if not is_of_collective(error):
                raise
            raise NotAppliedError(
                f"a worker was lost while an outer step was applied: {error}"
            ) from error

    def exchange_again(self) -> None:
        """Take the outer step whose exchange has failed, with the present workers. Collective.

        Each sends what it has changed since the last one, a worker that has joined nothing. Nothing
        is done if none has failed.

        Raises:
            CollectiveError: a peer is lost, and all is as before.
            NotAppliedError: a peer is lost, and other workers may be a step farther.
        """
        if self._due is not None:
            begin = perf_counter()
            self._exchange_now(self._due, self.attempted - self.settings.ddp_steps)
            self._count_exposed(begin, moved=True)

    def _count_exposed(self, begin: float, *, moved: bool) -> None:
        """Note the time since ``begin``, in which training has waited."""
        self._exposed += perf_counter() - begin
        if moved:
            self._gradients.metrics["outer/exposed_ms"] = self._exposed * 1e3
            self._exposed = 0.0

    def _average_buffers(self, number: int) -> None:
        if number == 0:  # once a window; first, as a lost peer must leave all as it is
            held = list(self.module.buffers())
            average_buffers(held, self.reducer.network, share=self._gradients.own_share)

    def wait(self) -> None:
        """Wait for the exchange that is under way, if any; its mean is used when it is due."""
        if self._gradients.under_way is not None:
            self._gradients.wait()

    def finish(self) -> None:
        """End the training: every worker gets the mean of all. Collective.

        The mean of the workers' own weights, uncompressed, without outer learning rate and
        momentum: after a learning rate that has decayed to 0 a step of momentum overshoots, and the
        residual of a sparse codec has many windows, which one step must not apply at once. Where no
        worker has changed its weights since the last outer step, nothing is exchanged.
        """
        local = self.attempted - self.settings.ddp_steps
        if local < 0:
            return
        few = "" if self._has_finished else self.settings.few(local)
        if few and self.reducer.network.rank == 0:
            log.warning("%s", few)
        self._has_finished = True
        is_under_way = self._gradients.under_way is not None
        if is_under_way:
            self._gradients.take()  # not used: the workers' own weights have all that it is of
        self.anchor.agree()
        if not is_under_way and not self._has_changed():
            return
        for number, fragment in enumerate(self.anchor.fragments):
            if fragment.parameters:
                exchange = self._gradients.average(number, attempted=self.attempted)
                self._average_buffers(number)
                self._apply(exchange, mean_only=True)

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last outer step, for a logger; empty before it.

        ``outer/pseudo_gradient_norm``: of the mean; ``outer/drift``: root mean square of the
        workers' own norms; ``outer/cosine``: mean cosine between two workers' pseudo-gradients,
        weighted by their norms (two workers or more); ``outer/workers``: those whose weights were
        finite, which alone take part; ``outer/samples`` of all workers, where they count by them;
        ``outer/lr``: learning rate of the outer optimizer; ``outer/exposed_ms``: time that
        :meth:`step` took since the outer step before, with ``overlap_steps`` what is not hidden.
        """
        return dict(self._gradients.metrics)

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._has_stepped and not any(group["lr"] for group in optimizer.param_groups):
            return  # changes nothing: torch makes the state for a checkpoint by such a step
        if not self._has_stepped and not self.attempted and self._differs_from_anchor():
            raise ValueError(
                "The model's weights must be those of local_updates() before the first step, and "
                "have been changed since; load them before, or call anchor_from_weights() once "
                "all ranks have loaded the same"
            )
        self._has_stepped = True
        self._look()

    def _has_changed(self) -> bool:
        """True if the weights of any worker differ from the anchor. Collective."""
        network, changed = self.reducer.network, self._differs_from_anchor()
        flag = torch.tensor([changed], dtype=torch.int32, device=network.device)
        network.control.all_reduce(flag).wait()
        return bool(flag)

    @torch.no_grad()
    def _apply(self, exchange: PendingMean, *, mean_only: bool = False) -> None:
        """Take an outer step; ``mean_only`` without the outer optimizer and mixing."""
        fragment = exchange.fragment
        if exchange.trained is not None and not mean_only:
            self.anchor.follow(exchange.trained, fragment)
        for _, anchor, part in fragment.rows():
            mean = part.shaped(part.of(exchange.mean)).to(anchor.device)
            if mean_only:
                anchor.sub_(mean)
            else:
                anchor.grad = mean
        if not mean_only:
            self.outer_optimizer.step()
            self._gradients.metrics["outer/lr"] = self.outer_optimizer.param_groups[0]["lr"]
            if self.outer_scheduler and exchange.number == self.anchor.last:
                self.outer_scheduler.step()  # all fragments of a window have one rate
        reshard(self.module)
        exchanged = self.anchor.names
        for parameter, anchor, part in fragment.rows():
            anchor.grad = None
            # Workers keep nothing of their own of what is frozen, and exchanged no more.
            mixes = not mean_only and part.name in exchanged
            take_anchor(parameter, anchor, keep=self.settings.mixing if mixes else 0.0)
        if exchange.lost:
            self._begin_again()

    def _begin_again(self) -> None:
        """Give this worker, which was not finite, the anchor as a whole and moments of its own.

        One fragment is not enough: what is not finite in another would be in all gradients.
        """
        self.start_from_anchor()
        for state in (of for optimizer in self._optimizers for of in optimizer.state.values()):
            moments = (tensor for tensor in state.values() if isinstance(tensor, Tensor))
            if not all(bool(local_of(tensor).isfinite().all()) for tensor in moments):
                state.clear()  # the optimizer makes it anew
