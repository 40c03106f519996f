"""The rows of the step-time benchmark: a model each, and what communicates for it."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.allreduce_settings import (
    COMPUTE_ROW,
    FP16_ROW,
    LAYERS,
    NO_FEEDBACK_SUFFIX,
    ONE_BUCKET_SUFFIX,
    PER_CHANNEL_ROW,
    PER_TENSOR_ROW,
    POWERSGD_ROW,
    WIDTH,
    is_torch_row,
)
from benchmarks.hierarchical_settings import FORMS, levels, split_row

_LEARNING_RATE = 1e-3
_ONE_BUCKET_MB = 4096  # larger than the model
_POWERSGD_RANK = 4
_POWERSGD_START = 2  # the earliest that the hook allows; before it is plain fp32


class Row:
    """One model of its own with its optimizer and what communicates for it."""

    def __init__(self, name: str, *, seed: int) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.name = name
        cap_mb = _ONE_BUCKET_MB if name.endswith(ONE_BUCKET_SUFFIX) else None
        self.ddp = DistributedDataParallel(model, bucket_cap_mb=cap_mb)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)
        self.handle = attach(self.ddp, name)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """One training step; returns when the parameters are updated."""
        silent = self.ddp.no_sync() if self.name == COMPUTE_ROW else contextlib.nullcontext()
        with silent:
            loss = (self.ddp(inputs) - targets).square().sum(dim=1).mean()
            loss.backward()
        self.optimizer.step()

    def forget(self) -> None:
        """Free the gradients, so that only the row whose turn it is holds any."""
        self.optimizer.zero_grad(set_to_none=True)

    def digest(self) -> int:
        """63 bits that change with any bit of the parameters."""
        digest = hashlib.blake2b(digest_size=8)
        for parameter in self.ddp.parameters():
            digest.update(parameter.detach().numpy().data)
        return int.from_bytes(digest.digest(), "little") >> 1

    def counted(self, key: str) -> int:
        """Bytes of the last step as our own counters have them; 0 where nothing counts."""
        return 0 if self.handle is None else int(self.handle.comm_stats()["last_step"][key])


def attach(ddp: DistributedDataParallel, row: str) -> Any | None:
    """Let the row's method communicate for the model; our handle, or None for torch's own."""
    if is_torch_row(row):
        _attach_torch(ddp, row.removesuffix(ONE_BUCKET_SUFFIX))
        return None
    from lightning_dist import compress_ddp
    from lightning_dist.codecs import BlockCodec, resolve_codec

    form, name = split_row(row)
    codec = name.removesuffix(NO_FEEDBACK_SUFFIX)
    options: dict[str, Any] = {"error_feedback": False} if codec != name else {}
    if form is not None:
        options["hierarchical"] = FORMS[form]
    intra, inter = levels(codec)
    if isinstance(resolve_codec(inter), BlockCodec):
        options["compile_kernels"] = True  # what a model of this size gets by default, but certain
    chosen: Any = inter if intra is None else {"intra": intra, "inter": inter}
    return compress_ddp(ddp, chosen, **options)


def _attach_torch(ddp: DistributedDataParallel, row: str) -> None:
    # Imported where needed: only the risky rows use what these load.
    if row == FP16_ROW:
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif row == POWERSGD_ROW:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd

        state = powersgd.PowerSGDState(
            process_group=None,
            matrix_approximation_rank=_POWERSGD_RANK,
            start_powerSGD_iter=_POWERSGD_START,
        )
        ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    elif row in (PER_TENSOR_ROW, PER_CHANNEL_ROW):
        import torch.ao.quantization  # noqa: F401 - the hooks use it and do not import it
        from torch.distributed.algorithms.ddp_comm_hooks import quantization_hooks as quantization

        per_tensor = row == PER_TENSOR_ROW
        name = "quantization_pertensor_hook" if per_tensor else "quantization_perchannel_hook"
        ddp.register_comm_hook(None, getattr(quantization, name))
