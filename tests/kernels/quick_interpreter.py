"""Triton's interpreter without what costs it two thirds of its time and changes nothing."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest


@cache
def quicken_interpreter() -> None:
    """Let Triton's language be patched once per launch, and sums and types be computed once.

    A launch replaces all operators of the language, and so does every call of a function within a
    kernel, where nothing is left to replace. Integers are added and multiplied in int64 too, for
    assertions about overflows that are off without ``debug``. Every operation derives the type and
    the shape of its result anew, which takes longer than NumPy's arithmetic on small blocks.
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
    _remember_types(tl.core)
    np_dtypes, np_dtype = {}, interpreter._get_np_dtype

    def known_np_dtype(dtype: Any) -> Any:
        if dtype.name not in np_dtypes:
            np_dtypes[dtype.name] = np_dtype(dtype)
        return np_dtypes[dtype.name]

    interpreter._get_np_dtype = known_np_dtype


def _remember_types(core: Any) -> None:
    """Compute the attributes of equal block types, and of tensors of equal types, once.

    Those of pointers are not remembered: their names do not tell their address spaces.
    """
    new_type, types = core.block_type.__init__, {}
    new_tensor, tensors = core.tensor.__init__, {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
        if key in types:
            vars(self).update(types[key])
            return
        new_type(self, element_ty, shape)
        if type(element_ty) is core.dtype:
            types[key] = vars(self)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if type.name in tensors:
            vars(self).update(tensors[type.name], handle=handle)
            return
        new_tensor(self, handle, type)
        if not type.scalar.is_ptr():
            tensors[type.name] = {**vars(self), "handle": None}

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor
