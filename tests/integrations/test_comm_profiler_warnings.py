"""What a rank has lost of its lines is told by that rank: rank 0 sees only that none came."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from planted import Planted

from lightning_dist import CommProfiler
from lightning_dist.integrations.profile_run import ProfileRun
from lightning_dist.profiling.capture.events import RankFile
from lightning_dist.profiling.report.files import Wanted


class Closing:
    """What is left of a run when it closes."""

    is_closed = False
    metadata = SimpleNamespace(rank=1)

    def close(self, reason: str, *, together: bool) -> Sequence[str]:
        return ("lines do not reach rank 0: Connection closed by peer",)


def test_a_rank_tells_what_it_could_not_send() -> None:
    profiler = CommProfiler()
    profiler._run = Closing()
    told = "CommProfiler, rank 1: lines do not reach rank 0: Connection closed by peer"
    with pytest.warns(UserWarning, match=told):
        profiler._close("finished", together=True)


@pytest.mark.parametrize(
    ("has_finished", "asks", "reason"),
    [(False, True, "the training did not end by itself"), (True, False, "predict=False")],
)
def test_why_nothing_is_predicted_is_known_without_looking(
    has_finished: bool, asks: bool, reason: str, tmp_path: Path
) -> None:
    of_rank = Planted(world_size=1).run().ranks[0]  # looked at, it would say "one rank exchanges"
    file = RankFile(tmp_path, rank=0)
    file.write([of_rank.metadata, *of_rank.steps.values()])
    file.close()
    run = ProfileRun.__new__(ProfileRun)
    run.folder, run._has_finished, run._predicts = tmp_path, has_finished, asks
    summary, _ = run.report(Wanted(html=False, trace=False))
    assert (
        summary.unavailable["predictions"]
        == f"{reason}; `lightning-dist profile whatif DIR` measures"
    )
    assert summary.predictions is None
