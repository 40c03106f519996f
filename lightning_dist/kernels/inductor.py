"""Fused kernels: each pass of ``passes.py`` as one loop over memory, compiled at set-up.

Sparse codecs have C++ of our own (``native.py``), the others torch's compiler.

torch.compile's own front end is not used: it guards on every property of every argument and would
recompile, inside a backward pass, when DDP changes its buckets. Here a pass is traced once with the
number of blocks and all strides symbolic and handed to the same code generator. Only on the CPU: an
accelerator has kernels of our own (``triton/``). This file holds every private name of torch that
this takes; if one of them goes, the kernels stay eager and a warning says so.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_dist.base.accelerator import is_accelerator
from lightning_dist.base.log import get_logger
from lightning_dist.codecs.base import Payload
from lightning_dist.codecs.noise import block_keys
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.exchange.rounds import row_bytes, views
from lightning_dist.kernels.native import block_passes, sparse_passes
from lightning_dist.kernels.passes import EAGER, Pass, Passes, compute_dtype
from lightning_dist.kernels.triton import available_on

log = get_logger(__name__)

FUSE_FROM_ELEMENTS = 1 << 22  # a smaller model saves less than the 20 s that compiling costs
_one_at_a_time = threading.Lock()  # torch's tracer keeps its state in globals
_fused: dict[Variant, Mapping[str, Pass]] = {}  # a second fit must not compile again
_COMPILERS = "g++ or clang++ on CPU, Triton on CUDA"
_BLOCKS = 96  # any number that is not 0 or 1: it becomes a symbol


@dataclass(frozen=True)
class Variant:
    """Specialisation of a compiled pass."""

    passes: Passes
    dtype: torch.dtype  # of the gradients
    rows: int
    received: int  # payloads that a mean is made of
    device: torch.device
    immediate: bool  # whether state is written when it is encoded
    only: Literal["", "encode", "decode"] = ""  # passes of the other kind have other shapes


def should_fuse(
    wish: bool | Literal["auto"], *, numel: int, device: torch.device, says: bool = False
) -> bool:
    """``auto``: if a compiler is found and the model is large enough to win the time back.

    Args:
        says: warn that it takes long, or that there is no compiler.

    Raises:
        ValueError: ``wish`` is True and there is no compiler.
    """
    # Triton's kernels are small, and used whatever the size of the model.
    is_large = is_accelerator(device) or numel >= FUSE_FROM_ELEMENTS
    if wish is False or not (wish is True or is_large):
        return False
    there = _has_compiler(device)
    if wish is True and not there:
        raise ValueError(
            f"compile_kernels=True needs a compiler for {device.type} ({_COMPILERS}) and found "
            "none; install one or use 'auto'"
        )
    if says and there:
        log.warning("Compiling the codec's kernels (about 20 s the first time)")
    elif says:
        log.warning(
            "Found no compiler for %s (%s): the codec's kernels are not compiled, and slower; "
            "install one, or set compile_kernels=False",
            device.type,
            _COMPILERS,
        )
    return there


def _has_compiler(device: torch.device) -> bool:
    if is_accelerator(device):
        return available_on(device)
    return any(shutil.which(name) for name in ("g++", "clang++"))


def fused_passes(variant: Variant) -> Mapping[str, Pass]:
    """Compiled passes by name; none off the CPU and, with a warning, where the tool chain fails."""
    if variant.device.type != "cpu":
        return {}
    # In a thread of its own: the compiler leaves Python objects in the state that torch copies from
    # the calling thread into every collective, and a gloo group whose last collective still holds
    # one waits for ever when it is destroyed.
    with _one_at_a_time:
        if variant not in _fused:
            # Where there is no GPU, torch 2.11 goes on using an object of the thread that traced
            # first, when that thread has ended: it must not be the one below.
            getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()
            with ThreadPoolExecutor(1) as compiler:
                _fused[variant] = compiler.submit(_fused_passes, variant).result()
        return _fused[variant]


def known_passes(variant: Variant) -> Mapping[str, Pass]:
    """Passes of :func:`fused_passes` that this process has compiled before; else none."""
    return _fused.get(variant, {})


def _fused_passes(variant: Variant) -> Mapping[str, Pass]:
    passes = variant.passes

    def compiled() -> Iterator[_Compiled]:
        examples = _examples(variant)
        for name, fused in _compiled(variant, examples).items():
            yield name, fused, getattr(passes, name), examples[name]

    return _agreeing(passes.codec.name, compiled)


def compiled_sparse_passes(device: torch.device) -> Mapping[str, Pass]:
    """Compiled passes of ``threshold`` by name, as of :func:`fused_passes`."""
    if device.type != "cpu":
        return {}

    def compiled() -> Iterator[_Compiled]:
        generator = torch.Generator().manual_seed(0)
        x, residual = torch.randn(2, 5000, generator=generator).unbind()
        scale, codec = torch.tensor(3.0), Threshold()
        examples: dict[str, tuple[Any, ...]] = {
            "select": (codec, x, residual, scale, 7),
            "scatter": (x, EAGER["select"](codec, x, None, scale, 0), 1 / 3),
            "keep": (x, residual, scale),
        }
        fused = sparse_passes()
        for name, example in examples.items():
            yield name, fused[name], EAGER[name], example

    with _one_at_a_time:
        return _agreeing(Threshold.name, compiled)


_Compiled = tuple[str, Pass, Pass, tuple[Any, ...]]
"""Name of a pass; compiled; eager; arguments to compare them with."""


def _agreeing(codec: str, compile_all: Callable[[], Iterable[_Compiled]]) -> Mapping[str, Pass]:
    """The compiled passes that give the bytes of the eager ones."""
    start = time.perf_counter()
    fused: dict[str, Pass] = {}
    try:
        for name, compiled, eager, example in compile_all():
            if _agrees(compiled, eager, example):
                fused[name] = compiled
            else:
                log.warning("The fused %s pass differs from the eager one: not used", name)
    except Exception as error:  # a broken tool chain must not stop a training run
        log.warning("Compiling failed, the kernels stay eager (same bytes, slower): %s", error)
        return {}
    log.info("Compiled the %s kernels in %.1f s", codec, time.perf_counter() - start)
    return fused


def _compiled(variant: Variant, examples: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Pass]:
    if variant.passes.codec.native is None:
        return {
            name: _compile(getattr(variant.passes, name), arguments)
            for name, arguments in examples.items()
        }
    compiled = block_passes(variant.passes, variant.dtype, variant.received)
    return {name: compiled[name] for name in examples if name in compiled}


def _compile(function: Pass, arguments: tuple[Any, ...]) -> Pass:
    from torch._dynamo.utils import get_metrics_context
    from torch._inductor.compile_fx import compile_fx  # 5 s to import: only where it is used
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils import _pytree as pytree

    tensors, spec = pytree.tree_flatten(arguments)

    def flat_function(*flat: Tensor | None) -> tuple[()]:
        function(*pytree.tree_unflatten(list(flat), spec))
        return ()

    with torch.no_grad():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [None if t is None else _symbolic(t, mode, str(i)) for i, t in enumerate(tensors)]
        with mode:
            graph = make_fx(flat_function)(*fakes)
        with get_metrics_context():  # torch.compile's, without which torch 2.7 refuses some passes
            run: Any = compile_fx(graph, fakes)

    def fused(*call: Any) -> None:
        run(*_leaves(call))

    return fused


def _leaves(tree: Sequence[Any]) -> list[Tensor | None]:
    flat: list[Tensor | None] = []
    for part in tree:
        if isinstance(part, (tuple, list)):
            flat.extend(_leaves(part))
        else:
            flat.append(part)
    return flat


def _symbolic(tensor: Tensor, mode: Any, name: str) -> Any:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.STATIC][: tensor.dim()]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, source=ConstantSource(name), symbolic_context=context)


def _examples(variant: Variant) -> Mapping[str, tuple[Any, ...]]:
    """Arguments of every pass, each tensor with row strides of its own, as in a bucket."""
    codec, rows, world = variant.passes.codec, variant.rows, variant.passes.world_size
    generator = torch.Generator().manual_seed(0)

    def dense(dtype: torch.dtype, spare: int, size: float) -> Tensor:
        shape = (rows, _BLOCKS + spare, codec.block)
        values = torch.randn(shape, generator=generator) * size
        return values.to(variant.device, dtype)[:, :_BLOCKS]

    def keys(count: int) -> Tensor | None:
        if not codec.stochastic:
            return None
        spaced = block_keys(torch.arange(count * (_BLOCKS + 1), dtype=torch.int32), salt=1)
        return spaced.view(count, _BLOCKS + 1, 1).to(variant.device)[:, :_BLOCKS]

    def payload(count: int) -> Payload:
        planes, blocks = codec.planes(variant.dtype), _BLOCKS + 3
        buffer = torch.zeros(
            count, row_bytes(planes, blocks), dtype=torch.uint8, device=variant.device
        )
        made = tuple(plane[:, :_BLOCKS] for plane in views(buffer, planes, blocks))
        x = torch.randn((count, _BLOCKS, codec.block), generator=generator).to(variant.device)
        for plane, encoded in zip(made, codec.encode(x, keys(count)), strict=True):
            plane.copy_(encoded)
        return made

    grad = dense(variant.dtype, 1, 1.0)
    memory = variant.passes.memory
    wide = compute_dtype(variant.dtype)
    drawn = memory.drawn(rows, _BLOCKS + 2, codec.block, dtype=wide, generator=generator)
    state = tuple(held.to(variant.device)[:, :_BLOCKS] for held in drawn)
    scale = torch.ones((), dtype=torch.float32, device=variant.device)
    received = tuple(payload(rows) for _ in range(variant.received))
    now = variant.immediate and bool(state)
    finished = () if variant.immediate else state
    sent_with = None if variant.only else keys(rows)  # decoders of rows have no keys
    examples: dict[str, tuple[Any, ...]] = {
        "encode_and_commit" if now else "encode": (grad, state, scale, keys(rows), payload(rows)),
        "decode_and_commit": (grad, finished, scale, sent_with, payload(rows), received),
    }
    if variant.only:
        return {
            name: arguments for name, arguments in examples.items() if name.startswith(variant.only)
        }
    if rows > 1:
        examples["reduce"] = (payload(world), keys(1), payload(1))
        if state:
            examples["server_feedback"] = (state[0][:1], scale, payload(world), payload(1))
    return examples


@torch.no_grad()
def _agrees(compiled: Pass, eager: Pass, arguments: tuple[Any, ...]) -> bool:
    from torch.utils import _pytree as pytree

    copy = pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, arguments)
    result, expected = compiled(*arguments), eager(*copy)
    pairs = zip(
        pytree.tree_leaves((arguments, result)), pytree.tree_leaves((copy, expected)), strict=True
    )
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))
