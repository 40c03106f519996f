"""PowerSGD against its formulas in numpy and torch's own hook, and on unequal machines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from feeding import SHAPES, Fed, Tensors, backward, compressed, digest, feed, mean, residuals
from numpy.typing import NDArray
from saving import train
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
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
    left, right = codec.first_factors(name, TENSORS[name], DOUBLE)
    errors = [np.zeros(MATRICES[name]) for _ in range(size)]
    return Twin(left.numpy(), right.numpy(), errors, two_phase)


@dataclass
class Run:
    outputs: list[Tensors]
    residuals: Tensors = field(default_factory=dict)
    factors: list[str] = field(default_factory=list)  # digests after every step
    wire: list[Mapping[str, Any]] = field(default_factory=list)


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
            run.wire.append(dict(reducer.comm_stats()["last_step"]))
        kept = reducer.residuals
        run.residuals = {name: kept[name].clone() for name in kept}
    return run


@worlds
@forms
def test_it_is_the_formulas(size: int, two_phase: bool) -> None:
    steps = 7
    ranks = run_threads(lambda rank: ours(rank, steps, two_phase=two_phase), size)
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


@forms
def test_factors_and_gradients_are_equal_on_all_ranks(two_phase: bool) -> None:
    first, *others = run_threads(lambda rank: ours(rank, 4, two_phase=two_phase), 3)
    assert len(set(first.factors)) == 4, "they change at every step"
    for other in others:
        assert other.factors == first.factors
        assert [digest(g) for g in other.outputs] == [digest(g) for g in first.outputs]


@worlds
def test_two_phase_gives_what_torchs_hook_gives(size: int) -> None:
    """From the same first Q.

    torch keeps ``M_i - mean approximation``, we ``M_i - own approximation``: the mean is the same.
    """
    shapes, steps = {"first": TENSORS["first"]}, 6

    def torchs(rank: Rank) -> list[Tensor]:
        group = rank.group("ddp")
        model = DistributedDataParallel(Fed(shapes, DOUBLE), process_group=group)
        state = PowerSGDState(group, matrix_approximation_rank=RANK, min_compression_rate=1)
        state.start_powerSGD_iter = 0  # one matrix in one bucket: DDP changes nothing later
        _, right = PowerSGD(rank=RANK).first_factors("first", shapes["first"], DOUBLE)
        state.p_memory_dict[0] = torch.zeros(40 * RANK, dtype=DOUBLE)
        state.q_memory_dict[0] = right.clone().flatten()
        model.register_comm_hook(state, powerSGD_hook)
        return path(rank, model)

    def mine(rank: Rank) -> list[Tensor]:
        codec = PowerSGD(rank=RANK, two_phase=True)
        with compressed(rank, Fed(shapes, DOUBLE), codec) as (model, _):
            return path(rank, model)

    def path(rank: Rank, model: DistributedDataParallel) -> list[Tensor]:
        fed = [feed(rank.rank, step, shapes, DOUBLE) for step in range(steps)]
        return [backward(model, gradients)["first"] for gradients in fed]

    for theirs, found in zip(run_threads(torchs, size), run_threads(mine, size), strict=True):
        torch.testing.assert_close(found, theirs, rtol=1e-9, atol=1e-9)


def low_rank(rank: int, size: int) -> Tensor:
    """A gradient of full rank on every rank, whose mean over the ranks has rank 2."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=DOUBLE)

    mean, apart = normal(40, RANK) @ normal(RANK, 48), normal(size, 40, 48)
    return mean + apart[rank] - apart.mean(0)


def constant(rank: Rank, steps: int, gradient: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """Outputs ``(steps, n, m)`` and local residuals for the same gradient at every step."""
    shapes = {"first": TENSORS["first"]}
    with compressed(rank, Fed(shapes, DOUBLE), f"powersgd:rank={RANK}", **settings) as (model, red):
        outputs, owed = [], []
        for _ in range(steps):
            outputs.append(backward(model, {"first": gradient})["first"])
            kept = red.residuals
            owed.append(kept["first"].clone() if "first" in kept else torch.zeros(1))
    return torch.stack(outputs), torch.stack(owed)


@worlds
def test_a_constant_gradient_of_its_rank_is_exact_from_the_second_step_on(size: int) -> None:
    """One power iteration finds the span of a mean gradient of rank 2."""
    mean = torch.stack([low_rank(rank, size) for rank in range(size)]).mean(0)

    def body(rank: Rank) -> tuple[Tensor, Tensor]:
        return constant(rank, 5, low_rank(rank.rank, size), error_feedback=False)

    for outputs, _ in run_threads(body, size):
        assert (outputs[0] - mean).norm() > 0.5 * mean.norm()
        for output in outputs[1:]:
            torch.testing.assert_close(output, mean, rtol=1e-9, atol=1e-9)


@worlds
def test_with_memory_no_residual_is_left_after_two_steps(size: int) -> None:
    """The second step also brings what the first has left out, and so does every second one."""
    mean = torch.stack([low_rank(rank, size) for rank in range(size)]).mean(0)
    ranks = run_threads(lambda rank: constant(rank, 6, low_rank(rank.rank, size)), size)
    for outputs, _ in ranks:
        for steps in (2, 4, 6):
            torch.testing.assert_close(outputs[:steps].mean(0), mean, rtol=1e-9, atol=1e-9)
    owed = torch.stack([held for _, held in ranks]).mean(0).norm(dim=1)
    assert (owed[1::2] < 1e-9 * mean.norm()).all()
    assert (owed[::2] > 0.01 * mean.norm()).all()


@worlds
def test_the_residual_of_a_constant_random_gradient_levels_off(size: int) -> None:
    """Every rank another gradient of full rank: the local residuals stay bounded."""
    steps = 160

    def body(rank: Rank) -> Tensor:
        _, owed = constant(rank, steps, given(rank.rank, 0)["first"])
        return owed.norm(dim=1)

    for norms in run_threads(body, size):
        early, late = norms[60:110].max(), norms[110:].max()
        assert late < 1.05 * early


def ring(nbytes: int, size: int) -> int:
    return 2 * (size - 1) * nbytes // size


@worlds
@forms
def test_bytes_of_a_step(size: int, two_phase: bool) -> None:
    """One allreduce of ``r n`` or ``r m`` in turn, or of both; float32."""
    n, m = (sum(shape[i] for shape in MATRICES.values()) for i in range(2))
    assert (n, m) == (46, 84)
    uncompressed = ring((40 + 300) * 4, size)

    def body(rank: Rank) -> list[float]:
        codec = PowerSGD(rank=RANK, two_phase=two_phase)
        with compressed(rank, Fed(TENSORS), codec) as (model, reducer):
            sent, before = [], 0.0
            for step in range(4):
                backward(model, feed(rank.rank, step, TENSORS))
                stats = reducer.comm_stats()
                total = stats["per_codec"]["powersgd"]["wire_bytes"]
                sent.append(total - before)
                assert stats["last_step"]["wire_bytes"] == sent[-1] + uncompressed
                before = total
            return sent

    codec = PowerSGD(rank=RANK, two_phase=two_phase)
    for sent in run_threads(body, size):
        for step, found in enumerate(sent):
            payload = sum(codec.payload_bytes(TENSORS[name], step=step) for name in MATRICES)
            both, one = 4 * RANK * (n + m), 4 * RANK * (n, m)[step % 2]
            assert payload == (both if two_phase else one)
            # Two allreduces are each rounded down.
            parts = [4 * RANK * n, 4 * RANK * m] if two_phase else [payload]
            assert found == sum(ring(part, size) for part in parts)


def test_the_state_has_the_factors_and_goes_on_with_another_number_of_ranks() -> None:
    """2 -> 3 ranks: the same factors, the mean residual, and the next step is the formula's."""
    settings: Mapping[str, Any] = {"codec": f"powersgd:rank={RANK}", "dtype": DOUBLE}
    state = train(2, range(3), **settings).state
    assert sorted(state["factors"]) == ["first", "second"]
    shapes = {name: [tuple(f.shape) for f in pair] for name, pair in state["factors"].items()}
    assert shapes == {"first": [(40, 2), (48, 2)], "second": [(33, 2), (50, 2)]}

    def body(rank: Rank) -> tuple[Mapping[str, Any] | None, Tensor]:
        codec = settings["codec"]
        with compressed(rank, Fed(dtype=DOUBLE), codec, min_compress_numel=256) as (model, reducer):
            reducer.load_state_dict(state)
            again = reducer.state_dict()
            return again, backward(model, feed(rank.rank, 3, dtype=DOUBLE))["first"]

    owed = state["residuals"]["first"].mean(0).view(40, 48)
    left, right = (factor.numpy() for factor in state["factors"]["first"])
    twin = Twin(left, right, [owed.numpy()] * 3, two_phase=False, step=3)
    expected = twin([feed(rank, 3, dtype=DOUBLE)["first"].numpy() for rank in range(3)])
    ranks = run_threads(body, 3)
    again = ranks[0][0]
    assert again is not None
    assert again["factors"].keys() == state["factors"].keys()
    for name, factors in state["factors"].items():
        assert all(map(torch.equal, again["factors"][name], factors))
    for _, output in ranks:
        torch.testing.assert_close(output, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


SETTINGS = {"min_compress_numel": 256}

REDUCED = ("tf32", "bf16")

products = {"mm": torch.mm, "addmm": torch.addmm}


def short(tensor: Tensor) -> Tensor:
    """As tensor cores round float32, where the setting of the moment lets them."""
    reduced = torch.backends.cuda.matmul.fp32_precision in REDUCED
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
    steps = 10

    def body(rank: Rank) -> tuple[Tensors, Tensors, Tensors]:
        given = [feed(rank.rank, step) for step in range(steps)]
        with compressed(rank, Fed(), form, **SETTINGS) as (model, reducer):
            found = [backward(model, gradients) for gradients in given]
            owed = residuals(reducer)
        names = sorted(owed)
        return (
            {name: torch.stack([each[name] for each in given]).sum(0) for name in names},
            {name: torch.stack([each[name] for each in found]).sum(0) for name in names},
            {name: owed[name].view(SHAPES[name]) for name in names},
        )

    torch.set_float32_matmul_precision("medium")
    try:
        ranks = run_threads(body, 2)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    went_in, came_out, owed = (mean(of) for of in zip(*ranks, strict=True))
    for name, total in went_in.items():
        assert float((came_out[name] + owed[name] - total).abs().max()) < 1e-4, name


@pytest.mark.parametrize("tree", [None, [[0, 1], [2]]], ids=str)
@pytest.mark.parametrize(("commit", "told_in"), [("immediate", 100), ("deferred", 101)])
def test_ranks_that_have_drifted_apart_are_reported(tree: Any, commit: str, told_in: int) -> None:
    """The factors of one rank are a little different, as another LAPACK would have them.

    Every 100 steps gradients are compared: in that step, or with the flags of the next one.
    """
    settings = {"tree": tree, "commit": commit, **SETTINGS}

    def body(rank: Rank) -> str:
        with compressed(rank, Fed(), "powersgd:rank=2", **settings) as (model, reducer):
            for step in range(told_in):
                backward(model, feed(rank.rank, step))
                for factor in reducer.state.factors.get("first", ()):
                    factor.mul_(1 + 1e-3 * (rank.rank == 2))
            with pytest.raises(RuntimeError) as caught:
                backward(model, feed(rank.rank, told_in))
            return str(caught.value)

    for message in run_threads(body, 3):
        assert "powersgd" in message
        assert "different gradients" in message
        assert "equal hardware" in message


def test_equal_ranks_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by an overflow nor by a new start, in the steps that are compared."""
    monkeypatch.setattr("lightning_dist.reducer.pipeline._COMPARED_EVERY", 2)

    def body(rank: Rank) -> int:
        with compressed(rank, Fed(), "powersgd:rank=2", **SETTINGS) as (model, reducer):
            for step in range(6):
                given = feed(rank.rank, step)
                if step in (2, 4) and rank.rank == 1:
                    given["second"][0, 0] = torch.inf
                backward(model, given)
            reducer.load_state_dict(None)
            backward(model, feed(rank.rank, 6))
            return reducer.step

    assert run_threads(body, 2) == [1, 1]
