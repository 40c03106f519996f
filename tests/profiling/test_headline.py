from __future__ import annotations

import pytest
from planted import Planted, bare, replace, replaced

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.run import Run


@pytest.mark.parametrize(
    ("planted", "told"),
    [
        (
            Planted(late={1: 50}),
            "39 % of the step is exposed communication (58.0 ms): "
            "78 % transfer, 18 % waiting, 3.4 % codec. Straggler: rank 1.",
        ),
        (
            Planted(),
            "33 % of the step is exposed communication (33.0 ms): 94 % transfer, 6.1 % codec.",
        ),
        (
            Planted(transfer=10, encode=0, decode=0, backward=4000),
            "Communication is hidden: 30.0 ms under the backward pass, 10.0 ms exposed; "
            "the step takes 4,037 ms.",
        ),
        (
            Planted(world_size=1, buckets=0),
            "A single rank does not communicate; the step takes 27.0 ms.",
        ),
        (
            Planted(buckets=0),
            "The step takes 27.0 ms; its parts are unavailable: no gradient bucket and no "
            "exchange was observed.",
        ),
        (
            Planted(steps=0),
            "No data: no step was recorded on any rank: no optimizer has stepped with "
            "parameters of the model; profile a training that makes a few.",
        ),
    ],
)
def test_the_most_important_of_a_planted_run(planted: Planted, told: str) -> None:
    assert summarize(planted.run()).headline == told


def test_of_some_ranks_only_is_said_before_all_else() -> None:
    run = Planted(late={1: 50}).run()
    told = summarize(Run({0: run.ranks[0]})).headline
    assert told.startswith("Partial data (1 of 2 ranks): ")


def test_a_rank_whose_lines_end_early_is_said_before_all_else() -> None:
    run = Planted(world_size=3, steps=40, late={1: 50}).run()

    def told(until: int, of: Run = run) -> str:
        few = {step: of.ranks[1].steps[step] for step in range(until)}
        return summarize(replaced(of, 1, steps=few)).headline

    whole = summarize(run).headline
    assert told(17) == f"Partial data (17 of 40 steps): {whole}"
    assert told(38) == whole  # a rank that is killed loses its last lines
    two = Run({rank: run.ranks[rank] for rank in (0, 1)})
    assert told(9, two).startswith("Partial data (2 of 3 ranks, 9 of 40 steps): ")
    gap = {step: each for step, each in run.ranks[1].steps.items() if not 10 <= step < 20}
    assert summarize(replaced(run, 1, steps=gap)).headline == whole


def test_waiting_that_no_single_rank_is_to_blame_for() -> None:
    turns = [Planted(world_size=3, late={late: 40}).run() for late in range(3)]
    ranks = turns[0].ranks
    mixed = {
        rank: replace(
            of, steps={step: turns[step % 3].ranks[rank].steps[step] for step in of.steps}
        )
        for rank, of in ranks.items()
    }
    assert summarize(Run(mixed), warmup_steps=0).headline == (
        "43 % of the step is exposed communication (59.7 ms): "
        "84 % transfer, 12 % waiting, 3.4 % codec."
    )


def test_where_waiting_is_not_known_transfer_says_so() -> None:
    ranks = Planted(world_size=3, late={1: 50}).run().ranks
    told = summarize(Run({rank: ranks[rank] for rank in (0, 2)})).headline
    assert told.endswith("(83.0 ms): 98 % transfer or unknown waiting, 2.4 % codec.")


def test_steps_without_detail() -> None:
    run = bare(Planted().run(), buckets=(), spans=(), detailed=False)
    assert summarize(run).headline == (
        "The step takes 100 ms; its parts are unavailable: no step was recorded in detail on all "
        "ranks."
    )


def test_what_nothing_covers_is_told() -> None:
    assert summarize(bare(Planted().run(), spans=())).headline == (
        "33 % of the step is exposed communication (33.0 ms): 100 % other."
    )
