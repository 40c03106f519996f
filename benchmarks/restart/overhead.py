"""What ElasticRestart costs a step without any fault: the same fit with and without it.

Two ranks, fits one after the other in the same processes, interleaved; no checkpoint is taken.
Beside the steps, which a busy machine moves by more than that, the time spent in its hooks.

    python -m benchmarks.restart.overhead --json FILE [--steps N] [--rounds N] [--width N]
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness.launch import run_ranks
from benchmarks.harness.results import parser_of, recording
from benchmarks.restart.tables import OVERHEAD

_WARM_UP = 10
_LIMIT_S = 3600.0
_HOOKS = ("on_train_batch_start", "on_before_backward", "on_train_batch_end")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    given = parser.parse_args()
    options = {"steps": given.steps, "rounds": given.rounds, "width": given.width}
    with recording(given) as record, tempfile.TemporaryDirectory() as folder:
        found = run_ranks(measure, ranks=2, timeout_s=_LIMIT_S, folder=folder, **options)
        record.rows = found[0]
        record.show(OVERHEAD)


def measure(*, folder: str, steps: int, rounds: int, width: int) -> Iterator[dict[str, Any]]:
    """The rows, on one rank."""
    import lightning as L
    import torch
    from lightning.pytorch.profilers import SimpleProfiler
    from torch.utils.data import DataLoader, TensorDataset

    from lightning_dist import ElasticRestart

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
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
    data = TensorDataset(torch.randn(2 * 32 * steps, width))
    medians: dict[str, list[float]] = {"without": [], "ElasticRestart": []}
    in_hooks: list[float] = []
    for number in range(rounds + 1):
        for name, kept in medians.items():
            is_ours, clock, profiler = name != "without", Clock(), SimpleProfiler()
            restart = ElasticRestart(f"{folder}/{number}", every_n_epochs=10)
            trainer = L.Trainer(
                strategy="compressed_ddp",
                devices=2,
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
    for name, m in medians.items():
        middle = float(np.median(m))
        yield {"fit": name, "step_ms": middle, "least": min(m), "most": max(m), "all": m}
    least, middle, most = np.quantile(in_hooks, (0.05, 0.5, 0.95)).tolist()
    yield {"fit": "of that in its hooks", "step_ms": middle, "least": least, "most": most}


if __name__ == "__main__":
    main()
