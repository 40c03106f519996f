"""What the configuration of a tracked run says of compression."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import fit
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from threads import of_all, on_threads
from torch import nn
from wandb_runs import config
from worlds import Rank

import lightning_dist
from lightning_dist import CompressedDDPStrategy, Int8, compress_ddp
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy


def finish(log: Path) -> dict[str, Any]:
    import wandb

    wandb.finish()
    (path,) = log.glob("wandb/offline-run-*/run-*.wandb")
    return config(path)


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_wandb_gets_codec_topology_and_versions(tmp_path: Path) -> None:
    logger = WandbLogger(offline=True, save_dir=tmp_path)
    strategy = CompressedDDPStrategy(Int8(block_size=128), start_step=2)
    for each in (strategy, FabricStrategy("bf16")):
        assert each.comm_config() == {}, "before the fit nothing is known of the ranks"
    fit(tmp_path, logger=logger, strategy=strategy, max_epochs=1)
    found = finish(tmp_path)["lightning_dist"]
    assert found == strategy.comm_config()
    assert (found["codec"], found["start_step"]) == ("Int8(block_size=128)", 2)
    assert (found["exchange"], found["topology"]) == ("flat", "1 host x 1 rank")
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["lightning_dist"] == lightning_dist.__version__
    assert found["versions"]["lightning"] == L.__version__


def test_loggers_whose_hyperparameters_stay_are_left_alone(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger=logger, strategy=CompressedDDPStrategy("none"), max_epochs=1)
    assert "lightning_dist" not in logger.experiment.hparams


@pytest.mark.parametrize(
    ("tree", "wanted"),
    [
        (None, {"exchange": "flat", "topology": "4 hosts x 1 rank", "hosts": 4, "world_size": 4}),
        (
            [[0, 1], [2, 3]],
            {"exchange": "hierarchical", "topology": "2 hosts x 2 ranks", "hosts": 2},
        ),
    ],
)
@on_threads(4)
def test_who_exchanges_with_whom(rank: Rank, tree: Any, wanted: dict[str, Any]) -> None:
    """All ranks say the same."""
    of = {"ranks_per_host": 2} if tree else {"ranks_per_host": 1, "hierarchical": False}
    handle = compress_ddp(rank.ddp(nn.Linear(16, 16)), "int4", groups=rank.groups(tree), **of)
    handle.close()
    found = handle.comm_config()
    assert of_all(rank, found) == [found] * 4
    assert found.items() >= wanted.items()


def test_a_restart_changes_what_the_run_says(tmp_path: Path) -> None:
    """A wandb run goes on with other settings: the newest are shown, and nothing raises."""
    for codec in ("none", "bf16"):
        logger = WandbLogger(offline=True, save_dir=tmp_path / codec, id="same", resume="allow")
        fit(tmp_path / codec, logger=logger, strategy=CompressedDDPStrategy(codec), max_epochs=1)
    assert finish(tmp_path / "none")["lightning_dist"]["codec"] == "BF16()"
