"""What a rank has lost of its lines is told by that rank: rank 0 sees only that none came."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from lightning_dist import CommProfiler


class Closing:
    """What is left of a run when it closes."""

    is_closed = False
    about = SimpleNamespace(rank=1)

    def close(self, reason: str, *, together: bool) -> Sequence[str]:
        return ("lines do not reach rank 0: Connection closed by peer",)


def test_a_rank_tells_what_it_could_not_send() -> None:
    profiler = CommProfiler()
    profiler._run = Closing()
    told = "CommProfiler, rank 1: lines do not reach rank 0: Connection closed by peer"
    with pytest.warns(UserWarning, match=told):
        profiler._close("finished", together=True)
