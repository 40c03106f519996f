"""A user of a container: no name, no home that can be written, no compiler."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from processes import port, run

NUMBER = 12345
SETPRIV = shutil.which("setpriv")
SCRIPT = """
import os
import lightning as L, torch
from torch.utils.data import DataLoader
from lightning_dist import AsyncCheckpoint, CommProfiler

os.chdir(os.path.dirname(__file__))

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2048, 2049)  # as large as those whose kernels are compiled

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

callbacks = [AsyncCheckpoint("checkpoints", every_n_train_steps=2), CommProfiler(dirpath="profile")]
trainer = L.Trainer(strategy="compressed_ddp", accelerator="cpu", devices=2, max_steps=2,
    logger=False, callbacks=callbacks, enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), DataLoader(torch.randn(8, 2048), batch_size=2))
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
@pytest.mark.skipif(SETPRIV is None, reason="setpriv is not installed")
def test_it_trains_with_one_line_about_the_compiler(tmp_path: Path) -> None:
    home, own = tmp_path / "home", tmp_path / "own"
    for folder, mode in ((home, 0o555), (own, 0o755)):
        folder.mkdir(mode=mode)
    os.chown(own, NUMBER, NUMBER)
    (own / "train.py").write_text(SCRIPT)
    # Reads what it could read in a container, where Python is nobody's own.
    rights = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    user = [str(SETPRIV), f"--reuid={NUMBER}", f"--regid={NUMBER}", "--clear-groups", *rights]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = run(
        [*user, *launcher, f"--master-port={port()}", str(own / "train.py")],
        limit=200,
        HOME=str(home),
        TMPDIR=str(own),
        PATH=str(home),
    )
    output = done.require_success().output
    assert output.count("Found no compiler for cpu") == 1
    assert (own / "checkpoints").is_dir()
    assert (own / "profile" / "run-0" / "report.html").exists()
