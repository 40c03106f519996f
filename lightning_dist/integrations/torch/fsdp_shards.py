"""FSDP2 over all ranks, where its own all-gather and reduce-scatter cross the slow link."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_dist.accelerator import is_accelerator
from lightning_dist.codecs import Codec, resolve_codec
from lightning_dist.codecs.base import BlockCodec
from lightning_dist.codecs.memory import RoundedError
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.policies import sized
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.handshake import all_facts, require_equal
from lightning_dist.integrations.torch.fsdp_checks import ParameterGroup
from lightning_dist.kernels.inductor import should_fuse
from lightning_dist.private import at_end_of_backward, name_before_compile
from lightning_dist.reducer.rows import RowGather, RowReduceScatter, Rows
from lightning_dist.reducer.stats import CommStats, Count, places, run_config
from lightning_dist.settings import Settings
from lightning_dist.topology import Topology, this_host

log = logging.getLogger(__name__)

_KINDS = ("parameters", "gradients")


@dataclass(frozen=True)
class ShardSettings:
    """Checked settings of a model that is sharded over all ranks.

    Args:
        given: all that the user has set, but the codec of the parameters.
        gradients, parameters: policies that answer with block codecs.
    """

    given: Settings
    gradients: Codec
    parameters: Codec

    @classmethod
    def check(cls, given: Settings, parameters: str | Codec) -> ShardSettings:
        """Resolve names and refuse what cannot work.

        Raises:
            ValueError: with the rule, the value received and what to do.
        """
        if given.start_step or given.commit != "auto":
            raise ValueError(
                "with parameters= every step is compressed, and nothing is committed later: leave "
                "start_step and commit out"
            )
        gradients, of_parameters = given.codec, resolve_codec(parameters)
        for policy, what in ((gradients, "gradients"), (of_parameters, "parameters")):
            if policy.boundaries() != (0,):
                raise ValueError(
                    f"a sharded model cannot change codecs while it trains, got {policy} for its "
                    f"{what}; give one codec, or by_name or by_size of several"
                )
        for leaf in of_parameters.leaves():
            if leaf.inside_host() is None:
                raise ValueError(
                    "parameters are gathered whole, and nothing of them is kept: their codec must "
                    f"be one such as 'int8', 'fp8', 'bf16' or 'none', got {leaf}"
                )
        for leaf in gradients.leaves():
            if leaf.of_shards() is None:
                raise ValueError(
                    "in a reduce-scatter every rank decodes its own shard: the codec of gradients "
                    f"must be of blocks and not sparse, got {leaf}; use 'qsgd:bits=8', or 'int8' "
                    "with error_feedback=True"
                )
            if given.error_feedback == "auto" and leaf.keeps_residual and not leaf.lossless:
                raise ValueError(
                    f"codec {leaf} is biased, and where gradients are sharded over all ranks each "
                    "would keep an error of the whole model: give error_feedback=True, which keeps "
                    "it in 8 bits (1 byte and 2/block for every element of the unsharded model), "
                    "error_feedback=False to lose it, or an unbiased codec such as 'qsgd:bits=8'"
                )
        least = given.min_compress_numel
        return cls(given, sized(gradients, least), sized(of_parameters, least))

    @property
    def memory(self) -> bool:
        """Whether what the codec of the gradients loses is kept, in 8 bits."""
        return self.given.error_feedback is True


class CompressedShards:
    """The collectives of a model that is sharded over all ranks, quantised.

    Made by :func:`~lightning_dist.compress_fsdp` with ``parameters=``.
    """

    def __init__(
        self, model: nn.Module, settings: ShardSettings, *, groups: Sequence[ParameterGroup]
    ) -> None:
        self.model, self._settings = model, settings
        names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
        own = {
            "gradients": repr(settings.gradients),
            "parameters": repr(settings.parameters),
            "error_feedback": settings.memory,
            "groups": [[names[p] for p in group.parameters] for group in groups],
        }
        self.group, self.device = groups[0].group, groups[0].parameters[0].device
        facts = all_facts({**own, "host": this_host()}, group=self.group, device=self.device)
        require_equal([{key: fact[key] for key in own} for fact in facts])
        ranks = self.group.size()
        self.topology = Topology(tuple(fact["host"] for fact in facts), self.group.rank())
        self.closed = False
        self._stats, self._in_backward = CommStats(), False
        self._unhook = model.register_forward_pre_hook(lambda *_: self.begin())
        self._reductions: dict[str, RowReduceScatter] = {}
        every: list[RowGather | RowReduceScatter] = []
        for each in groups:
            cut, numel = _cut(settings.parameters, each, names, each.dtype)
            gather = RowGather(Rows(cut, numel=numel, dtype=each.dtype, ranks=ranks), self.topology)
            every.append(gather)
            each.module.set_custom_all_gather(cast(Any, _AllGather(self, gather)))
            cut, numel = _cut(settings.gradients, each, names, each.reduce_dtype, trained=True)
            if not numel:
                continue
            rows = Rows(
                cut,
                numel=numel,
                dtype=each.reduce_dtype,
                ranks=ranks,
                weight=1.0 / ranks,
                memory=RoundedError() if settings.memory else None,
            )
            name = names[each.parameters[0]]
            reduction = RowReduceScatter(
                rows, self.topology, name=name, device=self.device, memory=settings.memory
            )
            every.append(reduction)
            each.module.set_custom_reduce_scatter(cast(Any, _ReduceScatter(self, reduction)))
            self._reductions[name] = reduction
        self._compile(every)

    def begin(self) -> None:
        """Give up what a backward pass that an exception has cut short has left.

        Called before each forward pass of the model; by whoever does not call the model itself.
        """
        if self._in_backward:
            self._in_backward = False
            self._stats.drop_step()

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is left out: gradients would be whole meanwhile."""
        return nullcontext()

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent, as of ``Reducer.comm_stats``; of ``parameters`` and ``gradients``.

        A step is a backward pass, and the forward passes before it. ``raw_bytes`` are those that
        FSDP itself would have sent.
        """
        stats = dict(self._stats.as_mapping())
        per_codec = stats.pop("per_codec")
        return {**stats, **{kind: per_codec.get(kind, Count().as_dict()) for kind in _KINDS}}

    def comm_config(self) -> dict[str, Any]:
        """Codecs, hosts and versions, for the configuration of a tracked run."""
        return {
            **run_config(self._settings.given, None),
            "parameters": repr(self._settings.parameters),
            "exchange": "sharded",
            **places(self.topology),
        }

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes``, 0 without error feedback."""
        return {"residual_bytes": sum(each.nbytes for each in self._reductions.values())}

    def state_dict(self) -> dict[str, Any] | None:
        """Where random numbers go on, on the first rank; None elsewhere. Errors are not saved."""
        if self.group.rank():
            return None
        return {"steps": {name: each.step for name, each in self._reductions.items()}}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Go on from :meth:`state_dict`, the same object on every rank; nothing is owed then.

        None starts afresh.
        """
        steps = {} if state is None else state["steps"]
        for name, each in self._reductions.items():
            each.step = int(steps.get(name, 0))
            for held in (of for errors in each.errors for of in errors):
                held.zero_()

    def close(self) -> None:
        """Leave the collectives to torch again."""
        self._unhook.remove()
        self.closed = True

    def record(self, kind: str, of: RowGather | RowReduceScatter) -> None:
        """Count one collective of ``"parameters"`` or ``"gradients"``."""
        self._stats.record(kind, of.raw.total, of.sent)
        if kind == _KINDS[1] and not self._in_backward:
            self._in_backward = True
            at_end_of_backward(self._end_step)

    def _end_step(self) -> None:
        self._in_backward = False
        self._stats.end_step()

    def _compile(self, every: Sequence[RowGather | RowReduceScatter]) -> None:
        wish, numel = self._settings.given.compile_kernels, sum(each.rows.numel for each in every)
        if is_accelerator(self.device):
            if wish is True:
                raise ValueError(
                    f"with parameters= kernels are compiled on a CPU only, got compile_kernels="
                    f"True and a model on {self.device.type}; leave compile_kernels out"
                )
            return
        if not should_fuse(wish, numel=numel, device=self.device):
            return
        if self.group.rank() == 0:
            log.warning("compiling the codecs' kernels (about 20 s the first time)")
        for each in every:
            each.fuse(self.device)


def _cut(
    policy: Codec,
    group: ParameterGroup,
    names: Mapping[Tensor, str],
    dtype: torch.dtype,
    *,
    trained: bool = False,
) -> tuple[dict[BlockCodec, list[tuple[int, int]]], int]:
    """``(offset, elements)`` of the shards of ``group`` in a row, by codec, and their sum."""
    found: dict[BlockCodec, list[tuple[int, int]]] = {}
    offset = 0
    for parameter, numel in zip(group.parameters, group.padded, strict=True):
        if trained and not parameter.requires_grad:
            continue
        codec = policy.for_tensor(names[parameter], tuple(parameter.shape), step=0).of_shards()
        assert codec is not None, "checked with the settings"
        # Blocks that are mostly padding send more than none.
        more = codec.wire_bytes(numel, dtype) >= numel * dtype.itemsize
        chosen = NoCompression() if more or codec.lossless else codec
        found.setdefault(chosen, []).append((offset, numel))
        offset += numel
    return found, offset


class _Comm:
    """A collective that ``fully_shard`` calls instead of its own.

    On the stream that it has chosen; ``async_op`` may be answered with None, when it is done.
    """

    def __init__(self, owner: CompressedShards, quantised: RowGather | RowReduceScatter) -> None:
        self._owner, self._quantised = owner, quantised
        self._channel: Channel | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory at every call, as torch's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _exchange(
        self, output: Tensor, own: Tensor, group: dist.ProcessGroup, *, kind: str, numel: int
    ) -> None:
        rows = self._quantised.rows
        if numel != rows.numel or group.size() != rows.ranks:
            raise RuntimeError(
                f"a parameter group has {rows.numel} elements on each of {rows.ranks} ranks, and "
                f"{numel} of {group.size()} are exchanged: every parameter must get a gradient in "
                "each backward pass, and reshard_after_forward must be True or False"
            )
        if self._channel is None or self._channel.group is not group:
            self._channel = Channel(group, name="intra")
        self._quantised(output, own, self._channel)
        self._owner.record(kind, self._quantised)


class _AllGather(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._owner.closed:
            work: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        numel = input_tensor.numel()
        self._exchange(output_tensor, input_tensor, group, kind=_KINDS[0], numel=numel)
        return None


class _ReduceScatter(_Comm):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self._owner.closed:
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                "gradients are averaged or added when they are reduced quantised, got a gradient "
                "divide factor; leave set_gradient_divide_factor out"
            )
        numel = output_tensor.numel()
        self._exchange(output_tensor, input_tensor, group, kind=_KINDS[1], numel=numel)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        return None
