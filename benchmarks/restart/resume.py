"""Cost of a lost rank: seconds to the first new step, and repeated samples, of three ways.

torchrun, 2 ranks, a checkpoint every 10 steps, a fault on rank 1 after step 25. ``ours``: torchrun
restarts the ranks, and ElasticRestart resumes. The others are resumed by a new torchrun immediately
after the old one has ended: the time of a person is not counted.

    python -m benchmarks.restart.resume --rounds N --json FILE
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.harness.launch import end_job, start_job
from benchmarks.harness.results import parser_of, recording
from benchmarks.harness.testbed import exit_on_signals
from benchmarks.restart.tables import RESUME

SAMPLES, BATCH, EVERY, STRUCK = 320, 4, 10, 25
"""Samples of the one epoch and of a batch; steps between two checkpoints, and before the fault."""
HANG_TIMEOUT_S = 4.0
_WIDTH, _ROWS, _LAYERS = 256, 512, 4
_STRUCK_RANK = 1

WAYS = {
    "ours": "ElasticRestart, compressed_ddp int8",
    "lightning": "Lightning ddp, ckpt_path by hand",
    "accelerate": "Accelerate, load_state by hand",
}
_LIMIT_S = 150.0


def measure(way: str, action: str) -> dict[str, Any]:
    """One round: train, be struck, resume, finish."""
    restarts = 3 if way == "ours" else 0
    with tempfile.TemporaryDirectory(prefix="faults") as folder:
        launched, output = time.time(), Path(folder) / "output"
        options = ["--nproc-per-node=2", f"--max-restarts={restarts}", "--rdzv-backend=c10d"]
        options += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
        training = ["-m", "benchmarks.restart.resume", way, folder, action]
        for number in range(2):
            words = ["-m", "torch.distributed.run", *options, *training]
            job = start_job(words, output, RESUME_START=str(number))
            try:
                with suppress(subprocess.TimeoutExpired):
                    if job.wait(_LIMIT_S) == 0:
                        return _account(Path(folder), launched)
            finally:
                end_job(job)
        raise RuntimeError(f"{way} failed: {output.read_text(errors='replace')[-3000:]}")


def _account(folder: Path, launched: float) -> dict[str, Any]:
    lines = [
        {**json.loads(text), "rank": path.stem}
        for path in folder.glob("rank-*.jsonl")
        for text in path.read_text().splitlines()
    ]
    struck = float((folder / "struck").read_text())
    after = [line for line in lines if line["time"] > struck and line["attempt"] != "0/0"]
    committed = {(line["step"], line["rank"]): line["ids"]
                 for line in sorted(lines, key=lambda line: line["time"])}  # fmt: skip
    ids = sorted(each for of_step in committed.values() for each in of_step)
    missed = set(range(SAMPLES)) - set(ids)
    first = [line for line in lines if (line["attempt"], line["rank"]) == ("0/0", "rank-0")]
    times = sorted(line["time"] for line in first)
    gaps = [late - early for early, late in itertools.pairwise(times)]
    return {
        "recovery_s": round(min(x["time"] for x in after if x["step"] > STRUCK) - struck, 2),
        "first_step_again_s": round(min(x["time"] for x in after) - struck, 2),
        "samples_redone": sum(len(x["ids"]) for x in after if x["step"] <= STRUCK),
        "ids_exact": ids == list(range(SAMPLES)),
        "samples_missed": len(missed),
        "samples_twice": len(ids) - len(set(ids)),
        "first_start_s": round(times[0] - launched, 2),
        "step_s": round(statistics.median(gaps), 3),
    }


def measure_all(rounds: int, *, stops: int) -> list[dict[str, Any]]:
    """Medians of rounds of every way in turn, and then of rounds with a stopped rank."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for way, action in [(way, "kill") for way in WAYS] * rounds + [("ours", "stop")] * stops:
        found.setdefault((way, action), []).append(measure(way, action))
    rows = []
    for (way, action), measured in found.items():
        row: dict[str, Any] = {"way": WAYS[way], "fault": action, "rounds": len(measured)}
        if action == "stop":
            row["hang_timeout"] = HANG_TIMEOUT_S
        for name in (key for key in measured[0] if key != "ids_exact"):
            row[name] = round(statistics.median(each[name] for each in measured), 3)
        row["ids_exact"] = all(each["ids_exact"] for each in measured)
        rows.append(row)
    return rows


class Numbered(Dataset):
    """Samples that know their number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(_WIDTH, generator=torch.Generator().manual_seed(index))


def make_model() -> nn.Module:
    torch.manual_seed(1)
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
    return nn.Sequential(*layers)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """Of many rows per sample, so that computing takes its time."""
    rows = x.repeat_interleave(_ROWS, 0)
    return nn.functional.mse_loss(model(rows), rows.flip(1))


class Account:
    """What this rank has done, step by step, and the fault that it meets."""

    def __init__(self, folder: Path, action: str) -> None:
        self.folder, self.action = folder, action
        self.rank = int(os.environ["RANK"])
        self.attempt = f"{os.environ['RESUME_START']}/{os.environ['TORCHELASTIC_RESTART_COUNT']}"

    def done(self, step: int, ids: list[int]) -> None:
        line = {"step": step, "ids": ids, "time": time.time(), "attempt": self.attempt}
        with open(self.folder / f"rank-{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        if step == STRUCK and self.rank == _STRUCK_RANK:
            self._strike()

    def _strike(self) -> None:
        try:
            marker = os.open(self.folder / "struck", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(marker, repr(time.time()).encode())
        os.close(marker)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.action])


def with_lightning(folder: Path, account: Account, *, ours: bool) -> None:
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    import lightning_dist

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net, batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    class Note(L.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, _: Any, batch: Any, __: int):
            account.done(trainer.global_step, batch[0].tolist())

    place = folder / "checkpoints"
    stop = account.action == "stop"
    hang = {"hang_timeout": HANG_TIMEOUT_S} if stop else {}
    saving = (
        lightning_dist.ElasticRestart(place, every_n_train_steps=EVERY, seed=1, **hang)
        if ours
        else ModelCheckpoint(place, every_n_train_steps=EVERY, save_top_k=-1)
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="compressed_ddp" if ours else "ddp",
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Note(), saving],
    )
    L.seed_everything(1, verbose=False)
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True)
    trainer.fit(Net(), loader, ckpt_path=None if ours else newest(place))


def with_accelerate(folder: Path, account: Account) -> None:
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(1)
    settings = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(cpu=True, dataloader_config=settings)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    loader = DataLoader(Numbered(), batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, left = 0, loader
    if found := newest(folder / "checkpoints"):
        accelerator.load_state(found)
        step = int(Path(found).name)
        left = accelerator.skip_first_batches(loader, step)
    for ids, x in left:
        loss = loss_of(model, x)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        step += 1
        account.done(step, ids.tolist())
        if step % EVERY == 0:
            accelerator.save_state(str(folder / "checkpoints" / f"{step:04d}"))


def newest(folder: Path) -> str | None:
    """The newest checkpoint, as somebody would choose it who resumes by hand."""
    found = sorted(folder.glob("*"), key=lambda path: path.stat().st_mtime)
    return str(found[-1]) if found else None


def train(way: str, place: str, action: str) -> None:
    torch.set_num_threads(1)
    folder = Path(place)
    account = Account(folder, action)
    if way == "accelerate":
        with_accelerate(folder, account)
    else:
        with_lightning(folder, account, ours=way == "ours")


def main() -> None:
    if "RANK" in os.environ:
        train(*sys.argv[1:])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each way (%(default)s)")
    given = parser.parse_args()
    with recording(given, seed=1) as record, exit_on_signals():
        record.rows = measure_all(given.rounds, stops=max(1, given.rounds // 3))
        record.show(RESUME)


if __name__ == "__main__":
    main()
