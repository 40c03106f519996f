"""A model in DDP whose process group is replaced."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist.elastic.recovery.groups import init_alone
from lightning_dist.integrations.torch.regroup import from_rank
from lightning_dist.private import send_buffers


@pytest.fixture
def alone() -> Iterator[None]:
    if dist.is_initialized():  # Lightning leaves the group of a Trainer of another test
        assert dist.get_world_size() == 1
        yield
        return
    init_alone()
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_a_rank_that_needs_no_state_does_not_receive_it() -> None:
    """There are no such ranks, and none is asked."""
    assert from_rank(None, rank=1, to=[2, 3]) is None


@pytest.mark.usefixtures("alone")
def test_buffers_of_one_type_are_sent_in_one_collective() -> None:
    """Running means, variances and counts of 20 layers, but those that DDP ignores."""
    module = nn.Sequential(nn.Linear(4, 4), *(nn.BatchNorm1d(4) for _ in range(20)))
    ignored = [name for name, _ in module.named_buffers() if name.startswith("20.")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = DistributedDataParallel(module)
    with torch.profiler.profile(record_shapes=True) as profile:
        send_buffers(model)
    sent = [each.input_shapes for each in profile.events() if each.name == "gloo:broadcast"]
    counts, values = 19, 19 * 8  # without the last layer
    assert sorted(sent) == [[[counts]], [[values]]]
