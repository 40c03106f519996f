"""1-bit Adam against its own formulas, and through a real exchange."""

import copy
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist import OneBitAdam
from lightning_dist.sync.ddp import compress_ddp

SHAPE = (24, 32)
BETAS = (0.8, 0.95)


def gradient(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SHAPE, generator=generator) * (1 + torch.arange(32)) / 16


class Weight(nn.Module):
    """``d loss / d weight`` is what forward is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE))

    def forward(self, given: Tensor) -> Tensor:
        return (self.weight * given).sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = nn.ModuleList([Weight(), Weight()])

    def forward(self, given: Tensor) -> Tensor:
        return torch.stack([each(given) for each in self.both]).sum()


def make(parameters: Iterable[nn.Parameter], freeze_step: int = 3) -> OneBitAdam:
    return OneBitAdam(parameters, lr=0.05, freeze_step=freeze_step, betas=BETAS, weight_decay=0.1)


def train(rank: Rank, codec: str, steps: int, freeze_step: int = 3) -> list[Tensor]:
    model = rank.ddp(Weight())
    reducer = compress_ddp(model, codec, groups=rank.groups(), min_compress_numel=0)
    optimizer = make(model.parameters(), freeze_step)
    optimizer.attach(reducer)
    path = []
    for step in range(steps):
        optimizer.zero_grad()
        model(gradient(rank.rank, step)).backward()
        optimizer.step()
        path.append(model.module.weight.detach().clone())
    reducer.close()
    return path


def by_hand(size: int, steps: int, freeze_step: int, *, first: int = 0) -> list[Tensor]:
    """Algorithm 1 in float64, with exact exchanges."""
    weight = torch.ones(SHAPE, dtype=torch.float64)
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    path = []
    for step in range(steps):
        g = sum(gradient(r, first + step).double() for r in range(size)) / size
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        if step < freeze_step:
            v = BETAS[1] * v + (1 - BETAS[1]) * g * g
        done, learnt = step + 1, min(step + 1, freeze_step)
        weight = weight * (1 - 0.05 * 0.1)
        root = (v / (1 - BETAS[1] ** learnt)).sqrt() + 1e-8
        weight = weight - 0.05 * (m / (1 - BETAS[0] ** done)) / root
        path.append(weight)
    return path


def test_the_warm_up_is_adamw() -> None:
    ours, theirs = Weight(), Weight()
    optimizers = (
        make(ours.parameters(), freeze_step=100),
        torch.optim.AdamW(theirs.parameters(), lr=0.05, betas=BETAS, weight_decay=0.1),
    )
    for step in range(8):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            model(gradient(0, step)).backward()
            optimizer.step()
        torch.testing.assert_close(ours.weight, theirs.weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_with_an_exact_exchange_it_is_adam_with_a_frozen_variance(size: int) -> None:
    """Codec ``none``: the mean of the ranks' momenta is the momentum of the mean gradient."""
    ranks = run_threads(lambda rank: train(rank, "none", 8), size)
    for path in ranks:
        for got, expected in zip(path, by_hand(size, 8, 3), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_compressed_momenta_stay_near_and_replicas_identical() -> None:
    """One bit with error feedback: every step is off, the sum of the steps is not."""
    ranks = run_threads(lambda rank: train(rank, "sign:block_size=32", 60, 20), 3)
    for path in ranks[1:]:
        assert all(map(torch.equal, path, ranks[0]))
    exact = by_hand(3, 60, 20)
    moved = (exact[-1] - exact[19]).norm()
    assert (ranks[0][-1].double() - exact[-1]).norm() < 0.6 * moved
    assert (ranks[0][20].double() - exact[20]).norm() > 1e-3, "step 21 must have been compressed"
    torch.testing.assert_close(ranks[0][19].double(), exact[19], rtol=1e-4, atol=1e-4)


def test_elements_without_a_variance_do_not_move() -> None:
    """Else a momentum of 1 over a variance of 0 would be an update of 1e8."""
    model = Weight()
    optimizer = make(model.parameters(), freeze_step=2)
    for step in range(5):
        given = gradient(0, step)
        given[3] = 0 if step < 2 else 1.0
        optimizer.zero_grad()
        model(given).backward()
        optimizer.step()
    torch.testing.assert_close(model.weight[3], torch.full((32,), 0.995**5))


def test_it_goes_on_from_its_state(tmp_path: Path) -> None:
    def run(model: Weight, optimizer: OneBitAdam, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(gradient(0, step)).backward()
            optimizer.step()

    whole = Weight()
    run(whole, first := make(whole.parameters()), range(6))
    assert first.active
    half = Weight()
    run(half, optimizer := make(half.parameters()), range(4))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    rest = copy.deepcopy(half)
    later = make(rest.parameters())
    later.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    run(rest, later, range(4, 6))
    assert torch.equal(rest.weight, whole.weight)


def test_bad_settings_are_refused() -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"freeze_step must be at least 1 step, .* got 0"):
        OneBitAdam(parameters, freeze_step=0)
    with pytest.raises(ValueError, match=r"betas must be in \[0, 1\), got \(0.9, 1.0\)"):
        OneBitAdam(parameters, freeze_step=1, betas=(0.9, 1.0))
    with pytest.raises(ValueError, match=r"eps must be positive, got lr=0.001, .* eps=0"):
        OneBitAdam(parameters, freeze_step=1, eps=0)


@pytest.mark.parametrize("codec", ["fp16", "qsgd", "int8"])
def test_a_codec_without_a_residual_is_refused(codec: str) -> None:
    def body(rank: Rank) -> None:
        model = rank.ddp(Weight())
        feedback = "auto" if codec != "int8" else False
        reducer = compress_ddp(model, codec, groups=rank.groups(), error_feedback=feedback)
        with pytest.raises(
            ValueError, match=f"a codec that keeps a residual.*error_feedback={feedback!r}"
        ):
            make(model.parameters()).attach(reducer)
        reducer.close()

    run_threads(body, 2)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_group_that_is_added_in_the_warm_up(replaces: bool) -> None:
    """Its bias corrections are of its own steps, its momenta are exchanged; later none is taken.

    ``replaces``: the list of groups, as a BaseFinetuning does that is resumed.
    """

    def body(rank: Rank) -> list[Tensor]:
        model = rank.ddp(Both())
        first, second = model.module.both
        reducer = compress_ddp(model, "none", groups=rank.groups(), min_compress_numel=0)
        optimizer, path = make(first.parameters(), freeze_step=5), []
        optimizer.attach(reducer)
        for step in range(8):
            if step == 2 and replaces:
                added = {**optimizer.defaults, "params": [second.weight]}
                optimizer.param_groups = [*optimizer.param_groups, added]
            elif step == 2:
                optimizer.add_param_group({"params": [second.weight]})
            optimizer.zero_grad()
            second.weight.grad = None
            given = gradient(rank.rank, step)
            model(given).backward()
            assert len(optimizer._adjusted) == (2 if step >= 5 else 0)
            optimizer.step()
            path.append(second.weight.detach().clone())
        with pytest.raises(ValueError, match="a group of new ones 3 steps after freeze_step=5"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        reducer.close()
        return path[2:]

    for path in run_threads(body, 2):
        for got, expected in zip(path, by_hand(2, 6, 3, first=2), strict=True):
            torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_a_second_one_is_refused() -> None:
    def body(rank: Rank) -> None:
        model = rank.ddp(Weight())
        reducer = compress_ddp(model, "sign", groups=rank.groups())
        make(model.parameters()).attach(reducer)
        with pytest.raises(ValueError, match="One OneBitAdam can be used at a time"):
            make(model.parameters()).attach(reducer)
        reducer.close()

    run_threads(body, 2)


def test_a_second_backward_before_the_step_is_refused() -> None:
    """Its bucket would hold momenta already; under no_sync it is right."""

    def body(rank: Rank) -> None:
        model = rank.ddp(Weight())
        reducer = compress_ddp(model, "none", groups=rank.groups())
        optimizer = make(model.parameters(), freeze_step=1)
        optimizer.attach(reducer)
        model(gradient(rank.rank, 0)).backward()
        optimizer.step()
        model(gradient(rank.rank, 1)).backward()
        with pytest.raises(RuntimeError, match="one synchronised backward pass per step"):
            model(gradient(rank.rank, 2)).backward()
        reducer.close()

    run_threads(body, 2)


def test_it_serves_one_model() -> None:
    def body(rank: Rank) -> None:
        model = rank.ddp(Weight())
        reducers = [
            compress_ddp(DistributedDataParallel(Weight(), process_group=rank.group(f"ddp{i}")),
                         "sign", groups=[rank.group(f"a{i}"), rank.group(f"b{i}")])
            for i in range(2)
        ]  # fmt: skip
        optimizer = make(model.parameters())
        optimizer.attach(reducers[0])
        with pytest.raises(ValueError, match="A OneBitAdam serves one model"):
            optimizer.attach(reducers[1])
        for reducer in reducers:
            reducer.close()

    run_threads(body, 2)


def test_a_copy_and_a_pickle_work_alone() -> None:
    model = Weight()
    optimizer = copy.deepcopy(make(model.parameters()))
    assert (optimizer.freeze_step, optimizer.active) == (3, False)
    optimizer.step()
