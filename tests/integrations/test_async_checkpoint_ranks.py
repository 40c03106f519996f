"""AsyncCheckpoint on two ranks, and what three and one make of its files."""

from __future__ import annotations

import pytest
import torch
from results import Results, pick, require_equal

from lightning_dist.checkpoint.disk.verify import describe
from lightning_dist.checkpoint.reading import load

RUNS = ["ddp single", "ddp sharded", "int8 single", "int8 sharded"]


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_for_bit(run: str, two: Results) -> None:
    """From the middle of an epoch; parameters, moments and residuals of every rank."""
    for facts in pick(two("async_resume"), run):
        whole, resumed = facts["whole"], facts["resumed"]
        assert list(whole["digests"]) == [1, 2, 3, 4, 5, 6]
        assert list(resumed["digests"]) == [4, 5, 6]
        assert resumed["digests"].items() <= whole["digests"].items()
        require_equal(resumed["residuals"], whole["residuals"])
        assert facts["names"] == ["again", "step=3.ckpt", "step=6.ckpt"]
    if run.startswith("int8"):
        mine, other = (facts["whole"]["residuals"] for facts in pick(two("async_resume"), run))
        assert any(not torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize("run", RUNS)
def test_no_lock_file_is_left_whichever_rank_ends_last(run: str, two: Results) -> None:
    two("async_resume")
    folder = two.folder / f"async-{run.replace(' ', '-')}"
    assert [path.name for path in folder.rglob("*") if path.name.endswith(".lock")] == []


def test_either_format_holds_the_same(two: Results) -> None:
    two("async_resume")
    for name in ("ddp", "int8"):
        single, sharded = (
            load(str(two.folder / f"async-{name}-{form}" / "step=3.ckpt"), weights_only=True)
            for form in ("single", "sharded")
        )
        assert single.keys() == sharded.keys()
        require_equal(single["state_dict"], sharded["state_dict"])
        moments = (state["optimizer_states"][0]["state"] for state in (single, sharded))
        for one, other in zip(*(found.values() for found in moments), strict=True):
            require_equal(one, other)


def test_two_ranks_write_a_half_each(two: Results) -> None:
    """But for what only rank 0 has: the pickle, buffers, loops."""
    for facts in pick(two("async_resume"), "ddp sharded"):
        small, large = facts["shards"]
        assert 0 <= large - small < 6000 < small


def test_the_last_checkpoint_is_found_on_all_ranks(two: Results) -> None:
    for facts in pick(two("async_resume"), "last"):
        assert facts["from"].endswith("async-int8-sharded/step=6.ckpt")
        assert list(facts["digests"]) == [7, 8]


@pytest.mark.parametrize("run", ["single 0", "sharded 0", "sharded 1"])
def test_all_ranks_know_what_was_not_written(run: str, two: Results) -> None:
    """With a full disk below rank 0, or below rank 1, and whatever the policy."""
    reason = "rank 1 could not write: OSError" if run.endswith("1") else "OSError"

    def failure(step: int, kept: int) -> str:
        return (
            f"The checkpoint FOLDER/step={step}.ckpt of step {step} was not written: {reason}: "
            f"[Errno 27] File too large; the last complete one is FOLDER/step={kept}.ckpt of step "
            f"{kept}"
        )

    for rank, facts in enumerate(two("async_books")):
        warned, raised = facts[f"{run} warn"], facts[f"{run} raise"]
        assert warned["error"] == ""
        warnings = [f"[lightning_dist] {failure(*steps)}" for steps in ((2, 1), (5, 4))]
        assert warned["said"] == (warnings if rank == 0 else [])
        assert warned["steps"] == [1, 2, 3, 4, 5]
        assert [[name for name in books if name[0] != "."] for books in warned["books"]] == [
            [f"step={step}.ckpt", "last.ckpt", "last.ckpt", f"step={step}.ckpt"] for step in (3, 4)
        ]
        assert raised["error"] == failure(2, 1)
        assert raised["said"] == []
        assert raised["steps"] == [1, 2]
        assert [n for n in raised["names"] if n[0] != "."] == ["last.ckpt", "step=1.ckpt"]


def test_refused_on_all_ranks(two: Results) -> None:
    for facts in two("async_refusals"):
        for form in ("single", "sharded"):
            assert facts[f"file {form}"] == (
                "No checkpoints can be written to FOLDER/async-a-file: FileExistsError: [Errno 17] "
                "File exists: 'FOLDER/async-a-file'"
            )
        assert facts["other model"].startswith(
            "FOLDER/async-ddp-sharded/step=3.ckpt is a checkpoint of another model; parameters and "
            "buffers of another shape: net.0.weight (32, 16) for (7, 16)"
        )
        assert facts["changed"] is False


def test_the_checkpoint_io_under_stock_ddp(two: Results) -> None:
    for facts in two("async_io"):
        assert facts["names"] == ["step=6.ckpt"]
        assert facts["resumed"]["digests"] == facts["stock"]["digests"]
        assert list(facts["resumed"]["digests"]) == [7, 8]


@pytest.mark.parametrize("run", RUNS)
def test_other_numbers_of_ranks_go_on_from_it(run: str, two: Results, three: Results) -> None:
    two("async_resume")
    path = two.folder / f"async-{run.replace(' ', '-')}" / "step=3.ckpt"
    assert describe(str(path)).origin.ranks == 2
    of_three, of_one = three("async_two_to_three"), three("async_two_to_one", ranks=1)
    first = {facts[run]["first"] for facts in (*of_three, *of_one)}
    assert len(first) == 1
    for facts in (*of_three, *of_one):
        assert list(facts[run]["digests"]) == [4, 5, 6]
    assert len({tuple(facts[run]["digests"].values()) for facts in of_three}) == 1
    saved = load(str(path))
    if run.startswith("int8"):
        owed = {n: rows.mean(0) for n, rows in saved["lightning_dist"]["residuals"].items()}
        for ranks in (of_three, of_one):
            for name, residual in owed.items():
                mean = torch.stack([facts[run]["start"][name] for facts in ranks]).mean(0)
                torch.testing.assert_close(mean, residual, rtol=1e-6, atol=0.0)


def test_three_ranks_write_a_third_each(three: Results) -> None:
    for facts in three("async_two_to_three"):
        smallest, *_, largest = facts["shards"]
        assert len(facts["shards"]) == 3
        assert 0 <= largest - smallest < 6000 < 2 * smallest
