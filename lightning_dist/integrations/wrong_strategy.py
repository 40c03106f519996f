"""Strategies that a Trainer or Fabric does not take: which one it takes instead.

Lightning answers all of them with "invalid strategy name" before any code of a strategy runs, so
the check is put before its own.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Collection
from typing import Any

import wrapt

from lightning_dist.integrations.strategy_names import SHARDED

_CONNECTORS = {
    "lightning": {
        "Trainer": ("pytorch.trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
        "Fabric": ("fabric.connector", "_Connector"),
    },
    "pytorch_lightning": {
        "Trainer": ("trainer.connectors.accelerator_connector", "_AcceleratorConnector"),
    },
    "lightning_fabric": {"Fabric": ("connector", "_Connector")},
}
"""Classes that read ``strategy=``, in the packages of Lightning."""


def explain_wrong_strategies(package: str, names: Collection[str]) -> None:
    """Let the Trainer and Fabric of an imported ``package`` say which strategy was meant.

    Safe to repeat; nothing happens in a version of the package that has no such class.

    Args:
        names: those of our strategies.
    """
    for user, (module, name) in _CONNECTORS[package].items():
        connector = getattr(sys.modules.get(f"{package}.{module}"), name, None)
        if connector is None or isinstance(vars(connector).get("__init__"), wrapt.FunctionWrapper):
            continue
        wrapt.wrap_function_wrapper(connector, "__init__", _checks_first(package, user, names))


def _checks_first(package: str, user: str, names: Collection[str]) -> Any:
    def check(init: Any, _: object, args: Any, kwargs: dict[str, Any]) -> None:
        strategy = kwargs.get("strategy")
        if isinstance(strategy, str):
            _check_name(strategy, package, user, names)
        elif strategy is not None:
            _check_object(strategy, package, user)
        init(*args, **kwargs)

    return check


def _check_name(name: str, package: str, user: str, names: Collection[str]) -> None:
    from lightning_dist.integrations.refusals import of_other_package

    if package != "lightning":
        if name.lower() in names:
            raise ValueError(of_other_package(f"this {user}", package))
        return
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry

    known = [*(StrategyRegistry if user == "Trainer" else STRATEGY_REGISTRY)]
    if name.lower() in known:
        return
    if user == "Fabric" and name.lower() == SHARDED:
        raise ValueError(
            f"Fabric takes no {name!r} by name, its strategy needs the function that calls "
            "fully_shard: strategy=lightning_dist.fabric.CompressedModelParallelStrategy("
            "parallelize_fn)"
        )
    if ":" in name and name.lower().split(":")[0] in names:
        option = name.split("_")[-1]
        raise ValueError(
            f"Unknown strategy {name!r}: codec options go into the class: "
            f"strategy=CompressedDDPStrategy({option!r})"
        )
    near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.75)
    if near and near[0] in names:
        raise ValueError(f"Unknown strategy {name!r}: did you mean {near[0]!r}?")


def _check_object(strategy: object, package: str, user: str) -> None:
    from lightning_dist.integrations.arguments import CompressionArguments
    from lightning_dist.integrations.model_parallel import ModelParallelArguments

    if not isinstance(strategy, CompressionArguments | ModelParallelArguments):
        return
    from lightning_dist.integrations.refusals import of_other_package

    if package != "lightning":
        raise ValueError(of_other_package(f"this {user}", package))
    from lightning.pytorch.strategies import Strategy

    homes = {"Trainer": "lightning_dist", "Fabric": "lightning_dist.fabric"}
    made_for = "Trainer" if isinstance(strategy, Strategy) else "Fabric"
    if made_for != user:
        takes, got = (f"{homes[each]}.{type(strategy).__name__}" for each in (user, made_for))
        raise ValueError(
            f"{user} takes {takes}, got {got}, which is for {made_for}; import the former"
        )
