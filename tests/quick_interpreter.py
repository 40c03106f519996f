"""Triton's interpreter without 40% of its time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest


@cache
def patch_the_language_once() -> None:
    """A launch replaces all operators of Triton's language.

    So does every call of a function within a kernel, where nothing is left to replace.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    tl, patch = interpreter.tl, interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [
            each for each in function.__globals__.values() if each is tl or each is tl.core
        ]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
