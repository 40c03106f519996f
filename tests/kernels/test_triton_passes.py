"""Every kernel writes the bytes of the eager passes, in one launch for a whole bucket."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from eager import DEVICE, Eager, hard_numbers, laid_out, on_device, same, same_payload, span_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quick_interpreter import quicken_interpreter
from torch import Tensor

from lightning_dist.codecs import (
    FP8,
    QSGD,
    BlockCodec,
    Int4,
    Int8,
    NoCompression,
    Sign,
    TernGrad,
    TopK,
)
from lightning_dist.codecs.memory import NoMemory
from lightning_dist.exchange.rounds import row_bytes, views
from lightning_dist.kernels.passes import Factors, Passes
from lightning_dist.kernels.triton import GRADIENT_DTYPES, Slice, SliceTable, kernels_of, packed

triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
passes = pytest.importorskip("lightning_dist.kernels.triton.passes")
registry = pytest.importorskip("lightning_dist.kernels.triton.registry")
codecs = pytest.importorskip("lightning_dist.kernels.triton.passes")
quicken_interpreter()

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of inf and NaN
    *on_device,
]

TABLE: list[BlockCodec] = [
    Int8(block_size=64),
    Int4(block_size=64),
    FP8(block_size=64),
    Sign(block_size=64),
    QSGD(block_size=64),
    TernGrad(block_size=64),
    Int4(block_size=48),  # the bytes of a block are no power of two
    Sign(block_size=48),
]
OTHERS: list[BlockCodec] = [
    Int8(),
    Int8(block_size=48),
    Int4(),
    FP8(),
    Sign(),
    QSGD(),
    QSGD(bits=2, block_size=48),
    QSGD(bits=8, norm="l2"),
    TernGrad(block_size=80),
    TernGrad(clip_sigma=2.5),
]
every_codec = pytest.mark.parametrize("codec", TABLE, ids=repr)

ODD = (1, 1000, 64, 63, 2049)  # elements: no multiple of a block, fewer than a block for each rank


@dataclass
class Bucket:
    """The arguments of all passes for some slices, on the device, and the eager passes of them."""

    eager: Eager
    table: SliceTable
    flat: Tensor
    residual: Tensor | None
    scale: Tensor
    salts: Tensor | None

    @property
    def kernels(self) -> Any:
        return kernels_of(self.eager.codec, dtype=self.flat.dtype)

    def payload(self, rows: int) -> Tensor:
        return torch.zeros(rows, self.table.row_bytes(0), dtype=torch.uint8, device=DEVICE)

    def reduce(self, shards: Tensor, *, row: int) -> tuple[Tensor, Tensor | None]:
        """The mean, and the new residual."""
        residual, scale, salts = map(on_device, (self.residual, self.scale, self.salts))
        mean, given = self.payload(1), {"residual": residual, "scale": scale, "salts": salts}
        self.kernels.reduce(on_device(shards), mean, table=self.table, row=row, **given)
        return mean, residual

    def decode(self, payloads: Tensor, weight: float = 1.0) -> Tensor:
        """The new gradient."""
        flat = on_device(self.flat)
        self.kernels.decode(on_device(payloads), flat, table=self.table, weight=weight)
        return flat

    def shards(self, count: int) -> Tensor:
        """Payloads of ``count`` ranks: what the eager encoder says of other numbers."""
        codec, columns = self.eager.codec, self.eager.columns
        shards = torch.zeros(count, self.table.row_bytes(0), dtype=torch.uint8)
        x = hard_numbers(count * columns * codec.block, seed=5)
        keys = None
        if codec.stochastic:
            keys = torch.arange(count * columns, dtype=torch.int32).view(count, columns, 1)
        encoded = codec.encode(x.view(count, columns, codec.block), keys)
        for plane, values in zip(
            views(shards, codec.planes(torch.float32), columns), encoded, strict=True
        ):
            plane.copy_(values)
        return shards


def bucket(
    codec: BlockCodec,
    slices: list[Slice],
    *,
    rows: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 8.0,
    tile_elements: int | None = 1024,
) -> Bucket:
    table = SliceTable.of(codec, [slices], rows=rows, device=DEVICE, tile_elements=tile_elements)
    flat = hard_numbers(span_of(slices) + 3, seed=1, dtype=dtype)
    residual = hard_numbers(sum(part.numel for part in slices), seed=2) * 0.01
    salts = torch.arange(len(slices), dtype=torch.int32) * 77777 - 5 if codec.stochastic else None
    return Bucket(Eager(codec, slices, rows), table, flat, residual, torch.tensor(scale), salts)


def on_device(tensor: Any) -> Any:
    return None if tensor is None else tensor.to(DEVICE, copy=True)


def check_encode(of: Bucket) -> None:
    payload, new, finite = of.eager.encode(of.flat, of.residual, of.scale, of.salts)
    flat, residual, scale, salts = map(on_device, (of.flat, of.residual, of.scale, of.salts))
    own, flag = of.payload(of.table.rows), torch.tensor(True, device=DEVICE)
    of.kernels.encode(flat, residual, scale, table=of.table, payload=own, finite=flag, salts=salts)
    assert same_payload(of.eager, own, payload)
    assert residual is new is None or same(residual, new)
    assert bool(flag) == bool(finite.all())
    assert same(flat, of.flat)


def check_reduce(of: Bucket, *, row: int, world_size: int) -> None:
    shards = of.shards(world_size)
    mean = of.eager.reduce(shards, row, of.salts)
    new = of.eager.server_feedback(of.residual, of.scale, shards, mean, row)
    out, residual = of.reduce(shards, row=row)
    assert same_payload(of.eager, out, mean)
    assert same(residual, new)


def check_decode(of: Bucket, *, count: int) -> None:
    weight = 1 / count
    payloads = of.shards(count * of.table.rows)
    assert same(of.decode(payloads, weight), of.eager.decode(payloads, of.flat, weight))


def check(of: Bucket) -> None:
    world_size = of.table.rows
    check_encode(of)
    check_reduce(of, row=world_size - 1, world_size=world_size)
    check_decode(of, count=1)


@every_codec
def test_kernels_write_the_bytes_of_the_eager_passes(codec: BlockCodec) -> None:
    check(bucket(codec, laid_out(*ODD, gap=1), rows=3))
    of = bucket(codec, laid_out(*ODD), rows=1)  # two ranks gather whole payloads
    check_encode(of)
    check_decode(of, count=2)


@pytest.mark.parametrize(
    ("dtype", "tile_elements"), [*zip(GRADIENT_DTYPES, (64, 256, 1 << 16), strict=True)]
)
def test_gradients_of_every_dtype_in_tiles_of_any_size(
    dtype: torch.dtype, tile_elements: int
) -> None:
    slices = laid_out(1000, 65)
    of = bucket(Int8(block_size=64), slices, rows=2, dtype=dtype, tile_elements=tile_elements)
    check(of)


@every_codec
def test_one_row_of_many_has_smaller_tiles(codec: BlockCodec) -> None:
    """So that a large GPU has work for all its processors."""
    rows = 32
    of = bucket(codec, laid_out(rows * 512 + 7, 63), rows=rows)
    assert of.table.finer is not None
    own = of.table.tile_starts[1]
    assert of.table.finer.tile_starts[1] > 1.5 * own
    check_encode(of)
    check_reduce(of, row=5, world_size=rows)


@every_codec
@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_block_that_is_not_finite_keeps_its_residual(codec: BlockCodec, bad: float) -> None:
    """The others are committed, and all ranks see its scale."""
    of = bucket(codec, laid_out(1000), rows=2)
    of.flat[5] = bad
    before = of.residual.clone()
    check_encode(of)
    payload, new, finite = of.eager.encode(of.flat, of.residual, of.scale, of.salts)
    assert finite.logical_not().sum() == 1
    assert new is not None
    assert same(new[: codec.block], before[: codec.block])
    mean, residual = of.reduce(torch.cat([payload[:1], of.payload(1).cpu()]), row=0)
    flat = of.decode(torch.cat([mean, mean]))
    assert not flat[: codec.block].isfinite().any()
    assert flat[codec.block : 2 * codec.block].isfinite().all()
    assert residual[: codec.block].isfinite().all()


@every_codec
def test_numbers_that_are_tiny_or_huge(codec: BlockCodec) -> None:
    of = bucket(codec, laid_out(900), rows=2, scale=2.0**-3)
    for start, size in enumerate((2.0**-149, 2.0**-135, 2.0**-126, 1e-30, 1e30, 3.4e38)):
        of.flat[start * 128 : start * 128 + 128] = size
        of.flat[start * 128 + 1 : start * 128 + 100 : 3] *= -0.3
    of.residual *= 1e-3
    check(of)


@every_codec
def test_without_residual(codec: BlockCodec) -> None:
    check_encode(replace(bucket(codec, laid_out(300, 70), rows=2), residual=None))


@pytest.mark.parametrize("codec", [Int8(block_size=64), QSGD(block_size=64)], ids=repr)
def test_state_that_is_committed_later_is_the_same(codec: BlockCodec) -> None:
    """For steps that may be skipped: it is computed again."""
    of = bucket(codec, laid_out(500, 130), rows=2)
    flat, scale, salts = map(on_device, (of.flat, of.scale, of.salts))
    now, later = on_device(of.residual), on_device(of.residual)
    own, again, mean = of.payload(2), of.payload(2), of.payload(1)
    of.kernels.encode(flat, now, scale, table=of.table, payload=own, salts=salts)
    of.kernels.reduce(own, mean, table=of.table, row=1, residual=now, scale=scale, salts=salts)

    of.kernels.encode(
        flat, later, scale, table=of.table, payload=again, salts=salts, writes_state=False
    )
    of.kernels.reduce(again, of.payload(1), table=of.table, row=1, salts=salts)
    assert same(later, of.residual)
    of.kernels.encode(flat, later, scale, table=of.table, payload=None, salts=salts)
    of.kernels.reduce(again, None, table=of.table, row=1, residual=later, scale=scale, salts=salts)
    assert torch.equal(own, again)
    assert same(later, now)


def test_compiling_ahead_changes_nothing() -> None:
    of = bucket(Int8(block_size=64), laid_out(100), rows=2)
    flat, residual, own = on_device(of.flat), on_device(of.residual), of.payload(2)
    ahead = of.kernels.compiling()
    ahead.encode(flat, residual, on_device(of.scale), table=of.table, payload=own)
    ahead.decode(own, flat, table=of.table)
    assert same(flat, of.flat)
    assert same(residual, of.residual)
    assert not own.any()


def test_shares_of_any_size_follow_each_other() -> None:
    """As inside a node: every owner has other slices, and perhaps none."""
    codec = Int8(block_size=64)
    slices = laid_out(500, 130, 64)
    shares = [slices[:2], [], slices[2:]]
    table = SliceTable.of(codec, shares, device=DEVICE)
    flat = hard_numbers(span_of(slices), seed=1)
    payload = torch.zeros(table.payload_bytes, dtype=torch.uint8, device=DEVICE)
    kernels = kernels_of(codec, dtype=flat.dtype)
    kernels.encode(
        on_device(flat), None, torch.ones((), device=DEVICE), table=table, payload=payload
    )
    parts = payload.split([table.row_bytes(row) for row in range(3)])
    assert [len(part) > 0 for part in parts] == [True, False, True]
    for share, part in zip(shares, parts, strict=True):
        if share:
            eager = Eager(codec, share, 1)
            expected, _, _ = eager.encode(flat, None, torch.ones(()), None)
            assert same_payload(eager, part.unsqueeze(0), expected)
    back = on_device(torch.zeros_like(flat))
    kernels.decode(payload, back, table=table)
    assert (back.cpu() - flat).abs().max() <= flat.abs().max() / 200


def test_gradients_that_have_no_kernels() -> None:
    assert kernels_of(Int8(), dtype=torch.float64) is None
    assert kernels_of(Int4(hadamard=True), dtype=torch.float32) is None
    assert kernels_of(Int8(block_size=16384), dtype=torch.float32) is None
    assert kernels_of(TopK(), dtype=torch.float32) is None


@dataclass(frozen=True)
class OwnInt8(Int8):
    """A codec of a user."""


def test_a_codec_of_a_user_may_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    own = OwnInt8(block_size=64)
    assert kernels_of(own, dtype=torch.float32) is None
    registry.register_kernels(OwnInt8, encode=codecs.int8_encode, level=codecs.int8_level)
    check(bucket(own, laid_out(*ODD, gap=1), rows=3))


@pytest.mark.exhaustive
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("codec", [*TABLE, *OTHERS], ids=repr)
def test_every_world_size(codec: BlockCodec, rows: int) -> None:
    dtype = GRADIENT_DTYPES[rows % 3]
    check(bucket(codec, laid_out(*ODD, gap=1), rows=rows, dtype=dtype))


@pytest.mark.exhaustive
@every_codec
@settings(max_examples=10)
@given(data=st.data())
def test_any_bucket(codec: BlockCodec, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 1500), min_size=1, max_size=5))
    gap = data.draw(st.integers(0, 17))
    rows = data.draw(st.integers(1, 5))
    dtype = data.draw(st.sampled_from(GRADIENT_DTYPES))
    scale = data.draw(st.sampled_from([1.0, 2.0**-20, 3.0, 65536.0]))
    slices = laid_out(*sizes, gap=gap)
    of = bucket(codec, slices, rows=rows, dtype=dtype, scale=scale, tile_elements=None)
    for place, value in data.draw(st.lists(_SPIKES, max_size=4)):
        of.flat[place % len(of.flat)] = value
    check(of)


_SPIKES = st.tuples(
    st.integers(0, 10000),
    st.one_of(
        st.floats(-1e4, 1e4), st.sampled_from([torch.nan, torch.inf, -torch.inf, 1e-44, 3e38])
    ),
)


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_uncompressed_payloads_are_added_in_their_order(dtype: torch.dtype, wide: bool) -> None:
    """Inside a node, into a share that may be wider than what travels."""
    codec = NoCompression()
    eager = Passes(codec, NoMemory(), Factors(mean=1 / 3), 3)
    rows = hard_numbers(3 * 5008, seed=1, dtype=dtype).view(3, 5008)
    payloads = [(row[:5001].view(1, -1, 1),) for row in rows]
    expected = torch.zeros(1, 5001, 1, dtype=torch.float32 if wide else dtype)
    eager.decode_and_commit(expected, (), torch.ones(()), None, payloads[0], payloads)
    kernels, flat = kernels_of(codec, dtype=dtype), torch.zeros(5001, dtype=expected.dtype)
    slices = [[Slice(0, 3000), Slice(3000, 2001)]]
    table = SliceTable.of(codec, slices, device=DEVICE, dtype=dtype)
    there = torch.zeros(3, table.payload_bytes, dtype=torch.uint8, device=DEVICE)
    one = torch.ones((), device=DEVICE)
    for row, payload in zip(rows, there, strict=True):
        given = on_device(row[:5001])
        kernels.encode(given, None, one, table=table, payload=payload)
        assert same(payload[: given.nbytes].view(dtype), row[:5001])
    found = on_device(flat)
    kernels.decode(there, found, table=table, weight=1 / 3)
    assert same(found, expected.flatten())


@pytest.mark.parametrize("dtype", GRADIENT_DTYPES)
def test_uncompressed_slices_are_packed_in_rows_and_reduced(dtype: torch.dtype) -> None:
    """Rows of equal length, whatever the slices; means are weighted before they are added."""
    codec, columns, size = NoCompression(), 400, 3
    flat = hard_numbers(1200, seed=1, dtype=dtype)
    groups = packed([(7, 500), (600, 390), (1000, 200)], rows=size, columns=columns)
    assert [sum(part.numel for part in row) for row in groups] == [400, 400, 290]
    chosen = torch.cat([flat[7:507], flat[600:990], flat[1000:1200]])
    sizes = [row_bytes(codec.planes(dtype), columns)] * size
    table = SliceTable.of(codec, groups, sizes=sizes, device=DEVICE, dtype=dtype)
    kernels = kernels_of(codec, dtype=dtype)
    own = torch.zeros(size, table.row_bytes(0), dtype=torch.uint8, device=DEVICE)
    kernels.encode(on_device(flat), None, torch.ones((), device=DEVICE), table=table, payload=own)
    rows = own.cpu()[:, : columns * dtype.itemsize].contiguous().view(dtype)
    assert same(rows.flatten()[: len(chosen)], chosen)
    shards, mean = torch.cat([own[2:], own[1:2], own[2:]]), torch.zeros_like(own[:1])
    kernels.reduce(shards, mean, table=table, row=2)
    eager = torch.zeros(1, columns, 1, dtype=dtype)
    payload = (shards.cpu()[:, : columns * dtype.itemsize].contiguous().view(dtype).unsqueeze(-1),)
    Passes(codec, NoMemory(), Factors(), size).reduce(payload, None, (eager,))
    found = mean.cpu()[:, : columns * dtype.itemsize].contiguous().view(dtype)
    assert same(found[0, :290], eager.flatten()[:290])
    back = on_device(torch.zeros_like(flat))
    kernels.decode(own, back, table=table)
    places = torch.cat([torch.arange(a, a + n) for a, n in ((7, 500), (600, 390), (1000, 200))])
    assert same(back.cpu()[places], chosen)
    others = torch.ones(len(flat), dtype=torch.bool)
    others[places] = False
    assert not back.cpu()[others].any()
