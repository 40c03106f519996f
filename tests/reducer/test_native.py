"""Compiled passes of the sparse codecs give the bytes of the eager ones, whatever the gradient."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from arguments import in_a_bucket, on_the_wire
from feeding import EVERY_CODEC, SHAPES, Fed, backward, compressed, feed, held
from hypothesis import example, given
from hypothesis import strategies as st
from threads import on_threads
from torch import Tensor
from worlds import Rank

from lightning_dist.codecs import DGC, BlockCodec, RandomK, Threshold, TopK
from lightning_dist.codecs.memory import Memory, NoMemory
from lightning_dist.codecs.noise import block_keys
from lightning_dist.kernels import inductor, native
from lightning_dist.kernels.passes import EAGER, Factors, Pass, Passes

CPU = torch.device("cpu")
CODECS: tuple[BlockCodec, ...] = (
    TopK(),
    TopK(ratio=0.25, block_size=256, values="fp32"),
    TopK(ratio=1.0, block_size=64),
    TopK(ratio=0.05, block_size=512, values="int8"),
    DGC(),
    DGC(ratio=0.3, block_size=128, momentum=0.7),
    RandomK(),
    RandomK(ratio=0.1, block_size=256, unbiased=True),
    RandomK(ratio=0.001, block_size=8192),
)
KINDS = ("normal", "rounded", "zeros", "few", "subnormal", "huge", "special")
SPECIAL = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, 3e38, 1.0])


def values(shape: Sequence[int], kind: str, *, seed: int) -> Tensor:
    """Gradients, most of them with equal magnitudes in a block."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    drawn = torch.randint(0, len(SPECIAL), shape, generator=generator)
    return {
        "normal": lambda: x,
        "rounded": lambda: x.round(),
        "zeros": lambda: torch.zeros(shape) * x.sign(),
        "few": lambda: torch.where(drawn == 0, x, 0.0),
        "subnormal": lambda: x.round() * 1e-45,
        "huge": lambda: x * 1e38,
        "special": lambda: torch.where(x > 2, SPECIAL[drawn], x),
    }[kind]()


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; but a NaN is a NaN."""
    if a.is_floating_point():
        nan = a.isnan() & b.isnan()
        a, b = a.masked_fill(nan, 0), b.masked_fill(nan, 0)
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def passes_of(codec: BlockCodec, memory: Memory, *, world: int) -> Passes:
    share = 1.0 / world
    linear = codec.exchange == "allreduce"
    factors = Factors(encode=share, own=float(world)) if linear else Factors(mean=share)
    return Passes(codec, memory, factors, world)


def step(
    passes: Passes,
    encode: Any,
    decode_and_commit: Any,
    *,
    blocks: int,
    kind: str,
    scale: float,
    kept: float,
    immediate: bool,
) -> list[Tensor]:
    """All that the two passes write, in the strides of a bucket.

    ``immediate``: ``encode`` commits, and ``decode_and_commit`` has nothing to.
    """
    codec, shape = passes.codec, (1, blocks, passes.codec.block)
    world = 1 if codec.exchange == "allreduce" else passes.world_size
    keys = block_keys(torch.arange(blocks, dtype=torch.int32), salt=3).view(1, blocks, 1)
    given_keys = keys if codec.stochastic else None
    factor = torch.tensor(scale)
    payloads = [on_the_wire(codec, 1, blocks) for _ in range(world)]
    for rank, payload in enumerate(payloads):
        grad = in_a_bucket(shape, spare=1, offset=3, seed=0)
        grad.copy_(values(shape, kind, seed=rank))
        # Finite, as what is kept of a step.
        state = tuple(
            in_a_bucket(shape, spare=2, offset=1, seed=10 + i).mul_(kept)
            for i, _ in enumerate(passes.memory.kinds)
        )
        encode(grad, state, factor, given_keys, payload)
    finished = () if immediate else state
    decode_and_commit(grad, finished, factor, given_keys, payloads[-1], tuple(payloads))
    return [grad, *state, *(plane for payload in payloads for plane in payload)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@given(
    kind=st.sampled_from(KINDS),
    blocks=st.integers(1, 5),
    scale=st.sampled_from([1.0, 8.0, 3.0, 65536.0]),
    immediate=st.booleans(),
    world=st.integers(1, 3),
    feedback=st.booleans(),
    kept=st.sampled_from([0.0, 1e-3, 1.0]),
)
@example(kind="special", blocks=3, scale=3.0, immediate=True, world=2, feedback=True, kept=1.0)
@example(kind="special", blocks=3, scale=1.0, immediate=True, world=2, feedback=True, kept=1.0)
@example(kind="subnormal", blocks=2, scale=1.0, immediate=False, world=2, feedback=True, kept=0.0)
@example(kind="zeros", blocks=2, scale=1.0, immediate=True, world=3, feedback=False, kept=0.0)
def test_the_bytes_are_those_of_the_eager_passes(
    codec: BlockCodec,
    kind: str,
    blocks: int,
    scale: float,
    immediate: bool,
    world: int,
    feedback: bool,
    kept: float,
) -> None:
    memory = codec.memory("auto") if feedback else NoMemory()
    passes = passes_of(codec, memory, world=world)
    received = 1 if codec.exchange == "allreduce" else world
    compiled = native.block_passes(passes, torch.float32, received)
    assert set(compiled) == {"encode", "encode_and_commit", "decode_and_commit"}
    given: dict[str, Any] = {"blocks": blocks, "kind": kind, "scale": scale, "kept": kept}
    first = "encode_and_commit" if immediate else "encode"
    given["immediate"] = immediate
    found = step(passes, compiled[first], compiled["decode_and_commit"], **given)
    wanted = step(passes, getattr(passes, first), passes.decode_and_commit, **given)
    assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


@pytest.mark.parametrize("values_of", ["bf16", "fp32"])
@given(
    kind=st.sampled_from(KINDS),
    numel=st.sampled_from([1, 7, 4095, 4096, 9001]),
    scale=st.sampled_from([1.0, 8.0, 3.0]),
    unit=st.sampled_from(["rms", "absolute"]),
    tau=st.sampled_from([0.5, 3.0]),
    feedback=st.booleans(),
)
def test_threshold_too(
    values_of: str, kind: str, numel: int, scale: float, unit: str, tau: float, feedback: bool
) -> None:
    codec = Threshold(tau=tau, unit=unit, values=values_of)

    def step(passes: Mapping[str, Pass]) -> list[Tensor]:
        bucket = values((5 + numel,), kind, seed=1)
        residual = values((numel,), "normal", seed=2) if feedback else None
        other = torch.arange(0, numel, 3, dtype=torch.int32), torch.randn(-(-numel // 3))
        compensated, factor = bucket[5:], torch.tensor(scale)
        own = passes["select"](codec, compensated, residual, factor, 5)
        left = [compensated.clone(), *own]
        passes["scatter"](bucket, own, -1.0)
        passes["keep"](compensated, residual, factor)
        for payload in (own, other):
            passes["scatter"](bucket, payload, 1 / 3)
        return [*left, bucket, *([] if residual is None else [residual])]

    generator = torch.random.get_rng_state()
    found = step(native.sparse_passes())
    torch.random.set_rng_state(generator)
    wanted = step(EAGER)
    assert [same(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


SPARSE = [name for name in EVERY_CODEC if name.startswith(("topk", "dgc", "randomk", "threshold"))]


@pytest.mark.parametrize("state_update", ["immediate", "deferred"])
@pytest.mark.parametrize("codec", SPARSE)
@on_threads(2)
def test_steps_of_a_real_ddp_have_the_same_bits(rank: Rank, codec: str, state_update: str) -> None:
    """With parameters that fill no whole blocks, buckets that are rebuilt, and one bad gradient."""

    def train(compiled: bool) -> list[Tensor]:
        settings: dict[str, Any] = {"compile_kernels": compiled, "state_update": state_update}
        settings |= {"min_compress_numel": 256, "ddp": {"bucket_cap_mb": 0.01}}
        with compressed(rank, Fed(), codec, **settings) as (model, reducer):
            assert reducer.planner.is_fused is compiled
            found = []
            for number in range(5):
                fed = feed(rank.rank, number)
                if number == 3 and rank.rank == 0:
                    fed["second"][4, 5] = torch.inf
                found += [*backward(model, fed).values(), *held(reducer)]
            return found

    found, wanted = train(compiled=True), train(compiled=False)
    assert len(found) > 5 * len(SHAPES)
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))


def test_what_the_cpp_has_no_passes_for_stays_eager() -> None:
    """Gradients of another dtype, and payloads of a linear codec that are added here."""
    topk = passes_of(TopK(), NoMemory(), world=2)
    assert native.block_passes(topk, torch.bfloat16, 2) == {}
    assert native.block_passes(topk, torch.float64, 2) == {}
    assert native.block_passes(passes_of(RandomK(), NoMemory(), world=2), torch.float32, 2) == {}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a library that compiles fast is kept, and nobody has put it yet."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(native, "_OPTIONS", (*native._OPTIONS, "-O0", "-march=x86-64"))
    return tmp_path / "lightning_dist"


def test_one_process_of_a_machine_compiles(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def counted(command: list[str]) -> str:
        commands.append(command)
        return output_of(command)

    output_of = native._output_of
    monkeypatch.setattr(native, "_output_of", counted)
    with ThreadPoolExecutor(3) as ranks:
        libraries = {future.result() for future in [ranks.submit(native._built) for _ in range(3)]}
    assert libraries == set(folder.glob("native-*"))
    assert len([command for command in commands if "-o" in command]) == 1


def test_another_machine_or_source_is_another_library(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    libraries = {native._built()}
    output_of = native._output_of
    monkeypatch.setattr(
        native, "_output_of", lambda command: output_of(command) + "#define __AVX512F__ 1"
    )
    libraries.add(native._built())
    source = tmp_path / "native.cpp"
    source.write_text(native._SOURCE.read_text() + "// another\n")
    monkeypatch.setattr(native, "_SOURCE", source)
    libraries.add(native._built())
    assert libraries == set(folder.glob("native-*"))
    assert len(libraries) == 3


def without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", native._library.__wrapped__)


def tried(caplog: pytest.LogCaptureFixture) -> str:
    """What is said where nothing can be compiled, once of each kind of codec."""
    passes = passes_of(TopK(block_size=64 + 64), NoMemory(), world=2)
    variant = inductor.Variant(
        passes, torch.float32, rows=1, received=2, device=CPU, immediate=False
    )
    assert inductor._fused_passes(variant) == {}
    assert inductor.compiled_sparse_passes(CPU) == {}
    first, second = (record.getMessage() for record in caplog.records)
    assert first.startswith("[lightning_dist] Compiling failed, the kernels stay eager (same")
    assert second == first
    return second


def test_without_a_compiler_kernels_stay_eager(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_library(monkeypatch)
    monkeypatch.setenv("PATH", "")
    assert "found neither g++ nor clang++" in tried(caplog)


def test_with_a_broken_compiler_kernels_stay_eager(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    source = tmp_path / "native.cpp"
    source.write_text("no C++")
    monkeypatch.setattr(native, "_SOURCE", source)
    without_a_library(monkeypatch)
    assert "error: " in tried(caplog)
    assert not list(folder.glob("native-*"))


def test_a_user_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the password database has no entry, and no variable says it."""
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert native._user() == "uid_54321"


def test_a_library_of_another_user_is_not_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without_a_library(monkeypatch)
    monkeypatch.setattr(os, "getuid", lambda: folder.parent.stat().st_uid + 1)
    assert "belongs to another user" in tried(caplog)


def test_passes_that_give_other_bytes_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiled = native.block_passes(passes_of(TopK(), NoMemory(), world=2), torch.float32, 2)
    wrong = {**compiled, "decode_and_commit": lambda *tensors: None}
    monkeypatch.setattr(inductor, "block_passes", lambda *asked: wrong)
    passes = passes_of(TopK(), NoMemory(), world=2)
    variant = inductor.Variant(
        passes, torch.float32, rows=1, received=2, device=CPU, immediate=False
    )
    assert set(inductor._fused_passes(variant)) == {"encode"}
    assert "The fused decode_and_commit pass differs from the eager one: not used" in caplog.text
    threshold = {**native.sparse_passes(), "keep": lambda *given: None}
    monkeypatch.setattr(inductor, "sparse_passes", lambda: threshold)
    assert set(inductor.compiled_sparse_passes(CPU)) == set(EAGER) - {"keep"}
    assert "The fused keep pass differs from the eager one: not used" in caplog.text
