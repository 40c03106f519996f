"""Log line with the settings in force; and a warning at the end if they never took effect."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from weakref import finalize

from lightning_utilities.core import rank_zero

from lightning_dist.base.log import get_logger, prefixed
from lightning_dist.codecs import NoCompression
from lightning_dist.codecs.none import Uncompressed
from lightning_dist.measurement.exposure import expected_traffic
from lightning_dist.ranks.launch import RECOVERY_STORE
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import CommStats
from lightning_dist.sync.grouping import picture

_OURS = "lightning_dist"
_DELAYED = (
    "; delay 1: each mean is applied one step late, the first step gets zeros, and the last mean "
    "is in the checkpoint only"
)
log = get_logger(__name__)


def log_in_force(reducer: Reducer, *, begins: int | None) -> None:
    """Say it; for rank 0 of a reducer that was attached just now.

    Args:
        begins: the first synchronised step at which a parameter is compressed, None: none is.
    """
    if reducer.network.world_size == 1:
        if os.environ.get(RECOVERY_STORE):  # the others are met later
            return
        log.warning(
            "One process: nothing is exchanged or compressed; %s takes effect with two ranks or "
            "more. If you started several processes, they are not connected: check WORLD_SIZE",
            reducer.settings.inter,
        )
        return
    show(lambda: in_force(reducer))
    if begins is not None:
        reducer.never_compressed = finalize(reducer, _never_begun, reducer.stats, begins)


def in_force(reducer: Reducer) -> str:
    """``compressed DDP: codec int8, flat exchange, 2 nodes x 1 rank, ...``"""
    config, settings = reducer.comm_config(), reducer.settings
    places = config["topology"]
    if config["exchange"] != "flat":
        places = picture(settings, settings.nodes or reducer.network.topology.by_node())
    expected = expected_traffic(reducer.names, settings, reducer.network)
    since = f" from step {expected.since} on" if expected.since else ""
    if expected.sent is None:
        sent = "as many bytes as the gradients make it"
    elif config["exchange"] == "flat":
        sent = f"about {_amount(expected.sent.total)}"
    else:
        inter, intra = _amount(expected.sent.inter), _amount(expected.sent.intra)
        sent = f"about {inter} to other nodes and {intra} inside its own"
    return (
        f"compressed DDP: codec {settings.inter}, {config['exchange']} exchange, {places}, world "
        f"size {config['world_size']}; rank 0 sends {sent} per step{since}, "
        f"{_amount(expected.raw)} without compression; {config['commit']} "
        f"commit{_DELAYED if settings.delay else ''}"
    )


def _amount(nbytes: int) -> str:
    return f"{nbytes / 1e6:.1f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.1f} kB"


def show(line: Callable[[], str]) -> None:
    """Show what is in force, where nobody has configured logging, too.

    Python shows no more than warnings there. Lightning shows its own log. A level that was set for
    the logger ``lightning_dist`` holds. ``line`` is called only if its result is shown.
    """
    if "lightning" in sys.modules:
        if rank_zero.log.isEnabledFor(logging.INFO):
            rank_zero.log.info(prefixed(line()))
    elif log.isEnabledFor(logging.INFO):
        log.info(line())
    elif not logging.getLogger(_OURS).level:
        print(prefixed(line()), file=sys.stderr)


def _never_begun(stats: CommStats, begins: int) -> None:
    sent = stats.as_mapping()
    if sent["steps"] and sent["per_codec"].keys() <= {NoCompression.name, Uncompressed.name}:
        log.warning(
            "Nothing was compressed in %d synchronised steps: compression starts at step %d "
            "(start_step, warmup, after_steps), with OneBitAdam after its freeze_step; lower it",
            sent["steps"],
            begins,
        )
