"""What goes on after a restart: learning rates, random numbers, seeds, checkpoints that stay."""

import errno
import io
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler as schedulers

from lightning_dist.checkpoint.disk.format import CheckpointError
from lightning_dist.checkpoint.disk.writer import Writer
from lightning_dist.elastic import rng
from lightning_dist.elastic.data.plan import Layout, Position
from lightning_dist.elastic.progress import (
    ElasticState,
    Generators,
    require_same_optimizer,
    scale_learning_rates,
)
from lightning_dist.elastic.retention import Retention
from lightning_dist.elastic.rng import derive_seed
from lightning_dist.ranks.agreement import Membership
from lightning_dist.settings.run import CheckpointSettings

STEPS = 24
Make = Callable[[torch.optim.Optimizer, float], Any]


def _lambda(optimizer: torch.optim.Optimizer, factor: float) -> Any:
    return schedulers.LambdaLR(optimizer, [lambda step: 0.9**step, lambda step: 1 / (1 + step)])


def _sequence(optimizer: torch.optim.Optimizer, factor: float) -> Any:
    parts = [
        schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=5),
        schedulers.CosineAnnealingLR(optimizer, T_max=9, eta_min=0.001 * factor),
        schedulers.ExponentialLR(optimizer, 0.8),
    ]
    return schedulers.SequentialLR(optimizer, parts, milestones=[5, 14])


def _chain(optimizer: torch.optim.Optimizer, factor: float) -> Any:
    parts = [
        schedulers.ConstantLR(optimizer, factor=0.1, total_iters=6),
        schedulers.ExponentialLR(optimizer, 0.9),
    ]
    return schedulers.ChainedScheduler(parts, optimizer)


def _plateau(optimizer: torch.optim.Optimizer, factor: float) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.5, min_lr=0.01 * factor)


MAKES: dict[str, Make] = {
    "StepLR": lambda o, f: schedulers.StepLR(o, 4, gamma=0.5),
    "MultiStepLR": lambda o, f: schedulers.MultiStepLR(o, [3, 9], gamma=0.5),
    "LambdaLR": _lambda,
    "MultiplicativeLR": lambda o, f: schedulers.MultiplicativeLR(o, lambda step: 0.95),
    "CosineAnnealingLR": lambda o, f: schedulers.CosineAnnealingLR(o, 10, eta_min=0.01 * f),
    "CosineAnnealingWarmRestarts": lambda o, f: schedulers.CosineAnnealingWarmRestarts(
        o, 5, 2, eta_min=0.01 * f
    ),
    "OneCycleLR": lambda o, f: schedulers.OneCycleLR(
        o, max_lr=[0.4 * f, 0.04 * f], total_steps=STEPS + 1, three_phase=True
    ),
    "CyclicLR": lambda o, f: schedulers.CyclicLR(
        o, base_lr=0.1 * f, max_lr=0.3 * f, step_size_up=4, cycle_momentum=False
    ),
    "LinearLR": lambda o, f: schedulers.LinearLR(o, start_factor=0.1, total_iters=8),
    "PolynomialLR": lambda o, f: schedulers.PolynomialLR(o, total_iters=12, power=2),
    "SequentialLR": _sequence,
    "ChainedScheduler": _chain,
    "ReduceLROnPlateau": _plateau,
}


class Training:
    """An optimizer with two groups and a scheduler, stepped with a metric that never improves."""

    def __init__(self, make: Make, factor: float = 1.0, *, tensors: bool = False) -> None:
        weights = nn.Linear(2, 2)

        def lr(value: float) -> Any:
            return torch.tensor(value * factor) if tensors else value * factor

        groups = [
            {"params": [weights.weight], "lr": lr(0.2)},
            {"params": [weights.bias], "lr": lr(0.02)},
        ]
        self.optimizer = torch.optim.SGD(groups, lr=lr(0.2), momentum=0.9)
        self.scheduler = make(self.optimizer, factor)

    def step(self, times: int) -> list[list[float]]:
        """The learning rates after each of them."""
        is_plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
        rates = []
        for _ in range(times):
            self.optimizer.step()
            self.scheduler.step(*([1.0] if is_plateau else []))
            rates.append(self.rates)
        return rates

    @property
    def rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def scale(self, factor: float) -> None:
        scale_learning_rates([self.optimizer], [self.scheduler], factor=factor)


def require_same_rates(
    training: Training, reference: Training, steps: int, *, rel: float = 1e-9
) -> None:
    """Now, and after each of the next steps."""
    assert training.rates == pytest.approx(reference.rates, rel=rel)
    for got, expected in zip(training.step(steps), reference.step(steps), strict=True):
        assert got == pytest.approx(expected, rel=rel)


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("before", [0, 1, 5, 7, 14, 20])
@pytest.mark.parametrize("factor", [0.75, 2.0])
def test_they_go_on_as_if_built_with_the_scaled_rate(name: str, before: int, factor: float) -> None:
    training, reference = Training(MAKES[name]), Training(MAKES[name], factor)
    training.step(before)
    reference.step(before)
    training.scale(factor)
    assert training.scheduler.get_last_lr() == pytest.approx(training.rates)
    require_same_rates(training, reference, STEPS - before)


@pytest.mark.parametrize("factors", [(4.0, 0.5, 0.5), (1.0,)])
@pytest.mark.parametrize("name", MAKES)
def test_the_other_way_round_it_is_as_before(name: str, factors: tuple[float, ...]) -> None:
    training, reference = Training(MAKES[name]), Training(MAKES[name])
    for factor in factors:
        training.scale(factor)
    require_same_rates(training, reference, STEPS)


def test_rates_that_are_tensors() -> None:
    training, reference = Training(MAKES["StepLR"], tensors=True), Training(MAKES["StepLR"], 2.0)
    training.step(3)
    reference.step(3)
    training.scale(2.0)
    require_same_rates(training, reference, 9, rel=1e-6)


def test_the_state_of_another_version_of_the_optimizer_is_taken() -> None:
    optimizer = torch.optim.Adam(nn.Linear(1, 1).parameters())
    schedulers.OneCycleLR(optimizer, 0.1, total_steps=3)
    state = optimizer.state_dict()
    state["param_groups"][0] |= {"newer": True}
    require_same_optimizer(optimizer, state, path="")
    del state["param_groups"][0]["newer"], state["param_groups"][0]["foreach"]
    require_same_optimizer(optimizer, state, path="")
    require_same_optimizer(optimizer, {"of": "something else"}, path="")


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR", "OneCycleLR", "ReduceLROnPlateau"])
def test_after_a_checkpoint(name: str) -> None:
    """As in a restart: the scheduler is loaded into one that the script has built anew."""
    saved, reference = Training(MAKES[name]), Training(MAKES[name], 2.0)
    saved.step(6)
    reference.step(6)
    training = Training(MAKES[name])
    training.optimizer.load_state_dict(saved.optimizer.state_dict())
    training.scheduler.load_state_dict(saved.scheduler.state_dict())
    training.scale(2.0)
    require_same_rates(training, reference, 9)
    assert saved.rates != training.rates, "what was saved is left alone"


@given(st.floats(0.01, 100))
def test_without_a_scheduler(factor: float) -> None:
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.3, betas=(0.8, 0.9))
    scale_learning_rates([optimizer], [], factor=factor)
    (group,) = optimizer.param_groups
    assert group["lr"] == 0.3 * factor
    assert group["betas"] == (0.8, 0.9)
    assert group["weight_decay"] == 0


def draw() -> list[float]:
    """From every generator of this process, also what they keep for the next call."""
    numbers = [random.random(), random.gauss(0, 1), random.getrandbits(40)]
    numbers += [np.random.rand(), np.random.randn(), float(np.random.randint(10**9))]
    return numbers + torch.rand(3).tolist() + torch.randn(2).tolist()


def test_what_is_held_is_put_back_again_and_again() -> None:
    draw()
    put_back = rng.hold()
    expected = [draw() for _ in range(3)]
    for _ in range(2):
        put_back()
        assert [draw() for _ in range(3)] == expected


def test_they_go_on_where_they_were() -> None:
    """Also with half of a pair: gauss() and randn() draw two numbers and hand out one.

    States are read without running code.
    """
    rng.seed_all(3)
    random.gauss(0, 1)
    np.random.randn()
    file = io.BytesIO()
    torch.save(rng.capture(), file)
    expected = random.gauss(0, 1), np.random.randn(), draw(), draw()
    file.seek(0)
    rng.restore(torch.load(file, weights_only=True))
    assert (random.gauss(0, 1), np.random.randn(), draw(), draw()) == expected


def test_one_seed_for_all_of_them() -> None:
    rng.seed_all(2**62 + 5)
    expected = draw()
    draw()
    rng.seed_all(2**62 + 5)
    assert draw() == expected
    rng.seed_all(2**62 + 6)
    assert all(a != b for a, b in zip(draw(), expected, strict=True))


def test_outside_nothing_has_happened() -> None:
    state = rng.capture()
    expected = draw()
    rng.restore(state)
    with rng.isolated(1):
        inside = draw()
    assert draw() == expected

    def fail() -> None:
        with rng.isolated(1):
            assert draw() == inside
            raise RuntimeError("inside")

    rng.restore(state)
    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert draw() == expected


def test_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither machine needs the state of the other."""
    with_numpy = rng.capture()
    with monkeypatch.context() as without:
        without.setattr(rng, "np", None)
        state = rng.capture()
        assert "numpy" not in state
        expected = random.random(), torch.rand(1)
        for each in (state, with_numpy):
            rng.restore(each)
            assert (random.random(), torch.rand(1)) == expected
        rng.seed_all(1)
    rng.restore(state)
    assert (random.random(), torch.rand(1)) == expected


def test_a_seed_depends_on_what_it_is_for() -> None:
    purposes = [(0,), (0, "order"), (0, "order", 0), (0, "order", 1), (1, "order", 0)]
    purposes += [(0, "workers", 0), (0, "workers", 1), (0, "order", 10), (0, "order", 1, 0)]
    seeds = {derive_seed(*purpose) for purpose in purposes}
    assert len(seeds) == 9
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed(0, "order", 0) == 1829853113658518448, "the same everywhere"


@pytest.mark.parametrize(("data_size", "is_same"), [(2, True), (4, False), (1, False)])
def test_ranks_that_share_samples_draw_the_same(data_size: int, is_same: bool) -> None:
    """Four ranks saved two shares; as many go on, whose tensor-parallel groups may be others."""
    layout = Layout.of_script(world_size=2, micro_batch=1, accumulate=1)
    saved = [{"rank": rank} for rank in range(4)]
    state = ElasticState("", 5, layout, layout, Position(), 3, 3, rng=saved)
    found = [
        Generators(
            state,
            rank=rank,
            world_size=4,
            device=torch.device("cpu"),
            data_ranks=(rank * data_size // 4, data_size),
        ).capture()
        for rank in range(4)
    ]
    if is_same:
        assert found == saved
    else:
        assert len({each["seed"] for each in found}) == data_size


class Kept:
    """The checkpoints of one run, of which the saves of some steps fail."""

    def __init__(self, folder: Path, *, on_error: Any = "warn", **settings: Any) -> None:
        self.folder, self.failing = folder, set[int]()
        self.warned: list[str] = []
        self.committed: list[int] = []
        self.retention = Retention(
            str(folder),
            keep=2,
            settings=CheckpointSettings(writer="thread", on_error=on_error, **settings),
            members=Membership(),
            warn=self.warned.append,
            committed=lambda event: self.committed.append(event.origin.step),
        )
        self.found = self.retention.open()
        self.retention.save_for("run", restricted=False, resumed=self.found)

    def save(self, step: int) -> None:
        path = self.retention.begin(f"{step}.ckpt")
        assert path is not None
        self.retention.checkpointer.save({"step": torch.tensor(step)}, path, step=step)
        assert self.retention.is_saved_within(20)

    @property
    def names(self) -> set[str]:
        return {path.stem for path in self.folder.glob("*.ckpt")}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Kept]]:
    made: list[Kept] = []
    usual = Writer._save

    def save(writer: Writer, job: Any, snapshot: memoryview) -> None:
        if job.origin.step in made[-1].failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(writer, job, snapshot)

    def start(**settings: Any) -> Kept:
        if made:
            made[-1].retention.close(patiently=True)
        made.append(Kept(tmp_path, **settings))
        return made[-1]

    monkeypatch.setattr(Writer, "_save", save)
    yield start
    made[-1].retention.close(patiently=True)


def test_a_save_that_fails_takes_nobodys_place(start: Callable[..., Kept]) -> None:
    kept = start()
    kept.failing = {3, 4}
    for step in range(1, 5):
        kept.save(step)
    assert kept.names == {"1", "2"}
    assert len(kept.warned) == 2
    assert "3.ckpt of step 3 was not written" in kept.warned[0]
    for step, names in ((5, {"2", "5"}), (6, {"5", "6"})):
        kept.save(step)
        assert kept.names == names
    assert kept.committed == [1, 2, 5, 6]


@pytest.mark.parametrize(("next_step", "names"), [(3, {"1", "3"}), (2, {"1", "2"})])
def test_what_was_passed_over_goes_first_and_its_name_is_free(
    next_step: int, names: set[str], start: Callable[..., Kept]
) -> None:
    kept = start()
    for step in range(1, 3):
        kept.save(step)
    content = bytearray((kept.folder / "2.ckpt").read_bytes())
    content[len(content) // 2] ^= 1
    (kept.folder / "2.ckpt").write_bytes(content)
    again = start()
    assert again.found == str(kept.folder / "1.ckpt")
    again.save(next_step)
    assert again.names == names


def test_a_failure_is_raised_once_by_the_first_caller(start: Callable[..., Kept]) -> None:
    kept = start(on_error="raise")
    kept.failing = {1}
    kept.save(1)
    assert kept.retention.has_failed
    with pytest.raises(CheckpointError, match=r"1.ckpt of step 1 was not written.*none of this"):
        kept.retention.begin("2.ckpt")
    kept.retention.agree_on_failures()
    kept.save(2)
    assert kept.names == {"2"}


def test_a_folder_of_others_is_refused(start: Callable[..., Kept], tmp_path: Path) -> None:
    kept = start()
    torch.save({"weights": torch.ones(2)}, tmp_path / "theirs.ckpt")
    kept.save(1)
    assert start().found == str(tmp_path / "1.ckpt"), "one of ours is there too"
    (tmp_path / "1.ckpt").unlink()
    with pytest.raises(ValueError, match=r"theirs.ckpt was not saved under .* use another folder"):
        start()


def test_a_new_leader_copies_lazily_as_the_one_before(tmp_path: Path) -> None:
    members = Membership()
    members.ranks.leader = 1
    retention = Retention(
        str(tmp_path),
        keep=2,
        settings=CheckpointSettings(writer="thread", snapshot="overlap"),
        members=members,
        warn=print,
        committed=print,
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1)
    retention.saves.watch([optimizer])
    assert not retention.saves.writes
    members.ranks.leader = 0
    retention.move(members, run="run", restricted=False)
    assert retention.saves.writes
    assert retention.checkpointer._snapshots.optimizers == [optimizer]
    retention.close(patiently=True)
