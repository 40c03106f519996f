"""FSDP2 over all ranks, where its own all-gather and reduce-scatter cross the slow link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_dist.codecs import Codec, resolve_codec
from lightning_dist.codecs.base import BlockCodec
from lightning_dist.codecs.memory import RoundedError
from lightning_dist.codecs.none import NoCompression
from lightning_dist.codecs.policies import sized
from lightning_dist.exchange.channel import Channel
from lightning_dist.exchange.handshake import all_facts, require_equal
from lightning_dist.integrations.torch.fsdp_checks import GatheredGroup, gathered_groups
from lightning_dist.private import name_before_compile
from lightning_dist.reducer.rows import RowGather, RowReduceScatter, Rows
from lightning_dist.reducer.stats import Count
from lightning_dist.topology import Topology, this_host


@dataclass(frozen=True)
class ShardSettings:
    """Checked settings of a model that is sharded over all ranks.

    Args:
        gradients, parameters: policies that answer with block codecs.
        memory: keep what the codec of the gradients loses, in 8 bits.
    """

    gradients: Codec
    parameters: Codec
    memory: bool

    @classmethod
    def check(
        cls,
        codec: str | Codec,
        *,
        parameters: str | Codec,
        error_feedback: bool | Literal["auto"] = "auto",
        min_compress_numel: int | None = None,
    ) -> ShardSettings:
        """Resolve names and refuse what cannot work.

        Raises:
            ValueError: with the rule, the value received and what to do.
        """
        gradients, of_parameters = resolve_codec(codec), resolve_codec(parameters)
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
            if error_feedback == "auto" and leaf.keeps_residual and not leaf.lossless:
                raise ValueError(
                    f"codec {leaf} is biased, and where gradients are sharded over all ranks each "
                    "would keep an error of the whole model: give error_feedback=True, which keeps "
                    "it in 8 bits (1 byte and 2/block for every element of the unsharded model), "
                    "error_feedback=False to lose it, or an unbiased codec such as 'qsgd:bits=8'"
                )
            if error_feedback is True and not leaf.contraction:
                raise ValueError(
                    f"error feedback diverges with codec {leaf}, which is unbiased; leave "
                    "error_feedback at 'auto'"
                )
        return cls(
            sized(gradients, min_compress_numel),
            sized(of_parameters, min_compress_numel),
            error_feedback is True,
        )


class CompressedShards:
    """The collectives of a model that is sharded over all ranks, quantised.

    Made by :func:`~lightning_dist.compress_fsdp` with ``parameters=``.
    """

    def __init__(
        self, model: nn.Module, settings: ShardSettings, *, groups: Sequence[GatheredGroup]
    ) -> None:
        self.model = model
        names: dict[Tensor, str] = {p: name_before_compile(n) for n, p in model.named_parameters()}
        own = {
            "gradients": repr(settings.gradients),
            "parameters": repr(settings.parameters),
            "error_feedback": settings.memory,
            "groups": [[names[p] for p in group.parameters] for group in groups],
        }
        group, device = groups[0].group, groups[0].parameters[0].device
        facts = all_facts({**own, "host": this_host()}, group=group, device=device)
        require_equal([{key: fact[key] for key in own} for fact in facts])
        topology = Topology(tuple(fact["host"] for fact in facts), group.rank())
        self._counts = {"parameters": Count(), "gradients": Count()}
        self._reductions: dict[str, _ReduceScatter] = {}
        self._gathers: list[_AllGather] = []
        for each in groups:
            parameters = [names[p] for p in each.parameters]
            cut, numel = _cut(settings.parameters, each, names, each.dtype)
            rows = Rows(cut, numel=numel, dtype=each.dtype, ranks=group.size())
            gather = _AllGather(RowGather(rows, topology), self._counts["parameters"])
            each.module.set_custom_all_gather(cast(Any, gather))  # the base class is private
            self._gathers.append(gather)
            cut, numel = _cut(settings.gradients, each, names, each.reduce_dtype, trained=True)
            if not numel:
                continue
            rows = Rows(
                cut,
                numel=numel,
                dtype=each.reduce_dtype,
                ranks=group.size(),
                weight=1.0 / group.size(),
                memory=RoundedError() if settings.memory else None,
            )
            reduction = RowReduceScatter(
                rows, topology, name=parameters[0], device=device, memory=settings.memory
            )
            scatter = _ReduceScatter(reduction, self._counts["gradients"])
            each.module.set_custom_reduce_scatter(cast(Any, scatter))
            self._reductions[parameters[0]] = scatter

    def comm_stats(self) -> Mapping[str, Any]:
        """Bytes this rank sent, in all and of ``parameters`` and ``gradients``.

        ``raw_bytes`` are those that FSDP itself would have sent.
        """
        total = Count()
        for count in self._counts.values():
            total.add(count.raw, count.sent)
        return {**total.as_dict(), **{kind: of.as_dict() for kind, of in self._counts.items()}}

    def memory(self) -> Mapping[str, int]:
        """Bytes held between steps: ``residual_bytes``, 0 without error feedback."""
        kept = sum(each.reduction.nbytes for each in self._reductions.values())
        return {"residual_bytes": kept}

    def state_dict(self) -> dict[str, Any]:
        """Where random numbers go on, equal on all ranks. Errors are not saved: they are lost."""
        return {"steps": {name: each.reduction.step for name, each in self._reductions.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; nothing is owed then."""
        for name, each in self._reductions.items():
            each.reduction.step = int(state["steps"][name])
            for held in (of for errors in each.reduction.errors for of in errors):
                held.zero_()

    def close(self) -> None:
        """Leave the collectives to torch again."""
        for gather in self._gathers:
            gather.closed = True
        for scatter in self._reductions.values():
            scatter.closed = True


def attach_shards(
    model: nn.Module, settings: ShardSettings, *, mesh: DeviceMesh
) -> CompressedShards:
    """What :func:`compress_fsdp` does with ``parameters=``, with checked settings. Collective."""
    return CompressedShards(model, settings, groups=gathered_groups(model, mesh))


def _cut(
    policy: Codec,
    group: GatheredGroup,
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

    def __init__(self, counts: Count) -> None:
        self.closed = False
        self._counts = counts
        self._channel: Channel | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """New memory at every call, as torch's own."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _over(self, group: dist.ProcessGroup, rows: Rows, numel: int) -> Channel:
        if numel != rows.numel or group.size() != rows.ranks:
            raise RuntimeError(
                f"a parameter group has {rows.numel} elements on each of {rows.ranks} ranks, and "
                f"{numel} of {group.size()} are exchanged: every parameter must get a gradient in "
                "each backward pass, and reshard_after_forward must be True or False"
            )
        if self._channel is None or self._channel.group is not group:
            self._channel = Channel(group, name="intra")
        return self._channel


class _AllGather(_Comm):
    def __init__(self, gather: RowGather, counts: Count) -> None:
        super().__init__(counts)
        self._gather = gather

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.closed:
            work: dist.Work | None = dist.all_gather_single(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
            return work
        channel = self._over(group, self._gather.rows, input_tensor.numel())
        self._gather(output_tensor, input_tensor, channel)
        self._counts.add(self._gather.raw.total, self._gather.sent)
        return None


class _ReduceScatter(_Comm):
    def __init__(self, reduction: RowReduceScatter, counts: Count) -> None:
        super().__init__(counts)
        self.reduction = reduction

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.closed:
            work: dist.Work | None = dist.reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
            return work
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise RuntimeError(
                "gradients are averaged or added when they are reduced quantised, got a gradient "
                "divide factor; leave set_gradient_divide_factor out"
            )
        channel = self._over(group, self.reduction.rows, output_tensor.numel())
        self.reduction(output_tensor, input_tensor, channel)
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        self._counts.add(self.reduction.raw.total, self.reduction.sent)
        return None
