"""The order of the samples of an epoch: the same for every world size, worker and restart."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_dist.elastic.rng import isolated
from lightning_dist.elastic.seeds import derive_seed


class EpochOrder:
    """What a sampler of a single process would yield, fixed by seed and epoch.

    Args:
        sampler: of the user's loader. A ``DistributedSampler`` stands for its whole dataset,
            shuffled or not.
        seed: the same on all ranks and after every restart. A generator that the sampler has is
            seeded with it too: some samplers seed their own at random when they are made.
    """

    def __init__(self, sampler: Sampler[Any] | Iterable[Any], *, seed: int) -> None:
        self._sampler: Iterable[Any] = _of_one_process(sampler)
        own = sampler.seed if isinstance(sampler, DistributedSampler) else 0
        self._seed = derive_seed(seed, "sampler", own)
        generator = getattr(self._sampler, "generator", None)
        self._generator = generator if isinstance(generator, torch.Generator) else None
        self._cached: tuple[int, Sequence[Any]] | None = None

    @property
    def size(self) -> int:
        """Samples of an epoch.

        Raises:
            ValueError: the sampler does not know.
        """
        try:
            return len(self._sampler)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError(
                f"a sampler has to know how many samples an epoch has; {type(self._sampler)!r} has "
                "no len(). Give it a __len__"
            ) from None

    def of(self, epoch: int) -> Sequence[Any]:
        """Indices in the dataset, in order."""
        if self._cached is None or self._cached[0] != epoch:
            self._cached = (epoch, self._make(epoch))
        return self._cached[1]

    def _make(self, epoch: int) -> Sequence[Any]:
        if type(self._sampler) is SequentialSampler:
            return range(len(self._sampler))
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with isolated(derive_seed(self._seed, "order", epoch)), self._own_generator(epoch):
            drawn = iter(self._sampler)
            try:
                order: Sequence[Any] = array("q", drawn)
            except TypeError:  # not all samplers yield integers
                order = list(self._sampler)
        if len(order) != self.size:
            raise ValueError(
                f"a sampler has to yield as many samples as its len() says, {self.size}; "
                f"{type(self._sampler).__name__} gave {len(order)} in epoch {epoch}"
            )
        return order

    @contextmanager
    def _own_generator(self, epoch: int) -> Iterator[None]:
        """Seed the sampler's own generator, which the next EpochOrder must find as it was."""
        if self._generator is None:
            yield
            return
        before = self._generator.get_state()
        self._generator.manual_seed(derive_seed(self._seed, "own", epoch))
        try:
            yield
        finally:
            self._generator.set_state(before)


def _of_one_process(sampler: Sampler[Any] | Iterable[Any]) -> Iterable[Any]:
    if not isinstance(sampler, DistributedSampler):
        return sampler
    if type(sampler) is not DistributedSampler:
        raise ValueError(
            f"{type(sampler).__name__} deals samples to ranks itself; elastic restart does that, "
            "for any number of ranks: give the loader a sampler for a single process"
        )
    dataset: Any = sampler.dataset
    return RandomSampler(dataset) if sampler.shuffle else SequentialSampler(dataset)
