"""Settings of local updates: when workers exchange, how the mean is used, and what travels."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from lightning_dist.settings.declared import (
    AllowedValues,
    choice,
    count,
    number,
    setting,
    settings_of,
)
from lightning_dist.settings.exchange import LOCAL, LOCAL_SHARDS, ExchangeSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from lightning_dist.codecs import Codec

Method = Literal["local_sgd", "post_local_sgd", "diloco", "streaming", "sparseloco"]
METHODS: tuple[str, ...] = get_args(Method)
Weight = Literal["workers", "samples"]
Replicas = Literal["rank", "node"]
OuterOptimizer: TypeAlias = "Callable[[Sequence[Tensor]], Optimizer]"
OuterSchedule: TypeAlias = "Callable[[Optimizer], LRScheduler]"

_METHODS: dict[str, dict[str, Any]] = {
    "local_sgd": {"sync_every": 8},
    "post_local_sgd": {"sync_every": 8},
    # Windows and momentum of which the loss is measured (benchmarks/results/README.md); the papers
    # have windows of 30 to 500 steps, and momentum of 0.9.
    "diloco": {"sync_every": 16, "outer_lr": 0.7, "outer_momentum": 0.6},
    "streaming": {
        "sync_every": 16,
        "fragments": 4,
        "overlap_steps": 3,
        "mixing": 0.5,
        "outer_lr": 0.4,
        "outer_momentum": 0.9,
    },
    "sparseloco": {"sync_every": 4},
}
_CODECS = {"sparseloco": "topk:ratio=0.015625,values=int2,decay=0.95"}


def default_codec(method: str) -> str:
    """The codec of the pseudo-gradient where the user names none."""
    return _CODECS.get(method, "int8")


_DEFAULTS: dict[str, Any] = {
    **{"fragments": 1, "overlap_steps": 0, "mixing": 0.0, "ddp_steps": 0},
    **{"outer_lr": 1.0, "outer_momentum": 0.0, "weigh_by": "workers", "offload": False},
}
"""Where the method has no other."""
_BELOW_1 = number("0 or more and less than 1", lambda value: 0 <= value < 1)


@dataclass(frozen=True)
class LocalUpdateSettings(ExchangeSettings):
    """Everything that decides what workers do between exchanges, and what these send.

    What is None is the default of the method. Equal on all ranks, or the start fails.

    Raises:
        ValueError: a setting is out of range or cannot take effect.
    """

    kind: ClassVar[str] = LOCAL
    instead: ClassVar[Mapping[str, str]] = {
        "start_step": "ddp_steps are steps of plain DDP before the first local one",
        "delay": "overlap_steps are the steps that an exchange may take",
        "compile_kernels": "they exchange seldom and compile nothing, so leave it out",
        "state_update": "there is no step to undo; leave it out",
    }

    method: Method = setting(
        "diloco",
        choice(*METHODS),
        'defaults of the arguments that follow. ``"local_sgd"``: the mean of the weights; '
        '``"post_local_sgd"``: after ``ddp_steps`` steps of plain DDP; ``"diloco"``: outer '
        'Nesterov momentum; ``"streaming"``: fragments, applied while training goes on; '
        '``"sparseloco"``: the mean of the largest changes, in two bits each.',
        positional=True,
        by_method=True,
        ask="Exchange every few steps (local updates)? diloco, streaming, ...; null: every step",
    )
    sync_every: int = setting(
        None,
        count("attempted steps", least=1),
        "attempted optimizer steps between two outer steps of a parameter. None: 16; SGD methods "
        "8; sparseloco 4.",
        accepts="int | None",
        by_method=True,
        ask="Local steps between two exchanges of a parameter; null: by method",
    )
    fragments: int = setting(
        None,
        count("parts", least=1),
        "parts of the model that are exchanged in turn. None: 1; streaming 4.",
        accepts="int | None",
        by_method=True,
        ask="Parts of the model that are exchanged in turn; null: by method",
    )
    overlap_steps: int = setting(
        None,
        count("steps"),
        "steps for which an exchange runs before its mean is used; 0 waits for it. None: 0; "
        "streaming 3.",
        accepts="int | None",
        by_method=True,
        ask="Steps that an exchange has before its mean is used; null: by method",
    )
    mixing: float = setting(
        None,
        _BELOW_1,
        "weight of a worker's own parameters when the anchor has moved, 0 to 1. None: 0; "
        "streaming 0.5.",
        accepts="float | None",
        by_method=True,
    )
    ddp_steps: int = setting(
        None,
        count("steps"),
        "steps of plain DDP before the first local one. None: 0.",
        accepts="int | None",
        by_method=True,
        ask="Steps of plain DDP before the first local one; null: none",
    )
    outer_lr: float = setting(
        None,
        number("above 0", lambda value: value > 0),
        "learning rate of the outer SGD. None: 1; diloco 0.7; streaming 0.4.",
        accepts="float | None",
        by_method=True,
    )
    outer_momentum: float = setting(
        None,
        _BELOW_1,
        "Nesterov momentum of the outer SGD. None: 0; diloco 0.6; streaming 0.9.",
        accepts="float | None",
        by_method=True,
    )
    weigh_by: Weight = setting(
        "workers",
        choice(*get_args(Weight)),
        'weight of a worker in the mean: ``"workers"``, all the same, or ``"samples"``, the number '
        "of samples (or tokens) of its steps. A Trainer counts them; elsewhere say how many.",
        by_method=True,
    )
    offload: bool = setting(
        False,
        choice(True, False),
        "keep the anchor and the outer optimizer's state in the host's memory between outer steps.",
        by_method=True,
    )
    outer_optimizer: OuterOptimizer | None = setting(
        None,
        AllowedValues(
            "None (SGD), or make an optimizer of tensors, such as lambda tensors: "
            "torch.optim.AdamW(tensors, lr=0.1)",
            lambda value: value is None or callable(value),
        ),
        "another one, made from the anchor's tensors, as ``lambda tensors: "
        "torch.optim.AdamW(tensors, lr=0.1)``. None: SGD.",
        outside=False,
    )
    outer_schedule: OuterSchedule | None = setting(
        None,
        None,
        "learning rate scheduler, made from the outer optimizer. It steps after every outer step "
        "(of all fragments) but that of :meth:`~LocalUpdates.finish`. None: constant.",
        outside=False,
    )
    codec: str | Codec | Mapping[str, Any] = setting(
        None,
        settings_of(ExchangeSettings)["codec"].rule,
        "codec of the pseudo-gradient, as for :func:`~lightning_dist.compress_ddp`. None: int8, of "
        "sparseloco its own.",
        accepts="str | Codec | Mapping[str, Any] | None",
        objects=True,
        ask=settings_of(ExchangeSettings)["codec"].ask,
    )
    # They exchange seldom and compile nothing: no setting here.
    compile_kernels: bool | Literal["auto"] = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            near = difflib.get_close_matches(str(self.method), METHODS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"method must be one of {', '.join(METHODS)}, got {self.method!r}{meant}"
            )
        if self.outer_optimizer is not None:
            given: Any = self
            if given.outer_lr is not None or given.outer_momentum is not None:
                raise ValueError(
                    "outer_lr and outer_momentum are of the outer SGD, got them with an "
                    "outer_optimizer; set them there"
                )
        defaults = {**_DEFAULTS, "codec": default_codec(self.method), **_METHODS[self.method]}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        super().__post_init__()

    def _check_together(self) -> None:
        super()._check_together()
        if self.sync_every % self.fragments:
            raise ValueError(
                "sync_every must be a multiple of fragments, which take turns at equal intervals, "
                f"got sync_every={self.sync_every} and fragments={self.fragments}"
            )
        if self.overlap_steps >= self.interval and self.overlap_steps:
            raise ValueError(
                "overlap_steps must be less than sync_every / fragments, so that one exchange is "
                f"under way at a time, got {self.overlap_steps} and {self.sync_every} / "
                f"{self.fragments} = {self.interval}"
            )
        if self.method == "post_local_sgd" and not self.ddp_steps:
            raise ValueError(
                "post_local_sgd is plain DDP before ddp_steps, got ddp_steps=0; set it to the "
                "number of steps before the first local one, or use method='local_sgd'"
            )

    def _resolve_codec(self) -> None:
        super()._resolve_codec()
        if any(leaf.momentum_correction for leaf in self.inter.leaves()):
            raise ValueError(
                f"codec {self.inter.name!r} gives gradients momentum, and a pseudo-gradient is a "
                "difference of weights; use 'topk'"
            )

    def few(self, steps: float) -> str:
        """Why the outer steps of so many local ones are too few; empty if they are enough."""
        outer = int(steps) // self.sync_every
        for need, least, why in (
            (self.method == "sparseloco", 64, "an exchange sends 1/64 of the change"),
            (self.outer_momentum > 0, 20, "outer momentum needs as many to build up"),
        ):
            if need and outer < least:
                return (
                    f"{outer} outer steps in {steps:g} local ones, and {self.method} needs {least} "
                    f"or more: {why}. Lower sync_every={self.sync_every}, or use 'local_sgd'"
                )
        return ""

    @property
    def interval(self) -> int:
        """Attempted steps between two outer steps of any fragments."""
        return self.sync_every // self.fragments

    def fragment_at(self, step: int) -> int | None:
        """The fragment that is sent after local step ``step``, from 1 on; None: none is."""
        if step % self.interval:
            return None
        return (step // self.interval - 1) % self.fragments

    @property
    def outer(self) -> dict[str, Any]:
        """The settings that those of an exchange have not, JSON-able."""
        of_exchange = {field.name for field in fields(ExchangeSettings)}
        return {
            name: getattr(self, name)
            for name, declared in settings_of(type(self)).items()
            if name not in of_exchange and declared.outside
        }


@dataclass(frozen=True)
class ShardedLocalUpdateSettings(LocalUpdateSettings):
    """Settings of local updates whose workers are sharded models."""

    kind: ClassVar[str] = LOCAL_SHARDS
    instead: ClassVar[Mapping[str, str]] = {
        **LocalUpdateSettings.instead,
        "parameters": "FSDP gathers parameters inside a node itself; leave it out, or use "
        "CompressedModelParallelStrategy",
        "hierarchical": "each rank exchanges its shard; leave it out",
        **dict.fromkeys(
            ("ranks_per_node", "rank_groups"), "replicate_size is the number of workers"
        ),
    }

    def _check_together(self) -> None:
        super()._check_together()
        if self.ddp_steps:
            raise ValueError(
                "ddp_steps are steps of plain DDP, which needs the whole model on each rank, got "
                f"ddp_steps={self.ddp_steps}; leave it out (method='local_sgd' in the place of "
                "'post_local_sgd'), and begin from a checkpoint of CompressedModelParallelStrategy"
            )
