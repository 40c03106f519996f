"""Several ranks save one folder together: who writes which bytes, and what is loaded."""

import json
import re
import threading
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from checkpointers import LIMIT, opened_together
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.filesize import decimal
from snapshots import (
    assert_equal,
    filled,
    folder_saves,
    origin,
    owned_tensors,
    small_state,
    trained,
    write_folder,
)
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist.checkpoint.disk.folder import Receipt, merge
from lightning_dist.checkpoint.disk.format import (
    CheckpointError,
    CorruptCheckpointError,
    Manifest,
    Part,
    crc32,
    zeros,
)
from lightning_dist.checkpoint.disk.jobs import Committed, Failed, SaveFolder
from lightning_dist.checkpoint.disk.scan import describe, verify
from lightning_dist.checkpoint.reading import consolidate, load
from lightning_dist.checkpoint.saves import committed_line
from lightning_dist.checkpoint.snapshot.plan import (
    PICKLE,
    SnapshotPlan,
    owned_by,
    pickled,
    plan,
    shape_of,
)
from lightning_dist.ranks.facts import Spread

sizes = st.lists(st.integers(0, 200), max_size=8)
worlds = st.integers(1, 8)


def divided(
    shared: list[int], own: list[int], ranks: int
) -> tuple[list[SnapshotPlan], dict[str, bytes]]:
    """The plans of all ranks for a state of shared and own tensors, and all its records."""
    ours = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in shared]
    rest = [torch.randint(0, 256, (n,), dtype=torch.uint8) for n in own]
    content = pickled([t for pair in zip(ours, rest, strict=False) for t in pair] + ours + rest)
    owned = owned_tensors(*(t for t in ours if t.numel()))
    plans = [plan(content, owned=owned, overlap=True, rank=r, ranks=ranks) for r in range(ranks)]
    records = {f"data/{key}": bytes(s.tolist()) for key, s in enumerate(content.storages)}
    return plans, {PICKLE: content.data, **records}


@given(sizes, sizes, worlds)
def test_every_byte_is_written_once(shared: list[int], own: list[int], ranks: int) -> None:
    plans, records = divided(shared, own, ranks)
    found: dict[str, bytes] = dict.fromkeys(plans[0].records, b"")
    for of_rank in plans:
        snapshot = filled(of_rank)
        for record_range in of_rank.ranges:
            found[record_range.record] += snapshot[
                record_range.offset : record_range.offset + record_range.nbytes
            ]
    assert {name: found[name] for name in records} == records
    assert found.keys() - records.keys() == {"byteorder", "version"}


@given(sizes, sizes, worlds)
def test_shared_bytes_are_divided_evenly_and_rank_0_alone_has_the_rest(
    shared: list[int], own: list[int], ranks: int
) -> None:
    plans, _ = divided(shared, own, ranks)
    shares = [
        sum(storage_range.target.nbytes for storage_range in of_rank.later) for of_rank in plans
    ]
    assert sum(shares) == sum(shared)
    assert max(shares) - min(shares) <= 1
    first, *others = plans
    assert sum(storage_range.target.nbytes for storage_range in first.now) == sum(own)
    assert {record_range.record for record_range, _ in first.constants} == {
        PICKLE,
        "byteorder",
        "version",
    }
    assert all((of_rank.now, of_rank.constants) == ((), ()) for of_rank in others)


@given(sizes, sizes, worlds)
def test_pieces_lie_apart_in_the_order_of_the_archive(
    shared: list[int], own: list[int], ranks: int
) -> None:
    for of_rank in divided(shared, own, ranks)[0]:
        order = [of_rank.records.index(record_range.record) for record_range in of_rank.ranges]
        assert order == sorted(order)
        ends = 0
        for record_range in sorted(of_rank.ranges, key=lambda record_range: record_range.offset):
            assert record_range.offset >= ends
            assert record_range.offset % 64 == 0
            ends = record_range.offset + record_range.nbytes
        assert ends <= of_rank.nbytes


def test_without_overlap_all_is_copied_at_the_trigger() -> None:
    state = small_state()
    owned = owned_tensors(state["weight"])
    later = plan(pickled(state), owned=owned, overlap=True)
    at_once = plan(pickled(state), owned=owned, overlap=False)
    assert [storage_range.target.record for storage_range in later.later] == ["data/0"]
    assert at_once.later == ()
    assert {r.target for r in (*later.now, *later.later)} == {r.target for r in at_once.now}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_optimizers_own_parameters_and_their_state(kind: Any) -> None:
    arguments = {"lr": 0.1, "momentum": 0.9} if kind is torch.optim.SGD else {}
    model, optimizer = trained(kind, **arguments)
    expected = [*model.parameters()]
    for state in optimizer.state.values():
        expected += [value for value in state.values() if torch.is_tensor(value)]
    assert set(owned_by([optimizer])) == set(owned_tensors(*expected))
    assert not set(owned_by([optimizer])) & set(owned_tensors(*model.buffers()))
    assert owned_by([]) == owned_by([kind([nn.Parameter(torch.empty(0))])]) == {}


def test_the_shape_tells_apart_what_would_be_divided_differently() -> None:
    one, other = torch.zeros(3), torch.zeros(4)
    owned = owned_tensors(one, other)
    shape = shape_of(pickled([one, other]), owned)
    assert shape == shape_of(pickled({"a": one, "b": [other]}), owned)
    assert shape != shape_of(pickled([other, one]), owned)
    assert shape != shape_of(pickled([one]), owned)
    # The same bytes under another number: a tensor that only this rank has came first.
    assert shape != shape_of(pickled([torch.zeros(9), one, other]), owned)


Cuts = list[tuple[int, int, int]]  # (start, length, rank)


@st.composite
def cuts(draw: Any, numel: int = 60, ranks: int = 3) -> Cuts:
    """Parts of a tensor that do not overlap, each on some rank."""
    edges = sorted(draw(st.lists(st.integers(0, numel), max_size=8, unique=True)))
    pairs = list(pairwise(edges))
    kept = [pair for pair in pairs if draw(st.booleans())]
    return [(start, end - start, draw(st.integers(0, ranks - 1))) for start, end in kept]


def saves(target: str, values: Tensor, parts: Cuts, ranks: int = 3) -> list[Any]:
    made = []
    for rank in range(ranks):
        whole = torch.full_like(values, torch.nan)
        own = [(start, values.flatten()[start : start + n]) for start, n, r in parts if r == rank]
        spreads = {whole.untyped_storage().data_ptr(): Spread(whole, tuple(reversed(own)))}
        content = pickled({"before": torch.ones(3), "whole": whole, "after": torch.ones(2)})
        divided = plan(content, owned={}, overlap=False, spreads=spreads, rank=rank, ranks=ranks)
        save = SaveFolder(
            origin(ranks=ranks), target, divided.ranges, rank, divided.records,
            tuple(divided.spread.items()), peer_timeout=20,
        )  # fmt: skip
        made.append((save, filled(divided)))
    return made


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(parts=cuts())
def test_parts_are_where_they_belong_and_the_rest_is_zero(parts: Cuts, tmp_path: Path) -> None:
    target = f"{tmp_path}/x.ckpt"
    values = torch.randn(3, 20, dtype=torch.float64)
    events = write_folder(saves(target, values, parts))
    assert not any(isinstance(event, Failed) for event in events), events
    expected = torch.zeros(60, dtype=torch.float64)
    for start, numel, _ in parts:
        expected[start : start + numel] = values.flatten()[start : start + numel]
    verify(target)
    state = {"before": torch.ones(3), "whole": expected.view(3, 20), "after": torch.ones(2)}
    assert_equal(load(target), state)
    single = tmp_path / "single.ckpt"
    single.unlink(missing_ok=True)
    consolidate(target, str(single))
    assert_equal(torch.load(single), state)
    verify(str(single))


@pytest.mark.parametrize("numel", [0, 1, (1 << 20) + 7, 3 << 20])
def test_zeros_have_their_checksum(numel: int) -> None:
    assert zeros(numel) == Part("", 0, numel, crc32([bytes(numel)]))


def merged(
    *placed: tuple[int, int], spread: int | None = None, complete: int | None = None
) -> tuple[Part, ...]:
    """``(start, bytes)`` of the parts of one record."""
    gaps, whole = (() if nbytes is None else (("data/0", nbytes),) for nbytes in (spread, complete))
    save = SaveFolder(origin(), "x", (), 0, ("data/0",), gaps, whole)
    parts = tuple(("data/0", start, Part("f", start, n, 0)) for start, n in placed)
    return merge(save, [Receipt(parts=parts)]).records["data/0"]


def test_parts_come_in_any_order() -> None:
    assert merged((4, 4), (0, 4)) == (Part("f", 0, 4, 0), Part("f", 4, 4, 0))


def test_gaps_are_filled_where_they_may_be() -> None:
    assert merged((2, 2), spread=9) == (zeros(2), Part("f", 2, 2, 0), zeros(5))


def test_what_must_be_complete_may_be() -> None:
    assert merged((4, 5), (0, 4), complete=9) == (Part("f", 0, 4, 0), Part("f", 4, 5, 0))


@pytest.mark.parametrize(
    ("complete", "placed"),
    [
        *(
            (None, each)
            for each in ([(0, 4), (2, 4)], [(0, 4), (0, 4)], [(0, 4), (5, 1)], [(1, 3)])
        ),
        *((9, each) for each in ([(0, 4)], [(0, 4), (5, 4)], [(0, 4), (4, 6)], [])),
    ],
)
def test_what_was_not_written_once_is_an_error(
    complete: int | None, placed: list[tuple[int, int]]
) -> None:
    with pytest.raises(CheckpointError, match=r"bytes \d+ to \d+ of data/0 were not written once"):
        merged(*placed, complete=complete)


def test_parts_that_an_optimizer_owns_are_copied_later() -> None:
    """Of a sharded parameter, as of a whole one; a residual is copied at the trigger."""
    shard, residual = torch.ones(4), torch.ones(4)
    wholes = [torch.empty(8), torch.empty(8)]
    spreads = {
        whole.untyped_storage().data_ptr(): Spread(whole, ((4, part),), complete=part is shard)
        for whole, part in zip(wholes, (shard, residual), strict=True)
    }
    owned = {shard.untyped_storage().data_ptr(): shard}
    divided = plan(pickled(wholes), owned=owned, overlap=True, spreads=spreads, rank=1, ranks=2)
    assert [storage_range.target.record for storage_range in divided.later] == ["data/0"]
    assert [storage_range.target.record for storage_range in divided.now] == ["data/1"]
    assert (divided.complete, divided.spread) == ({"data/0": 32}, {"data/1": 32})


Kind = Literal["process", "thread"]
_SEEDED = threading.Lock()
"""The threads of a world share one random state."""


def model_of(rank: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Alike on all ranks but for the buffers; the first and the last weight are tied."""
    with _SEEDED, torch.random.fork_rng():
        torch.manual_seed(7)
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
        model[2].weight = model[0].weight
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).sum().backward()
        optimizer.step()
    model[1].running_mean += rank
    return model, optimizer


def state_of(rank: int, extra: int = 0) -> tuple[dict[str, Any], torch.optim.Optimizer]:
    model, optimizer = model_of(rank)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rank": rank}
    return {"extra": [torch.zeros(9) for _ in range(extra)], **state}, optimizer


def save_on_all_ranks(
    target: Path, ranks: int, writer: Kind, extra: Callable[[int], int] = lambda rank: 0
) -> None:
    def body(rank: Rank) -> list[object]:
        state, optimizer = state_of(rank.rank, extra(rank.rank))
        with opened_together(target.parent, rank, writer=writer) as checkpointer:
            checkpointer.watch([optimizer])
            checkpointer.save(state, str(target), step=1, sharded=True)
        return list(checkpointer.poll())

    for events in run_threads(body, ranks):
        assert [type(event) for event in events] == [Committed], events


@pytest.mark.parametrize(
    ("ranks", "writer"), [(1, "thread"), (2, "thread"), (2, "process"), (3, "thread")]
)
def test_all_ranks_save_one_state(tmp_path: Path, ranks: int, writer: Kind) -> None:
    target = tmp_path / "x.ckpt"
    save_on_all_ranks(target, ranks, writer)
    loaded = load(str(target))
    assert_equal(loaded, state_of(0)[0])
    weights = [loaded["model"][f"{layer}.weight"] for layer in (0, 2)]
    assert weights[0].data_ptr() == weights[1].data_ptr(), "they are tied no more"
    shards = [path.stat().st_size for path in target.glob("*.bin")]
    assert len(shards) == ranks
    described = verify(str(target))
    assert (described.kind, described.nbytes) == ("sharded", sum(shards))
    assert described.origin is not None
    assert described.origin.ranks == ranks


def test_a_folder_becomes_one_file_for_torch(tmp_path: Path) -> None:
    save_on_all_ranks(tmp_path / "x.ckpt", 2, "thread")
    nbytes = consolidate(f"{tmp_path}/x.ckpt", f"{tmp_path}/one.ckpt")
    assert nbytes == (tmp_path / "one.ckpt").stat().st_size
    assert_equal(torch.load(tmp_path / "one.ckpt", mmap=True), state_of(0)[0])
    one, many = (verify(f"{tmp_path}/{name}.ckpt") for name in ("one", "x"))
    assert (one.kind, one.origin) == ("single", many.origin)


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../secret", ".."])
@pytest.mark.parametrize("of", ["files", "records"])
def test_files_outside_of_the_folder_are_not_read(tmp_path: Path, of: str, name: str) -> None:
    """Of a manifest that somebody has written, with a checksum that fits."""
    save_on_all_ranks(tmp_path / "x.ckpt", 2, "thread")
    manifest = tmp_path / "x.ckpt" / "manifest.json"
    body = json.loads(manifest.read_text())["body"]
    if of == "files":
        body["files"][0]["name"] = name
    else:
        next(parts for parts in body["records"].values() if parts)[0]["file"] = name
    checksum = zlib.crc32(json.dumps(body, sort_keys=True).encode())
    manifest.write_text(json.dumps({"body": body, "crc32": checksum}))
    (tmp_path / "secret").write_text("of somebody else")
    says = f"must have its files in its own folder, got {name!r}"
    for use in (verify, load, lambda path: consolidate(path, f"{tmp_path}/one.ckpt")):
        with pytest.raises(CorruptCheckpointError, match=re.escape(says)):
            use(f"{tmp_path}/x.ckpt")
    assert not (tmp_path / "one.ckpt").exists()


@pytest.mark.parametrize("writer", ["thread", "process"])
def test_ranks_that_do_not_agree_leave_it_to_rank_0(tmp_path: Path, writer: Kind) -> None:
    """Rank 1 has one tensor more, so that all its records have other numbers."""
    target = tmp_path / "x.ckpt"
    save_on_all_ranks(target, 2, writer, extra=lambda rank: rank)
    assert_equal(load(str(target)), state_of(0)[0])
    text = (target / "manifest.json").read_text()
    assert len(Manifest.from_json(text, path=str(target)).files) == 1


class Unpicklable:
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("holds a socket")


@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_that_cannot_save_stops_all_before_they_wait(tmp_path: Path, bad: int) -> None:
    def body(rank: Rank) -> str:
        state = {"bad": Unpicklable() if rank.rank == bad else None}
        with (
            opened_together(tmp_path, rank) as checkpointer,
            pytest.raises(ValueError, match="cannot save") as raised,
        ):
            checkpointer.save(state, f"{tmp_path}/x.ckpt", step=1, sharded=True)
        return str(raised.value)

    wanted = f"rank {bad} cannot save its state: TypeError: holds a socket"
    assert run_threads(body, 2) == [wanted] * 2
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_rank_without_memory_tells_the_others(tmp_path: Path) -> None:
    """Only rank 0 takes the pickle, so only its limit is exceeded."""

    def body(rank: Rank) -> object:
        limit = 100 if rank.rank == 0 else None
        raises = (
            pytest.raises(ValueError, match="host_memory_limit=100") if limit else nullcontext()
        )
        with opened_together(tmp_path, rank, host_memory_limit=limit) as checkpointer:
            with raises:
                checkpointer.save(
                    state_of(rank.rank)[0], f"{tmp_path}/x.ckpt", step=1, sharded=True
                )
            checkpointer.wait(LIMIT)
            (event,) = checkpointer.poll()
        assert isinstance(event, Failed)
        return event.reason

    reasons = run_threads(body, 2)
    assert all("host_memory_limit=100" in str(reason) for reason in reasons), reasons


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_log_and_ls_say_the_same_size(tmp_path: Path, ranks: int) -> None:
    """That of the checkpoint, and not of what a rank has written of it."""
    target = f"{tmp_path}/x.ckpt"
    events = write_folder(folder_saves(target, {"weight": torch.randn(300_000)}, ranks))
    listed = decimal(describe(target).nbytes)
    for event in events:
        assert isinstance(event, Committed)
        assert f"is complete: {listed} in " in committed_line(event, blocking_ms=0.0)
    assert sum(event.nbytes for event in events) == describe(target).nbytes
