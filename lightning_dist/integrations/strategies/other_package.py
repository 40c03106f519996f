"""Our strategies, given to a Trainer or Fabric of the package `pytorch_lightning`.

It holds a second copy of every class, and would answer with "invalid strategy name" before any code
of a strategy runs, so the check is put before its own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
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


def refuse_strategies(package: str, names: Collection[str]) -> None:
    """Let the Trainer or Fabric of an imported ``package`` say that it is the wrong one.

    Safe to repeat; nothing happens in a version of the package that has no such class.

    Args:
        names: those of our strategies.
    """
    user, module, name = _CONNECTORS[package]
    connector = getattr(sys.modules.get(module), name, None)
    if connector is None or isinstance(vars(connector).get("__init__"), wrapt.FunctionWrapper):
        return

    def check(init: Any, _: object, args: Any, kwargs: dict[str, Any]) -> None:
        strategy = kwargs.get("strategy")
        if strategy.lower() in names if isinstance(strategy, str) else _is_ours(strategy):
            from lightning_dist.integrations.refusals import of_other_package

            raise ValueError(of_other_package(f"this {user}", package))
        init(*args, **kwargs)

    wrapt.wrap_function_wrapper(connector, "__init__", check)


def _is_ours(strategy: object) -> bool:
    if strategy is None:
        return False
    from lightning_dist.integrations.strategies.arguments import CompressionArguments
    from lightning_dist.integrations.strategies.mesh import ReplicatedMesh

    return isinstance(strategy, CompressionArguments | ReplicatedMesh)
