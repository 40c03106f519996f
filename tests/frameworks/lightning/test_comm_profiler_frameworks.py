"""CommProfiler as a callback of Lightning, and under Fabric and Accelerate."""

import csv
import gzip
import json
import os
import re
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from comm_profiles import (
    MS,
    STEPS,
    busy,
    in_detail,
    network,
    printed,
    profile,
    profiled,
    require_no_prediction,
    require_report_of_failure,
)
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from replicas import of_all
from scenarios.accelerating import forget_accelerators
from scenarios.fitting import QUIET
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from wandb_runs import history, records

from lightning_dist import CommProfiler, compress_ddp
from lightning_dist.accelerate import local_updates
from lightning_dist.measurement import calibration
from lightning_dist.profiling.analysis.breakdown import analyse, exposed_in
from lightning_dist.profiling.analysis.parts import difference
from lightning_dist.profiling.capture.events import PHASES
from lightning_dist.profiling.whatif import predict as costs
from lightning_dist.profiling.whatif.observe import observe

pytestmark = [pytest.mark.slow, pytest.mark.on_ranks(2)]
INT8 = "int8"


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        busy(0.02)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(
    folder: Path, profiler: CommProfiler, module: Module | None = None, **settings: Any
) -> L.Trainer:
    """24 steps in two epochs."""
    trainer = L.Trainer(
        **{
            **QUIET,
            "strategy": "compressed_ddp",
            "devices": 2,
            "max_epochs": 2,
            "log_every_n_steps": 5,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 2,
            "default_root_dir": folder,
            "callbacks": [profiler],
            **settings,
        }
    )
    loaders = [DataLoader(TensorDataset(torch.randn(96, 256)), batch_size=4) for _ in range(2)]
    with in_detail():
        trainer.fit(module or Module(), *loaders)
    return trainer


@pytest.mark.parametrize("strategy", ["compressed_ddp", "ddp"])
def test_a_callback_of_lightning_tells_the_console_files_and_loggers(
    strategy: str, tmp_path: Path
) -> None:
    loggers: list[Any] = [CSVLogger(tmp_path, name="csv", version=0)]
    if strategy == "compressed_ddp":
        loggers.append(WandbLogger(save_dir=tmp_path, offline=True, id="profiled"))
    with printed() as output:
        fit(tmp_path, CommProfiler(csv=True), strategy=strategy, logger=loggers)
    if strategy == "compressed_ddp":
        import wandb

        loggers[1].experiment.finish()
        wandb.teardown()
    run, summary = profile(tmp_path / "comm_profile")
    assert run.common_steps == list(range(24))  # and no validation among them
    assert summary["run"]["codec"] == ("ddp" if strategy == "ddp" else INT8)
    found = tmp_path / "comm_profile" / "run-0"
    meta = json.loads((found / "meta.json").read_text())
    told = summary["run"]["script"], summary["run"]["started"]
    assert told == (meta["script"], meta["started"])
    assert Path(told[0]).suffix == ".py"
    says = "of the step is exposed communication"
    assert [says in each for each in of_all(output.getvalue())] == [True, False]
    made = {"meta.json", "summary.json", "report.html", "trace.json.gz", "steps.csv"}
    assert set(os.listdir(found)) == {"rank0.jsonl", "rank1.jsonl", *made}
    with gzip.open(found / "trace.json.gz") as trace:
        assert json.load(trace)["traceEvents"]
    require_metrics(tmp_path / "csv" / "version_0" / "metrics.csv", is_compressed=len(loggers) > 1)
    if strategy == "compressed_ddp":
        require_numbers_table_and_files_in_wandb(tmp_path)


def require_metrics(path: Path, *, is_compressed: bool) -> None:
    rows = list(csv.DictReader(path.open()))
    live = [row for row in rows if row.get("comm/exposed_fraction")]
    assert len(live) >= 2
    assert all(0 < float(row["comm/exposed_fraction"]) < 1 for row in live)
    errors = [row.get("comm/error_relative_l2") for row in rows]
    lost = [float(error) for error in errors if error]
    assert is_compressed == (lost != [])
    assert all(0 < each < 0.02 for each in lost)
    ratio = float(live[-1]["comm/compression_ratio"])
    assert 3.5 < ratio < 4 if is_compressed else ratio == 1.0
    assert any(row.get("comm/codec_total_ms") for row in rows) == is_compressed
    assert float(live[-1]["comm/exposed_wait_ms"]) >= 0  # what only all ranks together know


def require_numbers_table_and_files_in_wandb(folder: Path) -> None:
    (log,) = folder.glob("wandb/offline-run-*/run-profiled.wandb")
    found = history(log)
    metrics = {"/".join(key.split("/")[:2]) for key in found if key.startswith("comm/")}
    names = ("exposed_fraction", "exposed_wait_ms", "buckets", "report")
    assert {f"comm/{name}" for name in names} <= metrics
    assert len(metrics) <= 32  # wandb slows down with many keys
    assert all(0 < float(value) < 1 for value in found["comm/exposed_fraction"])
    assert "comm-profile-profiled" in {record.artifact.name for record in records(log)}
    assert list(log.parent.glob("files/media/html/comm/report*.html"))
    assert list(log.parent.glob("files/media/table/comm/buckets*.json"))


class Manual(Module):
    """Its passes and steps are its own: an optimizer for each half, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], index: int) -> None:
        for half, optimizer in zip((self.net[:2], self.net[2:]), self.optimizers(), strict=True):
            loss = half(batch[0]).square().mean()
            self.manual_backward(loss)
            busy(0.002)
            optimizer.step()
            optimizer.zero_grad()
        busy(0.01)

    def configure_optimizers(self) -> Any:
        halves = self.net[:2], self.net[2:]
        return [torch.optim.SGD(half.parameters(), lr=0.01) for half in halves]


@pytest.mark.parametrize("strategy", ["ddp", "compressed_ddp"])
def test_every_optimizer_step_of_manual_optimization_is_a_step(
    strategy: str, tmp_path: Path
) -> None:
    profiler = CommProfiler(dirpath=tmp_path, print_summary=False, html=False)
    strategy += "_find_unused_parameters_true"
    assert fit(tmp_path, profiler, Manual(), strategy=strategy).global_step == 48
    run, summary = profile(tmp_path)
    assert run.common_steps == list(range(48))
    for number, step in run.ranks[0].steps.items():
        names = [phase.name for phase in step.phases]
        assert names == [*(["between_steps"] if number % 2 == 0 else []), "backward", "optimizer"]
        if number % 2 == 0 and number not in (0, 24):  # what a pass does after its last step
            assert step.phases[0].end / MS >= 10
        if step.detailed:
            assert [span.order for span in step.spans if span.phase == "exchange"]
            assert len({bucket.index for bucket in step.buckets}) == len(step.buckets) > 0
    for number in run.common_steps:
        for each in analyse(run, number):
            assert sum(each.parts.values()) == each.duration
    assert summary["exposed_ms"] > 0
    overlap = "forward and backward pass overlap; both are in backward"
    assert summary["unavailable"]["forward"] == overlap


def test_what_would_help_is_measured_when_it_is_over(tmp_path: Path) -> None:
    """As if the training had been long enough for what codecs cost to be measured."""
    with (
        patch.multiple(costs, LEAST_TRAINING=0.0, LARGEST_SHARE=1e3),
        patch.object(calibration, "_UNITS", 1),  # quickly
        printed() as output,
    ):
        fit(tmp_path, CommProfiler(html=False), strategy="ddp")
    _, summary = profile(tmp_path / "comm_profile")
    found = summary["predictions"]
    assert "predictions" not in summary["unavailable"]
    assert found["label"] == "Predicted step time (simulated)"
    assert found["baseline"]["codec"] == "ddp"
    assert abs(found["error"]) <= found["tolerance"]
    told = {each["codec"] for each in found["scenarios"] if each["step_ms"]}
    assert {"none", "fp16", "int8", "int4", "sign", "topk", "powersgd"} <= told
    kept = costs.read_costs(tmp_path / "comm_profile" / "run-0")
    assert set(kept.by_name) >= told - {"ddp"}
    source = kept.by_name["int8"].source
    assert source.startswith("measured alone on ")
    assert source.endswith(", not compiled")
    assert "after this run" in source
    nothing = "No other setting is predicted .* of the model(; .* may be, under .*)?"
    assert re.search(rf" (Predicted with .*: \d.*x|{nothing})\.$", summary["headline"])
    if dist.get_rank() == 0:
        assert summary["headline"] in output.getvalue()
        assert output.getvalue().count("Predicted step time (simulated)") == 1


class Ends(Module):
    """Before its tenth step, by an error or because it is told to."""

    def __init__(self, *, is_told: bool) -> None:
        super().__init__()
        self.is_told = is_told

    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 9:
            if not self.is_told:
                raise ArithmeticError("the loss is odd")
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ArithmeticError, "ArithmeticError: the loss is odd"), (SystemExit, "SIGTERMException")],
)
def test_a_run_that_does_not_end_by_itself_has_a_report_without_a_prediction(
    error: type[BaseException], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(error):
        fit(tmp_path, CommProfiler(), Ends(is_told=error is SystemExit))
    require_report_of_failure(tmp_path / "comm_profile", reason)
    require_no_prediction(tmp_path / "comm_profile", "the training did not end by itself")


def test_lightning_s_local_steps(tmp_path: Path) -> None:
    fit(tmp_path, CommProfiler(html=False), strategy="compressed_local_sgd")
    run, summary = profile(tmp_path / "comm_profile")
    assert [len(rank.steps) for rank in run.ranks.values()] == [24, 24]
    assert summary["traffic"]["wire_bytes"] > 0


def of_accelerate() -> tuple[Accelerator, nn.Module, Any]:
    forget_accelerators()
    accelerator, module = Accelerator(cpu=True), network()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(module, optimizer)


def test_exchanges_of_local_updates_are_in_the_profile(tmp_path: Path) -> None:
    """Local steps of four in an Accelerator's loop; rank 1 comes late to every exchange."""
    accelerator, model, optimizer = of_accelerate()
    updates = local_updates(accelerator, model, optimizer, sync_every=4)
    with profiled(model, tmp_path):
        for step in range(STEPS):
            accelerator.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
            busy(0.25 if step % 4 == 3 and dist.get_rank() == 1 else 0.0)
            updates.step()
    updates.close()
    forget_accelerators()
    run, summary = profile(tmp_path)
    assert [len(rank.steps) for rank in run.ranks.values()] == [12, 12]
    steps = [step for rank in run.ranks.values() for step in rank.steps.values()]
    assert {each.codec for step in steps for each in step.buckets} == {"int8+none"}
    waits = []
    for step in run.common_steps:
        waiting, late = sorted(analyse(run, step), key=lambda each: each.rank)
        assert sum(late.parts.values()) == late.duration
        exchanges = step % 4 == 3
        assert exchanges == bool(waiting.ns["exposed"]) == bool(late.ns["exposed"])
        waits += [waiting.parts["exposed_wait"]] * exchanges
        assert late.parts["other"] >= 250 * MS * exchanges
        control = [each for each in waiting.exchanges if each.group == "control"]
        assert len(control) == exchanges
        # That an exchange has ended may be noticed after the step has.
        intervals = [(each.begin, min(each.end, waiting.duration)) for each in control]
        assert not difference(intervals, exposed_in(waiting.record))
    # A machine with something else to do may hold up rank 0 as well, in some of the exchanges.
    assert max(waits) >= 50 * MS, waits  # 250 are planted
    reason = "with local updates, everything but the exchange is in other"
    assert dict.fromkeys(PHASES, reason).items() <= summary["unavailable"].items()
    assert {summary["breakdown_ms"][phase] for phase in PHASES} == {None}
    assert {each["step"] for each in summary["errors"]} == {11}  # of the third exchange
    with pytest.raises(ValueError, match=r"profile some steps of DDP.*--local-steps 4"):
        observe(run)


@pytest.mark.parametrize("name", ["fabric", "accelerate"])
def test_other_loops(name: str, tmp_path: Path) -> None:
    if name == "fabric":
        framework: Any = L.Fabric(strategy="compressed_ddp", accelerator="cpu", devices=2)
        framework.launch()
        model = framework.setup_module(network())
        optimizer = framework.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.01))
    else:
        framework, model, optimizer = of_accelerate()
        compress_ddp(model, "int8", compile_kernels=False)
    with profiled(model, tmp_path, predict=name != "fabric"):
        for _ in range(STEPS):
            framework.backward(model(torch.ones(4, 256)).sum())
            optimizer.step()
            optimizer.zero_grad()
    forget_accelerators()
    run, summary = profile(tmp_path)
    assert run.common_steps == list(range(STEPS))
    assert summary["run"]["codec"] == INT8
    assert summary["traffic"]["wire_bytes"] < summary["traffic"]["raw_bytes"] / 3
    short = "the training was shorter than 30 s"
    require_no_prediction(tmp_path, "predict=False" if name == "fabric" else short)
