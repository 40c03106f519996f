"""Environments in which a strategy is set up without a Trainer, or without all of torchrun's words.

The first two behaviours are those of tests of Lightning's own strategies.
"""

import os

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment
from processes import port, run

GATHER = """
import faulthandler, os, torch
faulthandler.dump_traceback_later(80, exit=True)
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning_dist import CompressedDDPStrategy

def work(strategy):
    strategy.setup_environment()
    mine = torch.full((3,), float(strategy.global_rank + 1), requires_grad=True)
    gathered = strategy.all_gather(mine, sync_grads=True)
    (gathered * (strategy.global_rank + 1)).sum().backward()
    return gathered.detach().tolist(), mine.grad.tolist()

if __name__ == "__main__":
    strategy = CompressedDDPStrategy(
        accelerator=CPUAccelerator(),
        cluster_environment=LightningEnvironment(),
        parallel_devices=[torch.device("cpu")] * 2,
    )
    print("SAID", _MultiProcessingLauncher(strategy, start_method="fork").launch(work, strategy))
"""


def test_a_strategy_without_a_module_sets_up_its_environment(
    tmp_path: object, quick_python: list[str]
) -> None:
    """Two ranks gather, with gradients, over a strategy that no Trainer has connected."""
    script = f"{tmp_path}/gather.py"
    with open(script, "w") as file:
        file.write(GATHER)
    done = run([*quick_python, script], limit=90, MASTER_PORT=str(port())).require_success()
    # The gradient of a gather is the sum of what every rank wants of this one's part: 1 + 2.
    assert "SAID ([[1.0, 1.0, 1.0], [2.0, 2.0, 2.0]], [3.0, 3.0, 3.0])" in done.output


def test_devices_are_the_scripts_where_the_launcher_does_not_count_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an agent other than torchrun may do, which sets no LOCAL_WORLD_SIZE, nor GROUP_WORLD_SIZE.

    torchrun's environment is chosen over SLURM's, as with ddp, and Lightning compares the devices
    with the world size.
    """
    for name in [*os.environ]:
        if name.startswith(("TORCHELASTIC", "SLURM", "LOCAL_", "GROUP_")):
            monkeypatch.delenv(name)
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert SLURMEnvironment.detect()
    given = {"strategy": "compressed_ddp", "accelerator": "cpu", "logger": False}
    strategy = L.Trainer(devices=2, **given).strategy
    assert isinstance(strategy.cluster_environment, TorchElasticEnvironment)
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    assert strategy.root_device == torch.device("cpu")
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 2, "rank": 1}
    three = L.Trainer(devices=3, **given).strategy
    with pytest.raises(ValueError, match=r"`devices=3` and `num_nodes=1` .* world size \(2\)"):
        three.launcher.launch(lambda: None)


NO_STEP = """
import threading, lightning as L, torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.trainer.states import TrainerFn
import lightning_dist

trainer = L.Trainer(
    strategy="compressed_ddp", accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_checkpointing=False, enable_model_summary=False,
)
trainer.state.fn = TrainerFn.FITTING
model = BoringModel()
model.trainer = trainer
trainer.strategy.connect(model)
trainer.strategy.setup_environment()
trainer.strategy.setup(trainer)
print("threads", sorted(thread.name for thread in threading.enumerate()))
torch.distributed.destroy_process_group()
"""


def test_a_strategy_that_never_trains_leaves_no_thread(quick_python: list[str]) -> None:
    """The module is wrapped and no step is taken; nobody calls teardown."""
    script = run([*quick_python, "-c", NO_STEP], limit=60, TAKEN_APART="1").require_success()
    assert "threads ['MainThread']" in script.output
