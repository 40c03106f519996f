"""`Trainer(strategy=...)` on two ranks: automatic optimisation, DDP's own arguments, precisions."""

import itertools
from functools import cache
from inspect import signature
from typing import Any

import pytest
import torch
from replicas import (
    fit_beside_ddp,
    mean_loss,
    of_all,
    require_compressed,
    require_equal,
    require_replicas,
)
from scenarios.fitting import compressed, fit, half, lossless, parameters, plain, residuals
from scenarios.models import Regression
from scenarios.world import Facts, rank
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.on_ranks(2, hash_seeds=True)
TRAINED = 16 * 32 + 32 + 32 * 16  # elements of `Regression`
SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
OVERFLOW_AT = 3  # batch


def with_momentum() -> Regression:
    return Regression(optimizer="momentum")


def test_codec_none_is_bit_identical_to_ddp() -> None:
    of_ddp = fit(with_momentum(), plain(**SMALL_BUCKETS))
    ours = fit(with_momentum(), lossless(**SMALL_BUCKETS))
    assert "lightning_dist_hook" in ours["ddp"]["comm_hook"]
    assert of_ddp["ddp"]["comm_hook"] is None
    assert "," in ours["ddp"]["rebuilt_bucket_sizes"], "several buckets"
    assert ours["digests"] == of_ddp["digests"]
    stats = ours["stats"]
    assert stats["steps"] == 8
    assert stats["wire_bytes"] == stats["raw_bytes"] == 8 * 4 * TRAINED
    require_replicas(ours)


@cache
def of_ddp_in_4_epochs() -> Facts:
    return fit(with_momentum(), plain(), max_epochs=4)


INT8 = 4 * 256 + 8 + 32 + 8
"""Bytes: two weights of 2 blocks of 256, each with a scale of 2 bytes, and a bias with a block of
its own size, in planes that are padded to 8 bytes."""


@pytest.mark.parametrize(
    ("codec", "given", "wire_bytes", "kept"),
    [
        ("fp16", {}, 2 * TRAINED, 0),
        ("bf16", {}, 2 * TRAINED, 0),
        ("int8", {}, INT8, 3),
        ("int8", {"error_feedback": False}, INT8, 0),
    ],
)
def test_lossy_codecs_train_as_ddp_does(
    codec: str, given: dict[str, Any], wire_bytes: int, kept: int
) -> None:
    """Every codec learns what plain DDP learns, with the bytes it promises."""
    of_ddp = of_ddp_in_4_epochs()
    ours = fit(with_momentum(), compressed(codec, **given), max_epochs=4)
    require_compressed(ours, steps=16)
    assert ours["stats"]["last_step"]["wire_bytes"] == wire_bytes
    assert ours["stats"]["raw_bytes"] == 16 * 4 * TRAINED
    assert len(ours["residuals"]) == kept
    assert ours["digests"][0] != of_ddp["digests"][0], "not compressed at all"
    first, last = mean_loss(ours, slice(0, 4)), mean_loss(ours, slice(-4, None))
    assert last < 0.5 * first
    assert last == pytest.approx(mean_loss(of_ddp, slice(-4, None)), rel=0.02)


def test_accumulation_communicates_on_optimizer_steps_only() -> None:
    """3 batches by twos and 2 epochs: 4 steps, two of them on one batch."""
    given = {"limit_train_batches": 3, "accumulate_grad_batches": 2}
    _, ours = fit_beside_ddp(Regression, steps=4, **given)
    assert ours["optimizer_steps"] == 4
    assert len(ours["digests"]) == 6


class Clipped(Regression):
    """Remembers the norm of the gradient before and after Lightning clips it."""

    def __init__(self) -> None:
        super().__init__()
        self.before: list[float] = []
        self.after: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *arguments: Any, **named: Any) -> None:
        self.before.append(self._norm())
        super().configure_gradient_clipping(optimizer, *arguments, **named)
        self.after.append(self._norm())

    def _norm(self) -> float:
        gradients: list[Tensor] = [p.grad for p in self.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.cat([g.reshape(-1) for g in gradients])))


def test_clipping_sees_the_mean_gradient() -> None:
    """The norm before clipping is the same on all ranks and as under DDP, the norm after is the
    limit."""
    of_ddp, ours = fit_beside_ddp(Clipped, steps=8, gradient_clip_val=0.05)
    before = ours["model"].before
    assert of_all(before) == [before, before]
    assert before == pytest.approx(of_ddp["model"].before, rel=0.01)
    assert min(before) > 0.3
    assert ours["model"].after == pytest.approx([0.05] * 8, rel=1e-3)


@cache
def in_one_bucket() -> Facts:
    return fit(Regression(), compressed())


TAKES_GRAD_COPIES = "batched_grad_copy" in signature(DistributedDataParallel).parameters
"""Whether torch is 2.13 or newer."""
CUT: dict[str, object] = {"rebuilt_bucket_sizes": "2048, 2176"}


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({}, CUT),
        ({"gradient_as_bucket_view": True}, {**CUT, "gradient_as_bucket_view": 1}),
        ({"static_graph": True}, {**CUT, "static_graph": 1}),
        ({"find_unused_parameters": True}, {}),
        *([({"batched_grad_copy": True}, CUT)] if TAKES_GRAD_COPIES else []),
    ],
)
def test_ddp_arguments_take_effect_and_change_no_bit(
    given: dict[str, bool], fact: dict[str, object]
) -> None:
    """Buckets may be cut and stored as one likes."""
    default, ours = in_one_bucket(), fit(Regression(), compressed(**SMALL_BUCKETS, **given))
    assert ours["ddp"] | fact == ours["ddp"]
    assert default["ddp"]["rebuilt_bucket_sizes"] == str(4 * TRAINED)
    assert ours["digests"] == default["digests"]
    require_equal(ours["residuals"], default["residuals"])
    require_compressed(ours, steps=8)


def test_start_step_delays_compression() -> None:
    """3 of 8 steps travel uncompressed."""
    ours = fit(Regression(), compressed(start_step=3))
    per_codec = ours["stats"]["per_codec"]
    assert per_codec["none"]["wire_bytes"] == 3 * 4 * TRAINED
    assert per_codec["int8"]["raw_bytes"] == 5 * 4 * TRAINED
    require_compressed(ours, steps=8)


@pytest.mark.parametrize(
    ("precision", "itemsize", "residual"),
    [
        ("bf16-mixed", 4, torch.float32),
        ("bf16-true", 2, torch.float32),
        ("16-true", 2, torch.float32),
        ("64-true", 8, torch.float64),
    ],
)
def test_precisions(precision: str, itemsize: int, residual: torch.dtype) -> None:
    """Gradients come in the dtype that DDP gives them; residuals are float32 or more."""
    of_ddp, ours = fit_beside_ddp(Regression, steps=8, precision=precision)
    assert {p.dtype.itemsize for p in ours["parameters"].values()} == {itemsize}
    assert {r.dtype for r in ours["residuals"].values()} == {residual}
    assert ours["stats"]["raw_bytes"] == 8 * itemsize * TRAINED
    assert ours["losses"] == pytest.approx(of_ddp["losses"], rel=0.02)
    assert mean_loss(ours, slice(4, 8)) < 0.9 * mean_loss(ours, slice(0, 4))


class Overflowing(Regression):
    """The loss of rank 1 is infinite at one batch. Remembers scale and state after every batch."""

    def __init__(self, *, overflow: bool = True) -> None:
        super().__init__(batches=8)
        self.overflow = overflow
        self.scales: list[float] = []
        self.states: list[dict[str, dict[str, Tensor]]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        hit = self.overflow and batch_idx == OVERFLOW_AT and rank() == 1
        return loss * float("inf") if hit else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.scales.append(self.trainer.precision_plugin.scaler.get_scale())
        kept = residuals(self.trainer.strategy)
        self.states.append({"parameters": parameters(self), "residuals": kept})


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_an_overflow_on_one_rank_leaves_no_trace(codec: str) -> None:
    """The step is skipped on both ranks, the scale halves, residuals stay, training goes on."""
    model, strategy = Overflowing(), compressed(codec, error_feedback=True)
    ours = fit(model, strategy, plugins=half(), max_epochs=1)
    before, at = model.states[OVERFLOW_AT - 1 : OVERFLOW_AT + 1]
    assert model.scales == [2.0**10] * OVERFLOW_AT + [2.0**9] * (8 - OVERFLOW_AT)
    require_equal(at["parameters"], before["parameters"])
    require_equal(at["residuals"], before["residuals"])
    assert any(residual.any() for residual in at["residuals"].values())
    for each in (state[kind] for state in model.states for kind in state):
        assert all(value.isfinite().all() for value in each.values())
    stood = [earlier == later for earlier, later in itertools.pairwise(ours["digests"])]
    assert stood == [batch == OVERFLOW_AT for batch in range(1, 8)]
    require_compressed(ours, steps=8)


def test_residuals_are_unscaled() -> None:
    """A scale that doubles at every step gives the bits that a constant scale gives."""
    found = []
    for growth_interval in (1000, 1):
        model = Overflowing(overflow=False)
        plugins = half(growth_interval=growth_interval)
        found.append(fit(model, compressed(), plugins=plugins, max_epochs=1))
        found[-1]["scales"] = model.scales
    constant, growing = found
    assert growing["scales"] == [2.0 ** (11 + step) for step in range(8)]
    assert set(constant["scales"]) == {2.0**10}
    assert all(residual.any() for residual in constant["residuals"].values())
    require_equal(growing["residuals"], constant["residuals"])
    require_equal(growing["parameters"], constant["parameters"])
    require_compressed(growing, steps=8)
