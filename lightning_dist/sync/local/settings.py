"""Settings of local updates: schedule of the exchanges, and use of the mean."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any, Literal, get_args

Method = Literal["local_sgd", "post_local_sgd", "diloco", "streaming", "sparseloco"]
Weight = Literal["workers", "samples"]
Replicas = Literal["rank", "node"]

_DEFAULTS: dict[str, dict[str, Any]] = {
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


@dataclass(frozen=True)
class LocalUpdateSettings:
    """Arguments of ``local_updates`` for its schedule and outer steps; equal on all ranks."""

    method: Method
    sync_every: int
    fragments: int = 1
    overlap_steps: int = 0
    mixing: float = 0.0
    ddp_steps: int = 0
    outer_lr: float = 1.0
    outer_momentum: float = 0.0
    weigh_by: Weight = "workers"
    offload: bool = False

    @classmethod
    def check(
        cls, method: Method, *, outer_optimizer: object = None, **given: Any
    ) -> LocalUpdateSettings:
        """Fill in the defaults of ``method`` for what is None, and refuse what cannot work.

        Args:
            outer_optimizer: the user's own, which has rates of its own; None: the outer SGD.
        """
        if method not in get_args(Method):
            near = difflib.get_close_matches(str(method), get_args(Method), n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(get_args(Method))
            raise ValueError(f"method must be one of {known}, got {method!r}{meant}")
        chosen = {key: value for key, value in given.items() if value is not None}
        if not (outer_optimizer is None or callable(outer_optimizer)):
            raise ValueError(
                f"outer_optimizer must make an optimizer of tensors, got {outer_optimizer!r}; "
                "write lambda tensors: torch.optim.AdamW(tensors, lr=0.1)"
            )
        if outer_optimizer is not None and chosen.keys() & {"outer_lr", "outer_momentum"}:
            raise ValueError(
                "outer_lr and outer_momentum are of the outer SGD, got them with an "
                "outer_optimizer; set them there"
            )
        settings = cls(method=method, **{**_DEFAULTS[method], **chosen})
        settings._check_counts()
        settings._check_rates()
        if settings.weigh_by not in get_args(Weight):
            raise ValueError(
                f"weigh_by must be 'workers' (equal) or 'samples', got {settings.weigh_by!r}"
            )
        if not isinstance(settings.offload, bool):
            raise ValueError(f"offload must be True or False, got {settings.offload!r}")
        return settings

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

    def _check_counts(self) -> None:
        least = {"sync_every": 1, "fragments": 1, "overlap_steps": 0, "ddp_steps": 0}
        for name, limit in least.items():
            value = getattr(self, name)
            if type(value) is not int or value < limit:
                raise ValueError(f"{name} must be {limit} or more, got {value!r}")
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

    def _check_rates(self) -> None:
        if not self.outer_lr > 0:
            raise ValueError(f"outer_lr must be above 0, got {self.outer_lr!r}")
        for name in ("outer_momentum", "mixing"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ValueError(f"{name} must be 0 or more and less than 1, got {value!r}")
