"""What one rank fails at, all fail at, and with an error of the same class."""

import json

import pytest
from worlds import Rank, run_threads

from lightning_dist.checkpoint.disk.folder_owner import NoLocksError
from lightning_dist.checkpoint.disk.format import (
    CheckpointError,
    CorruptCheckpointError,
    no_checkpoint,
)
from lightning_dist.ranks.agreement import Ranks, describe_error, error_from


class OfAUser(CheckpointError):
    """Only this program has it."""


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (CorruptCheckpointError("a/b.ckpt", "a byte is wrong"), CorruptCheckpointError),
        (CheckpointError("the writer is gone"), CheckpointError),
        (no_checkpoint("a"), FileNotFoundError),
        (PermissionError(13, "not yours"), OSError),
        (UnicodeError("no text"), ValueError),
        (KeyError("x"), RuntimeError),
        (NoLocksError(37, "no locks"), NoLocksError),
        (OfAUser("its own"), CheckpointError),
    ],
)
def test_an_error_has_its_class_on_other_ranks(raised: Exception, kind: type[Exception]) -> None:
    found = error_from(json.loads(json.dumps(describe_error(raised))))
    assert (type(found), str(found)) == (kind, str(raised))


def test_all_ranks_raise_what_one_of_them_fails_at() -> None:
    def one(rank: Rank) -> None:
        problem = CorruptCheckpointError("a", "it is empty") if rank.rank == 1 else None
        with pytest.raises(CorruptCheckpointError, match="it is empty") as caught:
            Ranks(rank.group("facts")).all({}, error=problem)
        assert caught.value.path == "a"

    run_threads(one, 2)
