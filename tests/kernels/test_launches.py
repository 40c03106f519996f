"""Launches of a bucket do not grow with parameters or ranks; what GPUs get of the kernels."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from eager import CODECS
from interpreted import in_tables
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_dist.codecs import resolve_codec
from lightning_dist.codecs.policies import raw_beside
from lightning_dist.kernels import passes as eager_passes
from lightning_dist.ranks import Topology
from lightning_dist.ranks.channel import Channel
from lightning_dist.ranks.levels import nodes_of
from lightning_dist.reducer.network import Network, in_levels
from lightning_dist.reducer.plan import intra as intra_plan
from lightning_dist.reducer.plan.planner import Planner
from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.state import ReducerState
from lightning_dist.reducer.units import table
from lightning_dist.reducer.units.base import CommUnit, decode_all, staggered
from lightning_dist.settings.exchange import ExchangeSettings

passes = pytest.importorskip("lightning_dist.kernels.triton.passes")

MODELS = {9: 1024 * 176, 384: 8 * 512}  # parameters of a bucket, and elements of each


def group_of(ranks: Sequence[int], rank: int) -> Any:
    return SimpleNamespace(size=lambda: len(ranks), rank=lambda: list(ranks).index(rank))


class Operators(TorchDispatchMode):
    """Counts torch's own launches: all operators that are not views."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not view and func is not torch.ops.aten.promote_types.default:
            self._counts["launches"] += 1
            self._counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def step_of(units: list[CommUnit], counts: Counter[str]) -> None:
    """As the reducer does it."""
    scale = torch.ones(())
    with Operators(counts):
        for unit in staggered(units):
            unit.encode(scale, step=0)
            unit.start()
        for unit in units:
            unit.start_second()
        decode_all(units, scale)


def planner_of(
    world_size: int,
    *,
    per_host: int = 1,
    immediate: bool = True,
    plans_for: torch.device | None = None,
) -> Planner:
    ranks = list(range(world_size))
    rank = world_size - 1
    nodes = tuple(f"node{of // per_host}" for of in ranks)
    channel = Channel(group_of(ranks, rank))
    topology, cpu = Topology(nodes, rank), torch.device("cpu")
    network = Network(channel, channel, topology, cpu, plans_for=plans_for)
    if per_host > 1:
        tree = [ranks[i : i + per_host] for i in range(0, world_size, per_host)]
        network = in_levels(
            network, nodes_of(tree), leader=False, new_group=lambda of: group_of(of, rank)
        )
    return Planner(
        network,
        ReducerState(),
        ExchangeSettings(error_feedback=True),
        immediate=immediate,
    )


def step(
    planner: Planner,
    codec: str,
    sizes: Sequence[int],
    counts: Counter[str],
    *,
    small: int = 0,
    dtype: torch.dtype = torch.float32,
) -> None:
    """A bucket of parameters of ``sizes``, with ``small`` uncompressed elements behind each."""
    places = [sum(sizes[:i]) + i * small for i in range(len(sizes))]
    slices = [ParameterSlice(f"p{i}", places[i], (n,)) for i, n in enumerate(sizes)]
    beside = [ParameterSlice(f"b{i}", places[i] + n, (small,)) for i, n in enumerate(sizes)]
    bucket = torch.zeros(sum(sizes) + len(sizes) * small, dtype=dtype)
    found = resolve_codec(codec)
    cut = {found: slices} | ({raw_beside(found): beside} if small else {})
    groups = planner.groups(cut, bucket)
    step_of([unit for group in groups for unit in group.units], counts)


@contextmanager
def without_network(counts: Counter[str], launch: Callable[..., None]) -> Iterator[None]:
    def begin(channel: Channel, op: str, *arguments: Any) -> Any:
        counts["collectives"] += 1
        counts[f"{op} of {channel.name}"] += 1
        return SimpleNamespace(wait=lambda: None)  # nothing is received

    with (
        in_tables(),
        patch.object(
            intra_plan, "unit_elements", lambda *arguments, **of: 1 << 62
        ),  # whole buckets
        patch.object(passes, "_launch", launch),
        patch.object(eager_passes, "is_accelerator", bool),  # which has no cache to cut for
        patch.object(Channel, "_begin", begin),
    ):
        yield


def counted(
    codec: str, parameters: int, world_size: int, *, small: int = 0, **form: Any
) -> Counter[str]:
    counts: Counter[str] = Counter()

    def launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
        counts["launches"] += 1
        counts[kernel.__name__] += 1

    with without_network(counts, launch):
        planner = planner_of(world_size, **form)
        step(planner, codec, [MODELS[parameters]] * parameters, counts, small=small)
    return counts


@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize("parameters", MODELS)
@pytest.mark.parametrize(
    ("world_size", "per_host", "small", "launches"),
    [
        *((size, 1, 0, (6, 6)) for size in (2, 3, 8)),
        *((size, 1, 1000, (6, 9)) for size in (2, 3, 8)),
        *((size, per_host, 0, (10, 10)) for size, per_host in ((4, 2), (8, 2), (8, 4))),
        *((size, per_host, 1000, (10, 12)) for size, per_host in ((4, 2), (8, 4))),
        # Three nodes reduce payloads between them; the deferred update encodes and reduces again.
        (6, 2, 1000, (12, 15)),
    ],
)
def test_int8(
    world_size: int,
    per_host: int,
    small: int,
    launches: tuple[int, int],
    parameters: int,
    immediate: bool,
) -> None:
    """Small: biases and norms, which travel in the exchange of what is compressed."""
    form = {"per_host": per_host, "immediate": immediate, "small": small}
    counts = counted("int8", parameters, world_size, **form)
    assert counts["launches"] <= launches[not immediate], counts
    assert counts["collectives"] <= (2 if per_host == 1 else 4), counts


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [
        ("topk", torch.float32),
        ("dgc", torch.float32),
        ("int4:hadamard=true", torch.float32),
        ("int8", torch.float64),
    ],
)
@pytest.mark.parametrize("world_size", [2, 8])
@pytest.mark.parametrize("parameters", MODELS)
def test_a_bucket_is_one_exchange_without_kernels_of_tables(
    parameters: int, world_size: int, codec: str, dtype: torch.dtype
) -> None:
    """Codecs and dtypes whose passes are launched for every parameter."""
    planner, numel = planner_of(world_size, plans_for=torch.device("cuda")), MODELS[parameters]
    slices = [ParameterSlice(f"p{i}", i * numel, (numel,)) for i in range(parameters)]
    bucket = torch.zeros(parameters * numel, dtype=dtype)
    (group,) = planner.groups({resolve_codec(codec): slices}, bucket)
    assert len(group.units) == 1


@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("codec", ["int4", "fp8", "sign", "qsgd", "terngrad"])
def test_other_codecs_launch_as_many(codec: str, per_host: int) -> None:
    """Stochastic ones copy their salts to the device besides."""
    counts = counted(codec, 384, 4, per_host=per_host, small=1000)
    salts = resolve_codec(codec).stochastic
    assert counts["aten._to_copy.default"] == salts, counts
    assert counts["launches"] - salts <= (6 if per_host == 1 else 10), counts


@pytest.mark.parametrize(
    ("dtype", "small"), [(torch.float32, 0), (torch.float32, 1000), (torch.bfloat16, 1000)]
)
@pytest.mark.parametrize("immediate", [True, False])
@pytest.mark.parametrize("codec", ["int8", "sign:block_size=48", "qsgd"])
@pytest.mark.parametrize(("world_size", "per_host"), [(2, 1), (3, 1), (8, 1), (4, 2)])
def test_what_a_step_launches_was_compiled_at_set_up(
    world_size: int,
    per_host: int,
    codec: str,
    immediate: bool,
    small: int,
    dtype: torch.dtype,
) -> None:
    """Triton compiles by which arguments are None, which addresses 16 divides, and constants."""
    compiled, launched = set[Any](), set[Any]()

    def launch(kernel: Any, *arguments: Any, only_compile: bool, **constants: Any) -> None:
        names = kernel.arg_names
        key = tuple(
            (value.dtype, name == "salts" or value.data_ptr() % 16 == 0)
            if isinstance(value, Tensor)
            else value is None
            for name, value in zip(names, arguments, strict=False)
        )
        constants.pop("programs", None)  # the grid is no part of a kernel
        of = {name: repr(value) for name, value in constants.items()}
        (compiled if only_compile else launched).add(
            (kernel.__name__, key, tuple(sorted(of.items())))
        )

    few = [5000, 300, 40]  # of fewer than a block for every rank
    with without_network(Counter(), launch), patch.object(table, "is_accelerator", bool):
        for sizes in ([4096, 4096 * 3], [4096, 1111], *([n] for n in few)):
            planner = planner_of(world_size, per_host=per_host, immediate=immediate)
            planner.fuse(resolve_codec(codec), [dtype], sizes=sizes)
            step(planner, codec, sizes, Counter(), small=small, dtype=dtype)
    assert len({name for name, *_ in launched}) >= 2
    assert launched <= compiled, launched - compiled


pytest.importorskip("triton", reason="Triton is not installed: pip install triton")


def compiled(architecture: int, dtype: str, kind: str, codecs: Sequence[str]) -> dict[str, Any]:
    """What ``compiled.py`` prints of each pass."""
    here = Path(__file__).parent
    words = [str(architecture), dtype, kind, *codecs]
    done = subprocess.run(
        [sys.executable, str(here / "compiled.py"), *words],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert len(found) == 3 * len(codecs)
    return found


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("architecture", "codecs"),
    [(80, CODECS[:1]), pytest.param(90, CODECS, marks=pytest.mark.exhaustive)],
)
def test_arithmetic_is_rounded_and_not_contracted(architecture: int, codecs: list[str]) -> None:
    """No approximate division or root, no flush to zero, no multiply-add of floats."""
    for name, each in compiled(architecture, "bfloat16", "aligned", codecs).items():
        ptx = each["ptx"]
        floats = set(re.findall(r"\b(?:div|fma|mul|add|sub|sqrt)\.\S*f(?:32|64)\b", ptx))
        assert floats or name == "none encode_kernel", name
        assert all(re.fullmatch(r"(?:div|mul|add|sub|sqrt)\.rn\.f\d+", op) for op in floats), name
        assert not re.search(r"\.ftz|\.approx|\.full\b|\bfma\b", ptx), name
        assert "ld.global.b8" not in ptx, f"{name}: codes are loaded byte by byte"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("architecture", "dtype", "kind", "codecs"),
    [
        (90, "float32", "aligned", CODECS[:2]),
        *(
            pytest.param(architecture, dtype, kind, CODECS, marks=pytest.mark.exhaustive)
            for architecture in (80, 90, 100)
            for dtype in ("float32", "bfloat16", "float16")
            for kind in ("aligned", "odd")
        ),
    ],
)
def test_registers_hold_a_tile_and_aligned_data_moves_in_wide_words(
    architecture: int, dtype: str, kind: str, codecs: list[str]
) -> None:
    for name, each in compiled(architecture, dtype, kind, codecs).items():
        shown = {key: value for key, value in each.items() if key != "ptx"}
        # One by one, elements take more addresses: two registers of a few kernels.
        assert each["spilled"] <= (0 if kind == "aligned" else 8), (name, shown)
        if kind == "aligned":  # else 16; the codes of terngrad are one such word for a thread
            assert each["stores"].get("32", 0) <= 1, (name, shown)
