"""`ElasticLoop` in one process, with several models, and as documented: what it keeps and says."""

import csv
import json
import logging
import math
import os
import re
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import GradientState
from elastic_runs import SIZE, Fault, committed, fit, make_loader
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from loop_pair import RATES
from loop_pair import train as train_pair
from loop_runs import failing, net, train
from needs import needs
from processes import ROOT, torchrun
from torch import nn

from lightning_dist import ElasticLoop
from lightning_dist.accelerate import AsyncStateCheckpointer
from lightning_dist.base.features import RECOVERY
from lightning_dist.elastic.process.lifecycle import Ended
from lightning_dist.frameworks.accelerate.async_state import folders


def loop_in(folder: Path, **changed: Any) -> ElasticLoop:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    return ElasticLoop(folder, **{"loader": make_loader(), "state": state, **changed})


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, 12),
        ({"gradient_accumulation_steps": 3}, 4),
        ({"every_n_train_steps": None}, 12),
        ({"snapshot": "overlap", "writer": "thread"}, 12),
    ],
    ids=str,
)
def test_later_starts_go_on_to_the_same_end(
    settings: dict[str, Any], steps: int, tmp_path: Path
) -> None:
    """Each but the last fails: within an epoch, after its last step, and at the end of another."""
    expected = train(tmp_path / "reference", "plain", elastic=settings)
    assert expected[1] == 3 * steps
    quiet = committed(tmp_path / "reference" / "account")
    within = ("in_pass", steps // 2 - 1), ("after_step", steps // 2)
    between = ("after_step", steps), ("after_epoch", 2 * steps)
    for name, faults in (("within", within), ("between", between)):
        for place, step in faults:
            with pytest.raises(Fault):
                train(tmp_path / name, "plain", elastic=settings, strike=failing(place, step))
        assert train(tmp_path / name, "plain", elastic=settings) == expected
        assert committed(tmp_path / name / "account") == quiet
    assert train(tmp_path / "within", "plain", elastic=settings)[1] == expected[1]


@pytest.mark.parametrize(
    "settings",
    [
        {"every_n_train_steps": 5},
        {"every_n_train_steps": None},
        {"every_n_train_steps": 5, "every_n_epochs": 2},
    ],
    ids=str,
)
def test_checkpoints_are_due_at_the_steps_of_a_trainer(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    settings = {**settings, "max_to_keep": 100}
    fit(tmp_path / "trainer", elastic=settings)
    train(tmp_path / "loop", "plain", elastic=settings)
    in_trainer, in_loop = (
        {path.name for path in (tmp_path / name / "ckpt").glob("*.ckpt")}
        for name in ("trainer", "loop")
    )
    assert in_loop == in_trainer


def test_a_loop_that_is_left_early_goes_on_there(tmp_path: Path) -> None:
    seen: list[int] = []
    for most in (3, 100):
        with loop_in(tmp_path, seed=3) as loop:
            for _ in loop.epochs(1):
                for numbers, _x in loop.batches():
                    if loop.steps == most:
                        break
                    loop.scale_loss(torch.ones((), requires_grad=True)).backward()
                    seen += numbers.tolist()
                    loop.step_done()
                if loop.steps == most:
                    break
    assert sorted(seen) == list(range(48))


def await_notice(loop: ElasticLoop) -> None:
    """A thread takes note; on a busy machine some steps later."""
    while not loop._run.session.lifecycle.stop_requested:
        os.sched_yield()


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGUSR1, None])
def test_a_notice_leads_to_one_checkpoint_and_handlers_are_given_back(
    told: signal.Signals | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SLURM announces a requeue with SIGUSR1; None: the cloud tells who asks.

    Once all is saved, another signal ends the process.
    """
    at_the_end: list[Any] = []

    def handler() -> Any:
        return signal.getsignal(told or signal.SIGTERM)

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            at_the_end.append(handler())

    listening, logger = Listening(), logging.getLogger("lightning_dist")
    before, due = handler(), threading.Event()
    expected = train(tmp_path / "reference", "plain")
    elastic = {"every_n_train_steps": None, "signals": (signal.SIGTERM, signal.SIGUSR1)}
    asks = {"preemption_check": due.is_set, "preemption_poll_interval": 0.01}

    def watch(loop: ElasticLoop) -> None:
        if loop.steps == 5:
            os.kill(os.getpid(), told) if told else due.set()
            await_notice(loop)

    logger.addHandler(listening)
    try:
        with caplog.at_level(logging.INFO, logger=logger.name), pytest.raises(Ended) as ended:
            train(tmp_path / "run", "plain", watch=watch, elastic={**elastic, **asks})
    finally:
        logger.removeHandler(listening)
    assert ended.value.code == 0
    assert at_the_end[-1] is handler() is before
    saved = [path.name for path in (tmp_path / "run" / "ckpt").glob("*.ckpt")]
    assert saved == ["epoch=0-step=5.ckpt"]
    assert train(tmp_path / "run", "plain", elastic=elastic) == expected


def test_a_loop_in_a_thread(tmp_path: Path) -> None:
    """As Ray runs one: Python has no signal handlers there, which is said."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(train(tmp_path / "run", "plain")))
    thread.start()
    with pytest.warns(UserWarning, match="Signals reach the main thread only"):
        thread.join()
    assert found == [train(tmp_path / "reference", "plain")]


def announce(loop: ElasticLoop) -> None:
    loop.scale_loss(torch.ones(()))


@pytest.mark.parametrize(
    ("accumulate", "calls", "says"),
    [
        (1, [ElasticLoop.step_done], r"use loop.scale_loss\(loss\).backward"),
        (1, [announce], "call it after the optimizer's step"),
        (2, [announce, ElasticLoop.step_done], "check loop.sync_gradients"),
    ],
    ids=["a loss that is not weighted", "a step that is not told", "a step in the middle of one"],
)
def test_batches_that_are_not_as_agreed(
    accumulate: int, calls: list[Callable[[ElasticLoop], None]], says: str, tmp_path: Path
) -> None:
    with (  # noqa: PT012
        pytest.raises(ValueError, match=says),
        loop_in(tmp_path, gradient_accumulation_steps=accumulate) as loop,
    ):
        for _ in loop.epochs(1):
            for _batch in loop.batches():
                for call in calls:
                    call(loop)


def test_a_checkpoint_has_what_follows_step_done(tmp_path: Path) -> None:
    """It is taken when the next batch is wanted."""

    def train(*, fails: bool) -> tuple[int, int, int]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        average = torch.optim.swa_utils.AveragedModel(model)
        state = {"model": model, "optimizer": optimizer, "schedule": scheduler, "ema": average}
        settings = {"loader": make_loader(), "state": state, "every_n_train_steps": 3}
        with ElasticLoop(tmp_path, **settings) as loop:
            for _ in loop.epochs(1):
                for _batch in loop.batches():
                    loop.scale_loss(torch.ones((), requires_grad=True)).backward()
                    optimizer.step()
                    loop.step_done()
                    average.update_parameters(model)
                    scheduler.step()
                    if fails and loop.steps == 7:
                        raise Fault
        return loop.steps, int(average.n_averaged), scheduler.last_epoch

    with pytest.raises(Fault):
        train(fails=True)
    assert train(fails=False) == (12, 12, 12)


def test_batches_of_an_epoch_are_asked_for_once(tmp_path: Path) -> None:
    """They would begin again."""
    with loop_in(tmp_path) as loop:
        next(iter(loop.epochs(1)))
        next(iter(loop.batches()))
        with pytest.raises(ValueError, match="once per epoch"):
            next(iter(loop.batches()))


def test_an_epoch_that_is_left_for_the_next(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ValueError, match="Epoch 0 has batches left"),
        loop_in(tmp_path) as loop,
    ):
        for _ in loop.epochs(2):
            next(iter(loop.batches()))


@pytest.fixture
def _accelerate_forgets() -> Iterator[None]:
    yield
    GradientState._reset_state()


def prepared(**arguments: Any) -> dict[str, Any]:
    accelerator, model = Accelerator(cpu=True, **arguments), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    loader, *parts = accelerator.prepare(make_loader(), model, optimizer, scheduler)
    return {"loader": loader, **dict(zip(("model", "optimizer", "scheduler"), parts, strict=True))}


def state_prepared(*names: str, **arguments: Any) -> dict[str, Any]:
    parts = prepared(**arguments)
    return {"state": {name: parts[name] for name in ("model", "optimizer", *names)}}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (lambda: {"loader": prepared()["loader"]}, r"before prepare\(\)"),
        (lambda: state_prepared("scheduler"), r"do not prepare\(\) it"),
        (
            lambda: state_prepared(gradient_accumulation_steps=4),
            r"gradient_accumulation_steps=4 of the Acc.*give it to ElasticL",
        ),
    ],
    ids=["a loader", "a scheduler that is stepped by ranks", "accumulation"],
)
@pytest.mark.usefixtures("_accelerate_forgets")
def test_what_accelerate_does_too_is_refused(given: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        loop_in(tmp_path, **given()).__enter__()


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be positive; got 0"),
        pytest.param(
            {"format": "sharded", "recovery": "in_process"},
            "needs checkpoints that one rank can write, and with format='sharded' all write",
            marks=needs(RECOVERY),
        ),
        ({"mirror_residuals": True}, "takes effect with recovery='in_process' only"),
        ({"mirror_residuals": 0, "recovery": "in_process"}, "the steps between two copies, got 0"),
        ({"mirror_residuals": -3, "recovery": "in_process"}, "True, False or the steps.*got -3"),
    ],
)
def test_settings_that_could_not_take_effect(
    given: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=says):
        loop_in(tmp_path, **given)


def test_an_async_state_checkpointer_of_ranks_that_come_and_go_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folders, "is_alone", lambda: True)
    with pytest.raises(ValueError, match="leave it out: ElasticLoop saves"):
        AsyncStateCheckpointer(None)  # type: ignore[arg-type]  # it is not looked at


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())}, "state= has no model"),
        ({"model": nn.Linear(1, 1), "extra": 3}, r"state\['extra'\] has no state_dict"),
    ],
)
def test_states(state: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        loop_in(tmp_path, state=state).__enter__()


def test_the_state_of_another_optimizer(tmp_path: Path) -> None:
    train(tmp_path, "plain", epochs=1)
    model = nn.Linear(1, 1)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    loop = loop_in(tmp_path / "ckpt", state={**state, "scheduler": nn.Identity()})
    with pytest.raises(ValueError, match=r"another optimizer than AdamW: .* no betas, eps;"):
        loop.__enter__()


def test_other_names_than_in_the_checkpoint(tmp_path: Path) -> None:
    train(tmp_path, "plain", epochs=1)
    with pytest.raises(ValueError, match="holds model, optimizer, scheduler, and state= has"):
        loop_in(tmp_path / "ckpt").__enter__()


def test_checkpoints_of_a_trainer_are_not_taken_for_ours(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(tmp_path, max_epochs=1)
    with pytest.raises(ValueError, match="was not saved by an ElasticLoop"):
        loop_in(tmp_path / "ckpt").__enter__()


def test_ranks_without_a_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="started 2 ranks, but no process group exists"):
        loop_in(tmp_path).__enter__()


def test_epochs_outside_of_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must be called inside `with ElasticLoop"):
        next(iter(loop_in(tmp_path).epochs(1)))


ELASTIC = {f"elastic/{name}" for name in ("restarts", "lost_time_s", "samples_recomputed")}
OF_SAVES = {f"checkpoint/{name}" for name in ("blocking_ms", "queue_ms", "optimizer_wait_ms")}
OF_COMMITS = {f"checkpoint/{name}" for name in ("write_ms", "bytes")}
ALWAYS = {f"checkpoint/{name}" for name in ("in_flight", "skipped", "failed")}
ALL = {"elastic/world_size"} | ELASTIC | OF_SAVES | OF_COMMITS | ALWAYS


def test_metrics_reach_trackers(tmp_path: Path) -> None:
    """What takes a dict, as ``wandb.log`` does, and the files of Fabric's logger."""
    rows: list[dict[str, float]] = []
    logger = CSVLogger(tmp_path, name="csv", version=0, flush_logs_every_n_steps=1)
    fabric = Fabric(accelerator="cpu", devices=1, loggers=[logger])
    made: list[ElasticLoop] = []

    def log(loop: ElasticLoop) -> None:
        made[:] = [loop]
        rows.append(dict(loop.metrics()))
        fabric.log_dict(rows[-1], step=loop.steps)

    settings = {"snapshot": "sync", "writer": "thread"}
    for faults in ({"strike": failing("in_pass", 7)}, {}):
        with suppress(Fault):
            train(tmp_path / "run", "plain", epochs=1, watch=log, elastic=settings, **faults)
        log(made[0])
    written = (tmp_path / "csv" / "version_0" / "metrics.csv").read_text().splitlines()
    found = [
        {name: float(value) for name, value in row.items() if name != "step" and value}
        for row in csv.DictReader(written)
    ]
    assert found == rows
    before = [row for row in rows if row["elastic/restarts"] == 0]
    after = rows[len(before) :]
    assert before[0].keys() == ALL - OF_SAVES - OF_COMMITS  # a save is due after step 2
    assert before[-1].keys() == ALL
    # 7 steps of 4 samples had been done, and 6 of them saved.
    assert {row["elastic/samples_recomputed"] for row in before} == {0}
    assert {row["elastic/samples_recomputed"] for row in after} == {4}
    assert "elastic/lost_time_s" not in after[0], "training is where it was before the fault"
    assert 0 < after[-1]["elastic/lost_time_s"] < 60
    assert after[-1].keys() == ALL
    assert after[-1]["checkpoint/bytes"] > 1000
    assert after[-1]["elastic/world_size"] == 1
    assert all(math.isfinite(value) for row in rows for value in row.values())


def test_without_an_account_nothing_is_said_of_restarts() -> None:
    """As in an object store; and nothing at all before training begins."""
    model = net()
    with ElasticLoop(
        f"memory://account-{os.urandom(4).hex()}",
        loader=make_loader(),
        state={"model": model},
        writer="thread",
    ) as loop:
        assert loop.metrics() == {}
        assert loop.run_id
        for _ in loop.epochs(1):
            assert loop.metrics().keys() == ALL - ELASTIC - OF_SAVES - OF_COMMITS
            for _, x in loop.batches():
                loop.scale_loss(model(x).sum()).backward()
                loop.step_done()
    assert loop.metrics().keys() == ALL - ELASTIC


DOCUMENT = ROOT / "docs" / "elastic.md"
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


SCRIPT = Path(__file__).with_name("loop_pair.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("pair")
    torchrun(SCRIPT, folder, ranks=2, limit=90, python=quick_python).require_success()
    return folder


def test_a_second_start_goes_on_to_the_same_end(folder: Path) -> None:
    """To the bit: both models, both optimizers, the residuals of both, two passes for a step."""
    first, other = (json.loads((folder / f"found-{rank}.json").read_text()) for rank in (0, 1))
    assert first == other
    assert first["run"]["hash"] == first["quiet"]["hash"]
    assert first["run"]["steps"] == first["quiet"]["steps"] == 6
    assert first["run"]["rates"] == first["quiet"]["rates"][4:]


@pytest.mark.parametrize(
    ("policy", "factor", "batch"),
    [("scale_lr", 0.5, 8), ("scale_lr:sqrt", 0.5**0.5, 8), ("fixed_global_batch", 1.0, 16)],
)
def test_one_rank_goes_on_with_other_learning_rates(
    policy: Any, factor: float, batch: int, folder: Path
) -> None:
    """Of both optimizers, and of the scheduler of one of them."""
    found = train_pair(folder / policy, batch_policy=policy)
    before, after = RATES, RATES["judge"] * 0.5  # from step 6 on, by the scheduler
    rates = found["rates"]
    assert rates[0] == pytest.approx([rate * factor for rate in before.values()])
    assert rates[-1] == pytest.approx([before["maker"] * factor, after * factor])
    steps = committed(folder / policy / "account")
    resumed = [step for step in steps.values() if step.world == 1]
    assert len(resumed[0].ids) == batch
    for epoch in range(2):
        ids = [each for step in steps.values() if step.epoch == epoch for each in step.ids]
        assert sorted(ids) == list(range(SIZE))
