"""Whether tensors of modules were written to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from lightning_dist.elastic.private import version_of


class TensorVersions:
    """Versions of the tensors of modules: numbers that rise with every operation that writes.

    Args:
        modules: by name.
        apart: tensors that are left out.
    """

    def __init__(self, modules: Mapping[str, nn.Module], *, apart: Iterable[Tensor] = ()) -> None:
        left_out = {id(tensor) for tensor in apart}
        self._named = [
            (name, tensor)
            for name, module in modules.items()
            for tensor in (*module.parameters(), *module.buffers())
            if id(tensor) not in left_out
        ]
        self.mark()

    @property
    def tensors(self) -> list[Tensor]:
        """All of them."""
        return [tensor for _, tensor in self._named]

    def mark(self) -> None:
        """:meth:`changed` looks for what is written from here on."""
        self._marked = [version_of(tensor) for _, tensor in self._named]

    def changed(self) -> str:
        """Name of a module that has changed; empty if none has."""
        pairs = zip(self._named, self._marked, strict=True)
        return next((name for (name, tensor), at in pairs if version_of(tensor) != at), "")
