"""Arguments that strategies refuse before a process group exists, and reports of all frameworks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.parallel import DistributedDataParallel

from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.signatures import refuse_codec_options, refuse_unknown

if TYPE_CHECKING:
    from lightning_dist.ranks import Topology


_HOOK_ARGUMENTS = ("ddp_comm_hook", "ddp_comm_state", "ddp_comm_wrapper", "model_averaging_period")


def refuse_ddp_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of DDP that cannot take effect beside our hook."""
    size = arguments.get("bucket_cap_mb")
    is_number = isinstance(size, int | float) and not isinstance(size, bool)
    if size is not None and not (is_number and size > 0):
        raise ValueError(
            f"bucket_cap_mb must be a number of MiB above 0, got {size!r}; DDP's default is 25"
        )
    for name in _HOOK_ARGUMENTS:
        if arguments.get(name) is not None:
            remedy = "leave it out, or use DDPStrategy with that hook"
            raise second_hook(f"{name}={arguments[name]!r}", owner="compressed_ddp", remedy=remedy)
    if arguments.get("mixed_precision") is not None:
        raise ValueError(
            "DDP's mixed_precision= installs a communication hook of its own, and a model takes "
            "one; leave it out and use precision='bf16-mixed' or '16-mixed'"
        )
    if arguments.get("skip_all_reduce_unused_params"):
        raise ValueError(
            "skip_all_reduce_unused_params=True makes DDP skip buckets, and the compressed step "
            "ends with the last one; leave it out"
        )


def require_ddp_arguments(
    of: type, settings: ExchangeSettings, arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError for arguments that a strategy of DDP cannot hand on."""
    refuse_ddp_arguments(arguments)
    refuse_codec_options(arguments, settings.codec, of=of)
    refuse_unknown(arguments, of=of, handed_to=DistributedDataParallel.__init__)
    refuse_pytorch_lightning(**arguments)


def require_sharded_arguments(
    of: type, settings: ExchangeSettings, arguments: Mapping[str, Any]
) -> None:
    """Raise ValueError for arguments that a strategy of a sharded model cannot hand on."""
    refuse_codec_options(arguments, settings.codec, of=of)
    if arguments.get("recovery") == "in_process":
        raise ValueError(
            "recovery='in_process' needs the whole model on each rank, and here each keeps a "
            "part of it, which is lost with it; leave recovery out: ElasticRestart restarts "
            "all ranks from a checkpoint"
        )
    refuse_unknown(arguments, of=of)
    refuse_pytorch_lightning(**arguments)


def second_hook(got: str, *, owner: str, remedy: str) -> ValueError:
    """The error for a communication hook beside the one that ``owner`` registers."""
    return ValueError(
        f"A model takes one communication hook and {owner} registers its own, got {got}; {remedy}"
    )


def refuse_pytorch_lightning(**objects: Any) -> None:
    """Raise ValueError for objects of the package `pytorch_lightning`.

    It holds a second copy of every class, so that isinstance fails in places far from here.
    """
    for role, given in objects.items():
        packages = [cls.__module__.split(".")[0] for cls in type(given).__mro__]
        foreign = {"pytorch_lightning", "lightning_fabric"}.intersection(packages)
        if foreign:
            raise ValueError(of_other_package(f"{role} ({type(given).__name__})", foreign.pop()))


def of_other_package(what: str, package: str) -> str:
    """The message for something of the package `pytorch_lightning` or `lightning_fabric`."""
    return (
        f"lightning_dist works with the package 'lightning', and {what} comes from {package!r}, "
        "whose classes are different ones; write 'import lightning as L', not "
        "'import pytorch_lightning'"
    )


CONFIG_KEY = "lightning_dist"
"""Key of ``comm_config()`` in the configuration of a tracked run."""
_OF_ONE_STEP = ("raw_bytes", "wire_bytes", "intra_bytes", "inter_bytes")
_IN_TOTAL = ("raw_bytes", "wire_bytes")


class Reports(Protocol):
    """Reports of one model: a Sync, a Reducer, or the record of a training that has ended."""

    @property
    def topology(self) -> Topology: ...

    def comm_stats(self) -> Mapping[str, Any]: ...

    def comm_config(self) -> dict[str, Any]: ...


def comm_metrics(stats: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Bytes that this rank sent: in the last step, and in total. For loggers and trackers.

    Args:
        stats: ``comm_stats()`` of every compressed model; their bytes are added up.

    Returns:
        ``comm/raw_bytes``, ``comm/wire_bytes``, ``comm/compression_ratio``, ``comm/intra_bytes``,
        ``comm/inter_bytes``, ``comm/total_raw_bytes``, ``comm/total_wire_bytes``; nothing before
        the first step.
    """
    begun = [model for model in stats if model["steps"]]
    if not begun:
        return {}
    last = {key: sum(model["last_step"][key] for model in begun) for key in _OF_ONE_STEP}
    ratio = last["raw_bytes"] / last["wire_bytes"] if last["wire_bytes"] else 1.0
    metrics = {f"comm/{key}": value for key, value in last.items()} | {
        "comm/compression_ratio": ratio
    }
    return metrics | {f"comm/total_{key}": sum(model[key] for model in begun) for key in _IN_TOTAL}
