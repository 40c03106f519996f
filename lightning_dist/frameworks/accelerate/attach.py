"""Attaching compression to an Accelerator, and its conditions.

A hook that would never run, or ranks that do not know of each other, are errors at this point.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

from lightning_dist.base.log import get_logger, prefixed
from lightning_dist.elastic.recovery.generations import is_alone
from lightning_dist.frameworks.accelerate.private import ddp_handler, prepared_models
from lightning_dist.ranks.launch import promised_ranks
from lightning_dist.settings import Resolved
from lightning_dist.sync.arguments import second_hook

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel

log = get_logger(__name__)

_PLUGIN = "the CompressedDDPPlugin"
_TWO_ON_CPU = (
    "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 --num_machines 1 "
    "train.py"
)


def print_outside(accelerator: Accelerator, resolved: Resolved) -> None:
    """Print on rank 0 which settings come from outside of the code, and from where."""
    if accelerator.is_main_process and (changed := resolved.outside_text()):
        # Not logged: Accelerate shows no log below a warning, and this is none.
        print(prefixed(f"set outside of the code: {changed}"), file=sys.stderr)


def kind_of(accelerator: Accelerator) -> str:
    """``NO``, ``MULTI_GPU``, ``FSDP``, ..."""
    return str(accelerator.distributed_type).rpartition(".")[2]


def wrap_method(accelerator: Accelerator, name: str, wrapper: Callable[..., Any]) -> None:
    """Have ``wrapper``, called with the method and its arguments, in the place of a method.

    For methods that Accelerate has no hook for.
    """
    setattr(accelerator, name, partial(wrapper, getattr(accelerator, name)))


def is_wrapped_by(accelerator: Accelerator, *kinds: type) -> bool:
    """Whether ``prepare`` was last wrapped by a method of one of these classes."""
    wrapper = getattr(accelerator.prepare, "func", None)
    return isinstance(getattr(wrapper, "__self__", None), kinds)


def require_attachable(accelerator: Accelerator) -> None:
    """Raise ValueError where the hook would not run or not be the only one; warn of one process."""
    if handler_of(accelerator) is not None:
        raise ValueError(
            "One CompressedDDPPlugin can be attached to an Accelerator, and one is attached "
            "already; attach it once, or give it in kwargs_handlers and do not attach it"
        )
    require_unprepared(accelerator, plugin="CompressedDDPPlugin")
    _require_ddp(accelerator)
    _require_no_hook(ddp_handler(accelerator))
    if accelerator.num_processes == 1 and not is_alone():
        _about_one_process(kind_of(accelerator))


def require_unprepared(accelerator: Accelerator, *, plugin: str) -> None:
    """Raise ValueError where a model is prepared already."""
    if prepared := prepared_models(accelerator):
        raise ValueError(
            f"A {plugin} must be attached before accelerator.prepare, got an Accelerator with a "
            f"prepared {type(prepared[0]).__name__}; attach it right after Accelerator(...)"
        )


def _require_ddp(accelerator: Accelerator) -> None:
    kind = kind_of(accelerator)
    if kind != "NO" and not kind.startswith("MULTI_"):
        raise ValueError(
            "A CompressedDDPPlugin compresses the gradients of DistributedDataParallel, got an "
            f"Accelerator with {kind}, which exchanges them itself; launch with --multi_gpu "
            "(distributed_type: MULTI_GPU), or leave the plugin out"
        )
    parallelism = accelerator.parallelism_config
    if parallelism is not None and parallelism.tp_enabled:
        raise ValueError(
            "A CompressedDDPPlugin compresses the gradients of DistributedDataParallel, which "
            f"Accelerate does not use with tensor parallelism, got tp_size={parallelism.tp_size}; "
            "leave tp_size at 1, or the plugin out"
        )


def _require_no_hook(given: DistributedDataParallelKwargs | None) -> None:
    if given is None:
        return
    no_hook = DDPCommunicationHookType.NO
    for name, default in (("comm_hook", no_hook), ("comm_wrapper", no_hook)):
        if getattr(given, name) != default:
            got = f"DistributedDataParallelKwargs({name}={getattr(given, name)})"
            raise second_hook(got, owner=_PLUGIN, remedy="leave it out, or the plugin")
    if given.comm_state_option:
        raise ValueError(
            "comm_state_option belongs to a hook of torch and cannot take effect beside a "
            f"CompressedDDPPlugin, got {given.comm_state_option}; leave it out"
        )
    if type(given).register_comm_hook is not DistributedDataParallelKwargs.register_comm_hook:
        got = f"a {type(given).__name__} with a register_comm_hook of its own"
        remedy = "use a DistributedDataParallelKwargs, or leave the plugin out"
        raise second_hook(got, owner=_PLUGIN, remedy=remedy)


def _about_one_process(kind: str) -> None:
    """One process of one, or one of several that will train for themselves."""
    promised = promised_ranks()
    if promised is not None:
        name, count = promised
        raise ValueError(
            f"All processes of a launch must train together, but {name}={count} and this "
            "Accelerator has num_processes=1: every process would train for itself. On CPU set "
            "ACCELERATE_USE_CPU=true in the environment and leave use_cpu and cpu= out "
            f"({_TWO_ON_CPU}); start a job of one process without a launcher"
        )
    if kind == "NO":  # otherwise DDP's reducer warns
        log.warning(
            "The Accelerator has one process, so nothing is exchanged or compressed. If you asked "
            "for several: 'accelerate launch --cpu --num_processes 2' starts one; write '%s'",
            _TWO_ON_CPU,
        )


class CompressionHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # no types
    """The user's arguments of DDP, and a hook of ours.

    Not in ``kwargs_handlers``: Accelerate takes none but its own classes there.

    Args:
        given: the user's, or None.
        compress: called with every model that was wrapped.
    """

    def __init__(
        self,
        given: DistributedDataParallelKwargs | None,
        compress: Callable[[DistributedDataParallel], object],
    ) -> None:
        self._given = given or DistributedDataParallelKwargs()
        known = fields(DistributedDataParallelKwargs)
        super().__init__(**{field.name: getattr(self._given, field.name) for field in known})
        self._compress = compress
        self.saved_by_another = False
        """Whether another than the plugin saves and loads residuals just now."""

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._given.to_dict(*args, **kwargs)
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP that differ from the defaults of Accelerate."""
        found: dict[str, Any] = self._given.to_kwargs()
        return found

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called for every model that was wrapped, before torch.compile."""
        self._compress(model)


def handler_of(accelerator: Accelerator) -> CompressionHandler | None:
    """Ours, if it is there."""
    found = ddp_handler(accelerator)
    return found if isinstance(found, CompressionHandler) else None
