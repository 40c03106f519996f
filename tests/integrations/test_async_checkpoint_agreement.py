"""What one of two ranks alone finds, or cannot do."""

from __future__ import annotations

from results import Results


def test_rank_0_verifies_and_all_raise_what_it_found(two: Results) -> None:
    reason = "FOLDER/async-agreement/step=6.ckpt is not a complete checkpoint: "
    for rank, facts in enumerate(two("async_one_rank_knows")):
        kind, text = facts["path"]
        assert kind == "CorruptCheckpointError"
        assert text.startswith(reason)
        assert facts["verified"] == (1 if rank == 0 else 0)
        assert facts["missing"] == (
            "FileNotFoundError",
            "There is no checkpoint at FOLDER/async-agreement/none.ckpt; lightning-dist ckpt ls "
            "DIR lists those of a folder",
        )


def test_last_passes_over_damage_that_headers_do_not_show(two: Results) -> None:
    for facts in two("async_one_rank_knows"):
        assert facts["last"].endswith("async-agreement/step=3.ckpt")
        kind, text = facts["all"]
        assert kind == "CheckpointError"
        assert "FOLDER/async-agreement/step=3.ckpt" in text
        assert "FOLDER/async-agreement/step=6.ckpt" in text
        assert facts["free"]


def test_a_folder_that_one_rank_does_not_see(two: Results) -> None:
    for rank, facts in enumerate(two("async_one_rank_knows")):
        kind, text = facts["unseen"]
        assert kind == "ValueError"
        assert text.startswith(
            f"ckpt_path='last' found a checkpoint in FOLDER/async-agreement-of-{rank} on some "
            "ranks, and none on others; put the folder where all ranks see it"
        )


def test_a_rank_that_cannot_open_the_folder(two: Results) -> None:
    for facts in two("async_rank_1_cannot_open"):
        assert facts["error"] == (
            "ValueError",
            "No checkpoints can be written to FOLDER/async-half-open: OSError: [Errno 28] No space "
            "left on device",
        )
        assert facts["free"]


def test_the_checkpoint_io_records_the_world_size(two: Results) -> None:
    assert [facts["ranks"] for facts in two("async_io_ranks")] == [2, 2]


def test_the_displaced_best_is_back_on_all_ranks(two: Results) -> None:
    for facts in two("async_displaced"):
        assert facts["books"] == [["step=2.ckpt"]]
        assert facts["best"] == "step=2.ckpt"


def test_a_fit_gives_its_process_group_back(two: Results) -> None:
    for facts in two("async_groups"):
        assert facts["groups"] == [1, 1, 1]
        assert facts["names"] == ["step=3.ckpt", "step=6.ckpt"]
