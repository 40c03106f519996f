"""What ElasticRestart costs a step without any fault: the same fit with and without it.

Two ranks, fits one after the other in the same processes, interleaved; no checkpoint is taken.
Beside the steps, which a busy machine moves by more than that, the time spent in its hooks.

    python -m benchmarks.restart.overhead --json FILE [--steps N] [--rounds N] [--width N]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from benchmarks.harness.results import parser_of, recording
from benchmarks.restart.tables import OVERHEAD

_WARM_UP = 10
_HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        run_id="overhead",
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
    )
    with recording(given) as record, tempfile.TemporaryDirectory() as folder:
        record.rows = elastic_launch(config, measure)(given, Path(folder))[0]
        record.show(OVERHEAD)


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """The rows, on one rank."""
    import lightning as L
    import torch
    from lightning.pytorch.profilers import SimpleProfiler
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_dist import ElasticRestart

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            width = arguments.width
            self.net = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(2 * 32 * arguments.steps, arguments.width))
    medians: dict[str, list[float]] = {"without": [], "ElasticRestart": []}
    in_hooks: list[float] = []
    for number in range(arguments.rounds + 1):
        for name, kept in medians.items():
            is_ours, clock, profiler = name != "without", Clock(), SimpleProfiler()
            restart = ElasticRestart(folder / f"{number}", every_n_epochs=10)
            trainer = L.Trainer(
                strategy="compressed_ddp",
                max_epochs=1,
                logger=False,
                profiler=profiler,
                enable_checkpointing=is_ours,
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[clock, restart] if is_ours else [clock],
            )
            trainer.fit(Net(), DataLoader(data, batch_size=32))
            if number == 0:  # the first one warms up
                continue
            kept.append(1000 * float(np.median(np.diff(clock.times[_WARM_UP:]))))
            if is_ours:
                took = profiler.recorded_durations
                of_hooks = [took[f"[Callback]{restart.state_key}.{hook}"] for hook in _HOOKS]
                in_hooks += (1000 * np.sum([of[_WARM_UP:] for of in of_hooks], axis=0)).tolist()
    rows: list[dict[str, Any]] = [
        {"fit": n, "step_ms": float(np.median(m)), "least": min(m), "most": max(m), "all": m}
        for n, m in medians.items()
    ]
    least, middle, most = np.quantile(in_hooks, (0.05, 0.5, 0.95)).tolist()
    rows.append({"fit": "of that in its hooks", "step_ms": middle, "least": least, "most": most})
    return rows


if __name__ == "__main__":
    main()
