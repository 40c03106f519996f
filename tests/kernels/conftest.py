"""Triton's interpreter patches its language once per module and launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest


@pytest.fixture(scope="module", autouse=True)
def _patch_once_per_launch() -> Iterator[None]:
    """The interpreter patches Triton's language at every call of a device function.

    Half of its time goes to that, and what one call of a module has patched holds for a launch.
    """
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    patch_language: Callable[[Any], Any] = interpreter._patch_lang
    patched: set[int] = set()

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            patched.clear()

    def patch_once(function: Any) -> Any:
        scope, module = Scope(), id(function.__globals__)
        if module not in patched:
            patched.add(module)
            scope._changes = patch_language(function)._changes
        return scope

    with patch.object(interpreter, "_patch_lang", patch_once):
        yield
