"""Packages that are imported by others, later, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

EXTRAS = {
    "accelerate": "accelerate",
    "jinja2": "profile",
    "plotly": "profile",
    "transformers": "transformers",
    "wandb": "wandb",
}
"""Extras of this package by the module that each brings; all others come with the package."""


@contextmanager
def needed_by(what: str) -> Iterator[None]:
    """Let a package that is missing within the body be one line, with the command for it.

    Args:
        what: the part that needs it, as its users call it; begins a sentence.

    Raises:
        ImportError: instead of ``ModuleNotFoundError``, for modules other than our own.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "lightning_dist"):
            raise
        extra = EXTRAS.get(package)
        wanted = f"'lightning-dist[{extra}]'" if extra else package
        raise ImportError(
            f"{what} needs {package}, which is not installed: pip install {wanted}"
        ) from None


def after_import(name: str, call: Callable[[ModuleType], None]) -> None:
    """Let ``call`` have the module ``name`` once it is imported: now, if it is already.

    A module whose import fails is waited for again.
    """
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Waiting(name, call))


class _Waiting(MetaPathFinder, Loader):
    """Finder of one module, and its loader around the one that the others find."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]) -> None:
        self._name, self._call = name, call
        self._loader: Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)  # so that the others are asked
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return spec
        self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        # As if nobody had waited: who asks a module for its source finds its own loader.
        module.__loader__ = self._loader
        assert module.__spec__ is not None
        module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        sys.meta_path.remove(self)
        self._call(module)
