"""CompressedDDPPlugin on two ranks: what is saved and loaded, of one model and of two."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.accelerate import Accelerator, AsyncStateCheckpointer
from scenarios.accelerate_runs import TOPK, Run
from scenarios.accelerate_states import error_of, warnings
from scenarios.accelerating import forget_accelerators
from scenarios.catalogue import Facts, folder, rank, scenario
from scenarios.fitting import parameters
from scenarios.models import WIDTH


@scenario
def plugin_resumes() -> Facts:
    """By save_state, and by AsyncStateCheckpointer; two models each."""
    facts: Facts = {}
    for way in ("save_state", "AsyncStateCheckpointer"):
        target = str(folder() / f"plugin_{way}")
        with Run(models=2) as whole:
            whole.train(4)
            state = (
                whole.accelerator
                if way == "save_state"
                else AsyncStateCheckpointer(whole.accelerator)
            )
            state.save_state(target)
            if way == "AsyncStateCheckpointer":
                state.close()
            whole.train(4)
            facts[way] = {"whole": whole.facts()}
        dist.barrier()
        with Run(models=2, by_hand=False) as resumed:
            for _ in range(4):
                next(resumed.batches)
            state = (
                resumed.accelerator
                if way == "save_state"
                else AsyncStateCheckpointer(resumed.accelerator)
            )
            with warnings() as messages:
                state.load_state(target)
            resumed.train(4)
            if way == "AsyncStateCheckpointer":
                state.close()
            facts[way] |= {"resumed": resumed.facts(), "messages": messages}
    return facts


@scenario
def plugin_other_checkpoints() -> Facts:
    """Of plain DDP, under the plugin; and of the plugin, without it."""
    target = str(folder() / "plain_accelerate")
    with Run(None) as plain:
        plain.train(2)
        plain.accelerator.save_state(target)
    dist.barrier()
    with Run() as ours:
        ours.train(2)
        owed = ours.facts()
        with warnings() as messages:
            ours.accelerator.load_state(target)
        facts = {"owed": owed, "loaded": ours.facts(), "messages": messages}
        ours.train(2)
        ours.accelerator.save_state(str(folder() / "of_plugin"))
        saved = ours.facts()
    dist.barrier()
    with Run(None) as plain:
        plain.accelerator.load_state(str(folder() / "of_plugin"))
        return {**facts, "saved": saved, "plain": plain.facts()}


@scenario
def plugin_folder_of_one_rank() -> Facts:
    """Rank 1 has a folder of its own, without the residuals of all ranks."""
    target = folder() / f"plugin_own_{rank()}"
    with Run() as run:
        run.train(1)
        run.accelerator.save_state(str(target))
        loading = error_of(lambda: run.accelerator.load_state(str(target)))
        run.accelerator.project_configuration.save_on_each_node = True
        return {"loading": loading, "saving": error_of(lambda: run.accelerator.save_state(target))}


@scenario
def plugin_for_others() -> Facts:
    """What `plugin_of_three` loads."""
    with Run() as run:
        run.train(3)
        run.accelerator.save_state(str(folder() / "of_two_plugins"))
        return run.facts()


@scenario
def plugin_end_training() -> Facts:
    """The last save is durable when `end_training` returns, and threads are gone."""
    with Run(by_hand=False) as run:
        state = AsyncStateCheckpointer(run.accelerator)
        run.train(1)
        state.save_state(folder() / "at_the_end")
        reducers = run.compression.reducers
        run.accelerator.state.destroy_process_group = dist.barrier  # the scenarios share theirs
        run.accelerator.end_training()
        return {
            "committed": state.last_committed is not None,
            "manifest": (folder() / "at_the_end" / "manifest.json").exists(),
            "closed": [reducer.closed for reducer in reducers],
        }


class Adversaries:
    """A generator and a critic with an optimizer each, trained in turn.

    Args:
        quiet: nothing of the critic travels while the generator learns.
    """

    def __init__(self, *, quiet: bool = True) -> None:
        forget_accelerators()
        self.accelerator, self.quiet = Accelerator(cpu=True, kwargs_handlers=[TOPK]), quiet
        torch.manual_seed(3)
        models = [
            nn.Sequential(nn.Linear(WIDTH, 256), nn.Tanh(), nn.Linear(256, WIDTH)),
            nn.Sequential(nn.Linear(WIDTH, 512), nn.Tanh(), nn.Linear(512, 1)),
        ]
        steps = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
        self.generator, self.critic, *self.steps = self.accelerator.prepare(*models, *steps)
        torch.manual_seed(rank())

    def train(self, batches: list[Tensor]) -> None:
        of_generator, of_critic = self.steps
        for real in batches:
            made = self.generator(real.flip(0))
            judged = self.critic(torch.cat([real, made.detach()]))
            self.accelerator.backward(judged[8:].mean() - judged[:8].mean())
            of_critic.step()
            of_critic.zero_grad()
            if self.quiet:
                with self.accelerator.no_sync(self.critic):
                    self.accelerator.backward(-self.critic(made).mean())
            else:
                self.accelerator.backward(-self.critic(made).mean())
            of_generator.step()
            of_generator.zero_grad()
            of_critic.zero_grad()

    def facts(self) -> Facts:
        compression = self.accelerator.compression
        assert compression is not None
        return {
            "parameters": {
                f"{index}.{name}": value
                for index, model in enumerate((self.generator, self.critic))
                for name, value in parameters(self.accelerator.unwrap_model(model)).items()
            },
            "residuals": [
                {name: each.residuals[name].clone() for name in each.residuals}
                for each in compression.reducers
            ],
            "stats": [dict(each) for each in compression.comm_stats()],
            "metrics": compression.metrics(),
        }

    def __enter__(self) -> Adversaries:
        return self

    def __exit__(self, *_: object) -> None:
        self.accelerator.compression.close()
        forget_accelerators()


@scenario
def plugin_adversaries() -> Facts:
    """4 steps; 2, a checkpoint and 2; 4 without no_sync."""
    draws = torch.Generator().manual_seed(rank())
    batches = [torch.randn(8, WIDTH, generator=draws) for _ in range(4)]
    target = str(folder() / "adversaries")
    with Adversaries() as whole:
        whole.train(batches)
        facts = {"whole": whole.facts()}
    with Adversaries() as first:
        first.train(batches[:2])
        first.accelerator.save_state(target)
    dist.barrier()
    with Adversaries() as second:
        second.accelerator.load_state(target)
        second.train(batches[2:])
        facts["resumed"] = second.facts()
    with Adversaries(quiet=False) as loud:
        loud.train(batches)
        facts["loud"] = loud.facts()
    return facts
