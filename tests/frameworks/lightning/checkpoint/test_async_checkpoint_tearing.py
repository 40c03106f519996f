"""A checkpoint is the state at its trigger, however soon the training goes on."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from checkpoint_runs import Net, fit, listing, require_same, whole_checkpoints
from lightning.pytorch.callbacks import (
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from lightning_dist import AsyncCheckpoint
from lightning_dist.checkpoint.snapshot.snapshot import Fence, LaterCopy
from lightning_dist.checkpoint.writer_queue import WriterQueue


class Witness(ModelCheckpoint):
    """Copies, at the moment at which the checkpoint is taken, all that goes into it."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(save_top_k=-1, filename="{step}", **arguments)
        self.copies: dict[str, Any] = {}

    @property
    def state_key(self) -> str:
        return "Witness"

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        state = trainer._checkpoint_connector.dump_checkpoint(self.save_weights_only)
        self.copies[Path(filepath).name] = copy.deepcopy(state)
        self._last_global_step_saved = trainer.global_step

    def require(self, folder: Path, *, missing: int = 0) -> None:
        """Every file of the folder is what was copied; ``missing`` of them are not there."""
        names = listing(folder)
        assert set(names) <= self.copies.keys()
        assert len(names) == len(self.copies) - missing > 1
        for name in names:
            found = torch.load(folder / name, weights_only=True)
            expected = self.copies[name]
            for state in (found, expected):
                del state["callbacks"]  # the books of two callbacks
            require_same(found, expected, name)


@pytest.fixture(autouse=True)
def _late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies begin when the training cannot go on without them, and not a moment earlier."""
    arrived = threading.Event()

    def signals(home: Any, name: str, signal: Callable[[], None]) -> None:
        original = getattr(home, name)

        def method(self: Any, *args: Any) -> Any:
            signal()
            return original(self, *args)

        monkeypatch.setattr(home, name, method)

    def late() -> None:
        assert arrived.wait(20), "nobody waited for the copy"

    signals(Fence, "close", arrived.clear)
    signals(Fence, "wait", arrived.set)
    for name in ("await_slot", "wait", "close"):
        signals(WriterQueue, name, arrived.set)
    signals(LaterCopy, "run", late)


class Manual(Net):
    """Two optimizers that step in turn, one of them twice per batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        for optimizer in (first, second, first):
            optimizer.zero_grad()
            self.manual_backward(self.other(self.net(self.batch())).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        return sgd, torch.optim.Adam(self.other.parameters())


class Scheduled(Net):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Tied(Net):
    """The last layer is the first one, transposed by the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.net[2].weight = self.net[0].weight


class Skipping(Net):
    """Every second loss is None: no step is made."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx % 2 else self.loss()


class EMA(WeightAveraging):
    def __init__(self) -> None:
        super().__init__(multi_avg_fn=get_ema_multi_avg_fn(0.5))


CASES: dict[str, tuple[Any, dict[str, Any], list[Any]]] = {
    "sgd": (lambda: Net(optimizer="sgd"), {}, []),
    "adamw": (lambda: Net(optimizer="adamw"), {}, []),
    "fused adamw": (lambda: Net(optimizer="fused"), {}, []),
    "a scheduler": (Scheduled, {}, []),
    "manual optimization": (Manual, {}, []),
    "accumulated gradients": (Net, {"accumulate_grad_batches": 2}, []),
    "clipped gradients": (Net, {"gradient_clip_val": 0.1}, []),
    "skipped steps": (Skipping, {}, []),
    "tied weights": (Tied, {}, []),
    "bf16": (Net, {"precision": "bf16-true"}, []),
    "ema": (Net, {}, [EMA]),
    "swa": (Net, {}, [lambda: StochasticWeightAveraging(0.1, swa_epoch_start=1)]),
    "blocking": (Net, {}, []),
    "sync": (Net, {}, []),
}


@pytest.mark.parametrize("trigger", ["every_n_train_steps", "every_n_epochs"])
@pytest.mark.parametrize("name", CASES)
def test_the_file_is_the_state_at_the_trigger(name: str, trigger: str, tmp_path: Path) -> None:
    model, arguments, callbacks = CASES[name]
    snapshots: dict[str, Any] = {"ema": "auto", "swa": "auto", "blocking": name, "sync": name}
    snapshot = snapshots.get(name, "overlap")
    ours = AsyncCheckpoint(
        tmp_path, "{step}", save_top_k=-1, snapshot=snapshot, writer="thread", **{trigger: 1}
    )
    witness = Witness(dirpath=tmp_path, **{trigger: 1})
    made = [make() for make in callbacks]
    fit(*made, witness, ours, model=model(), max_epochs=3, **arguments)
    witness.require(tmp_path)
    if name == "tied weights":
        state = torch.load(tmp_path / listing(tmp_path)[-1])["state_dict"]
        assert state["net.0.weight"].data_ptr() == state["net.2.weight"].data_ptr()


class Edits(Net):
    """Changes its weights at the start of the third batch, with or without anybody noticing."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 2:
            with torch.no_grad():
                if self.way == "in place":
                    self.net[0].weight.add_(1)
                else:
                    self.net[0].weight.data.add_(1)


@pytest.mark.parametrize("way", ["in place", "data"])
def test_weights_that_are_edited_outside_a_step_are_noticed(way: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_top_k": -1, "every_n_train_steps": 1, "writer": "thread"}
    ours = AsyncCheckpoint(tmp_path, "{step}", on_error="warn", **settings)
    witness = Witness(dirpath=tmp_path, every_n_train_steps=1)
    with pytest.warns(UserWarning, match="changed outside an optimizer step") as warned:
        fit(witness, ours, model=Edits(way), max_epochs=2)
    (message,) = {str(w.message) for w in warned if "outside an optimizer" in str(w.message)}
    what, _, last = message.partition("; the last complete one is ")
    assert what == (
        f"[lightning_dist] The checkpoint {tmp_path}/step=2.ckpt of step 2 was not written: "
        "Parameter of shape (6, 4) was changed outside an optimizer step while it was copied, so "
        "this checkpoint would mix two steps and was dropped; later ones are copied at once. "
        "Change parameters in the optimizer step only, or set snapshot='blocking'"
    )
    complete = [f"{tmp_path}/step={step}.ckpt of step {step}" for step in (1, 3)]
    assert last in complete, "the writer may be a save behind, or not"
    witness.require(tmp_path, missing=1)
    assert "step=2.ckpt" not in listing(tmp_path)
    assert (ours.metrics.saves, ours.metrics.failed) == (6, 1)


class Before(Net):
    """Has the state before the step saved, in the way that ModelCheckpoint knows."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layer = self.net
        self.saved_models: dict[int, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.saved_models[self.global_step] = copy.deepcopy(self.layer.state_dict())
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss())
        optimizer.step()


def test_the_state_before_a_manual_step(tmp_path: Path) -> None:
    """ModelCheckpoint puts other weights into the model while it saves."""
    model = Before()
    ours = AsyncCheckpoint(tmp_path, "{step}", save_top_k=-1, every_n_train_steps=1)
    fit(ours, model=model, max_epochs=1)
    assert whole_checkpoints(tmp_path) == [f"step={step}.ckpt" for step in (1, 2, 3)]
    for step, state in model.saved_models.items():
        saved = torch.load(tmp_path / f"step={step + 1}.ckpt")["state_dict"]
        require_same({k: saved[f"layer.{k}"] for k in state}, dict(state))
