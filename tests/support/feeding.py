"""Modules whose gradients are what a test feeds them, behind a real DDP with our reducer."""

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from tiers import some_exhaustive
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank

from lightning_dist.codecs import CODECS, Codec
from lightning_dist.reducer.reducer import Reducer
from lightning_dist.sync.ddp import compress_ddp

Shapes = Mapping[str, tuple[int, ...]]
Tensors = dict[str, Tensor]

_FITTING = {"ratio": 0.1, "tau": 1.5, "rank": 2}
"""Options of codecs that fit SHAPES; so do the blocks of `fitting`."""


def fitting(name: str) -> str:
    """The codec ``name`` with options of which SHAPES have several blocks, ranks and elements."""
    known = [option.name for option in fields(CODECS[name])]
    given = [f"{option}={value}" for option, value in _FITTING.items() if option in known]
    if "block_size" in known:
        given.append(f"block_size={128 if 'ratio' in known else 64}")
    return f"{name}:{','.join(given)}" if given else name


EVERY_CODEC = (
    *map(fitting, CODECS),
    "int8",
    "int4:block_size=64,hadamard=true",
    "topk:ratio=0.1,block_size=128,values=int8",
    "dgc:ratio=0.1,block_size=128,warmup_steps=4,clip=5.0",
    "threshold:tau=1.5,unit=absolute",
    "powersgd:rank=2,two_phase=true",
)
"""Every row of the table, and options that are a way of their own; blocks that fit SHAPES."""

FEW = ("none", "int8", "topk:ratio=0.1,block_size=128", "powersgd:rank=2", "qsgd:block_size=64")
"""One of every kind of unit and of randomness."""


def few_first(codecs: Iterable[str], few: Collection[str] = FEW) -> list[Any]:
    """Values of a parameter: codecs that are not among the few are for the exhaustive tier."""
    every = list(codecs)
    return some_exhaustive(every, {*every} - {*few})


PER_LEVEL = ("bf16 > int4:block_size=64", "fp16 > topk:ratio=0.1,block_size=128")
"""A codec inside nodes and one between them; ``compressed`` understands it."""

SHAPES: Shapes = {"first": (40, 48), "bias": (40,), "second": (33, 50)}
"""With blocks of 256 no matrix is whole in blocks or rows; ``bias`` is 1-D."""


class Fed(nn.Module):
    """``d loss / d p = feed[name of p]``; a parameter that is not fed is not used."""

    def __init__(self, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            values = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(values))

    def forward(self, feed: Tensors) -> Tensor:
        parameters = dict(self.named_parameters())
        return torch.stack([(parameters[name] * value).sum() for name, value in feed.items()]).sum()


def feed(
    rank: int, step: int, shapes: Shapes = SHAPES, dtype: torch.dtype = torch.float32
) -> Tensors:
    """Random gradients, other ones for every rank and step, the same in every run."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


@contextmanager
def compressed(
    rank: Rank,
    module: nn.Module,
    codec: str | Codec | Mapping[str, str | Codec] = "int8",
    *,
    ddp: Mapping[str, Any] | None = None,
    tree: Sequence[Any] | None = None,
    leader: bool = False,
    **settings: Any,
) -> Iterator[tuple[DistributedDataParallel, Reducer]]:
    """``module`` in a real DDP with our hook; in one world one after the other.

    ``tree``: groups of a hierarchical exchange, ``leader``: in the leader form.
    """
    model = rank.ddp(module, **(ddp or {}))
    if tree is not None:
        settings |= {"hierarchical": "leader" if leader else True, "rank_groups": tree}
    if isinstance(codec, str) and " > " in codec:
        codec = dict(zip(("intra", "inter"), codec.split(" > "), strict=True))
    groups = rank.groups(tree, leader=leader)
    reducer = compress_ddp(model, codec, groups=groups, **settings)
    try:
        yield model, reducer
    finally:
        reducer.close()


def backward(model: nn.Module, feed: Tensors) -> Tensors:
    """One forward and backward; the gradients it leaves."""
    model.zero_grad()
    model(feed).backward()
    return gradients(model)


def gradients(model: nn.Module) -> Tensors:
    named = getattr(model, "module", model).named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def residuals(reducer: Reducer) -> Tensors:
    return {name: reducer.residuals[name].clone() for name in reducer.residuals}


def mean(of_ranks: Sequence[Tensors]) -> Tensors:
    return {name: sum(t[name] for t in of_ranks) / len(of_ranks) for name in of_ranks[0]}


def digest(tensors: Mapping[str, Tensor] | Iterable[Tensor]) -> str:
    """Equal if and only if all bits are."""
    values = tensors.values() if isinstance(tensors, Mapping) else tensors
    flat = [t.detach().contiguous().flatten().view(torch.uint8) for t in values]
    return hashlib.sha256(torch.cat(flat).numpy().tobytes()).hexdigest()


def held(reducer: Reducer) -> list[Tensor]:
    """Everything a reducer keeps: residuals, momenta and factors, in one order."""
    state = reducer.state
    stores = (state.residuals, state.momenta)
    kept = [store[name] for store in stores for name in sorted(store)]
    factors = [factor for name in sorted(state.factors) for factor in state.factors[name]]
    return [tensor.clone() for tensor in (*kept, *factors)]


def step_digest(gradients: Tensors, reducer: Reducer) -> str:
    """Digest of all that a step leaves: gradients and state."""
    return digest([gradients[name] for name in sorted(gradients)] + held(reducer))


@dataclass
class FakeBucket:
    """What the reducer needs of DDP's GradBucket, which has no constructor."""

    flat: Tensor
    of: list[Tensor] = field(default_factory=list)
    number: int = 0
    last: bool = True

    def buffer(self) -> Tensor:
        return self.flat

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def parameters(self) -> list[Tensor]:
        return self.of
