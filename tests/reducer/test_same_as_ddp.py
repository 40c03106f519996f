"""Where nothing is compressed, the gradients are DDP's own, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed, gradients
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

DDP = {"bucket_cap_mb": 0.004}  # several buckets after the first step


def several_steps(rank: Rank, model: DistributedDataParallel, steps: int = 5) -> list[str]:
    """Digests of the gradients of every step."""
    return [digest(sorted_values(backward(model, feed(rank.rank, s)))) for s in range(steps)]


def sorted_values(tensors: Tensors) -> list[torch.Tensor]:
    return [tensors[name] for name in sorted(tensors)]


def plain(rank: Rank, dtype: torch.dtype = torch.float32, **ddp: Any) -> list[str]:
    return several_steps(rank, rank.ddp(Fed(dtype=dtype), **{**DDP, **ddp}))


def ours(
    rank: Rank, codec: str, dtype: torch.dtype = torch.float32, *, ddp: Any = None, **settings: Any
) -> list[str]:
    with compressed(rank, Fed(dtype=dtype), codec, ddp={**DDP, **(ddp or {})}, **settings) as (
        m,
        _,
    ):
        return several_steps(rank, m)


@pytest.mark.parametrize(
    ("size", "ddp"),
    [
        (2, {}),
        (3, {}),
        (4, {}),
        (3, {"gradient_as_bucket_view": True}),
        (3, {"static_graph": True}),
    ],
    ids=str,
)
def test_none_is_bit_identical_to_ddp(size: int, ddp: Mapping[str, Any]) -> None:
    expected = run_threads(lambda rank: plain(rank, **ddp), size)
    assert run_threads(lambda rank: ours(rank, "none", ddp=ddp), size) == expected
    assert len(set(expected[0])) == 5, "every step has other gradients"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_none_is_bit_identical_in_other_dtypes(dtype: torch.dtype) -> None:
    expected = run_threads(lambda rank: plain(rank, dtype), 3)
    assert run_threads(lambda rank: ours(rank, "none", dtype), 3) == expected


@pytest.mark.parametrize(
    "ddp", [{"gradient_as_bucket_view": True}, {"static_graph": True}], ids=str
)
@pytest.mark.parametrize("codec", ["fp16", "int8"])
def test_how_ddp_keeps_gradients_changes_no_bits(codec: str, ddp: Mapping[str, Any]) -> None:
    settings = {"min_compress_numel": 256}
    expected = run_threads(lambda rank: ours(rank, codec, **settings), 2)
    assert run_threads(lambda rank: ours(rank, codec, ddp=ddp, **settings), 2) == expected


@pytest.mark.parametrize("size", [2, 4])
def test_fp16_is_bit_identical_to_torchs_hook(size: int) -> None:
    """With 2 or 4 ranks the division is exact, wherever it happens."""

    def torchs(rank: Rank) -> list[str]:
        group = rank.group("ddp")
        model = DistributedDataParallel(Fed(), process_group=group, **DDP)
        model.register_comm_hook(group, fp16_compress_hook)
        return several_steps(rank, model)

    expected = run_threads(torchs, size)
    assert run_threads(lambda rank: ours(rank, "fp16"), size) == expected


@pytest.mark.parametrize(("codec", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
@pytest.mark.parametrize("size", [2, 4])
def test_casts_are_what_they_say(codec: str, dtype: torch.dtype, size: int) -> None:
    """(x / W) in the short type, summed by one allreduce of the bucket."""

    def reference(rank: Rank) -> str:
        parts = sorted_values(feed(rank.rank, 0, {"w": (40, 48)}))
        summed = (parts[0] / size).to(dtype).flatten()
        rank.group("ring").allreduce([summed]).wait()
        return digest([summed.float()])

    def body(rank: Rank) -> str:
        shapes = {"w": (40, 48)}
        with compressed(rank, Fed(shapes), codec) as (model, _):
            return digest(backward(model, feed(rank.rank, 0, shapes)))

    assert run_threads(body, size) == run_threads(reference, size)


def test_before_the_start_step_it_is_ddp() -> None:
    """From the start step on it is the compressed run that begins there."""
    settings = {"min_compress_numel": 256}
    expected = run_threads(plain, 3)
    late = run_threads(lambda rank: ours(rank, "int8", start_step=3, **settings), 3)
    assert [digests[:3] for digests in late] == [digests[:3] for digests in expected]
    assert all(a != b for a, b in zip(late[0][3:], expected[0][3:], strict=True))


@pytest.mark.parametrize("codec", ["none", "int8"])
def test_accumulated_gradients_are_sent_once(codec: str) -> None:
    """Inside no_sync the hook is not called; the sync step sends the sum, as DDP does."""

    def accumulate(rank: Rank, model: DistributedDataParallel) -> Tensors:
        for step in range(9):
            syncs = step % 3 == 2
            with nullcontext() if syncs else model.no_sync():
                model(feed(rank.rank, step)).backward()
            if syncs:
                last = gradients(model)
                model.zero_grad()
        return last

    def body(rank: Rank) -> tuple[Tensors, int]:
        with compressed(rank, Fed(), codec, min_compress_numel=256, ddp=DDP) as (model, reducer):
            return accumulate(rank, model), reducer.comm_stats()["steps"]

    expected = run_threads(lambda rank: accumulate(rank, rank.ddp(Fed(), **DDP)), 2)
    for (got, steps), wanted in zip(run_threads(body, 2), expected, strict=True):
        assert steps == 3
        tolerance = 0.0 if codec == "none" else 0.1
        for name, gradient in wanted.items():
            torch.testing.assert_close(got[name], gradient, rtol=0, atol=tolerance)
