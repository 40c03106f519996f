"""Every codec with its default options, in plain DDP, beside SGD with momentum.

A codec learns the digits task, or refuses the optimizer; it never trains to chance in silence.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from feeding import Fed, backward, compressed, feed
from worlds import Rank, run_threads

from benchmarks.convergence.tasks import DigitsSettings, DigitsTask
from lightning_dist.codecs import CODECS

SETTINGS = DigitsSettings(steps=120)
WORLD_SIZE = 2
LEAST = 75.0  # percent of the test images; chance is 10, without compression it is 94


@cache
def task_of(rank: int) -> DigitsTask:
    return DigitsTask(SETTINGS, rank=rank, world_size=WORLD_SIZE)


def accuracy(rank: Rank, codec: str, *, momentum: float) -> float:
    """Percent of the test images that are classified correctly after training."""
    task = task_of(rank.rank)
    module = task.model()  # DDP gives all ranks the parameters of the first
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        bound = 64**-0.5 if parameter.dim() == 1 else parameter.shape[1] ** -0.5
        torch.nn.init.uniform_(parameter, -bound, bound, generator=generator)
    with compressed(rank, module, codec) as (model, _):
        optimizer = torch.optim.SGD(model.parameters(), lr=SETTINGS.lr, momentum=momentum)
        batches = task.batches(seed=0)
        for _ in range(SETTINGS.steps):
            optimizer.zero_grad()
            task.loss(model, next(batches)).backward()
            optimizer.step()
        rank.barrier.wait()  # the optimizers of all ranks step in one process
        return task.evaluate(model)["test_accuracy"]


@pytest.mark.parametrize("codec", CODECS)
def test_a_default_learns_or_refuses_momentum(codec: str) -> None:
    momentum = 0.9
    if codec == "dgc":
        with pytest.raises(ValueError, match="codec 'dgc' gives the gradients momentum, and SGD"):
            run_threads(lambda rank: accuracy(rank, codec, momentum=0.9), WORLD_SIZE)
        momentum = 0.0
    reached = run_threads(lambda rank: accuracy(rank, codec, momentum=momentum), WORLD_SIZE)
    assert min(reached) > LEAST


@pytest.mark.parametrize("of_the_model", [True, False])
def test_only_optimizers_of_the_model_are_refused(of_the_model: bool) -> None:
    """Also one of several groups, and Adam, whose first moment is a momentum."""

    def body(rank: Rank) -> None:
        other = torch.nn.Parameter(torch.ones(3))
        with compressed(rank, Fed(), "dgc", min_compress_numel=256) as (model, reducer):
            backward(model, feed(rank.rank, 0))
            parameters = [*model.parameters()] if of_the_model else [other]
            optimizer = torch.optim.Adam([{"params": parameters}])
            rank.barrier.wait()
            try:
                optimizer.step()
            finally:
                rank.barrier.wait()
            reducer.close()
        optimizer.step()  # nothing is compressed any more

    if of_the_model:
        with pytest.raises(ValueError, match="and Adam has its own"):
            run_threads(body, 2)
    else:
        run_threads(body, 2)
