"""Effect of settings on a model and its optimizers: what they compress, said once, or refused."""

from __future__ import annotations

import difflib
import heapq
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary, finalize, ref

import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lightning_dist.base.log import get_logger, prefixed
from lightning_dist.base.private import name_before_compile, names_ignored_by_ddp
from lightning_dist.codecs import Codec, NoCompression
from lightning_dist.codecs.none import Uncompressed
from lightning_dist.codecs.policies import NORMS_BIASES_EMBEDDINGS, patterns_of
from lightning_dist.measurement.exposure import expected_traffic, first_compressed_step
from lightning_dist.ranks.launch import RECOVERY_STORE
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice, as_real
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.reducer.stats import CommStats, untraced
from lightning_dist.reducer.units.by_codec import require_units
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.base import Sync
from lightning_dist.sync.networks import picture
from lightning_dist.sync.rules import Case, check

log = get_logger(__name__)


def require_effect(
    settings: ExchangeSettings,
    names: Mapping[Tensor, str],
    *,
    says: bool,
    one_of_several: bool = False,
) -> int | None:
    """The first synchronised step that compresses a parameter; None: none does, said once.

    Args:
        one_of_several: other models may have what a rule of `by_name` is for: warn, do not raise.

    Raises:
        ValueError: the codec fits no parameter of the model, or a rule of `by_name` none, or it
            has no communication units.
    """
    for problem in _unmatched(settings.inter, list(names.values())):
        if not one_of_several:
            raise ValueError(problem)
        if says:
            log.warning("%s; ignore this if it is for another model", problem)
    trained = {name: tuple(p.shape) for p, name in names.items() if p.requires_grad}
    for leaf in settings.inter.leaves():
        require_units(leaf)
    wanted = [leaf for leaf in settings.inter.leaves() if not leaf.lossless]
    begins = first_compressed_step(settings.policy, trained)
    if not wanted or begins is not None:
        return begins
    choosy = [(leaf, *leaf.accepts) for leaf in wanted if leaf.accepts]
    if choosy and all(
        codec.for_tensor("", shape, step=0).lossless
        for codec, _, _ in choosy
        for shape in trained.values()
    ):
        codec, accepted, remedy = choosy[0]
        raise ValueError(
            f"codec {codec} compresses {accepted}, and none of the model's {len(trained)} "
            f"parameters is one: {remedy}, or use int8"
        )
    if says:
        log.warning(
            "Nothing is compressed: all %d parameters are 1-D or small for codec %s; lower "
            "min_compress_numel (0 compresses all)",
            len(trained),
            settings.inter,
        )
    return None


def _unmatched(codec: Codec, names: Sequence[str]) -> Iterator[str]:
    """Errors in patterns of the user's that are found in no name, frozen ones too."""
    for pattern in patterns_of(codec):
        if pattern != NORMS_BIASES_EMBEDDINGS and not any(re.search(pattern, n) for n in names):
            text = re.sub(r"[^\w.]", "", pattern.replace("\\.", ".")) or pattern
            near = heapq.nlargest(3, names, key=lambda name: _likeness(text, name))
            yield (
                f"by_name: a pattern must be found in the name of a parameter, got {pattern!r}, "
                f"which is found in none of {len(names)}; the nearest are "
                f"{', '.join(map(repr, near))}"
            )


def _likeness(text: str, name: str) -> float:
    """Likeness of a text and a name, or a part of it between dots."""
    parts = {name, *name.split(".")}
    return max(difflib.SequenceMatcher(None, text, part).ratio() for part in parts)


def compresses_fewer_bytes(
    settings: ExchangeSettings, names: Mapping[Tensor, str], planner: Planner
) -> bool:
    """Whether the codec sends fewer bytes of some parameter; for a small model says once if not.

    Raises:
        ValueError: it would send more than uncompressed gradients, whatever their size.
    """
    codec, wanted = None, list(_lossy(settings, names))
    for codec, part, dtype in wanted:
        if not planner.affordable(codec, part, dtype).lossless:
            return True
    if codec is None:
        return False
    ranks, count = planner.network.rows, len({part.name for _, part, _ in wanted})
    if planner.affordable(codec, ParameterSlice("", 0, (1 << 24,)), torch.float32).lossless:
        raise ValueError(
            f"codec {codec} between {ranks} ranks sends more than uncompressed gradients: its "
            "bytes grow with the number of ranks; lower the ratio, reduce inside nodes first "
            "(hierarchical=True), or use 'int4' or 'powersgd'"
        )
    if planner.network.rank == 0:
        log.warning(
            "Nothing is compressed: all %d parameters that codec %s is for are so small that it "
            "would send more bytes between %d ranks",
            count,
            codec,
            ranks,
        )
    return False


def _lossy(
    settings: ExchangeSettings, names: Mapping[Tensor, str]
) -> Iterator[tuple[Codec, ParameterSlice, torch.dtype]]:
    """Parameters that are compressed at some step, with the codec."""
    for step in settings.policy.boundaries():
        for parameter, name in names.items():
            shape = tuple(parameter.shape)
            codec = settings.policy.for_tensor(name, shape, step=step)
            if parameter.requires_grad and parameter.numel() and not codec.lossless:
                real = as_real(parameter)
                yield codec, ParameterSlice(name, 0, tuple(real.shape)), real.dtype


_OURS = "lightning_dist"
_DELAYED = (
    "; delay 1: each mean is applied one step late, the first step gets zeros, and the last mean "
    "is in the checkpoint only"
)


def log_effective_settings(reducer: Reducer, *, begins: int | None) -> None:
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
    show(lambda: effective_settings(reducer))
    if begins is not None:
        reducer.never_compressed = finalize(reducer, _never_begun, reducer.stats, begins)


def effective_settings(reducer: Reducer) -> str:
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
        f"{_amount(expected.raw)} without compression; {config['state_update']} "
        f"update{_DELAYED if settings.delay else ''}"
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


_Layout = tuple[int, ...]  # parameters of each group


def watch_optimizers(reducer: Reducer, module: nn.Module) -> None:
    """Check the optimizers of ``reducer``'s parameters, and let it compare what they are set to."""
    watch = OptimizerWatch(reducer, module)
    reducer.at_close.append(watch.close)
    reducer.hyperparameters = watch.hyperparameters


class OptimizerWatch:
    """Checks each optimizer of an owner's parameters before its first step, and with new groups.

    In plain DDP nothing else leads from a model to its optimizers. Their hyperparameters are
    compared between ranks by the reducer.
    """

    def __init__(self, owner: Reducer | Sync, module: nn.Module) -> None:
        self._owner, self._module = ref(owner), ref(module)
        self._seen: WeakKeyDictionary[Optimizer, _Layout] = WeakKeyDictionary()
        self._own: WeakKeyDictionary[Optimizer, frozenset[Tensor]] = WeakKeyDictionary()
        self.close = register_optimizer_step_pre_hook(untraced(self._before_step)).remove
        """Checks no more."""

    def hyperparameters(self) -> Mapping[str, str]:
        """Hyperparameters of each optimizer that has stepped, by optimizer, group and name."""
        values = {}
        for optimizer in list(self._own):
            names = self._names_of(optimizer)
            kind = f"{type(optimizer).__name__} of {min(names)!r}"
            for number, group in enumerate(optimizer.param_groups):
                for key in sorted({"lr", *optimizer.defaults} & group.keys()):
                    value = group[key]
                    if isinstance(value, Tensor) and value.numel() == 1:
                        value = value.item()
                    if isinstance(value, bool | int | float | str | tuple | list | None):
                        values[f"{key} of {kind}, group {number}"] = repr(value)
        return values

    def _names_of(self, optimizer: Optimizer) -> list[str]:
        owner = self._owner()
        return [] if owner is None else [owner.names[p] for p in self._own[optimizer]]

    def _before_step(self, optimizer: Optimizer, arguments: Any, named: Any) -> None:
        owner, module = self._owner(), self._module()
        if owner is None or module is None or owner.closed:
            return
        layout = tuple(len(group["params"]) for group in optimizer.param_groups)
        if self._seen.get(optimizer) != layout:
            self._check(optimizer, owner, module)
            self._seen[optimizer] = layout

    def _check(self, optimizer: Optimizer, owner: Reducer | Sync, module: nn.Module) -> None:
        stepped = {p for group in optimizer.param_groups for p in group["params"]}
        ignored, named = names_ignored_by_ddp(module), module.named_parameters()
        for name, parameter in named:
            if parameter in stepped and parameter not in owner.names and name not in ignored:
                raise ValueError(
                    f"All parameters that are stepped must be in the model when it is wrapped, got "
                    f"{name_before_compile(name)!r}, whose gradient no rank sends: it was added "
                    "later; add it before, or wrap the model anew"
                )
        averaged = stepped & owner.names.keys()
        if not averaged:
            return
        # One within another, such as ZeroRedundancyOptimizer's, has some of the same parameters.
        apart = [other for other, held in self._own.items() if held.isdisjoint(averaged)]
        check(
            Case(owner.settings, module, [optimizer, *apart], parameters=owner.names),
            at="optimizers",
        )
        self._own[optimizer] = frozenset(averaged)
