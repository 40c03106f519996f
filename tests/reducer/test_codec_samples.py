"""What a glimpse says is what the reducer did: compared with arithmetic in float64 of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
import torch
from feeding import EVERY_CODEC, Fed, Tensors, backward, compressed, feed, step_digest
from layouts import FORMS, Layout
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import BlockCodec, resolve_codec
from lightning_dist.codecs.noise import block_keys
from lightning_dist.reducer.codec_sample import CodecSample, Sampler
from lightning_dist.reducer.observer import Observer, Samples
from lightning_dist.reducer.reducer import Reducer

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
    flat = tensors if isinstance(tensors, Tensor) else torch.cat([*tensors.values()])
    return float(flat.double().norm())


@dataclass
class Reference:
    """Norms of what goes in, of what is compensated, and of what was owed before it, by step."""

    gradient: list[float] = field(default_factory=list)
    compensated: list[float] = field(default_factory=list)
    owed: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)


def observed(rank: Rank, codec: str, size: int) -> tuple[Looking, Reference]:
    """A run, with what error feedback has to be by its definition."""
    looking, known = Looking(), Reference()
    resolved = resolve_codec(codec)
    with compressed(rank, Fed(), codec, **SETTINGS) as (model, reducer):
        reducer.observe(looking)
        for step in range(STEPS):
            given = {n: g for n, g in feed(rank.rank, step).items() if len(g.shape) > 1}
            given = {name: g.double().flatten() for name, g in given.items()}
            before = held(reducer, "residuals"), held(reducer, "momenta")
            backward(model, feed(rank.rank, step))
            if clip := resolved.local_clip:
                most = clip / size**0.5
                given = {n: g * min(1.0, most / norm(g)) for n, g in given.items()}
            compensated = {
                name: g
                + before[0].get(name, torch.zeros(()))
                + resolved.momentum_correction * before[1].get(name, torch.zeros(()))
                for name, g in given.items()
            }
            known.gradient.append(norm(given))
            known.compensated.append(norm(compensated))
            owed = held(reducer, "residuals")
            known.owed.append(norm(before[0]) if before[0] else 0.0)
            known.after.append(norm(owed) if owed else 0.0)
    return looking, known


@pytest.mark.parametrize("size", [2, 3])
def test_a_glimpse_of_everything(size: int) -> None:
    """What goes in, what is compensated and what is owed are those of the definition; for two ranks
    what is lost is what is owed."""
    ranks = run_threads(lambda rank: [observed(rank, codec, size) for codec in lossy], size)
    for codec, (looking, known) in (pair for of in ranks for pair in zip(lossy, of, strict=True)):
        assert looking.buckets == [0] * STEPS, codec
        for i, (gradient, compensated, sent, residual) in enumerate(looking.steps):
            assert gradient.numel() == compensated.numel() == sent.numel() >= 40 * 48 + 33 * 50
            assert norm(gradient) == pytest.approx(known.gradient[i], rel=1e-6), codec
            assert norm(compensated) == pytest.approx(known.compensated[i], rel=1e-6), codec
            assert norm(residual) == pytest.approx(known.owed[i], rel=1e-6), codec
            assert (residual.numel() > 0) == resolve_codec(codec).keeps_residual, codec
            if residual.numel() and size == 2 and codec not in OTHERWISE:
                lost = norm(compensated - sent)
                assert lost == pytest.approx(known.after[i], rel=1e-4), codec


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
    "codec", ["fp16", "bf16", "int8", "fp8:block_size=64", "int4:block_size=64,hadamard=true"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_what_is_sent_is_what_the_codec_makes_of_it(codec: str, size: int) -> None:
    """In a step without a residual yet; elements may come in another order."""
    resolved = resolve_codec(codec)
    assert isinstance(resolved, BlockCodec)
    for rank, (looking, _) in enumerate(run_threads(lambda rank: first_step(rank, codec), size)):
        given = [feed(rank, 0)[name] for name in ("first", "second")]
        if resolved.block == 1:
            given = [torch.cat([each.flatten() for each in given])]
        sent = torch.cat([by_hand(resolved, each) for each in given])
        whole = torch.cat([each.flatten() for each in given]).double()
        (_, compensated, seen, _) = (each.double() for each in looking.steps[0])
        lost = norm(whole - sent)
        assert lost > 0
        assert norm(compensated - seen) == pytest.approx(lost, rel=1e-5)
        assert float(compensated @ seen) == pytest.approx(float(whole @ sent), rel=1e-6)


@pytest.mark.parametrize("codec", ["qsgd:block_size=64", "terngrad:block_size=64"])
def test_stochastic_codecs_lose_as_much_with_other_random_numbers(codec: str) -> None:
    resolved = resolve_codec(codec)
    assert isinstance(resolved, BlockCodec)
    for rank, (looking, _) in enumerate(run_threads(lambda rank: first_step(rank, codec), 2)):
        given = [feed(rank, 0)[name] for name in ("first", "second")]
        lost = [each.flatten() - by_hand(resolved, each) for each in given]
        _, compensated, seen, _ = looking.steps[0]
        assert norm(compensated - seen) == pytest.approx(norm(torch.cat(lost)), rel=0.1)


@pytest.mark.parametrize("layout", FORMS, ids=str)
@pytest.mark.parametrize("codec", ["int8", "topk:ratio=0.1,block_size=128", "fp16"])
def test_between_hosts_it_is_of_the_shares(codec: str, layout: Layout) -> None:
    """All shares of the hosts together are the mean of their gradients, once each."""

    def body(rank: Rank) -> tuple[Looking, Tensors]:
        looking, reducer = first_step(rank, codec, layout)
        return looking, held(reducer, "residuals")

    total, elements = 0.0, 0
    for looking, owed in run_threads(body, layout.size):
        if not looking.steps[0]:  # leaves the way to another rank
            assert norm(owed) == 0 if owed else True
            continue
        gradient, compensated, sent, residual = looking.steps[0]
        # Nothing was owed before.
        torch.testing.assert_close(gradient, compensated, rtol=1e-6, atol=1e-7)
        assert 0 < norm(compensated - sent) < norm(compensated)
        if owed:
            assert norm(residual) == 0
            assert norm(compensated - sent) == pytest.approx(norm(owed), rel=1e-5)
        elements += gradient.numel()
        total += float(gradient.double().sum())
    of_hosts = len(layout.tree)
    assert elements >= of_hosts * (40 * 48 + 33 * 50)
    given = [feed(rank, 0) for rank in range(layout.size)]
    whole = sum(float(each[name].double().sum()) for each in given for name in ("first", "second"))
    # Weighted, so that the plain mean over hosts is the mean over ranks.
    assert total / of_hosts == pytest.approx(whole / layout.size, abs=1e-3)


def test_looking_changes_no_bit() -> None:
    def train(rank: Rank, codec: str, looks: bool) -> list[str]:
        with compressed(rank, Fed(), codec, **SETTINGS) as (model, reducer):
            if looks:
                reducer.observe(Looking())
            return [step_digest(backward(model, feed(rank.rank, s)), reducer) for s in range(3)]

    def body(rank: Rank) -> None:
        for codec in (*lossy, "none"):
            assert train(rank, codec, True) == train(rank, codec, False), codec

    before = torch.get_rng_state()
    run_threads(body, 3)
    assert torch.equal(before, torch.get_rng_state())


def test_what_is_lossless_is_not_shown() -> None:
    for looking, _ in run_threads(lambda rank: first_step(rank, "none"), 2):
        assert looking.buckets == []
        assert looking.steps == [[]]


@pytest.mark.parametrize("codec", ["int8", "threshold:tau=1.5", "powersgd:rank=2", "fp16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_gradients_of_other_types(codec: str, dtype: torch.dtype) -> None:
    def body(rank: Rank) -> Looking:
        looking = Looking()
        with compressed(rank, Fed(dtype=dtype), codec, **SETTINGS) as (model, reducer):
            reducer.observe(looking)
            for step in range(2):
                backward(model, feed(rank.rank, step, dtype=dtype))
        return looking

    wide = torch.promote_types(dtype, torch.float32)
    for rank, looking in enumerate(run_threads(body, 2)):
        given = [feed(rank, 1, dtype=dtype)[name].flatten() for name in ("first", "second")]
        gradient, *others, residual = looking.steps[1]
        assert norm(gradient) == pytest.approx(norm(torch.cat(given)), rel=1e-6)
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
