"""The loop of docs/elastic.md, as it stands there, on two ranks."""

from __future__ import annotations

import re
from pathlib import Path

from processes import torchrun

import lightning_dist

DOCUMENT = Path(lightning_dist.__file__).parents[1] / "docs" / "elastic.md"
BEFORE = """
import os, sys
os.environ["ACCELERATE_USE_CPU"] = "true"
os.chdir(sys.argv[1])
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
criterion = torch.nn.functional.mse_loss
data = torch.utils.data.TensorDataset(torch.randn(48, 4), torch.randn(48, 2))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
"""
AFTER = r"""
accelerator.wait_for_everyone()
rate = optimizer.param_groups[0]["lr"]
sys.stdout.write(f"ended at step {loop.steps} rate {rate}\n")  # whole: the other rank writes too
"""


def test_the_loop_of_the_document(tmp_path: Path, quick_python: list[str]) -> None:
    (code,) = re.findall(r"```python\n(import logging\n.*?)```", DOCUMENT.read_text(), re.S)
    script = tmp_path / "script.py"
    script.write_text(BEFORE + code + AFTER)
    done = torchrun(script, tmp_path, ranks=2, limit=60, python=quick_python).require_success()
    assert "elastic: world 2, fresh start; global batch 8" in done.output
    assert "ended at step 18 rate 0.1\n" not in done.output, "the scheduler is the user's to step"
    assert done.output.count("ended at step 18 ") == 2
