"""One trainer on two ranks used several times, fits that fail, and what is refused."""

import os
import re
import time
from typing import Any

import pytest
from replicas import of_all, require_compressed, require_equal
from scenarios.fitting import AtStart, compressed, fit, make_trainer, residuals, snapshot
from scenarios.models import Regression
from scenarios.world import rank, warnings
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import OneBitAdam, after_steps

pytestmark = pytest.mark.on_ranks(2)
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
    assert "codec: 'Int8(block_size=256)' on rank 0; 'BF16()' on rank 1" in str(raised.value)
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


class Manual(Regression):
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
    fit(Manual(), compressed(start_step=9))
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
    with pytest.raises(ValueError, match="'table' was made with sparse=True"):
        fit(Sparse(), compressed())
