"""What `mkdocs build` needs to show arguments that are declared as settings.

Pages of the API are made from sources; signatures and docstrings of functions that are decorated
with `takes` are made when these are imported.
"""

from __future__ import annotations

import inspect
import re
from functools import reduce
from importlib import import_module
from typing import Any

from griffe import Docstring, Extension, Function, Parameter, ParameterKind, Parameters

_MODULES = re.compile(r"\b(?:\w+\.)+(?=\w)")


class SettingsExtension(Extension):
    """Shows those functions as they are in the process."""

    def on_function_instance(self, *, func: Function, **_: Any) -> None:
        """Replace the parameters and the docstring of a function that takes settings."""
        if not any(str(each.value).startswith("takes(") for each in func.decorators):
            return
        module = import_module(func.module.path)
        names = func.path.removeprefix(f"{module.__name__}.").split(".")
        call = reduce(getattr, names, module)
        func.parameters = Parameters(*map(_shown, inspect.signature(call).parameters.values()))
        func.docstring = Docstring(inspect.getdoc(call) or "", parent=func)


def _shown(parameter: inspect.Parameter) -> Parameter:
    kind, default = parameter.annotation, parameter.default
    text = kind if isinstance(kind, str) else _MODULES.sub("", inspect.formatannotation(kind))
    return Parameter(
        parameter.name,
        annotation=None if kind is parameter.empty else text,
        kind=ParameterKind(parameter.kind.description),
        default=None if default is parameter.empty else repr(default),
    )
