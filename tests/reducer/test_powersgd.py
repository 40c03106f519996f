"""PowerSGD against its formulas in numpy, and on unequal machines."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from feeding import Fed, Tensors, backward, compressed, digest, feed
from numpy.typing import NDArray
from saving import lost, totals
from threads import of_all, on_threads
from torch import Tensor
from worlds import Rank, run_threads

from lightning_dist.codecs import PowerSGD

DOUBLE = torch.float64
RANK = 2
TENSORS = {"first": (40, 48), "bias": (40,), "deep": (6, 4, 3, 3), "thin": (1, 300)}
MATRICES = {"first": (40, 48), "deep": (6, 36)}  # the others would not become smaller
Array = NDArray[np.float64]
worlds = pytest.mark.parametrize("size", [2, 3])
forms = pytest.mark.parametrize("two_phase", [False, True], ids=["alternating", "two_phase"])


def orth(matrix: Array) -> Array:
    return np.linalg.qr(matrix)[0]


@dataclass
class Twin:
    """One matrix on all ranks."""

    left: Array
    right: Array
    errors: list[Array]
    two_phase: bool
    step: int = 0

    def __call__(self, gradients: list[Array]) -> Array:
        ms = [g + e for g, e in zip(gradients, self.errors, strict=True)]
        if self.two_phase:
            left = orth(np.mean([m @ self.right for m in ms], 0))
            qs = [m.T @ left for m in ms]
            own = [left @ q.T for q in qs]
            self.right = orth(np.mean(qs, 0))
        elif self.step % 2 == 0:
            ps = [m @ self.right for m in ms]
            own = [p @ self.right.T for p in ps]
            self.left = orth(np.mean(ps, 0))
        else:
            qs = [m.T @ self.left for m in ms]
            own = [self.left @ q.T for q in qs]
            self.right = orth(np.mean(qs, 0))
        self.errors = [m - approximation for m, approximation in zip(ms, own, strict=True)]
        self.step += 1
        return np.mean(own, 0)  # the mean of products with one common side


def first_twin(name: str, size: int, two_phase: bool) -> Twin:
    codec = PowerSGD(rank=RANK, two_phase=two_phase)
    left, right, _ = codec.first_factors(name, TENSORS[name], DOUBLE)
    errors = [np.zeros(MATRICES[name]) for _ in range(size)]
    return Twin(left.numpy(), right.numpy(), errors, two_phase)


@dataclass
class Run:
    outputs: list[Tensors]
    residuals: Tensors = field(default_factory=dict)
    factors: list[str] = field(default_factory=list)  # digests after every step


def given(rank: int, step: int) -> Tensors:
    return feed(rank, step, TENSORS, DOUBLE)


def ours(rank: Rank, steps: int, *, two_phase: bool) -> Run:
    run = Run([])
    codec = PowerSGD(rank=RANK, two_phase=two_phase)
    with compressed(rank, Fed(TENSORS, DOUBLE), codec) as (model, reducer):
        for step in range(steps):
            run.outputs.append(backward(model, given(rank.rank, step)))
            pairs = reducer.state.factors
            run.factors.append(digest([factor for n in sorted(pairs) for factor in pairs[n]]))
        kept = reducer.residuals
        run.residuals = {name: kept[name].clone() for name in kept}
    return run


@worlds
@forms
def test_it_is_the_formulas(size: int, two_phase: bool) -> None:
    steps = 7
    ranks = run_threads(lambda rank: ours(rank, steps, two_phase=two_phase), size)
    assert len({*ranks[0].factors}) == steps, "they change at every step"
    assert all(run.factors == ranks[0].factors for run in ranks)
    twins = {name: first_twin(name, size, two_phase) for name in MATRICES}
    for step in range(steps):
        fed = [given(rank, step) for rank in range(size)]
        for name in TENSORS:
            expected = torch.stack([gradients[name] for gradients in fed]).mean(0)
            if name in MATRICES:
                matrices = [gradients[name].view(MATRICES[name]).numpy() for gradients in fed]
                exact, expected = expected, torch.from_numpy(twins[name](matrices))
                assert (exact.view(MATRICES[name]) - expected).norm() > 0.1, "it must be lossy"
            for run in ranks:
                found = run.outputs[step][name].view(expected.shape)
                torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    for rank, run in enumerate(ranks):
        assert run.residuals.keys() == MATRICES.keys()
        for name, residual in run.residuals.items():
            wanted = torch.from_numpy(twins[name].errors[rank]).flatten()
            torch.testing.assert_close(residual, wanted, rtol=1e-9, atol=1e-9)


IN_TURN = {"first": (40, 48), "second": (40, 48), "bias": (40,)}


@on_threads(2)
def test_a_matrix_that_is_exchanged_at_every_second_step_sends_both_sides(rank: Rank) -> None:
    """Two networks in turn, as in a GAN: each has the gradients that it would have alone."""
    codec, ddp = PowerSGD(rank=RANK), {"find_unused_parameters": True}
    alone: dict[str, list[Tensor]] = {"first": [], "second": []}

    def fed(name: str, turn: int) -> Tensors:
        return {name: feed(rank.rank, turn, IN_TURN, DOUBLE)["first"]}

    for name, outputs in alone.items():
        with compressed(rank, Fed({name: IN_TURN[name]}, DOUBLE), codec) as (model, _):
            outputs += (backward(model, fed(name, turn))[name] for turn in range(6))
    with compressed(rank, Fed(IN_TURN, DOUBLE), codec, ddp=ddp) as (model, reducer):
        for step in range(12):
            name, turn = ("first", "second")[step % 2], step // 2
            found = backward(model, fed(name, turn))[name]
            torch.testing.assert_close(found, alone[name][turn], rtol=1e-9, atol=1e-9)
            if step == 4:  # each of the two has another side to send
                reducer.load_state_dict(of_all(rank, reducer.state_dict())[0])


def ring(nbytes: int, size: int) -> int:
    return 2 * (size - 1) * nbytes // size


@worlds
@forms
@on_threads("size")
def test_bytes_of_a_step(rank: Rank, size: int, two_phase: bool) -> None:
    """One allreduce of ``r n`` or ``r m`` in turn, or of both; float32."""
    n, m = 40 + 6, 48 + 36
    codec, before = PowerSGD(rank=RANK, two_phase=two_phase), 0.0
    with compressed(rank, Fed(TENSORS), codec) as (model, reducer):
        for step in range(4):
            backward(model, feed(rank.rank, step, TENSORS))
            parts = [4 * RANK * n, 4 * RANK * m] if two_phase else [4 * RANK * (n, m)[step % 2]]
            payload = sum(codec.payload_bytes(TENSORS[name], step=step) for name in MATRICES)
            assert payload == sum(parts)
            stats = reducer.comm_stats()
            total = stats["per_codec"]["powersgd"]["wire_bytes"]
            # Two allreduces are each rounded down.
            assert total - before == sum(ring(part, size) for part in parts)
            uncompressed = ring((40 + 300) * 4, size)
            assert stats["last_step"]["wire_bytes"] == total - before + uncompressed
            before = total


SETTINGS = {"min_compress_numel": 256}
REDUCED = ("tf32", "bf16")
products = {"mm": torch.mm, "addmm": torch.addmm}


def short(tensor: Tensor) -> Tensor:
    """As tensor cores round float32, where the setting of the moment lets them."""
    try:
        reduced = torch.backends.cuda.matmul.fp32_precision in REDUCED
    except AttributeError:  # torch 2.7
        reduced = torch.get_float32_matmul_precision() != "highest"
    return tensor.to(torch.bfloat16).to(tensor.dtype) if reduced else tensor


@pytest.mark.parametrize("form", ["powersgd:rank=2", "powersgd:rank=2,two_phase=true"])
def test_mass_is_conserved_where_the_training_multiplies_in_tf32(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulated: this test's machine need not have the hardware."""

    def mm(a: Tensor, b: Tensor, **out: Any) -> Tensor:
        return products["mm"](short(a), short(b), **out)

    def addmm(c: Tensor, a: Tensor, b: Tensor, **out: Any) -> Tensor:
        return products["addmm"](c, short(a), short(b), **out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    torch.set_float32_matmul_precision("medium")
    try:
        ranks = run_threads(lambda rank: totals(rank, form, 10, **SETTINGS), 2)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert lost(ranks) < 1e-9


@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize(("state_update", "told_in"), [("immediate", 100), ("deferred", 101)])
@on_threads(3)
def test_ranks_that_have_drifted_apart_are_reported(
    rank: Rank, tree: Any, state_update: str, told_in: int
) -> None:
    """The factors of one rank are a little different, as another LAPACK would have them.

    Every 100 steps gradients are compared: in that step, or with the flags of the next one.
    """
    settings = {"tree": tree, "state_update": state_update, **SETTINGS}
    with compressed(rank, Fed(), "powersgd:rank=2", **settings) as (model, reducer):
        for step in range(told_in):
            backward(model, feed(rank.rank, step))
            for factor in reducer.state.factors.get("first", ())[:2]:
                factor.mul_(1 + 1e-3 * (rank.rank == 2))
        with pytest.raises(RuntimeError) as caught:
            backward(model, feed(rank.rank, told_in))
        message = str(caught.value)
    assert "powersgd" in message
    assert "different gradients" in message
    assert "equal hardware" in message


@patch("lightning_dist.reducer.pipeline._COMPARED_EVERY", 2)
@on_threads(2)
def test_equal_ranks_are_not(rank: Rank) -> None:
    """Neither by an overflow nor by a new start, in the steps that are compared."""
    with compressed(rank, Fed(), "powersgd:rank=2", **SETTINGS) as (model, reducer):
        for step in range(6):
            given = feed(rank.rank, step)
            if step in (2, 4) and rank.rank == 1:
                given["second"][0, 0] = torch.inf
            backward(model, given)
        reducer.load_state_dict(None)
        backward(model, feed(rank.rank, 6))
        assert reducer.step == 1
