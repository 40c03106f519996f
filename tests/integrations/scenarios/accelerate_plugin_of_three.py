"""Three ranks load what two have saved."""

from __future__ import annotations

from scenarios.accelerate_runs import Run
from scenarios.accelerate_states import warnings
from scenarios.catalogue import Facts, folder, scenario


@scenario
def plugin_of_three() -> Facts:
    with Run() as run, warnings() as messages:
        run.accelerator.load_state(str(folder() / "of_two_plugins"))
        loaded = run.facts()
        run.train(1)
        return {**loaded, "digests": run.digests, "messages": messages}
