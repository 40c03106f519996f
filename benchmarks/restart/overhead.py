"""What ElasticRestart costs a step without any fault: the same fit with and without it.

Two ranks, fits one after the other in the same processes, interleaved; no checkpoint is taken.
Beside the steps, which a busy machine moves by more than that, the time spent in its hooks.

    python -m benchmarks.restart.overhead --json FILE [--steps N] [--rounds N] [--width N]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.docs_tables import print_tables
from benchmarks.harness.results import collect_meta, write_json

_WARM_UP = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        _rank(arguments)
        return
    meta = collect_meta(seed=0, arguments={**vars(arguments), "json": None})
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node=2", "-m", "benchmarks.restart.overhead"]
        command += [f"--{name}={getattr(arguments, name)}" for name in ("steps", "rounds", "width")]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "ELASTIC_OVERHEAD": folder}
        subprocess.run(command, env=environment, check=True, timeout=580)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    if arguments.json:
        write_json(arguments.json, meta=meta, rows=rows)
    print_tables(meta, rows, "elastic-overhead")


def _rank(arguments: argparse.Namespace) -> None:
    import lightning as L
    import torch
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

    class Timed(ElasticRestart):
        """Adds up what its hooks take in every step."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.times: list[float] = []
            for name in ("on_train_batch_start", "on_before_backward", "on_train_batch_end"):
                setattr(self, name, self._timed(getattr(super(), name), ends=name.endswith("end")))
            self._so_far = 0.0

        def _timed(self, hook: Any, *, ends: bool) -> Any:
            def timed(*args: Any, **kwargs: Any) -> None:
                began = time.perf_counter()
                hook(*args, **kwargs)
                self._so_far += time.perf_counter() - began
                if ends:
                    self.times.append(self._so_far)
                    self._so_far = 0.0

            return timed

    class Clock(L.Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

    torch.set_num_threads(1)
    folder = Path(os.environ["ELASTIC_OVERHEAD"])
    data = TensorDataset(torch.randn(2 * 32 * arguments.steps, arguments.width))
    medians: dict[str, list[float]] = {"without": [], "ElasticRestart": []}
    in_hooks: list[float] = []
    for number in range(arguments.rounds + 1):
        for name, kept in medians.items():
            clock = Clock()
            restart = Timed(folder / f"{number}", every_n_epochs=10)
            trainer = L.Trainer(
                strategy="compressed_ddp",
                max_epochs=1,
                logger=False,
                enable_checkpointing=name != "without",
                enable_progress_bar=False,
                enable_model_summary=False,
                callbacks=[clock, *([restart] if name != "without" else [])],
            )
            trainer.fit(Net(), DataLoader(data, batch_size=32))
            steps = [
                b - a
                for a, b in zip(clock.times[_WARM_UP:], clock.times[_WARM_UP + 1 :], strict=False)
            ]
            if number:  # the first one warms up
                kept.append(1000 * statistics.median(steps))
                if name != "without":
                    in_hooks += [1000 * each for each in restart.times[_WARM_UP:]]
    if trainer.is_global_zero:
        rows = [
            {"fit": n, "step_ms": statistics.median(m), "least": min(m), "most": max(m), "all": m}
            for n, m in medians.items()
        ]
        quantiles = statistics.quantiles(in_hooks, n=20)
        rows.append(
            {
                "fit": "of that in its hooks",
                "step_ms": statistics.median(in_hooks),
                "least": quantiles[0],
                "most": quantiles[-1],
            }
        )
        (folder / "rows.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
