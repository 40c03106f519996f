"""FSDP2 over all ranks, where its own all-gather and reduce-scatter cross the slow link."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from typing_extensions import override

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.base.log import get_logger
from lightning_dist.base.private import map_tensors, name_before_compile
from lightning_dist.codecs import Codec
from lightning_dist.codecs.base import BlockCodec
from lightning_dist.codecs.memory import RoundedError, State
from lightning_dist.codecs.none import NoCompression
from lightning_dist.kernels.inductor import should_fuse
from lightning_dist.ranks import Topology, host_name
from lightning_dist.ranks.channel import Channel, Watch
from lightning_dist.ranks.facts import (
    Read,
    Spread,
    all_facts,
    gather,
    read_whole,
    require_equal,
    run_of,
)
from lightning_dist.reducer.rows import (
    RowGather,
    RowLayout,
    RowReduceScatter,
    cut_errors,
    joined_errors,
)
from lightning_dist.reducer.state import require_mapping
from lightning_dist.reducer.stats import CommStats, Count, places, run_config, untraced
from lightning_dist.settings.codecs import identity
from lightning_dist.settings.exchange import ShardedSettings
from lightning_dist.sync.base import Environment, Sync, remember, syncs_of
from lightning_dist.sync.buckets import flags_of
from lightning_dist.sync.effect import OptimizerWatch, show
from lightning_dist.sync.fsdp.checks import BackwardEnd, ParameterGroup, gathered_groups
from lightning_dist.sync.fsdp.private import collectives_of, parameter_groups_of
from lightning_dist.sync.fsdp.tensor_parts import ROWS, of_this_kind
from lightning_dist.sync.rules import Case, check

log = get_logger(__name__)

_KINDS = ("parameters", "gradients")


class CompressedShards(Sync):
    """The collectives of a model that is sharded over all ranks, quantised.

    Made by :func:`~lightning_dist.compress_fsdp` with ``parameters=``.
    """

    entry: ClassVar[str] = "compress_fsdp"
    settings: ShardedSettings

    @classmethod
    @override
    def attach(cls, model: nn.Module, settings: ShardedSettings, environment: Environment) -> Self:
        assert environment.mesh is not None
        attached = next((sync for sync in syncs_of(model) if sync.entry == cls.entry), None)
        check(Case(settings, model, environment=environment, attached=attached), at="model")
        sync = cls(model, settings, groups=gathered_groups(model, environment.mesh))
        remember(model, sync)
        if dist.get_rank() == 0:
            show(
                lambda: (
                    f"compressed FSDP2 over {sync.group.size()} ranks: parameters in "
                    f"{settings.policy_of_parameters}, gradients in {settings.policy_of_gradients}"
                )
            )
        return sync

    def __init__(
        self, model: nn.Module, settings: ShardedSettings, *, groups: Sequence[ParameterGroup]
    ) -> None:
        self._model, self.settings, self._parameter_groups = model, settings, groups
        names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
        self._names = names
        agreed = {
            "gradients": identity(settings.policy_of_gradients),
            "parameters": identity(settings.policy_of_parameters),
            "errors are kept": settings.keeps_rounded_errors,
            "groups": [[names[p] for p in group.parameters] for group in groups],
        }
        self.group, self.device = groups[0].group, groups[0].parameters[0].device
        facts = all_facts({**agreed, "node": host_name()}, group=self.group, device=self.device)
        require_equal([{key: fact[key] for key in agreed} for fact in facts])
        self._topology = Topology(tuple(fact["node"] for fact in facts), self.group.rank())
        self._closed = False
        self._stats = CommStats()
        self._has_reduced = False  # in this backward pass
        self.backward = BackwardEnd(
            model, self._end_step, begin=self._renew, cut_short=self._drop_step
        )
        self._trains = True  # whether the last forward pass was recorded by autograd
        self._reductions: dict[str, RowReduceScatter] = {}
        self._errors: dict[str, tuple[Sequence[int], State]] = {}  # with the parameter's shape
        self._flags: list[bool] | None = None
        self._watch = OptimizerWatch(self, model)
        self._replaced = ExitStack()  # until other parameters are trained
        self._collectives: dict[tuple[int, str], QuantisedCollective] = {}  # which may be watched
        self._renew()

    def _renew(self) -> None:
        """Replace the collectives, anew where layers were frozen or unfrozen, on all ranks alike.

        What is not trained now keeps no error.
        """
        flags = flags_of(self.names)
        if flags == self._flags:
            return
        self._flags = flags
        steps = {name: reduction.step for name, reduction in self._reductions.items()}
        errors = {name: held for name, (_, held) in self._errors.items()}
        self._replaced.close()
        self._replaced, self._reductions, self._errors = ExitStack(), {}, {}
        self._replace(self.names)
        for name, reduction in self._reductions.items():
            reduction.step = steps.get(name, 0)
        for name, (_, held) in self._errors.items():
            for error, before in zip(held, errors.get(name, ()), strict=False):
                error.copy_(before)

    def _replace(self, names: Mapping[Tensor, str]) -> None:
        settings, collectives = self.settings, list[RowGather | RowReduceScatter]()
        for index, group in enumerate(self._parameter_groups):
            rows = _rows(settings.policy_of_parameters, group, names, group.dtype)
            quantised: dict[str, RowGather | RowReduceScatter] = {
                "all_gather": RowGather(rows, self.topology)
            }
            if any(parameter.requires_grad for parameter in group.parameters):
                memory = RoundedError() if settings.keeps_rounded_errors else None
                rows = _rows(
                    settings.policy_of_gradients,
                    group,
                    names,
                    group.reduce_dtype,
                    trained=True,
                    memory=memory,
                )
                name = names[group.parameters[0]]
                self._reductions[name] = quantised["reduce_scatter"] = RowReduceScatter(
                    rows, self.topology, name=name, device=self.device
                )
                errors = rows.errors_of_slices(self._reductions[name].errors)
                self._errors |= dict(_by_parameter(errors, group, names))
            collectives += quantised.values()
            # Before FSDP's own hook, which gathers without gradients in any case.
            hook = group.module.register_forward_pre_hook(untraced(self._note), prepend=True)  # type: ignore[attr-defined]
            self._replaced.callback(hook.remove)
            self._replaced.enter_context(
                replaced_collectives(group.module, partial(self._quantised, index, quantised))
            )
        self._compile(collectives)

    @override
    def connect(self, optimizers: Sequence[Optimizer], environment: Environment) -> None:
        super().connect(optimizers, environment)
        case = Case(self.settings, None, optimizers, environment, parameters=self.names)
        check(case, at="optimizers")

    @override
    def begin_step(self) -> None:
        self.backward.begin()

    @override
    def before_backward(self, loss: Tensor) -> None:
        self.backward.watch(loss)

    @property
    @override
    def model(self) -> nn.Module:
        return self._model

    @property
    @override
    def names(self) -> Mapping[Tensor, str]:
        return self._names

    @property
    @override
    def closed(self) -> bool:
        return self._closed

    @property
    @override
    def topology(self) -> Topology:
        return self._topology

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent, as of ``Reducer.comm_stats``; of ``parameters`` and ``gradients``.

        A step is a backward pass, and the forward passes before it; those without gradients, as
        in validation, are in the totals alone. ``raw_bytes`` are those that FSDP itself would have
        sent.
        """
        stats = dict(self._stats.as_mapping())
        per_codec = stats.pop("per_codec")
        return {**stats, **{kind: per_codec.get(kind, Count().as_dict()) for kind in _KINDS}}

    def comm_config(self) -> dict[str, Any]:
        """Codecs, nodes and versions, for the configuration of a tracked run."""
        return {
            **run_config(self.settings, None),
            "parameters": str(self.settings.policy_of_parameters),
            "exchange": "sharded",
            **places(self.topology),
        }

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes``, 0 without error feedback."""
        return {"residual_bytes": sum(reduction.nbytes for reduction in self._reductions.values())}

    def state_dict(self, *, to: int = 0) -> dict[str, Any] | None:
        """State of all ranks on the first rank, None elsewhere. Collective; between passes.

        ``{"steps"}``, where random numbers go on. With error feedback also ``"errors"``,
        ``{parameter name: [scales, codes]}`` with a row of every rank: ranks times ``memory()``
        bytes on the CPU of the first rank. A sharded checkpoint leaves each row on its rank.
        """
        assert to == 0, "rows are put together there"
        state, spreads = self.spread_state_dict(device="meta" if self.group.rank() else "cpu")
        gather(spreads, Channel(self.group), device=self.device)
        return state if self.group.rank() == 0 else None

    def spread_state_dict(self, *, device: str = "cpu") -> tuple[dict[str, Any], list[Spread]]:
        """:meth:`state_dict` on every rank, with the errors left on their ranks.

        The tensors of the state are empty memory; the spreads are the parts that this rank has.
        """
        state: dict[str, Any] = {
            "steps": {n: reduction.step for n, reduction in self._reductions.items()}
        }
        size, spreads = self.group.size(), []
        for name, (_, errors) in self._errors.items():
            for held in errors:
                whole = torch.empty(size, *held.shape, dtype=held.dtype, device=device)
                starts = range(self.group.rank() * held.numel(), whole.numel(), held[0].numel())
                parts = tuple(zip(starts, map(torch.flatten, held), strict=False))
                spreads.append(Spread(whole, parts))
                state.setdefault("errors", {}).setdefault(name, []).append(whole)
        if spreads:
            state |= {"world_size": size, "rows": list(range(size))}
        return state, spreads

    def own_state(self, state: Mapping[str, Any], *, read: Read = run_of) -> dict[str, Any]:
        """:meth:`state_dict` with the rows that this rank loads: whole ones.

        Args:
            read: gives a part of a tensor of ``state``, which may be in a file.
        """
        loaded = {
            key: map_tensors(partial(read_whole, read=read), part)
            for key, part in state.items()
            if key not in (*ROWS, "errors")  # of replicas
        }
        if "errors" in state:
            loaded["rows"] = rows = state["rows"][self.group.rank() :: self.group.size()]
            loaded["errors"] = {
                name: [[_row(kind, row, read) for row in rows] for kind in kinds]
                for name, kinds in state["errors"].items()
            }
        return loaded

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; None starts afresh.

        With another number of ranks each row of errors is given to one rank, weighted so that their
        mean is as it was, but for the rounding to 8 bits. Errors of parameters that have none here
        are dropped, with a warning.
        """
        require_mapping(state)
        state = of_this_kind(state, key="steps", says=self.group.rank() == 0)
        state = {"steps": {}} if state is None else state
        for name, reduction in self._reductions.items():
            reduction.step = int(state["steps"].get(name, 0))
            for held in (tensor for errors in reduction.errors for tensor in errors):
                held.zero_()
        if "errors" in state:
            self._load_errors(state)

    load_own_state = load_state_dict

    def _load_errors(self, state: Mapping[str, Any]) -> None:
        before, ranks, dropped = state["world_size"], self.group.size(), 0
        mine = [i for i, row in enumerate(state["rows"]) if row % ranks == self.group.rank()]
        for name, saved in state["errors"].items():
            rows = [tuple(kind[i].to(self.device) for kind in saved) for i in mine]
            shape, errors = self._errors.get(name, ((), ()))
            if not errors:
                dropped += sum(codes.numel() for _, codes in rows)
            elif before == ranks and rows[0][1].shape == errors[1].shape:
                for held, saved_error in zip(errors, rows[0], strict=True):
                    held.copy_(saved_error)
            elif rows:
                wholes = torch.stack([joined_errors(row, shape) for row in rows])
                whole = wholes.sum(0) * (ranks / before)
                rounded = RoundedError().rounded(cut_errors(whole, shape, errors))
                for held, new in zip(errors, rounded, strict=True):
                    held.copy_(new)
        if dropped and self.group.rank() == 0:
            log.warning(
                "The checkpoint has errors of %d elements that are not compressed with error "
                "feedback in this run: they are dropped",
                dropped,
            )

    def close(self) -> None:
        """Leave the collectives to torch again."""
        self.backward.remove()
        self._replaced.close()
        self._watch.close()
        self._closed = True

    def _quantised(
        self, index: int, quantised: Mapping[str, RowGather | RowReduceScatter], op: str, _: Any
    ) -> Any:
        if op not in quantised:
            return None
        collective = QuantisedCollective(self, quantised[op])
        collective = self._collectives.setdefault((index, op), collective)
        collective.quantised = quantised[op]
        return collective

    def record(self, collective: RowGather | RowReduceScatter) -> None:
        """Count one collective."""
        is_gather = isinstance(collective, RowGather)
        count = self._stats.record if self._trains else self._stats.record_outside
        count(_KINDS[0] if is_gather else _KINDS[1], collective.raw.total, collective.sent)
        if not is_gather:
            self._has_reduced = True
            self.backward.queue()

    def _note(self, *_: Any) -> None:
        self._trains = torch.is_grad_enabled()

    def _end_step(self) -> None:
        if self._has_reduced:
            self._has_reduced = False
            self._stats.end_step()

    def _drop_step(self) -> None:
        self._has_reduced = False
        self._stats.drop_step()

    def _compile(self, collectives: Sequence[RowGather | RowReduceScatter]) -> None:
        wish, numel = (
            self.settings.compile_kernels,
            sum(collective.rows.numel for collective in collectives),
        )
        if is_accelerator(self.device):
            if wish is True:
                raise ValueError(
                    "With parameters= kernels are compiled on a CPU only, got compile_kernels=True "
                    f"and a model on {self.device.type}; leave compile_kernels out"
                )
            return
        says = self.group.rank() == 0
        if not should_fuse(wish, numel=numel, device=self.device, says=says):
            return
        for collective in collectives:
            collective.fuse(self.device)


def _row(saved: Tensor, row: int, read: Read) -> Tensor:
    numel = saved[0].numel()
    return read(saved, row * numel, numel).view(saved.shape[1:])


def _by_parameter(
    errors: Mapping[int, State], group: ParameterGroup, names: Mapping[Tensor, str]
) -> Iterator[tuple[str, tuple[Sequence[int], State]]]:
    """Name, whole shape and errors of each trained parameter, from those by offset."""
    offset = 0
    for parameter, shape, numel in zip(group.parameters, group.shapes, group.padded, strict=True):
        if parameter.requires_grad:
            if offset in errors:
                yield names[parameter], (shape, errors[offset])
            offset += numel


def _rows(
    policy: Codec,
    group: ParameterGroup,
    names: Mapping[Tensor, str],
    dtype: torch.dtype,
    *,
    trained: bool = False,
    memory: RoundedError | None = None,
) -> RowLayout:
    """Rows of the shards of ``group``, each parameter's in blocks of its codec.

    Args:
        trained: of gradients, whose mean is wanted; there are none of frozen parameters.
    """
    cut: dict[BlockCodec, list[tuple[int, int]]] = {}
    offset, ranks = 0, group.group.size()
    for parameter, numel in zip(group.parameters, group.padded, strict=True):
        if trained and not parameter.requires_grad:
            continue
        codec = policy.for_tensor(names[parameter], tuple(parameter.shape), step=0).of_shards()
        assert codec is not None, "checked with the settings"
        # Blocks that are mostly padding send more than none.
        more = codec.wire_bytes(numel, dtype) >= numel * dtype.itemsize
        chosen = NoCompression() if more or codec.lossless else codec
        cut.setdefault(chosen, []).append((offset, numel))
        offset += numel
    weight = 1.0 / ranks if trained else 1.0
    return RowLayout(cut, numel=offset, dtype=dtype, ranks=ranks, weight=weight, memory=memory)


class QuantisedCollective:
    """A collective that ``fully_shard`` calls instead of its own, on the stream that it chooses."""

    def __init__(self, owner: CompressedShards, quantised: RowGather | RowReduceScatter) -> None:
        self._owner, self.quantised = owner, quantised
        self._channel: Channel | None = None
        self.watch: Watch | None = None
        """Hears of the exchange."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory at every call, as torch's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType = dist.ReduceOp.AVG,
        async_op: bool = False,
    ) -> None:
        """Done when it returns, whatever ``async_op`` says; ``op`` is of a reduction."""
        rows, numel = self.quantised.rows, min(output_tensor.numel(), input_tensor.numel())
        if numel != rows.numel or group.size() != rows.ranks:
            raise RuntimeError(
                f"A parameter group has {rows.numel} elements on each of {rows.ranks} ranks, and "
                f"{numel} of {group.size()} are exchanged: every parameter must get a gradient in "
                "each backward pass, and reshard_after_forward must be True or False"
            )
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                "Gradients are averaged or added when they are reduced quantised, got a gradient "
                "divide factor; leave set_gradient_divide_factor out"
            )
        if self._channel is None or self._channel.group is not group:
            self._channel = Channel(group)
        self._channel.watch = self.watch
        self.quantised(output_tensor, input_tensor, self._channel)
        self._owner.record(self.quantised)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())


def replaced_collectives(module: FSDPModule, make: Callable[[str, Any], Any]) -> ExitStack:
    """Let others stand in for the collectives of ``module``, until what is returned is closed.

    Args:
        make: called with ``"all_gather"`` and ``"reduce_scatter"`` and what FSDP calls for it; None
            leaves that there.
    """
    stack = ExitStack()
    for comms in map(collectives_of, parameter_groups_of(module)):
        give: tuple[Any, Any] = module.set_custom_all_gather, module.set_custom_reduce_scatter
        for op, comm, replace in zip(("all_gather", "reduce_scatter"), comms, give, strict=True):
            other = make(op, comm)
            if other is not None:
                replace(other)
                stack.callback(replace, comm)
    return stack
