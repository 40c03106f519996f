"""A restart, of a Trainer or a loop, sees every sample once, whatever loader, or says why not."""

import multiprocessing
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain
from multiprocessing import active_children
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from elastic_data import LOADERS, DrawingStream, SilentStream
from elastic_runs import SIZE, FailAt, Fault, Net, committed, fit, hash_of, make_loader
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.trainer.connectors.data_connector import _DataLoaderSource
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from loop_runs import failing, net, train
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_dist import ElasticLoop
from lightning_dist.elastic.data.plan import Position
from lightning_dist.elastic.data.sampling import EndsAtSecondSignal
from lightning_dist.frameworks.lightning.elastic.data import TrainerDataShards
from lightning_dist.frameworks.lightning.elastic.loops import KeptSource


def weighted() -> DataLoader:
    sampler = WeightedRandomSampler(range(1, SIZE + 1), SIZE)
    return make_loader(sampler=sampler, shuffle=False)


KINDS = {
    **LOADERS,
    "stream that draws": lambda: DataLoader(DrawingStream(), batch_size=4),
    "weighted sampling": weighted,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_goes_on_in_the_data(kind: str, tmp_path: Path) -> None:
    loader = KINDS[kind]
    _, module = fit(tmp_path / "reference", loader=loader, max_epochs=2)
    expected = committed(tmp_path / "reference" / "account")
    for epoch in range(2):
        ids = [id for step in expected.values() if step.epoch == epoch for id in step.ids]
        assert sorted(ids) == list(range(SIZE)) or kind == "weighted sampling"
    within = 17 if kind == "weighted sampling" else 7  # what the second epoch has drawn, too
    for hook, step in (("on_after_backward", within), ("on_validation_end", 12)):
        folder, before = tmp_path / hook, active_children()
        with pytest.raises(Fault):
            fit(folder, FailAt(hook, step), loader=loader, max_epochs=2)
        assert set(active_children()) <= set(before), "workers of the loader are left"
        _, again = fit(folder, loader=loader, max_epochs=2)
        found = committed(folder / "account")
        assert [each.ids for each in found.values()] == [each.ids for each in expected.values()]
        assert hash_of(again) == hash_of(module)


def test_without_exactness_the_epoch_begins_anew(tmp_path: Path) -> None:
    settings = {"elastic": {"strict_data": False}, "max_epochs": 2}

    def loader() -> DataLoader:
        return DataLoader(SilentStream(), batch_size=4)

    with pytest.warns(UserWarning, match="Not exact"), suppress(Fault):
        fit(tmp_path, FailAt("on_after_backward", 17), loader=loader, **settings)
    with pytest.warns(UserWarning, match="start of its epoch"):
        trainer, _ = fit(tmp_path, loader=loader, **settings)
    assert trainer.current_epoch == 2
    assert trainer.global_step == 12 + 4 + 12, "resumed at step 16, and the second epoch anew"


def test_what_cannot_be_dealt_is_refused(tmp_path: Path) -> None:
    says = "SilentStream .* __len__ and iter_shard.*strict_data=Fal"
    with pytest.raises(ValueError, match=says):
        fit(tmp_path, loader=lambda: DataLoader(SilentStream(), batch_size=4))


@pytest.mark.parametrize(
    ("size", "interval", "intervals"),
    [(96, 3, [3, 6, 3]), (88, 6, [6, 11, 6]), (96, 0.5, [3, 6, 3]), (96, 1.0, [6, 12, 6])],
    ids=["steps", "an epoch whose last step is smaller", "half an epoch", "an epoch"],
)
def test_validations_stay_at_their_steps_when_ranks_are_lost_and_come(
    size: int, interval: float, intervals: list[int]
) -> None:
    """On 4 ranks, on 3 with 2 micro-batches per step, and on 4 again."""
    loop = SimpleNamespace(max_batches=6, _combined_loader=SimpleNamespace(limits=None))
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=1,
        limit_train_batches=1.0,
        val_check_interval=interval,
        val_check_batch=intervals[0],
        fit_loop=loop,
        lightning_module=SimpleNamespace(automatic_optimization=True),
    )
    data_shards = TrainerDataShards(
        trainer,
        exact=True,
        on_first=lambda: None,
        policy="fixed_global_batch",
        rank=0,
        world_size=4,
        resumed=None,
        path="",
        begun=None,
        seed=0,
    )
    data_shards.take(DataLoader(range(size), batch_size=4))  # type: ignore[arg-type]
    found = []
    for world_size in (4, 3, 4):
        data_shards.reshard(Position(0, 16, 1), rank=0, world_size=world_size)
        found.append(trainer.val_check_batch)
    assert found == intervals


def test_workers_have_the_seeds_of_seed_everything(tmp_path: Path) -> None:
    L.seed_everything(3, workers=True)
    trainer, _ = fit(
        tmp_path, loader=lambda: make_loader(num_workers=1), max_epochs=1, validate=False
    )
    begin = trainer.train_dataloader.worker_init_fn
    assert isinstance(begin, EndsAtSecondSignal)
    assert isinstance(begin.usual, partial)
    assert begin.usual.func is pl_worker_init_function


class TellsWorkers(L.Callback):
    """Sends all workers of this process a signal, as a launcher does, in one hook of one epoch."""

    def __init__(self, hook: str, epoch: int = 0) -> None:
        self.told: list[int] = []
        others = {each.pid for each in multiprocessing.active_children()}  # of an earlier test

        def tell(trainer: L.Trainer, *_: Any, **__: Any) -> None:
            if trainer.sanity_checking or trainer.current_epoch != epoch or self.told:
                return
            pids = {worker.pid for worker in multiprocessing.active_children()} - others
            self.told = [pid for pid in pids if pid]
            subprocess.run(["kill", "-TERM", *map(str, self.told)], check=True)

        setattr(self, hook, tell)


class Validated(Net):
    """Has a validation loader with workers."""

    def __init__(self, **loader: Any) -> None:
        super().__init__()
        self.of_loader = loader

    def val_dataloader(self) -> DataLoader:
        return make_loader(shuffle=False, num_workers=1, **self.of_loader)


@pytest.mark.parametrize(
    ("loader", "settings"),
    [
        ({}, {"check_val_every_n_epoch": 2}),
        ({}, {"reload_dataloaders_every_n_epochs": 1}),
        ({"persistent_workers": True}, {"num_sanity_val_steps": 1}),
    ],
    ids=["made at the first validation", "made anew", "begun by the sanity check"],
)
def test_a_validation_outlives_a_signal(
    loader: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    tells = TellsWorkers("on_validation_batch_end", epoch=1)
    trainer, _ = fit(
        tmp_path, tells, module=Validated(**loader), validate=False, max_epochs=2, **settings
    )
    assert (trainer.global_step, len(tells.told)) == (24, 1)


def test_a_stateful_loader_of_a_stream_outlives_a_signal(tmp_path: Path) -> None:
    tells = TellsWorkers("on_train_batch_end")
    loader = LOADERS["stateful stream, worker"]
    trainer, _ = fit(tmp_path, tells, loader=loader, validate=False, max_epochs=1)
    assert (trainer.global_step, len(tells.told)) == (12, 1)


@pytest.mark.parametrize(
    "several",
    [
        lambda *loaders: list(loaders),
        lambda *loaders: dict(zip("ab", loaders, strict=True)),
        lambda *loaders: CombinedLoader(list(loaders), "sequential"),
    ],
    ids=["list", "dict", "CombinedLoader"],
)
def test_each_of_several_loaders_is_kept(several: Callable[..., Any]) -> None:
    loaders = [make_loader(num_workers=1), make_loader(num_workers=1)]
    usual = _DataLoaderSource(several(*loaders), "train_dataloader")
    given = KeptSource(usual, trainer=L.Trainer(logger=False, accelerator="cpu")).dataloader()
    assert given is usual.instance
    assert all(isinstance(loader.worker_init_fn, EndsAtSecondSignal) for loader in loaders)


def test_the_trainers_own_sources_are_given_back(tmp_path: Path) -> None:
    trainer, _ = fit(tmp_path, max_epochs=1)
    assert type(trainer.fit_loop._data_source) is _DataLoaderSource
    assert type(trainer.fit_loop.epoch_loop.val_loop._data_source) is _DataLoaderSource


DEALT = [name for name in LOADERS if not name.startswith("stateful stream")]


@pytest.fixture(autouse=True)
def _no_workers_left() -> Iterator[None]:
    before = {each.pid for each in multiprocessing.active_children()}  # of other files' tests
    yield
    assert not {each.pid for each in multiprocessing.active_children()} - before


def ids_of(folder: Path) -> list[list[int]]:
    return [step.ids for step in committed(folder / "account").values()]


@pytest.mark.parametrize("data", DEALT)
def test_a_second_start_goes_on_in_the_data(data: str, tmp_path: Path) -> None:
    fails = failing("in_pass", 17)  # in the second epoch
    expected = train(tmp_path / "reference", "plain", data=data, epochs=2)
    with pytest.raises(Fault):
        train(tmp_path / "run", "plain", data=data, epochs=2, strike=fails)
    assert train(tmp_path / "run", "plain", data=data, epochs=2) == expected
    assert ids_of(tmp_path / "run") == ids_of(tmp_path / "reference")
    of_epochs = [[*chain(*ids_of(tmp_path / "run")[at : at + 12])] for at in (0, 12)]
    assert [sorted(ids) for ids in of_epochs] == [list(range(SIZE))] * 2
    assert of_epochs[0] != of_epochs[1]


def test_a_loop_refuses_what_cannot_be_dealt(tmp_path: Path) -> None:
    loader = DataLoader(SilentStream(), batch_size=4)
    with pytest.raises(ValueError, match="or use a map-style dataset"):
        ElasticLoop(tmp_path, loader=loader, state={"model": net()}).__enter__()
