"""Sentences of summaries of planted runs, as a snapshot.

``python tests/profiling/test_summary_words.py`` writes it anew; read the difference.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from planted import Planted, bare, replace, replaced

from lightning_dist.profiling.analysis.parts import Summary
from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import EndRecord
from lightning_dist.profiling.run import Run

SNAPSHOT = Path(__file__).with_name("snapshots") / "summaries.txt"
LATE = Planted(late={1: 50}).run()
NO_STEPS = Planted(steps=0).run()
THREE = Planted(world_size=3, steps=40, late={1: 50}).run()
FOUR_STEPS = Planted(steps=4).run()
HOSTS = Planted(world_size=4, hosts=["a", "a", "b", "b"]).run()
TURNS = [Planted(world_size=3, steps=8, late={late: 40}).run() for late in range(3)]


def only(run: Run, *ranks: int) -> Run:
    return Run({rank: run.ranks[rank] for rank in ranks})


def with_steps(run: Run, rank: int, *steps: int) -> Run:
    of_rank = run.ranks[rank].steps
    return replaced(run, rank, steps={step: of_rank[step] for step in steps})


def with_ends(ends: dict[int, EndRecord | None], run: Run | None = None) -> Run:
    run = replace(Planted(world_size=3).run(), notes=["line 9"]) if run is None else run
    for rank, end in ends.items():
        run = replaced(run, rank, end=end)
    return run


def late_in_turn() -> Run:
    run = TURNS[0]
    for rank, of in run.ranks.items():
        steps = {step: TURNS[step % 3].ranks[rank].steps[step] for step in of.steps}
        run = replaced(run, rank, steps=steps)
    return run


NO_DATA, LOST = EndRecord("OSError: no data", at=7), EndRecord("RuntimeError: closed by peer", at=8)
RUNS = {
    "even ranks": Planted().run(),
    "rank 1 is late": LATE,
    "ranks are late in turn": late_in_turn(),
    "hidden": Planted(transfer=10, encode=0, decode=0, backward=4000).run(),
    "one rank": Planted(world_size=1, buckets=0).run(),
    "no bucket": Planted(buckets=0).run(),
    "stock DDP": Planted(codec="ddp", encode=0, decode=0, sent=4_000_000).run(),
    "no spans": bare(Planted().run(), spans=()),
    "no detailed step": bare(Planted().run(), buckets=(), spans=(), detailed=False),
    "one of two ranks": only(LATE, 0),
    "rank 1 of three is missing": only(THREE, 0, 2),
    "rank 3 of two hosts is missing": only(HOSTS, 0, 1, 2),
    "rank 1 ends after 17 steps": with_steps(THREE, 1, *range(17)),
    "rank 1 ends after 38 steps": with_steps(THREE, 1, *range(38)),
    "rank 1 has a gap": with_steps(THREE, 1, *range(10), *range(20, 40)),
    "rank 1 ends after 9 steps, rank 2 is missing": with_steps(only(THREE, 0, 1), 1, *range(9)),
    "no step": NO_STEPS,
    "no step, and an error": with_ends({1: EndRecord("OSError: no data")}, NO_STEPS),
    "no step, and no end": with_ends({0: None, 1: None}, NO_STEPS),
    "no common step": with_steps(with_steps(FOUR_STEPS, 0, 0, 1), 1, 2, 3),
    "an error of one rank": with_ends({1: NO_DATA}),
    "errors of ranks in their order": with_ends(
        {1: NO_DATA, 2: replace(NO_DATA, at=9), 0: EndRecord("KeyboardInterrupt: ", at=6)}
    ),
    "a rank that lost its peer": with_ends({1: NO_DATA, 0: LOST}),
    "SIGTERM to all": with_ends(dict.fromkeys(range(3), EndRecord("SystemExit: 143"))),
    "late before the forward pass": Planted(late_data={0: 50}, meets_in_forward=True).run(),
}


def words(summary: Summary) -> str:
    fields: dict[str, list[str]] = {}
    for name, reason in summary.unavailable.items():
        if name not in ("errors", "links", "traffic.link_gbps"):  # planted in none of them
            fields.setdefault(reason, []).append(name)
    unavailable = (f"n/a {', '.join(names)}: {reason}" for reason, names in fields.items())
    return "\n".join([summary.headline, *(f"note: {x}" for x in summary.notes), *unavailable])


def texts() -> str:
    return "\n\n".join(f"# {name}\n{words(summarize(run))}" for name, run in RUNS.items()) + "\n"


def test_words_are_those_of_the_snapshot() -> None:
    assert texts() == SNAPSHOT.read_text()


if __name__ == "__main__":
    SNAPSHOT.write_text(texts())
