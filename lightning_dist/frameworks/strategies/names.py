"""The names of our strategies in Lightning's and Fabric's registries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_dist.codecs import CODECS

NAME = "compressed_ddp"
NAMES: dict[str, dict[str, Any]] = {
    NAME: {"start_method": "popen"},
    f"{NAME}_spawn": {"start_method": "spawn"},
    f"{NAME}_fork": {"start_method": "fork"},
    f"{NAME}_notebook": {"start_method": "fork"},
    f"{NAME}_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"{NAME}_{codec}": {"codec": codec} for codec in CODECS},
}
"""``compressed_ddp`` by start method, with unused parameters, and by codec: arguments by name."""


ELASTIC_NAMES: dict[str, dict[str, Any]] = {f"{NAME}_elastic": {"recovery": "in_process"}}
"""Names in Lightning's registry alone: with Fabric it is ElasticLoop that recovers."""

LOCAL_NAMES: dict[str, dict[str, Any]] = {
    "compressed_local_sgd": {"method": "local_sgd"},
    "compressed_diloco": {"method": "diloco"},
    "compressed_streaming_diloco": {"method": "streaming"},
    "compressed_sparseloco": {"method": "sparseloco"},
}
SHARDED = "compressed_model_parallel"
SHARDED_NAMES: dict[str, dict[str, Any]] = {SHARDED: {}}
"""Names in Lightning's registry alone: Fabric's strategy needs a function of the user's."""

LOCAL_SHARDED_NAMES: dict[str, dict[str, Any]] = {
    name.replace("compressed", SHARDED, 1): arguments for name, arguments in LOCAL_NAMES.items()
}
"""Names in Lightning's registry: ``compressed_model_parallel_diloco`` and the others."""


def register(
    registry: Any,
    make: Callable[..., Any],
    names: Mapping[str, Mapping[str, Any]] = NAMES,
    *,
    what: str = "compressed DDP",
) -> None:
    """Add ``names`` to ``registry``, as what ``make`` returns for their arguments."""
    for name, arguments in names.items():
        if name in registry:  # a second import, or the user's own: theirs stays
            continue
        settings = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        registry.register(name, make, description=f"{what} ({settings})", **arguments)
