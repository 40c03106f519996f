"""Where randomness comes from, what cannot change it, and several reducers over one network."""

import threading
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from feeding import Fed, backward, compressed, digest, feed, held
from layouts import PAIRS, Layout, flat
from saving import train
from threads import of_all, on_threads
from torch import Tensor
from torch.futures import Future
from worlds import Rank

from lightning_dist.codecs import QSGD, BlockCodec, TernGrad
from lightning_dist.exchange.rounds import AllGather
from lightning_dist.reducer import reducer as reducer_module
from lightning_dist.reducer.network import Executor, Network, executor_for
from lightning_dist.reducer.plan.slices import slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.units.tiles import Grid, Tile, UnitKeys
from lightning_dist.settings.exchange import ExchangeSettings

CODEC = QSGD(block_size=64)


def drawn(*names: str, codec: BlockCodec = CODEC, rank: int = 0, step: int = 0) -> UnitKeys:
    """Of whole parameters of three rows of four blocks, one after the other in a unit."""
    (span,) = Grid(3 * 4 * 64, 3, 64).spans(10**6)
    numbers, nothing = span.numbers(torch.device("cpu")), torch.empty(0)
    columns = [slice(4 * i, 4 * i + 4) for i in range(len(names))]
    tiles = [Tile(n, nothing, (), at, numbers) for n, at in zip(names, columns, strict=True)]
    keys = UnitKeys(codec, tiles, rank=rank)
    keys.draw(step)
    return keys


def different(a: Tensor, b: Tensor) -> bool:
    """Not one key in common, in any place."""
    return set(a.flatten().tolist()).isdisjoint(b.flatten().tolist())


@pytest.mark.parametrize(
    "other",
    [
        {"step": 1},
        {"rank": 1},
        {"codec": QSGD(block_size=64, bits=8)},
        {"codec": TernGrad(block_size=64)},
    ],
    ids=["step", "rank", "option", "codec"],
)
def test_keys_depend_on(other: dict[str, Any]) -> None:
    first, second = drawn("weight"), drawn("weight", **other)
    assert first.encode.unique().numel() == first.encode.numel(), "every block has its own"
    assert different(first.encode, second.encode)
    assert different(first.reduce, second.reduce)


def test_keys_depend_on_the_parameter() -> None:
    keys = drawn("weight", "other")
    assert different(keys.encode[:, :4], keys.encode[:, 4:])
    assert different(keys.reduce[:, :4], keys.reduce[:, 4:])


def test_the_mean_is_rounded_with_other_keys_than_what_is_sent() -> None:
    for rank in range(3):
        keys = drawn("weight", rank=rank)
        assert keys.reduce.shape == (1, 4, 1)
        assert different(keys.reduce, keys.encode)


def test_every_owner_rounds_its_own_blocks() -> None:
    of_ranks = [drawn("weight", rank=rank).reduce for rank in range(3)]
    assert torch.stack(of_ranks).unique().numel() == 12


DIVIDED, WHOLE = {"bucket_cap_mb": 0.004}, {"bucket_cap_mb": 25}


def path(rank: Rank, codec: str, buckets: dict[str, float]) -> list[str]:
    digests = []
    with compressed(rank, Fed(), codec, min_compress_numel=256, ddp=buckets) as (model, _):
        for step in range(4):
            gradients = backward(model, feed(rank.rank, step))
            digests.append(digest([gradients[name] for name in sorted(gradients)]))
        sizes = model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")
        assert (len(sizes) > 1) == (buckets is DIVIDED)
    return digests


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        *product(["qsgd:block_size=64", "terngrad:block_size=64"], [2, 3]),
        ("randomk:ratio=0.25,block_size=64", 2),  # more ranks add in the order of a ring
    ],
)
@on_threads("size")
def test_other_buckets_give_the_same_bits(rank: Rank, codec: str, size: int) -> None:
    whole = path(rank, codec, WHOLE)
    assert path(rank, codec, DIVIDED) == whole
    assert len({*whole}) == 4


@pytest.mark.parametrize("codec", ["qsgd:block_size=64", "terngrad:block_size=64"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_restart_gives_the_same_bits_whatever_the_buckets(codec: str, size: int) -> None:
    """The step is counted over the restart, and that is all of the state there is."""
    whole = train(size, range(4), codec=codec, ddp=DIVIDED)
    state = train(size, range(2), codec=codec, ddp=DIVIDED).state
    assert state == {"version": 1, "world_size": size, "step": 2, "strides": {}, "residuals": {}}
    resumed = train(size, range(2, 4), state, codec=codec, ddp=WHOLE)
    assert resumed.digests == [digests[2:] for digests in whole.digests]
    forgot = train(size, range(2, 4), {**state, "step": 0}, codec=codec, ddp=WHOLE)
    assert forgot.digests != resumed.digests, "else the step does not matter"


def repeated(rank: Rank, codec: str) -> list[Tensor]:
    """Two steps of the same gradients on every rank."""
    with compressed(rank, Fed(), codec, min_compress_numel=256, error_feedback=False) as (model, _):
        return [backward(model, feed(0, 0))["first"] for _ in range(2)]


@on_threads(2)
def test_equal_gradients_are_rounded_otherwise_at_every_step_and_on_every_rank(rank: Rank) -> None:
    """Two ranks: where they round differently the mean lies between two levels."""
    first, second = repeated(rank, "qsgd:bits=2,block_size=64")
    assert not torch.equal(first, second)
    levels = [block.abs().unique().numel() for block in first.flatten().split(64)]
    assert levels == [3] * 30  # 0, half a step, a step


@on_threads(3)
def test_randomk_sends_the_same_places_on_all_ranks(rank: Rank) -> None:
    """And other ones at the next step."""
    steps = repeated(rank, "randomk:ratio=0.25,block_size=64")
    assert len({*of_all(rank, digest(steps))}) == 1
    chosen = [sent.view(-1, 64) != 0 for sent in steps]
    assert all((places.sum(1) == 16).all() for places in chosen)
    assert not torch.equal(*chosen)


SHAPES = {"first": (40, 48), "second": (33, 50)}
STEPS = 3


class Context:
    """A reducer of two tensors of one parameter each."""

    def __init__(
        self,
        network: Network,
        codec: str,
        *,
        seed: int,
        executor: Executor | None = None,
        state_update: Literal["immediate", "deferred"] = "immediate",
        prefix: str = "",
    ) -> None:
        parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
        names: dict[Tensor, str] = {p: name for name, p in parameters.items()}
        settings = ExchangeSettings(codec, min_compress_numel=0, state_update=state_update)
        self.reducer = Reducer(
            names, settings=settings, network=network, executor=executor, prefix=prefix
        )
        self.slices = [slices_of([name], [p]) for name, p in parameters.items()]
        self.rank, self.seed = network.rank, seed
        self.digests: list[str] = []

    def start(self, step: int, key: int) -> Future[Tensor]:
        name = list(SHAPES)[key]
        flat = feed(self.rank, self.seed + step, SHAPES)[name].flatten()
        return self.reducer.start(flat, self.slices[key], key=key).done

    def ends(self, means: list[Future[Tensor]]) -> None:
        self.reducer.finish()
        self.digests.append(digest([*(mean.wait() for mean in means), *held(self.reducer)]))


@pytest.mark.parametrize("layout", [flat(2), Layout(PAIRS)], ids=str)
@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@on_threads("layout")
def test_steps_that_interleave_are_those_of_reducers_one_after_the_other(
    rank: Rank, state_update: Literal["immediate", "deferred"], layout: Layout
) -> None:
    codecs, alone = ("int8", "powersgd:rank=2"), []
    for seed, codec in enumerate(codecs):
        context = Context(
            rank.network(layout.tree), codec, seed=10 * seed, state_update=state_update
        )
        for step in range(STEPS):
            context.ends([context.start(step, key) for key in (0, 1)])
        context.reducer.close()
        alone.append(context.digests)
    network = rank.network(layout.tree)
    executor = executor_for(network.device)
    first, second = (
        Context(network, codec, seed=10 * seed, state_update=state_update, executor=executor)
        for seed, codec in enumerate(codecs)
    )
    for step in range(STEPS):
        means = [first.start(step, 0)]
        others = [second.start(step, 0)]
        means.append(first.start(step, 1))
        if step == 1:  # one step of the first within one of the second
            first.ends(means)
        others.append(second.start(step, 1))
        second.ends(others)
        if step != 1:
            first.ends(means)
    first.reducer.close()
    assert second.reducer.in_step
    second.ends([second.start(STEPS, key) for key in (0, 1)])
    second.reducer.close()
    assert executor.close()
    assert [first.digests, second.digests[:STEPS]] == alone


@on_threads(2)
def test_each_has_a_state_under_its_prefix(rank: Rank) -> None:
    network = rank.network()
    executor = executor_for(network.device)
    contexts = [
        Context(network, "int8", seed=seed, executor=executor, prefix=prefix)
        for seed, prefix in enumerate(["", "outer."])
    ]
    for context in contexts:
        context.ends([context.start(0, key) for key in (0, 1)])
    inner, outer = of_all(rank, [context.reducer.state_dict() for context in contexts])[0]
    assert inner is not None
    assert outer is not None
    whole = {**inner, **outer}
    assert {"step", "outer.step", "residuals", "outer.residuals"} <= whole.keys()
    assert len(whole) == 2 * len(inner)
    for context in contexts:
        before = held(context.reducer)
        context.ends([context.start(1, key) for key in (0, 1)])
        context.reducer.load_state_dict(whole)
        assert digest(held(context.reducer)) == digest(before)
        assert context.reducer.step == 1
        context.reducer.close()
    executor.close()


def fail(self: AllGather) -> None:
    raise RuntimeError("the link broke")


@patch.object(AllGather, "start", fail)
@on_threads(2)
def test_after_a_failure_of_one_no_other_exchanges(rank: Rank) -> None:
    """Its payloads could be taken for those that the other has not sent."""
    network = rank.network()
    executor = executor_for(network.device)
    first, second = (Context(network, "int8", seed=i, executor=executor) for i in range(2))
    with pytest.raises(RuntimeError, match="the link broke"):
        first.start(0, 0).wait()
    with pytest.raises(RuntimeError, match="An earlier exchange failed: the link broke"):
        second.start(0, 0).wait()
    assert not second.reducer.in_step
    for each in (first, second):
        each.reducer.close()
    executor.close()


@patch.object(reducer_module, "_PATIENCE", 0.01)
@on_threads(2)
def test_closing_one_gives_up_nothing_of_the_others(rank: Rank) -> None:
    """Their exchanges may be slow, and what they wait for is no failure."""
    network, gate = rank.network(), threading.Event()
    executor = executor_for(network.device)
    first, second = (Context(network, "int8", seed=i, executor=executor) for i in range(2))
    first.ends([first.start(0, key) for key in (0, 1)])
    executor.submit(lambda: gate.wait(60) and None)
    means = [second.start(0, key) for key in (0, 1)]
    first.reducer.close()
    gate.set()
    second.ends(means)
    second.reducer.close()
    assert executor.close()
    assert not first.reducer.planner.planned


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@pytest.mark.parametrize("codec", ["none", "int8", "threshold:tau=1.5", "powersgd:rank=2"])
@on_threads("size")
def test_a_tensor_may_be_elsewhere_at_every_step(
    rank: Rank, codec: str, state_update: Literal["immediate", "deferred"], size: int
) -> None:
    """The same bits as of one that stays, and no more memory from step to step."""
    staying = Context(rank.network(), codec, seed=0, state_update=state_update)
    flats = [torch.zeros(part.numel) for (part,) in staying.slices]
    for step in range(6):
        given = feed(rank.rank, step, SHAPES)
        for tensor, name in zip(flats, SHAPES, strict=True):
            tensor.copy_(given[name].flatten())
        starts = zip(flats, staying.slices, strict=True)
        staying.ends([staying.reducer.start(f, s, key=i).done for i, (f, s) in enumerate(starts)])
    expected = staying.reducer.memory()["buffer_bytes"]
    staying.reducer.close()
    moving = Context(rank.network(), codec, seed=0, state_update=state_update)
    kept, planned, memory = [], [], []  # all alive, so that none is where another was
    for step in range(6):
        means = [moving.start(step, key) for key in (0, 1)]
        moving.ends(means)
        kept += means
        planned.append(moving.reducer.planner.planned)
        memory.append(moving.reducer.memory()["buffer_bytes"])
    assert moving.digests == staying.digests
    assert memory[2] <= expected + 2 * 4 * sum(flat.numel() for flat in flats)
    assert memory[2:] == [memory[2]] * 4
    assert all(found[0] is planned[2][0] for found in planned[3:])
    moving.reducer.close()
