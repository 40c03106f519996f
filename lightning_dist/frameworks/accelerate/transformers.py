"""transformers' Trainer, and every class made of it, with compressed gradients."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from lightning_dist.base.features import TRANSFORMERS
from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.frameworks.accelerate.plugins import CompressedDDPPlugin


class CompressedDDPMixin:
    """Before a Trainer: ``class CompressedTrainer(CompressedDDPMixin, Trainer)``.

    Residuals of every rank are in the Trainer's checkpoints, wherever the optimizer's state is, and
    ``comm/*`` in what it logs.

    Args:
        compression: how gradients travel.
        *args, **kwargs: of the Trainer.

    Raises:
        ValueError: see :meth:`CompressedDDPPlugin.attach`.
    """

    compression: Compression
    """The compression of the plugin."""

    def __init__(self, *args: Any, compression: CompressedDDPPlugin, **kwargs: Any) -> None:
        if "transformers" in sys.modules:
            TRANSFORMERS.require()
        self._plugin = compression
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.compression = self._plugin.attach(self.accelerator)  # type: ignore[attr-defined]

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        wrapped = super()._wrap_model(*args, **kwargs)  # type: ignore[misc]
        self.compression.take_place()  # older Trainers put arguments of DDP of their own there
        return wrapped

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        self.compression.save(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None:
            self.compression.load(checkpoint)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As Trainer's; bytes go with the training's loss."""
        if "loss" in logs:
            logs = {**logs, **self.compression.metrics()}
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


@contextmanager
def residuals_in_checkpoints() -> Iterator[Callable[[Any, Compression], None]]:
    """Within the body, Trainers without the mixin have residuals in their checkpoints.

    Yields:
        A function that is called with an Accelerator and what compresses its models, if there are
        Trainers by then: those with that Accelerator save and load its residuals.
    """
    with ExitStack() as stack:

        def add(accelerator: Any, compression: Compression) -> None:
            if "transformers" not in sys.modules:
                return
            TRANSFORMERS.require()
            kind: Any = sys.modules["transformers"].Trainer
            for name, also in (
                ("_save_optimizer_and_scheduler", compression.save),
                ("_load_optimizer_and_scheduler", compression.load),
            ):
                method = getattr(kind, name)
                setattr(kind, name, _with(method, also, accelerator))
                stack.callback(setattr, kind, name, method)

        yield add


def _with(method: Callable[..., Any], also: Callable[[str], None], accelerator: Any) -> Any:
    @wraps(method)
    def both(self: Any, folder: str | None) -> None:
        method(self, folder)
        if folder is not None and self.accelerator is accelerator:
            also(folder)

    return both
