"""Models of all kinds on two ranks; one trainer used several times; fits that fail, refusals."""

import os
import re
import time
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from replicas import fit_beside_ddp, of_all, require_compressed, require_equal
from scenarios.fitting import (
    AtStart,
    compressed,
    digest,
    fit,
    make_trainer,
    parameters,
    plain,
    residuals,
    snapshot,
)
from scenarios.models import WIDTH, Finetuning, Regression, loader
from scenarios.world import rank, warnings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import OneBitAdam, after_steps

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
    saved = of_all(trainer.strategy.sync.reducer.state_dict())[0]
    assert saved["residuals"].keys() == names
    require_compressed(ours, steps=8)


SMALL_BUCKETS = {"bucket_cap_mb": 0.001}
SOON = 20  # seconds; a hang would last for the timeout of the group, 30


def test_a_second_fit_goes_on_where_the_first_ended() -> None:
    """Residuals and step count carry over: two fits of an epoch are one fit of two, bit for bit."""
    start, model = AtStart(), Regression()
    trainer = make_trainer(compressed(**SMALL_BUCKETS), max_epochs=1, callbacks=[start])
    trainer.fit(model)
    first = snapshot(trainer)
    require_compressed(first, steps=4)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    second, one_fit = snapshot(trainer), fit(Regression(), compressed(**SMALL_BUCKETS))
    require_equal(start.residuals, first["residuals"])
    assert start.step == 4
    assert second["digests"] == one_fit["digests"]
    require_equal(second["residuals"], one_fit["residuals"])
    require_compressed(second, steps=4)  # counted from the start of the fit


def test_a_second_fit_of_another_model_begins_afresh() -> None:
    """As of another fold: what is owed to the first model is not applied to it."""
    start = AtStart()
    trainer = make_trainer(compressed(**SMALL_BUCKETS), max_epochs=1, callbacks=[start])
    trainer.fit(Regression())
    trainer.fit_loop.max_epochs = 2
    trainer.fit(Regression())
    assert start.step == 0
    assert not any(bool(each.any()) for each in start.residuals.values())
    require_compressed(snapshot(trainer), steps=4)


def test_a_layer_that_a_callback_unfreezes() -> None:
    """Stock DDP never averages its gradients, and replicas drift apart."""
    model, start = Regression(), Regression().net[0].weight.detach().clone()
    trainer = make_trainer(compressed(**SMALL_BUCKETS), max_epochs=2, callbacks=[Finetuning()])
    trainer.fit(model)
    assert not torch.equal(model.net[0].weight, start)
    assert len({*of_all(digest(model))}) == 1
    assert snapshot(trainer)["residuals"]["net.0.weight"].any()


def test_fits_do_not_pile_up_threads_and_sockets() -> None:
    """Under plain DDP a fit leaves nothing behind; two gloo groups are 6 threads and 10 files."""
    trainer, threads, files = make_trainer(compressed(), max_epochs=0), [], []
    for fits in range(1, 6):
        trainer.fit_loop.max_epochs = fits
        trainer.fit(Regression(batches=1))
        threads.append(len(os.listdir("/proc/self/task")))
        files.append(len(os.listdir("/proc/self/fd")))
    assert threads[4] < threads[2] + 6, "two fits later"
    assert files[4] < files[2] + 10


FIRST, LAST = 2, 0  # layers in the order of their gradients; each is a bucket


class Interrupted(Regression):
    """Fails once, in batch 2, when the gradient of ``layer`` has been computed."""

    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer, self.fails = layer, True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.fails:
            self.net[self.layer].weight.register_hook(self._fail)
        return loss

    def _fail(self, _: Tensor) -> None:
        if self.fails:
            self.fails = False
            raise RuntimeError("once")


@pytest.mark.parametrize(
    "layers",
    [
        pytest.param((LAST, LAST), id="at the same place, with one bucket on its way"),
        pytest.param((LAST, FIRST), id="when rank 0 has sent a bucket that rank 1 never will"),
    ],
)
def test_a_fit_after_a_failed_one_continues_with_its_residuals(layers: tuple[int, int]) -> None:
    """The failure came in a backward pass with buckets on their way: its step never happened."""
    start, model = AtStart(), Interrupted(layers[rank()])
    strategy = compressed(**SMALL_BUCKETS)
    trainer = make_trainer(strategy, max_epochs=1, callbacks=[start])
    with pytest.raises(RuntimeError, match=r"^once$"):
        trainer.fit(model)
    owed = residuals(strategy)
    trainer.fit(model)
    assert start.step == 2
    require_equal(start.residuals, owed)
    assert any(residual.any() for residual in owed.values())
    require_compressed(snapshot(trainer), steps=4)


def test_rank_0_says_once_that_compression_does_not_pay() -> None:
    """A tiny model on the loopback interface."""
    with warnings() as messages:
        ours = fit(Regression(), compressed(), max_epochs=10)
    said = [message for message in messages if "costs more than it saves" in message]
    assert len(said) == (1 if rank() == 0 else 0)
    assert all("use codec='none' or plain DDP" in message for message in said)
    require_compressed(ours, steps=40)


def test_validate_test_and_predict_around_a_fit() -> None:
    """Evaluation needs no hook, and leaves what the next fit goes on from."""
    model = Regression()
    trainer = make_trainer(compressed(), max_epochs=1, limit_val_batches=1.0)

    def losses() -> tuple[float, float]:
        validated = trainer.validate(model, verbose=False)[0]["val_loss"]
        return validated, trainer.test(model, verbose=False)[0]["test_loss"]

    assert trainer.strategy.comm_stats() == {}
    before = losses()
    assert trainer.strategy.comm_stats() == {}
    trainer.fit(model)
    assert not isinstance(trainer.strategy.model, DistributedDataParallel)
    after = losses()
    assert after[0] < before[0]
    assert after[1] < before[1]
    assert of_all((before, after)) == [(before, after)] * 2
    assert len(trainer.predict(model)) == 4
    require_compressed(snapshot(trainer), steps=4)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model)
    require_compressed(snapshot(trainer), steps=4)


def test_ranks_with_different_settings_are_named_and_train_afterwards() -> None:
    start = time.monotonic()
    with pytest.raises(ValueError, match="codec: ") as raised:
        fit(Regression(), compressed("int8" if rank() == 0 else "bf16"))
    assert time.monotonic() - start < SOON
    assert "codec: 'int8' on rank 0; 'bf16' on rank 1" in str(raised.value)
    with pytest.raises(ValueError, match="start_step: 0 on rank 0; 1 on rank 1") as raised:
        fit(Regression(), compressed(start_step=rank()))
    assert "codec" not in str(raised.value)
    require_compressed(fit(Regression(), compressed()), steps=8)


class Frozen(Regression):
    """Its variance is frozen after as many steps."""

    def __init__(self, freeze_step: int) -> None:
        super().__init__()
        self.freeze_step = freeze_step

    def configure_optimizers(self) -> Any:
        return OneBitAdam(self.parameters(), freeze_step=self.freeze_step)


class ManualSteps(Regression):
    """Lightning does not know how many synchronised steps there are."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(2):
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()


def test_compression_that_would_begin_after_the_training_is_refused() -> None:
    """8 steps. A trial run is no training, and nobody knows the steps of manual optimization."""
    late = (
        "Compression must start before training ends, got step {} as its first (start_step, "
        "warmup or after_steps) and a training of 8 steps; set it lower, or use strategy='ddp'"
    )
    frozen = (
        "OneBitAdam compresses nothing before its freeze_step, which must come before the "
        "training ends, got freeze_step=8 and 8 steps; 15 to 25 % of them is usual"
    )
    start = time.monotonic()
    for model, strategy, message in (
        (Regression(), compressed(start_step=8), late.format(8)),
        (Regression(), compressed(after_steps(9, "int8")), late.format(9)),
        (Frozen(8), compressed("sign"), frozen),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            fit(model, strategy)
    fit(Regression(), compressed(start_step=7))
    fit(Frozen(7), compressed("sign"))
    fit(ManualSteps(), compressed(start_step=9))
    fit(Regression(), compressed(start_step=8), fast_dev_run=2)
    assert time.monotonic() - start < SOON


class Sparse(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 16, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.table(x[:, :1].long() % 10).squeeze(1))


def test_models_without_gradients_to_compress_are_refused() -> None:
    with pytest.raises(ValueError, match="must have a parameter with requires_grad=True"):
        fit(Regression().requires_grad_(False), compressed())
    with pytest.raises(ValueError, match=r"gradient of 'table\.weight' is sparse"):
        fit(Sparse(), compressed())
