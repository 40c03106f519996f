"""Rows of the benchmarks: models that communicate as the name of the row says.

no-comm             the same step under `no_sync`: compute only
ddp                 DistributedDataParallel as it is, fp32: the reference
torch-fp16-hook     with torch's own `fp16_compress_hook`
torch-powersgd, torch-powersgd-one-bucket, torch-quant-pertensor, torch-quant-perchannel
                    with torch's hooks of these names (PowerSGD: rank 4, from the third step on)
CODEC               `compress_ddp(ddp, CODEC)` with default options
CODEC-noef          without error feedback
CODEC-warm          uncompressed up to some step (`start_step`)
onebit-adam:CODEC   with an optimizer that is attached to it
flat/CODEC          `hierarchical=False`: hosts do not matter
hierarchical/CODEC  `hierarchical=True`: reduce-scatter within hosts, the compressed exchange
                    between the ranks of one local number, all-gather within hosts
leader/CODEC        `hierarchical="leader"`: reduce to one rank of each host, which exchanges for
                    all, and broadcast
FORM/INTRA+INTER    as codec: `{"intra": INTRA, "inter": INTER}`
delay/CODEC         `delay=1`: the mean of a step is applied in the next one
METHOD@H[:SETTING=VALUE,...][/CODEC]
                    `local_updates` with H local steps: `diloco@16:outer_lr=1/int8`
fsdp/CODEC          a model sharded within hosts by `fully_shard`; `compress_fsdp` between them,
                    under `no_sync()` before the last micro-batch
fsdp/native-hsdp    averaged between hosts by torch, at every micro-batch
fsdp/native-hsdp-deferred
                    with `set_requires_all_reduce(False)` before the last one
fsdp/all-ranks[-CODEC]
                    sharded over all ranks; with parameters in a codec, and gradients in the same,
                    or in qsgd of 8 bits where that is int8
fsdp/no-comm        the hosts do not communicate: the floor of the other rows of sharded models
fsdp/NAME@N         N micro-batches a step
ROW*F               F times the learning rate
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_dist import compress_ddp, compress_fsdp, local_updates
from lightning_dist.codecs import BlockCodec, resolve_codec
from lightning_dist.settings.local_updates import default_codec
from lightning_dist.sync.base import Groups
from lightning_dist.sync.local.outer_steps import LocalUpdates

COMPUTE_ROW, DDP_ROW, FP16_ROW = BASELINES = ("no-comm", "ddp", "torch-fp16-hook")
POWERSGD_ROW, ONE_BUCKET_ROW = "torch-powersgd", "torch-powersgd-one-bucket"
RISKY_BASELINES = (POWERSGD_ROW, ONE_BUCKET_ROW, "torch-quant-pertensor", "torch-quant-perchannel")
"""torch's hooks of more than one collective. They may end or hang the process."""
FORMS: dict[str, bool | str] = {"flat": False, "hierarchical": True, "leader": "leader"}
"""The name of a form -> what `compress_ddp(hierarchical=...)` calls it."""
DELAY, FSDP = "delay", "fsdp"
"""In the place of a form: the mean of a step is applied in the next one; a sharded model."""
NATIVE, DEFERRED, ALL = "native-hsdp", "native-hsdp-deferred", "all-ranks"
ALL_INT8 = f"{ALL}-int8"
"""Parameters gathered in int8, and gradients reduced in qsgd of 8 bits."""
NO_FEEDBACK_SUFFIX, WARM_SUFFIX, ONEBIT_PREFIX = "-noef", "-warm", "onebit-adam:"

_ONE_BUCKET_MB = 4096  # larger than the model
_POWERSGD_RANK = 4
_POWERSGD_START = 2  # the earliest that the hook allows; before it is plain fp32


def split_row(row: str) -> tuple[str | None, str]:
    """The form of a row, None where it leaves that to `compress_ddp`, and the rest of its name."""
    form, mark, codec = row.partition("/")  # no name or option of a codec has it in it
    return (form, codec) if mark and form in (*FORMS, DELAY, FSDP) else (None, row)


@dataclass(frozen=True, kw_only=True)
class RowName:
    """Parts of a row's name.

    Args:
        codec: of lightning_dist, between hosts; or the name of what torch does.
        intra: codec within hosts; None: what `compress_ddp` chooses.
        all_ranks: sharded over all ranks, none of which holds what another holds.
        parameters: codec of the parameters there; None: torch gathers them.
        rate: factor of the learning rate.
        local: arguments of `local_updates`; empty: gradients are exchanged in every step.
    """

    codec: str
    intra: str | None = None
    form: str | None = None
    feedback: bool = True
    warm: bool = False
    onebit: bool = False
    all_ranks: bool = False
    parameters: str | None = None
    micro_batches: int = 1
    rate: float = 1.0
    local: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> RowName:
        """From the name."""
        row, _, rate = text.partition("*")
        form, row = split_row(row)
        found = cls(codec=row, form=form, rate=float(rate or 1))
        before, mark, after = row.partition("@")
        if form == FSDP:
            codec, is_of_shards = before.removeprefix(f"{ALL}-"), before.startswith(f"{ALL}-")
            return replace(
                found,
                codec="qsgd:bits=8" if before == ALL_INT8 else codec,
                all_ranks=ALL in before,
                parameters=codec if is_of_shards else None,
                micro_batches=int(after or 1),
            )
        if mark:
            schedule, _, codec = after.partition("/")
            every, _, more = schedule.partition(":")
            chosen = dict(each.split("=") for each in more.split(",") if each)
            local = {name: int(v) if v.isdigit() else float(v) for name, v in chosen.items()}
            local |= {"method": before, "sync_every": int(every)}
            return replace(found, codec=codec or default_codec(before), local=local)
        name = row.removeprefix(ONEBIT_PREFIX).removesuffix(WARM_SUFFIX)
        codec = name.removesuffix(NO_FEEDBACK_SUFFIX)
        intra, mark, inter = codec.partition("+")
        return replace(
            found,
            codec=inter if mark else codec,
            intra=intra if mark else None,
            feedback=codec == name,
            warm=row.endswith(WARM_SUFFIX),
            onebit=row.startswith(ONEBIT_PREFIX),
        )

    @property
    def is_torch(self) -> bool:
        """Whether nothing of lightning_dist is in it."""
        return self.codec in (*BASELINES, *RISKY_BASELINES, NATIVE, DEFERRED, ALL)

    @property
    def silent(self) -> bool:
        """Whether hosts do not communicate; ranks of a host do where the model is sharded."""
        return self.codec == COMPUTE_ROW


class Row:
    """A model with its optimizer and what communicates for it. Collective.

    Args:
        optimizer: makes it for the model.
        blocks: of the model, which are sharded by themselves.
        shards: ranks that hold the model together, where it is sharded.
        options: of `compress_ddp`, or those of them that the others have.
    """

    def __init__(
        self,
        text: str,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        *,
        blocks: Iterable[nn.Module] = (),
        shards: int = 1,
        min_compress_numel: int | None = None,
        start_step: int = 0,
        compile_kernels: bool | Literal["auto"] = "auto",
        groups: Groups | None = None,
    ) -> None:
        self.text, self.name = text, RowName.parse(text)
        name, least = self.name, min_compress_numel
        self.updates: LocalUpdates | None = None
        self.handle: Any = None
        """What communicates, with ``comm_stats`` and ``close``; None: torch."""
        mesh = _shard(model, name, blocks, shards) if self.is_sharded else None
        cap_mb = _ONE_BUCKET_MB if text == ONE_BUCKET_ROW else None
        # As a worker of its own a rank has no DDP around its model.
        bare = mesh is not None or bool(name.local)
        self.model: Any = model if bare else DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self.optimizer = optimizer(model)
        codec = None if name.is_torch else resolve_codec(name.codec)
        if compile_kernels == "auto" and isinstance(codec, BlockCodec):
            compile_kernels = True  # what a model of the size of ours gets, but certain
        if name.is_torch:
            _attach_torch(self.model, text)
        elif mesh is not None:
            self.handle = compress_fsdp(
                model,
                name.codec,
                mesh=mesh,
                min_compress_numel=least,
                compile_kernels=compile_kernels,
                **({"parameters": name.parameters} if name.parameters else {}),
            )
        elif name.local:
            self.handle = self.updates = local_updates(
                model,
                self.optimizer,
                codec=name.codec,
                min_compress_numel=least,
                groups=groups,
                **name.local,
            )
        else:
            self.handle = compress_ddp(
                self.model,
                {"intra": name.intra, "inter": name.codec} if name.intra else name.codec,
                error_feedback="auto" if name.feedback else False,
                hierarchical=FORMS.get(name.form or "", "auto"),  # type: ignore[arg-type]
                delay=int(name.form == DELAY),
                min_compress_numel=least,
                start_step=start_step,
                compile_kernels=compile_kernels,
                groups=groups,
            )
        if name.onebit:
            self.optimizer.attach(self.handle)  # type: ignore[attr-defined]

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold the model only together."""
        return self.name.form == FSDP

    @property
    def reducer(self) -> Any | None:
        """Ours; None where there is none."""
        return getattr(self.handle, "reducer", None if self.name.all_ranks else self.handle)

    def backward(self, loss: Callable[[Any], Tensor]) -> None:
        """The backward passes of a step, one for each micro-batch."""
        for number in range(self.name.micro_batches):
            last = number + 1 == self.name.micro_batches
            if self.name.codec == DEFERRED:
                self.model.set_requires_all_reduce(last)
            with self._silent(last):
                loss(self.model).backward()

    def _silent(self, last: bool) -> AbstractContextManager[object]:
        if self.name.silent and not self.is_sharded:
            return self.model.no_sync()  # type: ignore[no-any-return]
        has_own = self.is_sharded and not self.name.all_ranks and self.handle is not None
        return nullcontext() if last or not has_own else self.handle.no_sync()

    def close(self) -> None:
        """Let go of the model."""
        if self.handle is not None:
            self.handle.close()


def _shard(model: nn.Module, name: RowName, blocks: Iterable[nn.Module], shards: int) -> DeviceMesh:
    """Shard ``model`` over all ranks, or one dimension of the mesh of replicas and shards."""
    world = dist.get_world_size()
    sizes, names = (world // shards, shards), ("replicate", "shard")
    if name.all_ranks:
        mesh = own = init_device_mesh("cpu", (world,))
    else:
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        own = mesh if name.codec in (NATIVE, DEFERRED) else mesh["shard"]
    for each in (*blocks, model):
        fully_shard(each, mesh=own)
    return mesh


def _attach_torch(ddp: DistributedDataParallel, row: str) -> None:
    # Imported where needed: only the risky rows use what these load.
    state, hook = None, None
    if row == FP16_ROW:
        hook = fp16_compress_hook
    elif row in (POWERSGD_ROW, ONE_BUCKET_ROW):
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        hook = powersgd.powerSGD_hook
        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_START,
        )
    elif row in RISKY_BASELINES:
        import torch.ao.quantization  # noqa: F401 - the hooks use it and do not import it
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization

        hook = getattr(quantization, f"quantization_{row.removeprefix('torch-quant-')}_hook")
    if hook is not None:
        ddp.register_comm_hook(state, hook)


def rotated(items: Iterable[Any], number: int) -> list[Any]:
    """Another one first in every round, so that no row always follows the same one."""
    found = list(items)
    first = number % len(found)
    return found[first:] + found[:first]


def tx_bytes_of(interface: str) -> int:
    """Bytes that an interface of this host has sent, from its own counter."""
    return int(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


def timed(run: Callable[[], object]) -> tuple[float, int]:
    """Seconds of what all ranks do, of the slowest, and bytes that this host sent. Collective."""
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    dist.barrier()
    tx_before, began = tx_bytes_of(interface), time.perf_counter()
    run()
    elapsed = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.barrier()  # now every rank has received what this one sent
    tx = tx_bytes_of(interface) - tx_before
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item(), tx


def digest_of(model: nn.Module) -> int:
    """63 bits that change with any bit of the parameters."""
    digest = hashlib.blake2b(digest_size=8)
    for parameter in model.parameters():
        whole = parameter.detach()
        whole = whole.full_tensor() if isinstance(whole, DTensor) else whole
        digest.update(whole.numpy().data)
    return int.from_bytes(digest.digest(), "little") >> 1
