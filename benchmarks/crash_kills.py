"""Trials in which the trainer, its writer or both are killed."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from dataclasses import asdict

from benchmarks.crash_process import Child, kill
from benchmarks.crash_trial import Trial, any_moment, start


def kill_trainer(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of the trainer; its writer finishes."""
    kill_at(trial, chance, lambda child: child.send(signal.SIGKILL))


def kill_both(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of trainer and writer, as when a cgroup or a machine ends."""
    trainer_first = chance.random() < 0.5

    def strike(child: Child) -> None:
        writer = child.children()
        if trainer_first:
            child.send(signal.SIGKILL)
        kill(writer)
        child.send(signal.SIGKILL)

    kill_at(trial, chance, strike)


def kill_at(trial: Trial, chance: random.Random, strike: Callable[[Child], None]) -> None:
    moment = any_moment(chance)
    trial.verdict.details["moment"] = asdict(moment)
    child = start(trial)
    try:
        if trial.follow(child, trial.ledger, moment):
            strike(child)
            trial.drain(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
    trial.resume()


def kill_writer(trial: Trial, chance: random.Random) -> None:
    """SIGKILL of the writer, once or twice; the trainer goes on to its end."""
    moments = [any_moment(chance) for _ in range(chance.choice((1, 1, 2)))]
    trial.verdict.details["moments"] = [asdict(moment) for moment in moments]
    child = start(trial)
    try:
        for moment in moments:
            if trial.follow(child, trial.ledger, moment):
                kill(child.children())
        trial.drain(child, trial.ledger)
        trial.check_reader()
    finally:
        child.close()
    verdict, ledger = trial.verdict, trial.ledger
    verdict.require(ledger.ended, "hang", "the trainer did not get to its end")
    saves = {message["step"] for message in ledger.of("saved")}
    failed = [m["step"] for m in ledger.of("failed") if m["step"] is not None]
    verdict.require(len(failed) == len(set(failed)), "report", f"told twice: {failed}")
    verdict.require(
        saves == ledger.committed | set(failed), "report",
        f"saves {saves}, committed {ledger.committed}, failed {failed}",
    )  # fmt: skip
    trial.check_first_run(leftovers="all")
    trial.resume()
