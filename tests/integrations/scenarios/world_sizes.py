"""Another number of ranks than the checkpoint `resume` of two ranks left in FOLDER/half.ckpt."""

from __future__ import annotations

from scenarios.catalogue import Facts, alone, folder, scenario
from scenarios.checkpoints import SETTINGS, fit_and_save, model, saved
from scenarios.fabric_runs import Run
from scenarios.fitting import compressed, make_trainer, snapshot
from scenarios.lifecycle import AtStart


def _resume_the_checkpoint_of_two(name: str) -> Facts:
    start = AtStart()
    trainer = make_trainer(
        compressed(**SETTINGS),
        max_epochs=2,
        callbacks=[start, saved(name)],
        enable_checkpointing=True,
    )
    trainer.fit(model(), ckpt_path=folder() / "half.ckpt")
    return {"start": start.residuals, "step": start.step, "resumed": snapshot(trainer)}


@scenario
def two_to_three() -> Facts:
    return _resume_the_checkpoint_of_two("three")


@scenario
def two_to_one() -> Facts:
    with alone():
        return _resume_the_checkpoint_of_two("one")


@scenario
def fabric_two_to_three() -> Facts:
    """The checkpoint that `fabric_resumes` of two ranks left."""
    run = Run()
    run.fabric.load(folder() / "fabric.ckpt", run.state())
    start = run.facts()
    run.train(4)
    return {"start": start, "resumed": run.facts()}


@scenario
def resume_three() -> Facts:
    """As `resume`, through the two-shot exchange."""
    whole = fit_and_save("whole3", compressed(**SETTINGS), epochs=2)
    fit_and_save("half3", compressed(**SETTINGS), epochs=1)
    path = folder() / "half3.ckpt"
    resumed = fit_and_save("resumed3", compressed(**SETTINGS), epochs=2, ckpt_path=path)
    return {"whole": whole, "resumed": resumed}
