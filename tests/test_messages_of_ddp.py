"""What a user of plain DDP reads when a model cannot be compressed. Tested whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from test_messages import message
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist.codecs import Int8
from lightning_dist.integrations.torch.ddp import compress_ddp


def test_a_module_that_is_not_ddp() -> None:
    assert message(compress_ddp, nn.Linear(2, 2)) == (
        "compress_ddp needs a DistributedDataParallel, got Linear; wrap the model first: "
        "DistributedDataParallel(model); compress_fsdp is for those of fully_shard"
    )


def refused(wrap: Callable[[Rank], DistributedDataParallel], **settings: Any) -> str:
    """The message of compress_ddp in a world of two, the same on both ranks."""

    def body(rank: Rank) -> str:
        return message(compress_ddp, wrap(rank), groups=rank.groups(), **settings)

    first, second = run_threads(body, 2)
    assert first == second
    return first


def test_a_grad_scaler_that_is_none() -> None:
    assert refused(lambda rank: rank.ddp(nn.Linear(2, 2)), grad_scaler=True) == (
        "grad_scaler must be a torch.amp.GradScaler, got True; create one"
    )


def test_a_second_hook() -> None:
    """Another's hook, and ours a second time."""

    def another(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    assert refused(another) == (
        "A model takes one communication hook, and fp16_compress_hook is registered already; "
        "remove that registration, or wrap the model in a new DistributedDataParallel"
    )

    def ours(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        groups = [rank.group("first payload"), rank.group("first flags")]
        compress_ddp(model, groups=groups).close()
        return model

    assert "and that of compress_ddp is registered already; call compress_ddp once" in refused(ours)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    assert refused(lambda rank: rank.ddp(model)) == (
        "Gradients must be dense, and '0' was made with sparse=True; make it with sparse=False"
    )


def test_no_trainable_parameters() -> None:
    """DDP itself refuses such a module, so it is frozen after it was wrapped."""

    def frozen(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        model.module.requires_grad_(False)
        return model

    assert refused(frozen) == (
        "The model must have a parameter with requires_grad=True, and has none; unfreeze one, or "
        "run without a distributed strategy"
    )


def test_skipped_buckets() -> None:
    ddp = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    assert refused(lambda rank: rank.ddp(nn.Linear(2, 2), **ddp)) == (
        "DistributedDataParallel(skip_all_reduce_unused_params=True) skips buckets, and the "
        "compressed step ends with the last one; leave it out"
    )


def test_ranks_with_different_settings() -> None:
    """Found before training, on all ranks, and each difference is named once."""

    def body(rank: Rank) -> str:
        codec = Int8(256 if rank.rank < 2 else 128)
        model, start = rank.ddp(nn.Linear(2, 2)), 10 if rank.rank == 1 else 0
        return message(compress_ddp, model, codec, groups=rank.groups(), start_step=start)

    assert set(run_threads(body, 3)) == {
        "All ranks must compress in the same way, but they differ in\n"
        "  codec: 'Int8(block_size=256)' on ranks 0, 1; 'Int8(block_size=128)' on rank 2\n"
        "  start_step: 0 on ranks 0, 2; 10 on rank 1\n"
        "Give every rank the same settings and the same version of the package."
    }


def test_ranks_with_different_models() -> None:
    """DDP compares shapes; frozen parameters it does not compare."""

    def body(rank: Rank) -> str:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = rank.ddp(module)
        module[rank.rank].requires_grad_(False)
        return message(compress_ddp, model, groups=rank.groups())

    first, second = run_threads(body, 2)
    assert first == second
    assert "parameters: '2 tensors, 20 elements, digest" in first
    assert first.count("on rank 0; ") == first.count(" on rank 1") == 1
