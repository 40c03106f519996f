"""When residuals are written; passes cut short and skipped steps lose and leave nothing."""

import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
from fed_model import Model
from feeding import (
    EVERY_CODEC,
    FEW,
    PER_LEVEL,
    SHAPES,
    Fed,
    Tensors,
    backward,
    compressed,
    digest,
    feed,
    mean,
    residuals,
    step_digest,
)
from layouts import FORMS, HOSTS_OF_FOUR, PAIRS, UNEVEN, Layout, flat
from threads import of_all, on_threads
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank

from lightning_dist.codecs import Codec, resolve_codec, warmup
from lightning_dist.exchange.rounds import AllReduce, Exchange, TwoShot
from lightning_dist.reducer.plan.slices import slices_of
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.base import Environment, remember, sync_of
from lightning_dist.sync.ddp import GradientSync

THREE = {"first": (40, 48), "second": (33, 50), "third": (16, 70)}
INTERRUPTED = 2


def model_of(rank: Rank, codec: str, layout: Layout | None = None) -> Model:
    network = rank.network(layout.tree, leader=layout.leader) if layout else rank.network()
    return Model(network, codec, shapes=THREE, error_feedback=True)


def trained(model: Model, rank: Rank, *, buckets: int, bad: bool = False) -> list[str]:
    """Digests of four steps, the third of which begins anew after ``buckets`` buckets.

    ``bad``: what rank 1 had handed over by then was not finite.
    """
    digests = []
    with closing(model.reducer):
        for step in range(4):
            if buckets and step == INTERRUPTED:
                aborted = feed(rank.rank, 77, THREE)
                if bad and rank.rank == 1:
                    aborted["first"][0, 0] = torch.inf
                model.begin(aborted, buckets)
                if bad:  # encoded, in the bucket's memory, before the next step is written there
                    model.reducer._executor.drain()
            torch.futures.wait_all(model.begin(feed(rank.rank, step, THREE)))
            digests.append(digest([*model.flats.values(), *residuals(model.reducer).values()]))
        assert model.reducer.comm_stats()["steps"] == 4
    return digests


@pytest.mark.parametrize("codec", ["int8", "fp16", "powersgd:rank=2", "threshold:tau=1.5"])
@pytest.mark.parametrize("layout", [flat(2), flat(3), *FORMS], ids=str)
@on_threads("layout")
def test_the_next_step_is_clean(rank: Rank, codec: str, layout: Layout) -> None:
    """Gradients and residuals equal those of a run in which that step never began.

    The next step is finite on every rank, whatever was handed over before, and is not undone.
    """
    ways = [(0, False), (1, True), (2, True)]
    if layout.tree or codec in ("int8", "fp16"):  # others add what is owed in the bucket's memory
        ways += [(1, False), (2, False)]
    clean, *interrupted = (
        trained(model_of(rank, codec, layout), rank, buckets=of, bad=bad) for of, bad in ways
    )
    assert all(digests == clean for digests in interrupted)


@pytest.mark.parametrize(("exchange", "codec"), [(AllReduce, "fp16"), (TwoShot, "int8")])
@on_threads(3)
def test_a_failure_of_what_was_left_over_reaches_the_new_step(
    rank: Rank, exchange: type[Exchange], codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for the payloads of the interrupted step fails: the new step must say so."""

    def fail(self: object) -> None:
        raise RuntimeError("the link broke")

    model = model_of(rank, codec)
    with closing(model.reducer):
        model.begin(feed(rank.rank, 0, THREE), 1)
        rank.barrier.wait()
        monkeypatch.setattr(exchange, "wait", fail)
        model.flats = {name: flat.clone() for name, flat in model.flats.items()}
        (future,) = model.begin(feed(rank.rank, 1, THREE), 1)
        model.reducer._executor.drain()
        assert future.done(), "nobody told the new step"
        with pytest.raises(RuntimeError, match="the link broke"):
            future.value()


class _Failing(torch.autograd.Function):
    """Identity whose backward raises when it is asked to."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise MemoryError("out of memory in the middle of the backward pass")
        return grad, None


class Halfway(nn.Module):
    """``Fed`` whose backward fails, on demand, after the first bucket has been handed over."""

    def __init__(self) -> None:
        super().__init__()
        self.fed, self.fails = Fed(), False

    def forward(self, given: Tensors) -> Tensor:
        last = _Failing.apply(self.fed({"first": given["first"]}), self.fails)
        return last + self.fed({name: given[name] for name in ("second", "bias")})


SETTINGS = {"min_compress_numel": 256, "state_update": "deferred", "ddp": {"bucket_cap_mb": 0.004}}


def train(model: nn.Module, rank: Rank, steps: range) -> list[str]:
    return [digest(dict(sorted(backward(model, feed(rank.rank, s)).items()))) for s in steps]


@on_threads(2)
def test_a_real_backward_that_raises_then_a_new_ddp(rank: Rank) -> None:
    """DDP itself takes no further step after that; a new DDP goes on with the old residuals."""
    with compressed(rank, Halfway(), **SETTINGS) as (model, _):
        uninterrupted = train(model, rank, range(5))
    module = Halfway()
    with compressed(rank, module, **SETTINGS) as (model, old):
        digests, before = train(model, rank, range(3)), sync_of(model, GradientSync)
        module.fails = True
        with pytest.raises(MemoryError):
            backward(model, feed(rank.rank, 77))
        module.fails = False
        with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
            model(feed(rank.rank, 3))
    # A copy of the module: on the old one the old DDP's hooks fire for as long as it is alive.
    copy = Halfway()
    copy.load_state_dict(module.state_dict())
    remember(copy, before)  # which stands for the module
    new = DistributedDataParallel(copy, process_group=rank.group("new"), bucket_cap_mb=0.004)
    groups = [rank.group("new payload"), rank.group("new flags")]
    environment = Environment(before=before, groups=groups)
    with closing(GradientSync.attach(new, old.settings, environment)):
        assert digests + train(new, rank, range(3, 5)) == uninterrupted


DOUBLE = torch.float64
STEPS = 8
BAD = {2: ("second", torch.inf), 3: ("second", torch.nan), 5: ("first", -torch.inf)}
"""What is not finite on rank 1, by step."""
CODECS: tuple[str | Codec, ...] = (
    "int8",
    "topk:ratio=0.1,block_size=128",
    "threshold:tau=1.5",
    "powersgd:rank=2",
    warmup({0: "int8", 5: "none"}),  # the residuals are sent in a step that is bad
)
TREES = [None, [[0, 1], [2]]]


@dataclass
class Loop:
    """A training loop.

    ``groups``: names of the parameters of each optimizer; ``scaled``: under a GradScaler;
    ``before_step``: what happens to the gradients, True where the step is then left out;
    ``skipped``: names of the parameters to which a step is not applied that is bad in one.
    """

    groups: Sequence[Sequence[str]]
    scaled: bool
    skipped: Sequence[str]
    before_step: Callable[[nn.Module], bool] = lambda module: False
    fused: bool = False


def replaces(module: nn.Module) -> bool:
    for parameter in module.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    return False


def leaves_out(module: nn.Module) -> bool:
    return not all(bool(p.grad.isfinite().all()) for p in module.parameters() if p.grad is not None)


ALL, TWO = [["first", "bias", "second"]], [["first", "bias"], ["second"]]
LOOPS = {
    "one optimizer, GradScaler": Loop(ALL, True, ALL[0]),
    "one fused optimizer, GradScaler": Loop(ALL, True, ALL[0], fused=True),
    "two optimizers, GradScaler": Loop(TWO, True, ALL[0]),
    "nan_to_num": Loop(ALL, False, ("first", "second"), replaces),
    "two optimizers, nan_to_num": Loop(TWO, False, ("first", "second"), replaces),
    "a loop that leaves the step out": Loop(ALL, False, ALL[0], leaves_out),
}


def given(rank: int, step: int) -> Tensors:
    gradients = feed(rank, step, dtype=DOUBLE)
    if rank == 1 and step in BAD:
        name, value = BAD[step]
        gradients[name].view(-1)[-3] = value
    return gradients


def mean_residuals(reducer: Reducer) -> Tensors:
    """On rank 0. Parameters that are not compressed owe nothing."""
    state = reducer.state_dict()
    rows = {} if state is None else state["residuals"]
    return {n: rows[n].mean(0).view(s) if n in rows else torch.zeros(s) for n, s in SHAPES.items()}


def run(
    rank: Rank, loop: Loop, codec: str | Codec, tree: Any
) -> tuple[Tensors, Tensors, Tensors, str]:
    """What weights have moved, what was applied, what is owed, and a digest of the weights."""
    module = Fed(dtype=DOUBLE)
    first = {name: p.detach().clone() for name, p in module.named_parameters()}
    applied = {name: torch.zeros_like(p) for name, p in first.items()}
    own = dict(module.named_parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=loop.scaled)
    optimizers = [
        torch.optim.SGD([own[name] for name in names], lr=1.0, fused=loop.fused)
        for names in loop.groups
    ]
    settings = {"min_compress_numel": 256, "error_feedback": True, "tree": tree}
    settings["grad_scaler"] = scaler if loop.scaled else None
    with compressed(rank, module, codec, state_update="deferred", **settings) as (model, reducer):
        for step in range(STEPS):
            model.zero_grad()
            scaler.scale(model(given(rank.rank, step))).backward()
            if not loop.before_step(module):
                for optimizer in optimizers:
                    scaler.step(optimizer)
            scaler.update()
            for name in applied.keys() - set(loop.skipped if step in BAD else ()):
                applied[name] += given(rank.rank, step)[name]
        owed = mean_residuals(reducer)
    moved = {name: first[name] - p.detach() for name, p in module.named_parameters()}
    return moved, applied, owed, digest(module.parameters())


LOOPS_WITH_CODECS = [
    *((loop, codec) for loop in LOOPS for codec in ("int8", CODECS[-1])),
    *((loop, codec) for loop in list(LOOPS)[::3] for codec in CODECS[1:-1]),
]
"""Every loop and every codec; all pairs of them are slow."""


@pytest.mark.parametrize("tree", TREES, ids=str)
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param(LOOPS_WITH_CODECS, id="some"),
        pytest.param(list(product(LOOPS, CODECS)), id="all", marks=pytest.mark.slow),
    ],
)
@on_threads(3)
def test_a_step_that_is_not_finite_is_undone(
    rank: Rank, pairs: list[tuple[str, str | Codec]], tree: Any
) -> None:
    for pair in pairs:
        loop, codec = pair
        ranks = of_all(rank, run(rank, LOOPS[loop], codec, tree))
        assert len({weights for *_, weights in ranks}) == 1, pair
        applied = mean([gradients for _, gradients, _, _ in ranks])
        moved, _, owed, _ = ranks[0]
        short = {n: float((moved[n] + owed[n] - applied[n]).abs().max()) for n in SHAPES}
        # Values are sent in a short type, scales too; what that loses is in the residual.
        assert max(short.values()) < 1e-11, (pair, short)


LARGE = {"min_compress_numel": 256}
SEVERAL_BUCKETS = {"ddp": {"bucket_cap_mb": 0.004}}
INT8 = resolve_codec("int8:block_size=64")


def digests(rank: Rank, codec: str, state_update: str, **settings: Any) -> list[str]:
    """Gradients and state of four steps."""
    with compressed(rank, Fed(), codec, state_update=state_update, **LARGE, **settings) as (
        model,
        reducer,
    ):
        assert reducer.immediate is (state_update == "immediate")
        return [step_digest(backward(model, feed(rank.rank, s)), reducer) for s in range(4)]


@pytest.mark.parametrize(
    ("layout", "codecs"),
    [
        (flat(2), EVERY_CODEC[::4]),
        pytest.param(flat(2), EVERY_CODEC, marks=pytest.mark.slow),
        (flat(3), EVERY_CODEC),
        (Layout(PAIRS), [*FEW, *PER_LEVEL]),
        (Layout(UNEVEN), FEW),
        (Layout(HOSTS_OF_FOUR), ["int8"]),
    ],
    ids=lambda value: str(value) * isinstance(value, Layout),
)
@on_threads("layout")
def test_finite_steps_are_the_same_bits(rank: Rank, layout: Layout, codecs: list[str]) -> None:
    """So that every law of the deferred update holds for the immediate one, and the reverse."""
    form = {**layout.form, **SEVERAL_BUCKETS}
    for codec in codecs:
        ways = [
            digests(rank, codec, state_update, **form) for state_update in ("immediate", "deferred")
        ]
        assert ways[0] == ways[1], codec


def spoilt(rank: int, step: int) -> Tensors:
    """Gradients with one inf, in one block of one rank."""
    given = feed(rank, step)
    if rank == 1:
        given["first"].view(-1)[70] = torch.inf
    return given


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_what_is_not_finite_keeps_its_residual_and_nothing_else_is_lost(
    rank: Rank, size: int
) -> None:
    """The rank with the inf keeps the residual of that block; all ranks see it.

    A step that is then skipped costs what it has sent, no more: afterwards the residual of every
    other element is what the codec has lost of it.
    """
    with compressed(rank, Fed(), INT8, **LARGE) as (model, reducer):
        backward(model, feed(rank.rank, 0))
        before = residuals(reducer)
        bad = backward(model, spoilt(rank.rank, 1))
        after = residuals(reducer)
        good = backward(model, feed(rank.rank, 2))
    assert all(g.isfinite().all() for g in (*good.values(), *after.values()))
    finite = {name: bool(g.isfinite().all()) for name, g in bad.items()}
    assert finite == {"first": False, "bias": True, "second": True}
    assert int((~bad["first"].isfinite()).sum()) == INT8.block
    kept = after["first"] == before["first"]
    block = torch.arange(len(kept)) // INT8.block == 70 // INT8.block
    if rank.rank == 1:
        assert kept[block].all()
    assert kept[~block].float().mean() < 0.1
    largest = max(float(given.abs().max()) for given in feed(rank.rank, 1).values())
    assert after["first"].abs().max() < largest / 20  # rounding errors, not gradients
    assert len({*of_all(rank, digest(good))}) == 1


StateUpdate = Literal["immediate", "deferred"]


@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@on_threads(2)
def test_a_backward_that_is_cut_short_is_not_counted(rank: Rank, state_update: StateUpdate) -> None:
    model, counts = Model(rank.network(), state_update=state_update, shapes=THREE), []
    with closing(model.reducer):
        for step, buckets in enumerate((3, 2, 3)):
            futures = model.begin(feed(rank.rank, step, THREE), buckets)
            if buckets == 3:
                torch.futures.wait_all(futures)
                counts.append(dict(model.reducer.comm_stats()["last_step"]))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("ends", [True, False], ids=["saved", "loaded"])
@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@on_threads(2)
def test_one_that_is_cut_short_is_over_before_state_is_used(
    rank: Rank, state_update: StateUpdate, ends: bool
) -> None:
    """What it has queued would meet the collectives of a checkpoint in another order elsewhere."""
    model = Model(rank.network(), state_update=state_update, shapes=THREE)
    reducer, over = model.reducer, threading.Event()
    with closing(reducer):
        torch.futures.wait_all(model.begin(feed(rank.rank, 0, THREE), 3))
        submit, begun = reducer._executor.submit, threading.Event()
        submit(begun.wait)
        model.begin(feed(rank.rank, 1, THREE), 2)
        submit(over.set)

        def submitted(task: Callable[[], None]) -> None:
            submit(task)
            begun.set()  # somebody waits for what was queued

        with patch.object(reducer._executor, "submit", submitted):
            saved = of_all(rank, reducer.state_dict() if ends else None)[0]
            if not ends:
                reducer.load_state_dict(saved)
        assert over.is_set()
        assert reducer.in_step, "and nothing is under way"
        torch.futures.wait_all(model.begin(feed(rank.rank, 2, THREE), 3))
        assert len({*of_all(rank, digest(model.flats))}) == 1
        assert reducer.step == (2 if ends else 1)


@on_threads(2)
def test_a_backward_that_is_cut_short_leaves_replicas_equal(rank: Rank) -> None:
    """It costs what it has sent: residuals stay rounding errors."""
    model = Model(rank.network(), state_update="immediate", shapes=THREE)
    with closing(model.reducer):
        for step in range(4):
            futures = model.begin(feed(rank.rank, step, THREE), 2 if step == 1 else 3)
            if step != 1:
                torch.futures.wait_all(futures)
                assert len({*of_all(rank, digest(model.flats))}) == 1
        assert all(each.abs().max() < 0.2 for each in residuals(model.reducer).values())


@pytest.mark.parametrize("size", [2, 3])
@on_threads("size")
def test_keys_and_their_order_may_be_any(rank: Rank, size: int) -> None:
    """Tensors that follow each other never share memory, whatever they are called."""

    def train(state_update: StateUpdate) -> list[str]:
        model, got = Model(rank.network(), state_update=state_update, shapes=THREE), []
        parameters = dict(zip((0, 2, 4), model.parameters.items(), strict=True))
        with closing(model.reducer):
            for step, keys in enumerate([(0, 2, 4), (0, 2, 4), (2, 0, 4), (4, 2, 0)]):
                given = feed(rank.rank, step, THREE)
                handles = []
                for key in keys:
                    name, parameter = parameters[key]
                    flat = model.flats[name].copy_(given[name].flatten())
                    slices = slices_of([name], [parameter])
                    handles.append(model.reducer.start(flat, slices, key=key))
                model.reducer.finish()
                torch.futures.wait_all([handle.done for handle in handles])
                got.append(digest(model.flats))
        return got

    assert train("immediate") == train("deferred")


def payload_bytes(rank: Rank, state_update: str) -> float:
    """Bytes per element of payloads, in a model of 8 buckets of one parameter each."""
    shapes = {f"{i}": (64, 1024) for i in range(8)}
    ddp = {"bucket_cap_mb": 0.25}
    with compressed(rank, Fed(shapes), state_update=state_update, ddp=ddp, **LARGE) as (
        model,
        reducer,
    ):
        for step in range(3):
            backward(model, feed(rank.rank, step, shapes))
        memory = reducer.memory()
        elements = sum(p.numel() for p in model.parameters())
        assert memory["residual_bytes"] == 4 * elements
        return memory["buffer_bytes"] / elements


@pytest.mark.parametrize("size", [2, 3, 4])
@on_threads("size")
def test_tensors_take_turns_with_the_memory_of_payloads(rank: Rank, size: int) -> None:
    assert payload_bytes(rank, "immediate") < (0.8 if size > 2 else 0.6)
    # W payloads where they are gathered, else three of one.
    assert payload_bytes(rank, "deferred") > 2


@pytest.mark.parametrize(
    ("settings", "immediate"),
    [
        ({}, True),
        ({"state_update": "deferred"}, False),
        ({"ddp": {"find_unused_parameters": True}}, False),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, False),
        ({"grad_scaler": torch.amp.GradScaler("cpu", enabled=False)}, True),
        ({"grad_scaler": torch.amp.GradScaler("cpu"), "state_update": "immediate"}, True),
    ],
)
@on_threads(2)
def test_which_one_is_in_force(rank: Rank, settings: dict[str, Any], immediate: bool) -> None:
    with compressed(rank, Fed(), **LARGE, **settings) as (_, reducer):
        assert reducer.immediate is immediate
        assert reducer.comm_config()["state_update"] == ("immediate" if immediate else "deferred")


@on_threads(2)
def test_unused_parameters_need_the_deferred_one(rank: Rank) -> None:
    ddp = {"find_unused_parameters": True}
    refused = pytest.raises(ValueError, match=r"state_update='immediate'.*find_unused.*'auto'")
    with refused, compressed(rank, Fed(), state_update="immediate", ddp=ddp):
        pass
