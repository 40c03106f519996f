"""Which parameters a rank's backward passes have used since the last synchronised step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor


class Usage:
    """Hooks on every parameter that takes a gradient.

    The bucket does not tell: DDP copies an unused parameter's gradient of an earlier pass into it.
    """

    def __init__(self, names: Mapping[Tensor, str]) -> None:
        self._used: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._note, name)
            )
            for parameter, name in names.items()
            if parameter.requires_grad
        ]

    def __contains__(self, name: object) -> bool:
        """Complete for the parameters of a bucket once DDP hands the bucket over."""
        return name in self._used

    def take(self) -> set[str]:
        """Names used since the last call. The hooks run before DDP's, so the set is complete."""
        used, self._used = self._used, set()
        return used

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, name: str, _: Tensor) -> None:
        self._used.add(name)
