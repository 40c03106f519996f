"""Every rule of the table has a training that breaks it, beside one that keeps it."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from threads import on_threads
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import FSDPModule
from torch.distributed.optim import ZeroRedundancyOptimizer
from worlds import Rank

from lightning_dist import OneBitAdam
from lightning_dist.settings.exchange import (
    DDP,
    FSDP2,
    LOCAL,
    LOCAL_SHARDS,
    ExchangeSettings,
    ShardedSettings,
)
from lightning_dist.settings.local_updates import LocalUpdateSettings, ShardedLocalUpdateSettings
from lightning_dist.sync.base import Environment
from lightning_dist.sync.rules import RULES, Case, check

SCALED = Environment(grad_scaler=torch.amp.GradScaler("cpu"))
DELAYED = ExchangeSettings(delay=1)
ROUNDED = ShardedSettings("int8", parameters="int8", error_feedback=True)
SETTINGS = {
    DDP: ExchangeSettings(),
    FSDP2: ShardedSettings(),
    LOCAL: LocalUpdateSettings(),
    LOCAL_SHARDS: ShardedLocalUpdateSettings(),
}
Break = Callable[[Case, Rank], Case]


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def frozen() -> nn.Module:
    return plain().requires_grad_(False)


def on_two_devices() -> nn.Module:
    model = plain()
    model[1].to_empty(device="meta")
    return model


def expert() -> nn.Module:
    model = plain()
    model[0].weight.allreduce = False
    return model


def planted(rank: Rank, **facts: object) -> Any:
    """A model in DDP with facts that DDP takes on an accelerator, or newer torch, alone."""
    model = rank.ddp(plain())
    for name, fact in facts.items():
        setattr(model, name, fact)
    return model


def hooked(rank: Rank) -> Any:
    model = rank.ddp(plain())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def of(kind: type) -> Any:
    """A module that is an instance of ``kind`` to whoever asks."""
    module = nn.Linear(4, 4)
    module.__class__ = type("Odd", (nn.Linear, kind), {})
    return module


def given(**facts: Any) -> Break:
    return lambda case, rank: replace(case, **facts)


def model(make: Callable[[], nn.Module]) -> Break:
    return lambda case, rank: replace(case, model=make())


def optimizers(*kinds: Any, **facts: Any) -> Break:
    def broken(case: Case, rank: Rank) -> Case:
        assert case.model is not None
        layers = nn.ModuleList(case.module.children())  # each optimizer has one of its own
        made = [kind(of.parameters(), lr=0.1) for kind, of in zip(kinds, layers, strict=False)]
        return replace(case, optimizers=made, **facts)

    return broken


def onebit(parameters: Any, lr: float) -> OneBitAdam:
    return OneBitAdam(parameters, lr, freeze_step=4)


def momentum(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr, momentum=0.9)


def zero(parameters: Any, lr: float) -> Any:
    return object.__new__(ZeroRedundancyOptimizer)  # it would need the default group


def reducer(**facts: Any) -> Any:
    names = {nn.Parameter(torch.ones(64, 64)): "weight"}
    return cast(Any, SimpleNamespace(names=names, step=0, **facts))


def unused(rank: Rank) -> Any:
    return rank.ddp(plain(), find_unused_parameters=True)


def mesh(*sizes: int) -> Any:
    return SimpleNamespace(size=lambda dimension: sizes[dimension])


BROKEN: dict[str, tuple[Break, str]] = {
    "a parameter is trained": (model(frozen), "has none; unfreeze one"),
    "a process trains on one device": (model(on_two_devices), "needs one device per process"),
    "ranks have the same parameters": (model(expert), "marked as that of an expert"),
    "sparse gradients are not compressed": (
        model(lambda: nn.Sequential(nn.Embedding(400, 400, sparse=True))),
        "is sparse .* averaged at once and uncompressed",
    ),
    "the model is in DDP": (model(plain), "needs a DistributedDataParallel"),
    "DDP has no mixed precision": (
        lambda case, rank: replace(case, model=planted(rank, mixed_precision=object())),
        "use torch.autocast",
    ),
    "DDP sends every bucket": (
        lambda case, rank: replace(case, model=planted(rank, skip_all_reduce_unused_params=True)),
        "skips buckets",
    ),
    "DDP has no other hook": (
        lambda case, rank: replace(case, model=hooked(rank)),
        "takes one communication hook, and fp16_compress_hook is registered",
    ),
    "what is written was used": (
        lambda case, rank: replace(
            case, settings=ExchangeSettings(state_update="immediate"), model=unused(rank)
        ),
        "leave state_update at 'auto'",
    ),
    "what is delayed will be used": (
        lambda case, rank: replace(case, settings=DELAYED, model=unused(rank)),
        "may use other parameters",
    ),
    "what is delayed is not scaled": (
        given(settings=DELAYED, environment=SCALED),
        "under the loss scale of the next step",
    ),
    "a model is attached once": (
        given(attached=SimpleNamespace(entry="compress_fsdp")),
        "compress_fsdp was called on it before",
    ),
    "errors in 8 bits are not scaled": (
        given(settings=ROUNDED, environment=SCALED),
        "gradients must not be scaled",
    ),
    "workers have no DDP inside": (
        lambda case, rank: replace(case, model=nn.Sequential(rank.ddp(plain()))),
        "has a DistributedDataParallel inside",
    ),
    "ddp_steps have DDP": (
        given(settings=LocalUpdateSettings(ddp_steps=4), model=plain()),
        "wrap it, or leave ddp_steps out",
    ),
    "local steps have no DDP": (
        lambda case, rank: replace(
            case, model=planted(rank, process_group=SimpleNamespace(size=lambda: 2)), world_size=2
        ),
        "which averages gradients in every step",
    ),
    "ddp_steps are the framework's": (
        lambda case, rank: replace(
            case,
            settings=LocalUpdateSettings(ddp_steps=4),
            model=rank.ddp(plain()),
            environment=Environment(steps_itself=True),
        ),
        "With manual optimization",
    ),
    "there are several workers": (
        given(environment=Environment(mesh=mesh(1, 4))),
        "got one node of 4 ranks",
    ),
    "momentum is applied once": (
        optimizers(momentum, settings=ExchangeSettings("dgc")),
        "has its own; use torch.optim.SGD without momentum",
    ),
    "what is delayed is its own": (
        optimizers(torch.optim.SGD, torch.optim.SGD, settings=DELAYED),
        "must belong to the same optimizer, got 2 optimizers",
    ),
    "momenta are not delayed": (
        optimizers(onebit, settings=DELAYED),
        "OneBitAdam needs exchanged momenta in the same step",
    ),
    "momenta are not clipped": (optimizers(onebit), "would clip OneBitAdam's momenta"),
    "momenta are whole": (optimizers(onebit), "here they are sharded"),
    "local steps are local": (optimizers(zero), "exchanges between ranks in every step"),
    "shards of workers can be saved": (
        lambda case, rank: replace(
            case, model=of(FSDPModule), environment=Environment(saves_shards=False)
        ),
        "call lightning_dist.local_updates in a loop of your own",
    ),
    "compression begins": (
        given(settings=ExchangeSettings(start_step=8), reducer=reducer(), steps=8),
        "got step 8 as its first",
    ),
    "OneBitAdam's begins": (
        optimizers(onebit, reducer=reducer(), steps=4),
        "got freeze_step=4 and 4 steps",
    ),
    "there is an outer step": (given(steps=15), "must have an outer step"),
}


def good(kind: str, rank: Rank) -> Case:
    """A training that keeps every rule."""
    net = rank.ddp(plain()) if kind == DDP else plain()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Case(SETTINGS[kind], net, [optimizer], reducer=reducer(), steps=100)


def test_every_rule_has_a_case() -> None:
    assert BROKEN.keys() == {rule.name for rule in RULES}
    assert len(RULES) == len(BROKEN), "names differ"


@pytest.mark.parametrize("name", BROKEN)
@on_threads(1)
def test_a_rule_is_kept_or_says_what_is_wrong(rank: Rank, name: str) -> None:
    rule = next(each for each in RULES if each.name == name)
    broken, says = BROKEN[name]
    kept = good(rule.of[0], rank)
    check(kept, at=rule.at)
    with pytest.raises(ValueError, match=says):
        check(broken(kept, rank), at=rule.at)
