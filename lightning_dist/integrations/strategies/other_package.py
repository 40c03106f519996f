"""Our strategies, given to a Trainer or Fabric that cannot take them.

The package `pytorch_lightning` holds a second copy of every class, and a Trainer and Fabric need
different classes of one name. They would answer with "invalid strategy name" before any code of a
strategy runs, so the check is put before theirs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import wrapt

_CONNECTORS = {
    "pytorch_lightning": (
        "Trainer",
        "pytorch_lightning.trainer.connectors.accelerator_connector",
        "_AcceleratorConnector",
    ),
    "lightning_fabric": ("Fabric", "lightning_fabric.connector", "_Connector"),
}
"""Classes that read ``strategy=``, in both packages."""
_OWN_CONNECTORS = {
    "Trainer": (
        "lightning.pytorch.trainer.connectors.accelerator_connector",
        "_AcceleratorConnector",
        "lightning.pytorch.strategies",
        "lightning_dist",
    ),
    "Fabric": (
        "lightning.fabric.connector",
        "_Connector",
        "lightning.fabric.strategies",
        "lightning_dist.fabric",
    ),
}
"""For `lightning`: module and name of such a class, module of the strategies that it accepts, and
of ours among them."""


def refuse_strategies(package: str, names: Collection[str]) -> None:
    """Let the Trainer or Fabric of an imported ``package`` say that it is the wrong one.

    Safe to repeat; nothing happens in a version of the package that has no such class.

    Args:
        names: those of our strategies.
    """
    user, module, name = _CONNECTORS[package]

    def check(strategy: Any) -> None:
        if strategy.lower() in names if isinstance(strategy, str) else _is_ours(strategy):
            from lightning_dist.integrations.refusals import of_other_package

            raise ValueError(of_other_package(f"this {user}", package))

    _check_before(module, name, check)


def refuse_other_class() -> None:
    """Let Lightning's Trainer and Fabric say which class of ours they take. Safe to repeat."""
    for user, (module, name, strategies, ours) in _OWN_CONNECTORS.items():
        _check_before(module, name, partial(_require_class, user, strategies, ours))


def _require_class(user: str, strategies: str, ours: str, strategy: Any) -> None:
    if isinstance(strategy, str | sys.modules[strategies].Strategy) or not _is_ours(strategy):
        return
    name = type(strategy).__name__
    raise ValueError(
        f"A {user} takes the {name} of {ours}, got the one of {type(strategy).__module__}; "
        f"write 'from {ours} import {name}'"
    )


def _check_before(module: str, name: str, check: Callable[[Any], None]) -> None:
    """Call ``check`` with ``strategy=`` before a connector is made."""
    connector = getattr(sys.modules.get(module), name, None)
    if connector is None or isinstance(vars(connector).get("__init__"), wrapt.FunctionWrapper):
        return

    def checked(init: Any, _: object, args: Any, kwargs: dict[str, Any]) -> None:
        check(kwargs.get("strategy"))
        init(*args, **kwargs)

    wrapt.wrap_function_wrapper(connector, "__init__", checked)


def _is_ours(strategy: object) -> bool:
    if strategy is None:
        return False
    from lightning_dist.integrations.strategies.arguments import CompressionArguments
    from lightning_dist.integrations.strategies.mesh import ReplicatedMesh

    return isinstance(strategy, CompressionArguments | ReplicatedMesh)
