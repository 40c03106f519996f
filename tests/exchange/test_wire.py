"""Planes in a uint8 buffer: side by side, aligned, and writing through."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.codecs import Plane
from lightning_dist.exchange.wire import row_bytes, views

_DTYPES = [torch.uint8, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
_planes = st.builds(Plane, st.sampled_from(_DTYPES), st.integers(1, 17))
layouts = given(
    planes=st.lists(_planes, min_size=1, max_size=4),
    rows=st.integers(1, 4),
    blocks=st.integers(1, 9),
)


def pattern(number: int, like: torch.Tensor) -> torch.Tensor:
    """Bytes that no other plane or place has, as far as a byte can tell."""
    return torch.arange(like.nbytes).mul(31).add(number * 7 + 1).to(torch.uint8)


@layouts
def test_shapes_and_dtypes(planes: list[Plane], rows: int, blocks: int) -> None:
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    got = [(view.dtype, tuple(view.shape)) for view in views(buffer, planes, blocks)]
    assert got == [(plane.dtype, (rows, blocks, plane.per_block)) for plane in planes]


@layouts
def test_planes_do_not_overlap(planes: list[Plane], rows: int, blocks: int) -> None:
    """What is written to each plane is still there after all others are written."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    payload = views(buffer, planes, blocks)
    for number, view in enumerate(payload):
        view.copy_(pattern(number, view).view(view.dtype).view(view.shape))
    for number, view in enumerate(payload):
        read = view.contiguous().view(torch.uint8).view(-1)
        assert torch.equal(read, pattern(number, view))


@layouts
def test_planes_cover_the_row(planes: list[Plane], rows: int, blocks: int) -> None:
    """Writing all planes writes every byte of the buffer but up to 7 after each plane."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    for view in views(buffer, planes, blocks):
        ones = torch.full((view.nbytes,), 255, dtype=torch.uint8)
        view.copy_(ones.view(view.dtype).view(view.shape))
    payload_bytes = sum(plane.bytes_per_block for plane in planes) * blocks
    assert (buffer == 255).sum(1).tolist() == [payload_bytes] * rows
    assert payload_bytes <= row_bytes(planes, blocks) <= payload_bytes + 7 * len(planes)


@layouts
def test_planes_are_aligned(planes: list[Plane], rows: int, blocks: int) -> None:
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    for view in views(buffer, planes, blocks):
        assert all(row.data_ptr() % view.itemsize == 0 for row in view)


@layouts
def test_views_follow_the_buffer(planes: list[Plane], rows: int, blocks: int) -> None:
    """A view shows what arrives later: collectives write into the buffer."""
    buffer = torch.zeros(rows, row_bytes(planes, blocks), dtype=torch.uint8)
    payload = views(buffer, planes, blocks)
    buffer.fill_(1)
    for view in payload:
        assert (view.contiguous().view(torch.uint8) == 1).all()


def test_a_buffer_of_another_size_is_refused() -> None:
    planes = [Plane(torch.float32, 4)]
    with pytest.raises(RuntimeError):
        views(torch.zeros(1, row_bytes(planes, 2) - 8, dtype=torch.uint8), planes, 2)
