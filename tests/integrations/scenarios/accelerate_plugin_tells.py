"""CompressedDDPPlugin on two ranks: what trackers are told."""

from __future__ import annotations

import importlib.util
from typing import Any

import accelerate
from accelerate.tracking import GeneralTracker

from lightning_dist.accelerate import CompressedDDPPlugin
from scenarios.accelerate_runs import Run
from scenarios.catalogue import Facts, folder, rank, scenario


class Notes(GeneralTracker):
    """A tracker that remembers."""

    name = "notes"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.configuration: Facts = {}
        self.logged: list[tuple[int | None, Facts]] = []

    @property
    def tracker(self) -> Notes:
        return self

    def store_init_configuration(self, values: Facts) -> None:
        self.configuration |= values

    def log(self, values: Facts, step: int | None = None, **_: Any) -> None:
        self.logged.append((step, values))


@scenario
def plugin_tells_trackers() -> Facts:
    accelerator = accelerate.Accelerator(cpu=True)
    compression = CompressedDDPPlugin("int8").attach(accelerator)
    facts: Facts = {"before prepare": compression.configuration()}
    for by_hand in (True, False):
        notes = Notes()
        with Run(CompressedDDPPlugin("int8"), by_hand=by_hand, log_with=notes) as run:
            config = {"lr": 0.1}
            if by_hand:
                config |= run.compression.configuration()
            run.accelerator.init_trackers("project", config=config)
            run.compression.log(0)  # nothing was sent so far
            run.train(2)
            run.compression.log(step=2)
            stats = dict(run.compression.comm_stats()[0])
            facts["comm_config"] = run.compression.reducers[0].comm_config()
        facts[str(by_hand)] = {
            "configuration": notes.configuration,
            "logged": notes.logged,
            "stats": stats,
        }
    return facts


@scenario
def plugin_in_wandb() -> Facts:
    """Accelerate's own tracker, offline; the test reads what rank 0 left."""
    if importlib.util.find_spec("wandb") is None:
        return {}
    home = folder() / "accelerate_wandb"
    home.mkdir(exist_ok=True)
    options = {"dir": str(home), "mode": "offline", "settings": {"silent": True}}
    with Run(CompressedDDPPlugin("int8"), by_hand=False, log_with="wandb") as run:
        run.accelerator.init_trackers("p", config={"lr": 0.1}, init_kwargs={"wandb": options})
        for step in range(2):
            run.train(1)
            run.compression.log(step)
        if rank() == 0:
            import wandb

            run.accelerator.get_tracker("wandb").finish()
            wandb.teardown()
        (reducer,) = run.compression.reducers
        return {"config": reducer.comm_config(), "metrics": run.compression.metrics()}
