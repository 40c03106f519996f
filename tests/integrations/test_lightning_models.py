"""Models of all kinds on two ranks: several optimizers, unused, frozen, tied, compiled."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from replicas import fit_beside_ddp, of_all, require_compressed, require_equal
from scenarios.fitting import compressed, fit, make_trainer, parameters, plain, residuals, snapshot
from scenarios.models import WIDTH, Regression, loader
from scenarios.world import rank
from torch import Tensor, nn

pytestmark = pytest.mark.on_ranks(2)
WEIGHT = 16 * 32  # elements of either weight of `Regression`
UNUSED = {"find_unused_parameters": True}


def of_network(tensors: dict[str, Tensor], network: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith(network)}


def owed_in(module: L.LightningModule) -> dict[str, Tensor]:
    strategy = module.trainer.strategy
    return residuals(strategy) if hasattr(strategy, "comm_stats") else {}


class GAN(L.LightningModule):
    """Two networks in one DDP module, one of them in every backward pass; remembers the residuals
    of both around every pass."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.generator = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))
        self.critic = nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, 1))
        self.backwards: list[tuple[str, dict[str, Tensor], dict[str, Tensor]]] = []

    def forward(self, noise: Tensor) -> Tensor:
        return self.generator(noise)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        noise, real = batch
        of_critic, of_generator = self.optimizers()

        self.toggle_optimizer(of_critic)
        loss = self.critic(self.generator(noise).detach()).mean() - self.critic(real).tanh().mean()
        self._step("critic", loss, of_critic)
        self.untoggle_optimizer(of_critic)

        self.toggle_optimizer(of_generator)
        self._step("generator", -self.critic(self.generator(noise)).mean(), of_generator)
        self.untoggle_optimizer(of_generator)

    def _step(self, name: str, loss: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        before = owed_in(self)
        self.manual_backward(loss)
        self.backwards.append((name, before, owed_in(self)))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.critic.parameters(), lr=0.01),
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
        ]

    def train_dataloader(self) -> Any:
        return loader(4)


def test_a_gan_trains_as_under_ddp_and_each_backward_leaves_the_other_networks_residual() -> None:
    of_ddp, ours = fit_beside_ddp(GAN, of=UNUSED, steps=16)  # two backward passes a batch
    assert ours["digests"][0] != of_ddp["digests"][0]
    backwards = ours["model"].backwards
    assert [network for network, *_ in backwards] == ["critic", "generator"] * 8
    for mine, before, after in backwards:
        other = "critic" if mine == "generator" else "generator"
        owed_before, owed_after = of_network(before, other), of_network(after, other)
        # Buffers are made, filled with zeros, in the very first backward.
        assert all(torch.equal(owed_after[n], owed_before[n]) for n in owed_before)
        assert owed_before or not any(owed.any() for owed in owed_after.values())
        weight = f"{mine}.0.weight"
        assert not torch.equal(after[weight], before.get(weight, torch.zeros(())))
    assert all(residual.any() for residual in of_network(backwards[-1][2], "gen").values())


class Manual(Regression):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().zero_grad()
        self.manual_backward(self.loss(batch))
        self.optimizers().step()


def test_manual_optimisation_with_a_static_graph() -> None:
    """Lightning itself starts the reduction of the first step here."""
    of_ddp, ours = fit_beside_ddp(Manual, of={"static_graph": True}, steps=8)
    assert ours["ddp"]["static_graph"] == 1
    assert ours["digests"][0] != of_ddp["digests"][0]


class Branches(Regression):
    """Two heads of which a step uses one; remembers parameters and residuals around it."""

    def __init__(self, *, alternate_ranks: bool) -> None:
        super().__init__()
        self.net = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.alternate_ranks = alternate_ranks
        self.steps: list[tuple[str, Any, Any]] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net[self.head](x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        turn = batch_idx + (rank() if self.alternate_ranks else 0)
        self.head = "ab"[turn % 2]
        return self.loss(batch)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = parameters(self), owed_in(self)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append((self.head, self.before, (parameters(self), owed_in(self))))


def test_a_branch_that_no_rank_uses_keeps_what_it_owes() -> None:
    """Neither its parameters nor its residual move, as under DDP; and both do when it is used."""
    _, ours = fit_beside_ddp(partial(Branches, alternate_ranks=False), of=UNUSED, steps=8)
    for used, *around in ours["model"].steps[2:]:
        unused = "b" if used == "a" else "a"
        for before, after in zip(*around, strict=True):
            require_equal(of_network(after, f"net.{unused}"), of_network(before, f"net.{unused}"))
            weight = f"net.{used}.weight"
            assert not torch.equal(after[weight], before[weight])


def test_a_branch_that_one_rank_uses_is_averaged_on_both() -> None:
    _, ours = fit_beside_ddp(partial(Branches, alternate_ranks=True), of=UNUSED, steps=8)
    steps = ours["model"].steps
    assert [head for head, *_ in steps] == list("babababa" if rank() else "abababab")
    for _, (before, _), (after, _) in steps:
        assert not any(torch.equal(after[name], before[name]) for name in before)


def test_without_the_flag_the_message_names_our_strategy() -> None:
    messages = []
    for strategy in (plain(), compressed()):
        with pytest.raises(RuntimeError) as raised:
            fit(Branches(alternate_ranks=False), strategy)
        messages.append(str(raised.value))
    of_ddp, ours = messages
    expected = of_ddp.replace("='ddp_find", "='compressed_ddp_find")
    assert ours == expected.replace("=DDPStrategy(", "=CompressedDDPStrategy(")
    assert "strategy='compressed_ddp_find_unused_parameters_true'" in ours


def test_frozen_parameters_stay_and_cost_nothing() -> None:
    model = Regression()
    model.net[0].requires_grad_(False)
    before = parameters(model)
    ours = fit(model, compressed())
    require_equal(of_network(ours["parameters"], "net.0"), of_network(before, "net.0"))
    assert list(ours["residuals"]) == ["net.2.weight"]
    assert ours["stats"]["raw_bytes"] == 8 * 4 * WEIGHT
    require_compressed(ours, steps=8)


def tied() -> Regression:
    model = Regression(hidden=WIDTH)
    model.net[2].weight = model.net[0].weight
    return model


def test_tied_weights_travel_once() -> None:
    _, ours = fit_beside_ddp(tied, steps=8)
    assert ours["model"].net[2].weight is ours["model"].net[0].weight
    assert sorted(ours["residuals"]) == ["net.0.bias", "net.0.weight"]
    assert ours["stats"]["raw_bytes"] == 8 * 4 * (16 * 16 + 16)


def test_sync_batchnorm_is_left_to_lightning() -> None:
    """On the CPU DDP itself refuses SyncBatchNorm: ours converts, and fails, exactly as DDP."""
    found = []
    for strategy in (plain, compressed):
        model = Regression()
        model.net[1] = nn.BatchNorm1d(32)
        with pytest.raises(
            ValueError, match="SyncBatchNorm layers only work with GPU modules"
        ) as raised:
            fit(model, strategy(), sync_batchnorm=True)
        found.append((str(raised.value), type(model.net[1])))
        ours = fit(model, strategy())
    assert found[0] == found[1]
    require_compressed(ours, steps=8)


@pytest.mark.parametrize("whole", [True, False])
def test_compiled_modules_train_as_eager_ones_under_the_same_names(whole: bool) -> None:
    """The whole module compiled, or a part of it."""
    eager, model = fit(Regression(), compressed()), Regression()
    if whole:
        model = torch.compile(model, backend="aot_eager")
    else:
        model.net[2] = torch.compile(model.net[2], backend="aot_eager")
    trainer = make_trainer(compressed(), max_epochs=2)
    trainer.fit(model)
    ours = snapshot(trainer)
    names = {"net.0.weight", "net.0.bias", "net.2.weight"}
    for name, value in eager["parameters"].items():
        inside = not whole and name == "net.2.weight"
        own = "net.2._orig_mod.weight" if inside else name
        torch.testing.assert_close(ours["parameters"][own], value, rtol=1e-4, atol=1e-5)
    assert ours["residuals"].keys() == names
    assert not whole or "_orig_mod" not in " ".join(trainer.lightning_module.state_dict())
    saved = of_all(trainer.strategy._reducer.state_dict())[0]
    assert saved["residuals"].keys() == names
    require_compressed(ours, steps=8)
