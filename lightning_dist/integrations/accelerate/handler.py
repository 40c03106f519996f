"""Where Accelerate asks how to wrap a model in DDP."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Protocol

from accelerate.utils import DistributedDataParallelKwargs

from lightning_dist.integrations.accelerate.private import ddp_handler

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch.nn.parallel import DistributedDataParallel


class CompressesModels(Protocol):
    """What a plugin has attached to an Accelerator."""

    def compress(self, model: DistributedDataParallel) -> object:
        """Compress the gradients of a model that was wrapped."""

    def saved_by_another(self) -> AbstractContextManager[None]:
        """Leave residuals to whoever saves and loads meanwhile."""


class CompressionHandler(DistributedDataParallelKwargs):  # type: ignore[misc]  # no types
    """The user's arguments of DDP, and a hook of ours.

    Not in ``kwargs_handlers``: Accelerate takes none but its own classes there.

    Args:
        given: the user's, or None.
        compression: is told of every model.
    """

    def __init__(
        self, given: DistributedDataParallelKwargs | None, compression: CompressesModels
    ) -> None:
        self._given = given or DistributedDataParallelKwargs()
        known = fields(DistributedDataParallelKwargs)
        super().__init__(**{field.name: getattr(self._given, field.name) for field in known})
        self.compression = compression

    def to_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        found: dict[str, Any] = self._given.to_dict(*args, **kwargs)
        return found

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of DDP that differ from the defaults of Accelerate."""
        found: dict[str, Any] = self._given.to_kwargs()
        return found

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Called for every model that was wrapped, before torch.compile."""
        self.compression.compress(model)


def handler_of(accelerator: Accelerator) -> CompressionHandler | None:
    """Ours, if it is there."""
    found = ddp_handler(accelerator)
    return found if isinstance(found, CompressionHandler) else None
