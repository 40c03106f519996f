"""Units over tables of slices do what units of tiles do: on the wire, to gradients and to state."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, feed, residuals
from interpreted import in_tables
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.base.exchanges import WHOLE_BUCKET
from lightning_dist.codecs import Int8
from lightning_dist.measurement import microbenchmark
from lightning_dist.measurement.microbenchmark import WIDTH, CodecWork
from lightning_dist.ranks.channel import Channel
from lightning_dist.reducer.codec_sample import Sampler
from lightning_dist.reducer.plan import flat as flat_plan
from lightning_dist.reducer.plan import intra, planner
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.stats import Observer
from lightning_dist.reducer.units.base import JoinedUnit, join
from lightning_dist.reducer.units.block import BlockUnit
from lightning_dist.reducer.units.table import TableUnit

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of inf and NaN

SHAPES = {"first": (40, 48), "second": (24, 50), "odd": (383,)}  # the last two in one bucket
CODECS = (
    "int8:block_size=64",
    "int4:block_size=64",
    "fp8:block_size=64",
    "sign:block_size=64",
    "qsgd:block_size=64",
    "terngrad:block_size=64",
)
STEPS = 3
SPOILED = 1  # a step


@dataclass
class Samples(Observer):
    """Takes samples of everything in every step."""

    steps: list[Tensors] = field(default_factory=lambda: [{}])

    def finished(self, buckets: Any) -> None:
        self.steps.append({})

    def encodes(self, bucket: int, samples: Any, *, numel: int, scale: Tensor) -> None:
        for i, each in enumerate(samples(Sampler(7, share=1))):
            assert each.residual is not None
            parts = each.gradient, each.compensated, each.sent, each.residual
            self.steps[-1].update({f"{bucket} {i} {k}": of for k, of in enumerate(parts)})


@dataclass
class Ran:
    gradients: list[Tensors] = field(default_factory=list)
    residuals: list[Tensors] = field(default_factory=list)
    units: set[type] = field(default_factory=set)
    samples: list[Tensors] = field(default_factory=list)
    wire: list[str] = field(default_factory=list)  # digests of all that was sent
    buffers: float = 0.0  # bytes per element


def train(rank: Rank, codec: str, spoiled: bool, sampled: bool, settings: dict[str, Any]) -> Ran:
    ran, samples = Ran(), Samples()
    settings = {"min_compress_numel": 0, "ddp": {"bucket_cap_mb": 0.004}, **settings}
    with compressed(rank, Fed(SHAPES), codec, **settings) as (model, reducer):
        if sampled:
            reducer.observe(samples)
        for step in range(STEPS):
            given = feed(rank.rank, step, SHAPES)
            if spoiled and step == SPOILED and rank.rank == 1:
                given["first"][5, 7] = torch.nan
                given["odd"][3] = torch.inf
            ran.gradients.append(backward(model, given))
            ran.residuals.append(residuals(reducer))
        ran.samples = samples.steps[:-1]  # the next one has not begun
        numel = sum(parameter.numel() for parameter in model.parameters())
        ran.buffers = reducer.memory()["buffer_bytes"] / numel
        groups = reducer.planner.planned
        ran.units = {type(unit) for group in groups for unit in group.units}
    return ran


def run(
    codec: str,
    size: int,
    *,
    tables: bool,
    spoiled: bool = False,
    sampled: bool = False,
    **settings: Any,
) -> list[Ran]:
    sent: dict[int, list[str]] = {rank: [] for rank in range(size)}

    def recorded(op: str) -> Any:
        begin = getattr(Channel, op)

        def call(channel: Channel, output: Tensor, own: Tensor, *sizes: Any) -> Any:
            payload = own.contiguous().view(torch.uint8).numpy().tobytes()
            if channel.name not in ("facts", "state"):  # which are not of a step
                sent[channel.group.rank()].append(f"{op} {hashlib.sha256(payload).hexdigest()}")
            return begin(channel, output, own, *sizes)

        return patch.object(Channel, op, call)

    kernels = in_tables() if tables else nullcontext()
    with kernels, recorded("all_to_all"), recorded("all_gather"):
        ranks = run_threads(lambda rank: train(rank, codec, spoiled, sampled, settings), size)
    for rank, ran in enumerate(ranks):
        ran.wire = sent[rank]
    return ranks


def same(a: Tensors, b: Tensors) -> bool:
    """To the bit; which of what is not finite is NaN is not looked at."""
    assert a.keys() == b.keys()
    return all(
        torch.equal(a[n].isfinite(), b[n].isfinite())
        and torch.equal(*(x[n].where(x[n].isfinite(), 0).view(torch.int32) for x in (a, b)))
        for n in a
    )


def both(codec: str, size: int, **settings: Any) -> list[tuple[Ran, Ran]]:
    """Every rank, with units of tiles and with tables."""
    tiles, tables = (run(codec, size, tables=each, **settings) for each in (False, True))
    assert all(before.units == {BlockUnit} for before in tiles)
    assert all(after.units == {TableUnit} for after in tables)
    return list(zip(tiles, tables, strict=True))


@pytest.mark.parametrize(
    ("size", "state_update"), [(2, "deferred"), (3, "immediate"), (3, "deferred")]
)
def test_uncompressed_slices_are_packed(size: int, state_update: str) -> None:
    """With the bits of tiles, beside what is compressed."""
    settings = {
        "state_update": state_update,
        "min_compress_numel": 1500,
        "ddp": {"bucket_cap_mb": 1},
    }
    for before, after in both("int8:block_size=64", size, **settings):
        assert all(map(same, after.gradients, before.gradients))
        assert after.residuals[-1].keys() == {"first"}


def test_calibration_measures_the_kernels_that_training_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Planner, "fuse", lambda *_, **__: None)  # of the CPU
    monkeypatch.setattr(microbenchmark, "UNIT_ELEMENTS", 16 * WIDTH)  # interpreted: few tiles
    with in_tables() as launched:
        measured = CodecWork(
            Int8(), feedback=True, fused=True, device=torch.device("cpu"), units=1, ranks=2
        )
        for call in (measured.prepare, measured.encode, measured.exchange, measured.decode):
            call()
    assert measured.is_fused
    assert launched == ["encode_kernel", "decode_kernel"]


@contextmanager
def alone() -> Iterator[None]:
    """Every unit has an exchange of its own."""

    def apart(units: Sequence[JoinedUnit]) -> None:
        for unit in units:
            join([unit])

    with patch.object(planner, "join", apart), patch.object(flat_plan, "join", apart):
        yield


@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@pytest.mark.parametrize("form", ["flat", "2x2", "leader"])
def test_units_that_share_an_exchange_do_what_they_do_alone(form: str, state_update: str) -> None:
    """Whole buckets, as on accelerators: two collectives on each level, and the same bits."""
    settings: dict[str, Any] = {
        "state_update": state_update,
        "min_compress_numel": 1500,
        "tables": True,
    }
    settings["ddp"] = {"bucket_cap_mb": 1}
    if form != "flat":
        settings |= {"tree": [[0, 1], [2, 3]], "leader": form == "leader"}
    codec, size = "int8:block_size=64", 3 if form == "flat" else 4
    with patch.object(intra, "unit_elements", lambda *_, **of: WHOLE_BUCKET):
        together = run(codec, size, **settings)
        with alone():
            apart = run(codec, size, **settings)
    for joined, each in zip(together, apart, strict=True):
        assert all(map(same, joined.gradients, each.gradients))
        assert all(map(same, joined.residuals, each.residuals))
        assert any(r.any() for r in joined.residuals[-1].values()) or form == "leader"
    # Two codecs in one bucket.
    collectives = [sum(len(rank.wire) for rank in ranks) for ranks in (together, apart)]
    assert collectives[1] == 2 * collectives[0] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("spoiled", [False, True])
@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("codec", CODECS)
def test_steps_of_every_codec_are_those_of_tiles(
    codec: str, size: int, state_update: str, spoiled: bool
) -> None:
    keeps = not codec.startswith("terngrad")  # error feedback diverges with it
    sampled = codec.startswith("qsgd")
    settings = {
        "state_update": state_update,
        "error_feedback": keeps,
        "spoiled": spoiled,
        "sampled": sampled,
    }
    for before, after in both(codec, size, **settings):
        assert len(after.samples) == len(before.samples) == sampled * STEPS
        assert all(after.samples)
        assert all(map(same, after.samples, before.samples))
        assert all(map(same, after.gradients, before.gradients))
        assert all(map(same, after.residuals, before.residuals))
        assert all(residual.isfinite().all() for residual in after.residuals[-1].values())
        assert keeps or not after.residuals[-1]
        assert not keeps or any(r.any() for r in after.residuals[-1].values())
        if size > 2:  # what was sent is encoded again, not kept
            assert after.buffers < 2.5
        if not spoiled:
            assert after.wire == before.wire != []
        else:
            assert not after.gradients[SPOILED]["first"].isfinite().all()
