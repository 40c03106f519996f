"""Workers in local steps, computed one after the other in one process, without the package.

From what real ones have written down: ``joins`` when one begins, ``batch`` with ``ids`` and the
``factor`` of its loss, ``taken`` with the learning rate when its optimizer has stepped, and
``outer`` with the number of ``workers`` in a mean and the ``norm`` of the anchor then.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from recovering_loops import Net, Samples
from torch import Tensor, nn

Lines = Mapping[str, Sequence[Mapping[str, Any]]]


def norm_of(weights: Sequence[Tensor]) -> float:
    """Norm of all weights together, in float64."""
    return float(torch.cat([weight.detach().double().flatten() for weight in weights]).norm())


def are_close(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether they differ by rounding only."""
    return all(
        torch.allclose(a, b, rtol=1e-7, atol=1e-10) for a, b in zip(left, right, strict=True)
    )


class Twin:
    """One worker."""

    def __init__(self, size: int) -> None:
        self.net, self._samples = Net(), Samples(size)
        self._sgd = torch.optim.SGD(self.net.parameters(), lr=1.0, momentum=0.9)

    def take(self, batches: Sequence[Mapping[str, Any]], lr: float) -> None:
        for batch in batches:
            if not batch["ids"]:
                continue
            x = torch.stack([self._samples[index][1] for index in batch["ids"]])
            (batch["factor"] * (self.net(x) - x.flip(1)).square().mean()).backward()
        self._sgd.param_groups[0]["lr"] = lr
        self._sgd.step()
        self._sgd.zero_grad()

    @property
    def weights(self) -> list[Tensor]:
        return [parameter.data for parameter in self.net.parameters()]

    @property
    def momenta(self) -> list[Tensor]:
        states = (self._sgd.state[parameter] for parameter in self.net.parameters())
        return [state["momentum_buffer"] for state in states if state]

    def start(self, anchor: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.weights, anchor, strict=True):
            mine.copy_(theirs)
        for parameter, momentum in zip(self.net.parameters(), momenta, strict=False):
            self._sgd.state[parameter]["momentum_buffer"] = momentum.clone()


def replay(
    lines: Lines, folder: Path, *, settings: Mapping[str, Any], size: int, last: int
) -> list[Tensor]:
    """The anchor at the end.

    Raises:
        AssertionError: a mean was not that of workers that were there, or one that has joined did
            not begin with the anchor and moments of another.

    Args:
        folder: with ``begin-<worker>.pt``, the states with which workers have begun.
        settings: of the outer steps.
        size: samples.
        last: step.
    """
    anchor = [weight.clone() for weight in Twin(size).weights]
    lr, momentum = settings["outer_lr"], settings["outer_momentum"]
    outer = torch.optim.SGD(anchor, lr=lr, momentum=momentum, nesterov=True)
    means: dict[int, tuple[float, float]] = {}
    batches: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    rates: dict[tuple[str, int], float] = {}
    for name, of_worker in lines.items():
        for line in of_worker:
            if "batch" in line:
                batches[name, line["batch"]].append(line)
            elif "taken" in line:
                rates[name, line["taken"]] = line["lr"]
            elif "outer" in line:
                found = line["workers"], line["norm"]
                known = means.setdefault(line["outer"], found)
                assert known == found, f"outer step {line['outer']} of {name}: {found}, {known}"
    ended = {name for name, of_worker in lines.items() if any("end" in line for line in of_worker)}
    joins = {
        name: line["joins"]
        for name, of_worker in lines.items()
        for line in of_worker
        if "joins" in line
    }
    workers = {name: Twin(size) for name, step in joins.items() if step == 0}
    for step in range(1, last + 1):
        for name in [name for name, at in joins.items() if at == step - 1 > 0]:
            if (name, step) in rates:  # or else it was lost before
                workers[name] = _newcomer(name, folder, anchor, workers, size=size)
        taking = [name for name in workers if (name, step) in rates]
        assert len({rates[name, step] for name in taking}) == 1, f"learning rates of step {step}"
        for name in taking:
            workers[name].take(batches[name, step], rates[name, step])
        if step % settings["sync_every"]:
            continue
        count, norm = means[step // settings["sync_every"]]
        certain = [name for name in taking if (name, step + 1) in batches or name in ended]
        doubtful = [name for name in taking if name not in certain]
        for lost in combinations(doubtful, int(count) - len(certain)):
            of_workers = [workers[name].weights for name in (*certain, *lost)]
            mean = [torch.stack(each).mean(0) for each in zip(*of_workers, strict=True)]
            if _stepped(anchor, mean, outer, norm):
                break
        else:
            raise AssertionError(f"outer step after {step}: not the mean of {count} of {taking}")
        for name in workers:
            workers[name].start(anchor, ())
    return anchor


def _stepped(
    anchor: list[Tensor], mean: list[Tensor], outer: torch.optim.Optimizer, norm: float
) -> bool:
    """Take an outer step if the anchor has this norm then."""
    before, state = [each.clone() for each in anchor], outer.state_dict()
    state = {**state, "state": {k: dict(v) for k, v in state["state"].items()}}
    for of_parameter in state["state"].values():
        of_parameter["momentum_buffer"] = of_parameter["momentum_buffer"].clone()
    for weight, of_mean in zip(anchor, mean, strict=True):
        weight.grad = weight - of_mean
    outer.step()
    if abs(norm_of(anchor) - norm) < 1e-9 * norm:
        return True
    for weight, old in zip(anchor, before, strict=True):
        weight.copy_(old)
    outer.load_state_dict(state)
    return False


def _newcomer(
    name: str, folder: Path, anchor: list[Tensor], workers: Mapping[str, Twin], *, size: int
) -> Twin:
    net, sgd = torch.load(folder / f"begin-{name}.pt")
    keys = [key for key, _ in nn.Module.named_parameters(Net())]
    assert are_close([net[key] for key in keys], anchor), f"{name} began with other weights"
    momenta = [state["momentum_buffer"] for state in sgd["state"].values()]
    held = [each.momenta for each in workers.values()]
    found = [each for each in held if len(each) == len(momenta) and are_close(each, momenta)]
    assert found, f"{name} began with other moments"
    twin = Twin(size)
    twin.start(anchor, found[0])
    return twin
