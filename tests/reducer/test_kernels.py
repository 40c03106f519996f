"""The arithmetic between gradient, residual and payload, eager and fused."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from arguments import DEFERRED, IMMEDIATE, PASSES, arguments, same_bits
from feeding import Fed, backward, compressed, feed, step_digest
from processes import run as run_process
from torch import Tensor
from torch._inductor import metrics
from worlds import Rank, run_threads

from lightning_dist.codecs import FP16, BlockCodec, Int8
from lightning_dist.codecs.memory import ErrorFeedback
from lightning_dist.kernels import inductor
from lightning_dist.kernels import passes as module
from lightning_dist.kernels.passes import Factors, Kernels, Passes

CPU = torch.device("cpu")
CODEC = Int8(block_size=64)
SIZE = 3  # with three ranks one variant has all four passes


def make(codec: BlockCodec = CODEC) -> Kernels:
    return Kernels(codec, memory=ErrorFeedback(), factors=Factors(), world_size=SIZE)


def test_reduce_and_carry_do_not_overflow_where_the_mean_does_not() -> None:
    shards, _, mean = arguments(CODEC, rows=3, blocks=5)["reduce"]
    for out, plane in zip(shards, CODEC.encode(torch.full((3, 5, 64), 3e38)), strict=True):
        out.copy_(plane)
    residual = torch.zeros(1, 5, 64)
    make().reduce(shards, None, mean)
    make().server_feedback(residual, torch.tensor(1.0), shards, mean)
    found = CODEC.decode(mean, torch.float32)
    torch.testing.assert_close(found, torch.full((1, 5, 64), 3e38), rtol=0.01, atol=0)
    assert residual.isfinite().all()


@pytest.mark.parametrize("name", PASSES)
def test_pieces_that_fit_a_cache_change_no_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = (arguments(CODEC, rows=3, blocks=13)[name] for _ in range(2))
    of_kernels = "decode_and_commit" if name == "decode" else name
    getattr(make(), of_kernels)(*whole)
    monkeypatch.setattr(module, "_CACHE_ELEMENTS", 2 * 3 * CODEC.block)
    getattr(make(), of_kernels)(*cut)
    assert same_bits(cut, whole)


def test_a_short_gradient_is_not_rounded_on_the_way() -> None:
    """bfloat16 gradient, float32 residual: the sum keeps the residual's small part."""
    codec, shape = FP16(), (1, 4, 1)
    grad, residual = torch.ones(shape, dtype=torch.bfloat16), torch.full(shape, 2e-3)
    own = (torch.zeros(shape, dtype=torch.float16),)
    make(codec).encode(grad, (residual,), torch.tensor(1.0), None, own)
    assert same_bits(own, codec.encode(torch.full(shape, 1.002)))
    assert (own[0] > 1).all()


SHAPES = {"first": (128, 130), "bias": (130,), "second": (256, 128)}  # 16 blocks a row and more
eager = make(Int8())


@pytest.fixture(scope="module")
def fused() -> Mapping[str, Callable[..., None]]:
    """The compiled passes of both updates of the state; ``decode`` has no state."""
    variant = inductor.Variant(
        eager.passes, torch.float32, rows=SIZE, received=1, device=CPU, immediate=False
    )
    immediate = dict(inductor.fused_passes(replace(variant, immediate=True)))
    immediate["decode"] = immediate.pop("decode_and_commit")
    return {**inductor.fused_passes(variant), **immediate}


def test_every_pass_is_fused(fused: Mapping[str, object]) -> None:
    assert set(fused) == set(PASSES)
    assert metrics.generated_kernel_count >= len(PASSES)


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize(("blocks", "offset"), [(16, 0), (17, 3), (96, 256), (301, 1)])
def test_fused_passes_give_the_bytes_of_the_eager_ones(
    fused: Mapping[str, Callable[..., None]], name: str, blocks: int, offset: int
) -> None:
    """Any number of blocks, any strides, any place in the bucket."""

    def fresh() -> tuple[object, ...]:
        of_passes = arguments(Int8(), rows=SIZE, blocks=blocks, offset=offset)
        grad = of_passes["encode"][0]
        grad[0, 0] = 0
        grad[1, 1] *= 1e-40
        grad[2, 2, 7] = 1e30
        return of_passes[name]

    by_fused, by_eager = fresh(), fresh()
    with torch.no_grad():
        fused[name](*by_fused)
        getattr(eager, "decode_and_commit" if name == "decode" else name)(*by_eager)
    assert same_bits(by_fused, by_eager)
    assert not same_bits(by_fused, fresh()), "the pass did nothing"


@pytest.mark.parametrize("name", ["encode_and_commit", "decode_and_commit", "server_feedback"])
def test_fused_passes_keep_the_residual_of_what_is_not_finite(
    fused: Mapping[str, Callable[..., None]], name: str
) -> None:
    """The same bits as the eager ones; of the payload only that it is not finite."""

    def residual_after(run: Callable[..., None]) -> Tensor:
        of_passes = arguments(Int8(), rows=SIZE, blocks=96)
        of_passes["encode"][0][0, 3, 5] = torch.inf
        of_passes["server_feedback"][2][0][1, 4] = torch.nan
        own = of_passes["decode_and_commit"][4][0]
        own[0, 3] = torch.inf
        with torch.no_grad():
            run(*of_passes[name])
        residual = of_passes[name][0] if name == "server_feedback" else of_passes[name][1][0]
        before = arguments(Int8(), rows=SIZE, blocks=96)["encode"][1][0][: len(residual)]
        kept = (residual == before).all(-1).nonzero().tolist()
        assert kept == [[0, 4 if name == "server_feedback" else 3]]
        return residual

    assert torch.equal(residual_after(fused[name]), residual_after(getattr(eager, name)))


def run(
    rank: Rank, *, compile_kernels: bool, state_update: str
) -> tuple[list[str], list[int], set[str]]:
    """Digests of 4 steps, kernels generated in each, and which fused passes were called."""
    called: set[str] = set()

    def counted(name: str, kernel: Callable[..., None]) -> Callable[..., None]:
        def call(*tensors: object) -> None:
            called.add(name)
            kernel(*tensors)

        return call

    settings = {
        "compile_kernels": compile_kernels,
        "state_update": state_update,
        "ddp": {"bucket_cap_mb": 0.05},
    }
    with compressed(rank, Fed(SHAPES), **settings) as (model, reducer):
        assert reducer.planner.is_fused is compile_kernels
        kernels = reducer.planner.flat.blocks(Int8(), torch.float32).kernels
        kernels.use({name: counted(name, kernel) for name, kernel in kernels._fused.items()})
        rank.barrier.wait()
        digests, generated = [], [metrics.generated_kernel_count]
        for step in range(4):
            gradients = backward(model, feed(rank.rank, step, SHAPES))
            digests.append(step_digest(gradients, reducer))
            generated.append(metrics.generated_kernel_count)
        assert len(model._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")) > 1
    return digests, generated, called


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("state_update", ["deferred", "immediate"])
def test_a_real_step_runs_fused_and_compiles_nothing(state_update: str) -> None:
    """Also when DDP rebuilds its buckets after the first step; with the bits of eager kernels."""
    known = len(inductor._fused)
    by_fused = run_threads(
        lambda rank: run(rank, compile_kernels=True, state_update=state_update), SIZE
    )
    assert len(inductor._fused) == known
    for _, generated, called in by_fused:
        assert generated == [generated[0]] * 5
        assert called == {
            "decode_and_commit" if name == "decode" else name
            for name in (DEFERRED if state_update == "deferred" else IMMEDIATE)
        }
    by_eager = run_threads(
        lambda rank: run(rank, compile_kernels=False, state_update=state_update), SIZE
    )
    assert [called for _, _, called in by_eager] == [set()] * SIZE
    assert [digests for digests, _, _ in by_fused] == [digests for digests, _, _ in by_eager]


def test_small_models_are_not_compiled_unless_asked() -> None:
    large, small = inductor.FUSE_FROM_ELEMENTS, inductor.FUSE_FROM_ELEMENTS - 1
    assert inductor.should_fuse("auto", numel=large, device=CPU)
    assert not inductor.should_fuse("auto", numel=small, device=CPU)
    assert inductor.should_fuse(True, numel=1, device=CPU)
    assert not inductor.should_fuse(False, numel=large, device=CPU)


def test_without_a_compiler_auto_is_eager_and_true_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    for wish, numel in (("auto", 1), (False, 1 << 30)):  # which need none
        assert not inductor.should_fuse(wish, numel=numel, device=CPU, says=True)
    assert not caplog.text
    large = inductor.FUSE_FROM_ELEMENTS
    assert not inductor.should_fuse("auto", numel=large, device=CPU, says=True)
    assert "Found no compiler for cpu" in caplog.text
    with pytest.raises(ValueError, match=r"compile_kernels=True needs a compiler for cpu \(g\+\+"):
        inductor.should_fuse(True, numel=1, device=CPU)


def test_for_a_gpu_triton_is_looked_for_by_who_has_imported_nothing_of_it() -> None:
    """As in ``lightning-dist profile whatif``, where no model has had torch load its compiler."""
    asks = (
        "import sys, torch; from lightning_dist.kernels.inductor import should_fuse; "
        "print(should_fuse('auto', numel=1 << 30, device=torch.device('cuda')))"
    )
    told = run_process([sys.executable, "-c", asks], limit=60).require_success()
    assert told.output.strip() in ("True", "False")


def other_variant(block_size: int) -> inductor.Variant:
    passes = Passes(Int8(block_size), ErrorFeedback(), Factors(), 2)
    return inductor.Variant(passes, torch.float32, rows=1, received=2, device=CPU, immediate=False)


def test_a_broken_tool_chain_leaves_the_kernels_eager(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(function: object, arguments: object) -> None:
        raise RuntimeError("no such header")

    monkeypatch.setattr(inductor, "_compile", fail)
    assert inductor.fused_passes(other_variant(32)) == {}
    assert "the kernels stay eager (same bytes, slower): no such header" in caplog.text


def test_the_compiler_is_not_used_on_an_accelerator(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = replace(other_variant(80), device=torch.device("meta"))
    assert inductor.fused_passes(elsewhere) == {}
    assert not caplog.records


def test_a_kernel_that_gives_other_bytes_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Here: one that does nothing, and one that is right."""

    def miscompile(function: Callable[..., None], arguments: object) -> Callable[..., None]:
        return function if function.__name__ == "encode" else lambda *tensors: None

    monkeypatch.setattr(inductor, "_compile", miscompile)
    assert set(inductor.fused_passes(other_variant(48))) == {"encode"}
    assert "The fused decode_and_commit pass differs from the eager one: not used" in caplog.text
