"""An ``accelerate.Accelerator`` that takes a CompressedDDPPlugin among its handlers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import accelerate

from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.frameworks.accelerate.plugins import CompressedDDPPlugin


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # it has no types
    """Accelerate's, with ``kwargs_handlers=[CompressedDDPPlugin("int8"), ...]``.

    Beside what attaching does by hand, ``prepare`` connects optimizers (``OneBitAdam``),
    ``init_trackers`` records the compression in the run's configuration, and ``end_training`` waits
    for the checkpoints of every ``AsyncStateCheckpointer``.

    Args:
        kwargs_handlers: as Accelerate's, and at most one CompressedDDPPlugin.

    Raises:
        ValueError: two plugins, or one that cannot be attached; see
            :meth:`CompressedDDPPlugin.attach`.
    """

    compression: Compression | None = None
    """The compression of the plugin; None without one."""

    def __init__(
        self, *args: Any, kwargs_handlers: Sequence[Any] | None = None, **kwargs: Any
    ) -> None:
        handlers = kwargs_handlers or ()
        plugins = [handler for handler in handlers if isinstance(handler, CompressedDDPPlugin)]
        if len(plugins) > 1:
            raise ValueError(
                f"An Accelerator takes one CompressedDDPPlugin, got {len(plugins)} in "
                "kwargs_handlers; give one"
            )
        others = [handler for handler in handlers if not isinstance(handler, CompressedDDPPlugin)]
        self._before_end: list[Callable[[], None]] = []
        super().__init__(*args, kwargs_handlers=others or None, **kwargs)
        for plugin in plugins:
            self.compression = plugin.attach(self)

    def before_end(self, action: Callable[[], None]) -> None:
        """Have ``end_training`` call ``action`` while the process group still exists."""
        self._before_end.append(action)

    def prepare_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super().prepare_optimizer(*args, **kwargs)
        if self.compression is not None:
            self.compression.register_optimizers(prepared)
        return prepared

    def init_trackers(
        self,
        project_name: str,
        config: dict[str, Any] | None = None,
        init_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """As Accelerate's; the compression is added to ``config``."""
        if self.compression is not None:
            config = {**self.compression.configuration(), **(config or {})}
        super().init_trackers(project_name, config=config, init_kwargs=init_kwargs)

    def free_memory(self, *objects: Any) -> Any:
        if self.compression is not None:
            self.compression.close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        while self._before_end:
            self._before_end.pop()()
        if self.compression is not None:
            self.compression.close()
        super().end_training()
