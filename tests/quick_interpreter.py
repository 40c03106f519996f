"""Triton's interpreter without what costs it two thirds of its time and changes nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest


@cache
def quicken_interpreter() -> None:
    """Let Triton's language be patched once per launch, and sums be computed once.

    A launch replaces all operators of the language, and so does every call of a function within a
    kernel, where nothing is left to replace. Integers are added and multiplied in int64 too, for
    assertions about overflows that are off without ``debug``.
    """
    interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
    tl, patch, builder = interpreter.tl, interpreter._patch_lang, interpreter.interpreter_builder

    def patch_once(function: Any) -> Any:
        languages = [
            each for each in function.__globals__.values() if each is tl or each is tl.core
        ]
        if any(tl.core.is_builtin(language.load) for language in languages):
            return patch(function)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = patch_once
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
