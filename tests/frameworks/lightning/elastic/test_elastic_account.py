"""What a run says of its restarts, and on what devices it runs; trainings that stop early, go on
longer, fail and are used again; other callbacks beside."""

import inspect
import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import (
    FailAt,
    Fault,
    Net,
    committed,
    fit,
    fit_with_faults,
    hash_of,
    journal,
    make_loader,
    quiet_trainer,
)
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.callbacks import (
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from processes import ROOT
from torch import Tensor

from lightning_dist import AsyncCheckpoint, ElasticRestart
from lightning_dist.checkpoint.disk.scan import newest_valid
from lightning_dist.elastic.progress import KEY
from lightning_dist.frameworks.lightning.launcher import (
    ElasticEnvironment,
    launch_of,
    local_devices,
)
from lightning_dist.ranks.launch import Launch
from lightning_dist.settings.declared import settings_of
from lightning_dist.settings.run import CheckpointSettings


def starts(folder: Path) -> list[dict[str, Any]]:
    return [line for line in journal(folder) if line["event"] == "start"]


def test_a_run_that_failed_gives_an_account_of_its_restart(tmp_path: Path, caplog: Any) -> None:
    logger = CSVLogger(tmp_path)
    with caplog.at_level(logging.INFO):
        fit_with_faults(tmp_path, [("on_after_backward", 7)], max_epochs=1, logger=logger)
    said = [text for text in dict.fromkeys(caplog.messages) if "elastic: " in text]
    assert said[0] == (
        "[lightning_dist] elastic: world 1, fresh start; global batch 4: 1 micro-batch on 1 rank"
    )
    assert said[1] == (
        "[lightning_dist] elastic: world 1 -> 1, resumed at sample 24 (epoch 0, step 6); global "
        "batch 4: 1 micro-batch on 1 rank"
    )
    assert said[2].startswith("[lightning_dist] elastic: 1 restart, ")
    assert said[2].endswith("4 samples recomputed (rank 0: Fault: on_after_backward at step 7)")
    lines = journal(tmp_path)
    assert len({line["run_id"] for line in lines if "run_id" in line}) == 1
    lines = [line for line in lines if line["event"] != "saved"]
    assert [line["event"] for line in lines] == ["start", "end", "start", "caught_up", "end"]
    assert lines[2]["redone"] == 4
    assert 0 < lines[3]["seconds"] < 60
    (path,) = (tmp_path / "lightning_logs").glob("*/metrics.csv")
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    column = header.index("elastic/samples_recomputed")
    assert {row[column] for row in rows} - {""} == {"4.0"}


def test_a_start_with_nothing_left_to_do_says_so(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.warns(UserWarning, match="elastic: ") as warned:
        fit(tmp_path, max_epochs=1)
    assert [str(each.message) for each in warned if "elastic: " in str(each.message)] == [
        "[lightning_dist] elastic: world 1 -> 1, resumed at sample 48 (epoch 1, step 12); global "
        "batch 4: 1 micro-batch on 1 rank; there is nothing left to do: the run in "
        f"{tmp_path}/ckpt is complete, and this model has got its weights. For another training "
        "give another folder"
    ]
    assert [line["event"] for line in journal(tmp_path)] == ["start", "saved", "end"]


def test_the_same_wandb_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    import wandb

    first, second = (WandbLogger(offline=True, save_dir=tmp_path) for _ in range(2))
    settings = {"max_epochs": 1, "strategy": "compressed_ddp_none"}
    ids = []
    with pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 7), logger=first, **settings)
    ids.append(first.experiment.id)
    wandb.finish()
    fit(tmp_path, logger=second, **settings)
    ids.append(second.experiment.id)
    wandb.finish()
    start = journal(tmp_path)[0]
    assert ids == [start["run_id"]] * 2
    # offline-run-<second>-<id>, and a number behind it where two began within one second.
    runs = {path.name.split("-")[3] for path in (tmp_path / "wandb").glob("offline-run-*")}
    assert runs == {start["run_id"]}


DOCUMENT = ROOT / "docs" / "elastic.md"


def test_the_table_has_every_argument_with_its_default() -> None:
    section = DOCUMENT.read_text().partition("## Arguments")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| (?:`(.*?)`|required) \|", section, re.MULTILINE)
    of_checkpoints = settings_of(CheckpointSettings).keys() - {"format"}  # on a page of their own
    arguments = {
        name: each
        for name, each in inspect.signature(ElasticRestart).parameters.items()
        if name not in of_checkpoints
    }
    expected = {
        name: "" if each.default is each.empty else repr(each.default).replace("'", '"')
        for name, each in arguments.items()
    }
    assert dict(rows) == expected


LOGGER = "lightning.pytorch.utilities.rank_zero"


class WorseEachEpoch(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", float(self.current_epoch))


def validation() -> Any:
    return make_loader(shuffle=False)


@pytest.mark.parametrize("kind", [ModelCheckpoint, AsyncCheckpoint])
@pytest.mark.parametrize("order", [1, -1])
def test_best_is_of_the_callback_that_monitors(tmp_path: Path, kind: Any, order: int) -> None:
    monitors = kind(tmp_path / "best", monitor="loss", save_top_k=2)
    restart = ElasticRestart(tmp_path / "newest", every_n_train_steps=5, writer="thread")
    trainer = quiet_trainer(callbacks=[restart, monitors][::order], max_epochs=2)
    module = WorseEachEpoch()
    trainer.fit(module, make_loader(), validation())
    assert torch.load(monitors.best_model_path)["epoch"] == 0
    trainer.validate(module, validation(), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == monitors.best_model_path
    assert trainer.checkpoint_callback is monitors


def test_best_is_the_newest_where_nobody_monitors(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, max_epochs=2)
    trainer.validate(module, validation(), ckpt_path="best", verbose=False)
    assert str(trainer.ckpt_path).endswith("step=24.ckpt")


def start_of(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = [each for each in caplog.messages if "elastic: world" in each]
    return line


def test_a_checkpoint_that_was_not_saved_under_elastic_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=5, save_top_k=-1)
    quiet_trainer(callbacks=[stock], max_epochs=2).fit(Net(), make_loader())
    given = str(tmp_path / "stock" / "epoch=1-step=15.ckpt")
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER), pytest.raises(Fault):
        fit(tmp_path, FailAt("on_after_backward", 19), validate=False, ckpt_path=given)
    line = start_of(caplog)
    assert "fresh start" not in line
    assert f"world 1, resumed from {given} (epoch 1, step 15)" in line
    assert "its samples of epoch 1 are not known" in line
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=LOGGER):
        fit(tmp_path, validate=False, ckpt_path=given)
    assert "(epoch 1, step 18)" in start_of(caplog), "its own checkpoint comes first"
    assert f"ckpt_path={given!r} is not loaded" in caplog.text


CPU = torch.device("cpu")


def gpus(*indices: int) -> list[torch.device]:
    return [torch.device("cuda", index) for index in indices]


def node(ranks: int, local_rank: int = 0) -> Launch:
    return Launch(is_elastic=True, local_rank=local_rank, local_world_size=ranks)


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 4)


@pytest.mark.parametrize(
    ("given", "ranks", "expected"),
    [
        *(([CPU] * given, 3, [CPU] * 3) for given in (0, 1, 2, 3, 5)),
        (gpus(0, 1, 2, 3), 2, gpus(0, 1)),  # devices="auto"
        (gpus(2, 3), 2, gpus(2, 3)),
        (gpus(2), 3, gpus(2, 0, 1)),
        (gpus(0), 4, gpus(0, 1, 2, 3)),
    ],
)
@pytest.mark.usefixtures("four_gpus")
def test_every_rank_has_a_device(
    given: list[torch.device], ranks: int, expected: list[torch.device]
) -> None:
    assert local_devices(given, node(ranks)) == expected


@pytest.mark.usefixtures("four_gpus")
def test_more_ranks_than_gpus() -> None:
    with pytest.raises(ValueError, match=r"local rank 4 needs a cuda .* --nproc-per-node=4"):
        local_devices(gpus(0), node(6, local_rank=4))


def test_ranks_that_each_see_one_gpu_as_their_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun --virtual-local-rank: every rank is local rank 0, and device 0 is its own."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert local_devices(gpus(0), node(8)) == gpus(0)


def test_other_launchers_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launch_of(TorchElasticEnvironment()) is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setenv("WORLD_SIZE", "7")
    assert launch_of(LightningEnvironment()) is None
    assert launch_of(None) is None
    launch = launch_of(ElasticEnvironment())
    assert launch is not None
    assert launch.world_size == 7


def ids_of(folder: Path) -> list[list[int]]:
    return [step.ids for step in committed(folder / "account").values()]


class SavesByItself(L.Callback):
    """Comes before ElasticRestart, as a user's callbacks do."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 4:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "own.ckpt")


def test_the_position_in_a_checkpoint_of_somebody_else(tmp_path: Path) -> None:
    fit(tmp_path / "one", SavesByItself(), default_root_dir=tmp_path)
    state = torch.load(tmp_path / "own.ckpt", weights_only=False)[KEY]
    assert (state["total_steps"], state["position"]["steps"]) == (4, 4)
    fit(tmp_path / "two", ckpt_path=str(tmp_path / "own.ckpt"))
    assert ids_of(tmp_path / "two") == ids_of(tmp_path / "one")[4:]


class LogsStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("step", float(self.current_epoch))
        return super().training_step(batch, batch_idx)


def test_a_metric_called_step_hides_no_checkpoint(tmp_path: Path) -> None:
    fit_with_faults(tmp_path, [("on_after_backward", 11)], LogsStep)
    assert starts(tmp_path)[1]["samples"] == 40, "step 10"


def test_more_steps_go_on_within_the_epoch(tmp_path: Path) -> None:
    fit(tmp_path / "whole", max_steps=24, max_epochs=-1)
    fit(tmp_path / "parts", max_steps=17, max_epochs=-1)
    fit(tmp_path / "parts", max_steps=24, max_epochs=-1)
    assert ids_of(tmp_path / "parts") == ids_of(tmp_path / "whole")


def test_an_early_stop_is_kept(tmp_path: Path) -> None:
    def stop() -> EarlyStopping:
        return EarlyStopping("score", patience=0, mode="max", min_delta=100.0)

    trainer, module = fit(tmp_path, stop(), max_epochs=9)
    assert trainer.global_step < 9 * 12
    again, same = fit(tmp_path, stop(), max_epochs=9)
    assert again.global_step == trainer.global_step
    assert hash_of(same) == hash_of(module)


def test_another_seed_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match=r"seed=6 cannot take effect.* of seed 5"):
        fit(tmp_path, max_epochs=2, elastic={"seed": 6})


def test_a_trainer_is_as_it_was_after_a_fit_that_failed(tmp_path: Path) -> None:
    seen: list[int] = []

    class Counts(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(len(batch[0]))
            return super().training_step(batch, batch_idx)

    trainer, _ = fit(tmp_path, max_epochs=1, limit_train_batches=3, module=Counts())
    trainer.fit_loop.max_epochs = 2
    fails = FailAt("on_after_backward", 4)
    trainer.callbacks.insert(0, fails)
    with pytest.raises(Fault):
        trainer.fit(Counts(), make_loader())
    assert trainer.limit_train_batches == 3
    trainer.callbacks.remove(fails)
    seen.clear()
    trainer.fit(Counts(), make_loader(batch_size=2))
    assert set(seen) <= {1, 2}, "the second loader, with the global batch of the first"


class EndsEpochs(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None


def test_epochs_that_a_module_ends_have_their_checkpoint(tmp_path: Path) -> None:
    settings = {"elastic": {"every_n_train_steps": None}}
    faults = [("on_after_backward", 12)]
    trainer, _ = fit_with_faults(tmp_path, faults, EndsEpochs, **settings)
    assert starts(tmp_path)[1]["samples"] == 2 * 5 * 4
    assert trainer.global_step == 15


@pytest.mark.parametrize(
    "average", [EMAWeightAveraging, partial(StochasticWeightAveraging, 0.1, 2)]
)
def test_a_run_that_is_extended_goes_on_from_its_own_weights(
    tmp_path: Path, average: Callable[[], L.Callback]
) -> None:
    """Not from the averages that its end has put into the model."""
    trained: list[Tensor] = []

    class Trained(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            trained[:] = [each.detach().clone() for each in pl_module.net.parameters()]

    _, module = fit(tmp_path, average(), Trained(), validate=False)
    path = newest_valid(str(tmp_path / "ckpt")).path  # type: ignore[union-attr]
    saved = torch.load(path, weights_only=True)
    weights = saved.get("current_model_state", saved["state_dict"]).values()
    pairs = [*zip(weights, trained, module.net.parameters(), strict=True)]
    assert all(torch.equal(saved, own) for saved, own, _ in pairs)
    assert not all(torch.equal(own, averaged) for _, own, averaged in pairs)


def test_a_trainer_that_is_used_again_completes_its_run_once(tmp_path: Path) -> None:
    """Also after the callback was in another trainer meanwhile."""
    callback = ElasticRestart(tmp_path)
    trainers = quiet_trainer(callbacks=[callback]), quiet_trainer(callbacks=[callback])
    for place in (0, 1, 0):
        callback._stand(trainers[place])
    for trainer in trainers:
        assert (
            len([each for each in trainer.callbacks if type(each).__name__ == "_BeforeOthers"]) == 1
        )
