"""The array that means, series and files are slices of."""

from __future__ import annotations

import numpy as np
from planted import MS, Planted, replace, replaced

from lightning_dist.profiling.analysis.parts import EXPOSED, PARTS
from lightning_dist.profiling.analysis.tables import step_table


def test_parts_add_up_to_every_step_of_every_rank() -> None:
    run = Planted(world_size=3, late={1: 30, 2: 70}, slow_steps={2: 3}).run()
    table = step_table(run, run.common_steps)
    assert table.values.shape[:2] == (6, 3)
    assert (table.of(*PARTS) == table.of("duration")).all()
    assert (table.of(*EXPOSED) == table.of("exposed")).all()
    assert (table.of("exposed_wait", "exposed_transfer", "hidden") == table.of("exchange")).all()


def test_waiting_is_of_who_waits_and_for_who_is_late() -> None:
    run = Planted(world_size=4, late={1: 30, 3: 70}).run()
    table = step_table(run, [2, 5])
    assert (table.of("waited") == [[70 * MS, 40 * MS, 70 * MS, 0]] * 2).all()
    assert (table.of("late") == [[0, 0, 0, 180 * MS]] * 2).all()
    assert (table.waited_for.sum(axis=0) == table.of("late").sum(axis=0)).all()
    assert (table.waited_for.sum(axis=1) == table.of("waited").sum(axis=0)).all()


def test_what_was_not_recorded_is_not_a_number() -> None:
    run = Planted().run()
    steps = {step: each for step, each in run.ranks[1].steps.items() if step != 3}
    steps[4] = replace(steps[4], detailed=False, buckets=(), spans=())
    table = step_table(replaced(run, 1, steps=steps), range(6))
    missing = np.isnan(table.values).all(axis=2)
    assert np.argwhere(missing).tolist() == [[3, 1], [4, 1]]
    assert np.isnan(table.values).any(axis=2).sum() == 2
    assert "rank 1" in table.unknown_wait


def test_a_host_has_one_link_to_the_others() -> None:
    run = Planted(world_size=4, hosts=["a", "a", "b", "b"]).run()
    sent, moving = step_table(run, [2]).link_uses()
    assert (sent.tolist(), moving.tolist()) == ([[8e6, 8e6]], [[60 * MS, 60 * MS]])
    alone, moving = step_table(Planted(hosts=["a"]).run(), [2]).link_uses()
    assert (alone.tolist(), moving.tolist()) == ([[4e6, 4e6]], [[60 * MS, 60 * MS]])
