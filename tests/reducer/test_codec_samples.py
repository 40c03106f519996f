"""What a glimpse says is what the reducer did: compared with arithmetic in float64 of our own."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product

import pytest
import torch
from feeding import EVERY_CODEC, Fed, Tensors, backward, compressed, feed, step_digest
from layouts import FORMS, Layout
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank

from lightning_dist.codecs import BlockCodec, resolve_codec
from lightning_dist.codecs.noise import block_keys
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import Observer, Samples

SETTINGS = {"min_compress_numel": 256}
STEPS = 4
OTHERWISE = ("randomk:ratio=0.1,block_size=128", "powersgd:rank=2,two_phase=true")
"""Samples of these are encoded with other random numbers, and with products of one rank alone."""
lossy = [codec for codec in EVERY_CODEC if not resolve_codec(codec).lossless]


@dataclass
class Looking(Observer):
    """Looks at everything in every step."""

    steps: list[list[Tensor]] = field(default_factory=list)
    buckets: list[int] = field(default_factory=list)
    rows: list[CodecSample] = field(default_factory=list)

    def encodes(self, bucket: int, samples: Samples, *, numel: int, scale: Tensor) -> None:
        self.buckets.append(bucket)
        self.rows += samples(Sampler(7, share=1))

    def finished(self, buckets: object) -> None:
        rows, self.rows = self.rows, []
        kept = [torch.zeros(0) if g.residual is None else g.residual for g in rows]
        found = [[g.gradient for g in rows], [g.compensated for g in rows], [g.sent for g in rows]]
        self.steps.append([torch.cat([p.flatten() for p in of]) for of in (*found, kept) if rows])


def held(reducer: Reducer, kind: str) -> Tensors:
    store = getattr(reducer.state, kind)
    return {name: store[name].double().clone() for name in store}


def norm(tensors: Mapping[str, Tensor] | Tensor) -> float:
    """Of all elements; 0 of none."""
    flat = (
        tensors if isinstance(tensors, Tensor) else torch.cat([*tensors.values(), torch.zeros(0)])
    )
    return float(flat.double().norm())


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_a_glimpse_of_everything(rank: Rank, size: int) -> None:
    """What goes in, what is compensated and what is owed are those of the definition; for two ranks
    what is lost is what is owed."""
    nothing = torch.zeros(())
    for codec in lossy:
        looking, resolved = Looking(), resolve_codec(codec)
        with compressed(rank, Fed(), codec, **SETTINGS) as (model, reducer):
            reducer.observe(looking)
            for step in range(STEPS):
                given = {n: g for n, g in feed(rank.rank, step).items() if len(g.shape) > 1}
                given = {name: g.double().flatten() for name, g in given.items()}
                owed, momenta = held(reducer, "residuals"), held(reducer, "momenta")
                backward(model, feed(rank.rank, step))
                reducer._executor.drain()
                if clip := resolved.local_clip:
                    most = clip / size**0.5
                    given = {n: g * min(1.0, most / norm(g)) for n, g in given.items()}
                expected = {
                    name: g
                    + owed.get(name, nothing)
                    + resolved.momentum_correction * momenta.get(name, nothing)
                    for name, g in given.items()
                }
                gradient, compensated, sent, residual = looking.steps[step]
                assert gradient.numel() == compensated.numel() == sent.numel() >= 40 * 48 + 33 * 50
                assert norm(gradient) == pytest.approx(norm(given), rel=1e-6), codec
                assert norm(compensated) == pytest.approx(norm(expected), rel=1e-6), codec
                assert norm(residual) == pytest.approx(norm(owed), rel=1e-6), codec
                assert (residual.numel() > 0) == resolved.keeps_residual, codec
                if residual.numel() and size == 2 and codec not in OTHERWISE:
                    lost, after = norm(compensated - sent), norm(held(reducer, "residuals"))
                    assert lost == pytest.approx(after, rel=1e-4), codec
        assert looking.buckets == [0] * STEPS, codec


def first_step(rank: Rank, codec: str, layout: Layout | None = None) -> tuple[Looking, Reducer]:
    """Glimpses of the first step, and the reducer as it leaves it."""
    looking = Looking()
    form = {} if layout is None else layout.form
    with compressed(rank, Fed(), codec, **form, **SETTINGS) as (model, reducer):
        reducer.observe(looking)
        backward(model, feed(rank.rank, 0))
    return looking, reducer


def by_hand(codec: BlockCodec, given: Tensor) -> Tensor:
    """What a codec without a residual makes of a tensor: blocks of it, alone."""
    padded = given.new_zeros(-(-given.numel() // codec.block) * codec.block)
    padded[: given.numel()] = given.flatten()
    blocks = padded.view(-1, codec.block)
    numbers = torch.arange(len(blocks), dtype=torch.int32).view(-1, 1)
    payload = codec.encode(blocks, block_keys(numbers, 99) if codec.stochastic else None)
    return codec.decode(payload, torch.float32).flatten()[: given.numel()].double()


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        *product(["fp16", "bf16", "int8"], [2, 3]),
        *product(["fp8:block_size=64", "int4:block_size=64,hadamard=true"], [2, 3]),
        *product(["qsgd:block_size=64", "terngrad:block_size=64"], [2]),
    ],
)
@on_threads("size")
def test_what_is_sent_is_what_the_codec_makes_of_it(rank: Rank, codec: str, size: int) -> None:
    """In a step without a residual yet; elements may come in another order."""
    resolved, given = resolve_codec(codec), feed(rank.rank, 0)
    assert isinstance(resolved, BlockCodec)
    parts = [given["first"].flatten(), given["second"].flatten()]
    whole = torch.cat(parts).double()
    if resolved.block == 1:
        parts = [torch.cat(parts)]
    sent = torch.cat([by_hand(resolved, each) for each in parts])
    looking, _ = first_step(rank, codec)
    (_, compensated, seen, _) = (each.double() for each in looking.steps[0])
    lost = norm(whole - sent)
    assert lost > 0
    if resolved.stochastic:  # with other random numbers it loses as much
        assert norm(compensated - seen) == pytest.approx(lost, rel=0.1)
        return
    assert norm(compensated - seen) == pytest.approx(lost, rel=1e-5)
    assert float(compensated @ seen) == pytest.approx(float(whole @ sent), rel=1e-6)


@pytest.mark.parametrize("layout", FORMS, ids=str)
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "fp16"])
@on_threads("layout")
def test_between_hosts_it_is_of_the_shares(rank: Rank, codec: str, layout: Layout) -> None:
    """All shares of the nodes together are the mean of their gradients, once each."""
    looking, reducer = first_step(rank, codec, layout)
    owed, total, elements = held(reducer, "residuals"), 0.0, 0
    if looking.steps[0]:
        gradient, compensated, sent, residual = looking.steps[0]
        # Nothing was owed before.
        torch.testing.assert_close(gradient, compensated, rtol=1e-6, atol=1e-7)
        assert 0 < norm(compensated - sent) < norm(compensated)
        if owed:
            assert norm(residual) == 0
            assert norm(compensated - sent) == pytest.approx(norm(owed), rel=1e-5)
        elements, total = gradient.numel(), float(gradient.double().sum())
    else:  # leaves the way to another rank
        assert norm(owed) == 0
    of_nodes = len(layout.tree)
    assert sum(of_all(rank, elements)) >= of_nodes * (40 * 48 + 33 * 50)
    given = feed(rank.rank, 0)
    whole = of_all(rank, sum(float(given[name].double().sum()) for name in ("first", "second")))
    # Weighted, so that the plain mean over nodes is the mean over ranks.
    assert sum(of_all(rank, total)) / of_nodes == pytest.approx(sum(whole) / rank.size, abs=1e-3)


@on_threads(3)
def test_looking_changes_no_bit(rank: Rank) -> None:
    def train(codec: str, looks: bool) -> list[str]:
        with compressed(rank, Fed(), codec, **SETTINGS) as (model, reducer):
            if looks:
                reducer.observe(Looking())
            return [step_digest(backward(model, feed(rank.rank, s)), reducer) for s in range(3)]

    before = torch.get_rng_state()
    for codec in (*lossy, "none"):
        assert train(codec, True) == train(codec, False), codec
    rank.barrier.wait()
    assert torch.equal(before, torch.get_rng_state())


@on_threads(2)
def test_what_is_lossless_is_not_shown(rank: Rank) -> None:
    looking, _ = first_step(rank, "none")
    assert (looking.buckets, looking.steps) == ([], [[]])


@pytest.mark.parametrize("codec", ["int8", "threshold:tau=1.5", "powersgd:rank=2", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@on_threads(2)
def test_gradients_of_other_types(rank: Rank, codec: str, dtype: torch.dtype) -> None:
    looking = Looking()
    with compressed(rank, Fed(dtype=dtype), codec, **SETTINGS) as (model, reducer):
        reducer.observe(looking)
        for step in range(2):
            backward(model, feed(rank.rank, step, dtype=dtype))
    given = [feed(rank.rank, 1, dtype=dtype)[name].flatten() for name in ("first", "second")]
    gradient, *others, residual = looking.steps[1]
    assert norm(gradient) == pytest.approx(norm(torch.cat(given)), rel=1e-6)
    wide = torch.promote_types(dtype, torch.float32)
    assert {each.dtype for each in (gradient, *others)} == {wide}
    assert residual.numel() in (0, gradient.numel())


def test_a_sampler_draws_each_element_as_often() -> None:
    share = 0.2
    counts = torch.zeros(100_003)
    few = torch.zeros(3)
    for seed in range(400):
        sampler = Sampler(seed, share=share)
        counts[sampler.drawn(len(counts), of=1)] += 1
        few[sampler.drawn(3, of=2000)] += 1
    assert counts.mean() / 400 == pytest.approx(share, rel=0.05)
    assert 0.1 < counts.min() / 400 <= counts.max() / 400 < 0.3
    assert few.mean() / 400 == pytest.approx(share, rel=0.3)


def test_a_sampler_is_its_seed() -> None:
    def drawn(seed: int) -> Tensor:
        sampler = Sampler(seed, share=0.3)
        parts = [sampler.drawn(50_000, of=1) for _ in range(2)]
        assert not torch.equal(*parts)
        assert all(torch.equal(each, each.unique()) for each in parts)
        return torch.cat(parts)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    everything = Sampler(1, share=1).drawn(50_000, of=1)
    assert torch.equal(everything, torch.arange(50_000))


def test_elements_are_drawn_on_the_host_whatever_the_default_device_is() -> None:
    expected = Sampler(5, share=0.5).drawn(100_000, of=1)
    with torch.device("meta"):
        drawn = Sampler(5, share=0.5).drawn(100_000, of=1)
    assert torch.equal(drawn, expected)
