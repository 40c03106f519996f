"""One trainer used several times, and what loggers get of it."""

from __future__ import annotations

import pytest
from results import Results, pick, require_compressed, require_equal, require_replicas

STEP = {"raw_bytes": 4 * 4096, "wire_bytes": 4096 + 16 * 2}  # one step of `OneMatrix`


def test_a_second_fit_goes_on_where_the_first_ended(two: Results) -> None:
    """Residuals and step count carry over: two fits of an epoch are one fit of two, bit for bit."""
    ranks = two("several_fits")
    for facts in ranks:
        require_equal(facts["start of second"], facts["first"]["residuals"])
        assert facts["step at start of second"] == 4
        assert facts["second"]["digests"] == facts["one fit"]["digests"]
        require_equal(facts["second"]["residuals"], facts["one fit"]["residuals"])
    require_compressed(pick(ranks, "first"), steps=4)
    require_compressed(pick(ranks, "second"), steps=4)  # counted from the start of the fit
    require_replicas(pick(ranks, "second"))


def test_fits_do_not_pile_up_threads_and_sockets(two: Results) -> None:
    """Under plain DDP a fit leaves nothing behind; two gloo groups are 6 threads and 10 files."""
    for facts in two("many_fits"):
        threads, files = zip(*facts["threads and files"], strict=True)
        assert threads[4] < threads[2] + 6, "two fits later"
        assert files[4] < files[2] + 10


@pytest.mark.parametrize("scenario", ["fit_after_a_failure", "fit_after_uneven_failures"])
def test_a_fit_after_a_failed_one_continues_with_its_residuals(two: Results, scenario: str) -> None:
    """The failure came in a backward pass with buckets on their way: its step never happened."""
    ranks = two(scenario)
    for facts in ranks:
        assert facts["error"] == "once"
        assert facts["step"] == 2
        require_equal(facts["start"], facts["owed"])
        assert any(residual.any() for residual in facts["owed"].values())
    require_compressed(pick(ranks, "second"), steps=4)
    require_replicas(pick(ranks, "second"))


def test_rank_0_says_once_that_compression_does_not_pay(two: Results) -> None:
    ranks = two("advice")
    said = [[m for m in facts["messages"] if "costs more than it saves" in m] for facts in ranks]
    assert [len(messages) for messages in said] == [1, 0]
    assert "use codec='none' or plain DDP" in said[0][0]
    require_compressed(ranks, steps=40)


def test_validate_test_and_predict_around_a_fit(two: Results) -> None:
    ranks = two("evaluation_around_fit")
    for facts in ranks:
        assert facts["stats before"] == facts["stats after validate"] == {}
        assert facts["val after"] < facts["val before"]
        assert facts["test after"] < facts["test before"]
        assert facts["predictions"] == 4
        assert not facts["wrapped after fit"]
        for name in ("val before", "val after", "test before", "test after"):
            assert facts[name] == ranks[0][name]
    require_compressed(pick(ranks, "fit"), steps=4)
    require_compressed(pick(ranks, "second fit"), steps=4)
    require_replicas(pick(ranks, "second fit"))


@pytest.mark.parametrize(("name", "every"), [("every step", 1), ("every second", 2)])
def test_loggers_get_the_bytes_of_the_last_step_and_in_total(
    two: Results, name: str, every: int
) -> None:
    """At the trainer's own interval, on rank 0, the last step of the fit included."""
    on_rank_0, on_rank_1 = two("csv_logger")
    steps = list(range(every, 5, every))
    assert on_rank_0[name] == [
        {
            "step": step - 1,
            "comm/raw_bytes": STEP["raw_bytes"],
            "comm/wire_bytes": STEP["wire_bytes"],
            "comm/compression_ratio": pytest.approx(STEP["raw_bytes"] / STEP["wire_bytes"]),
            "comm/intra_bytes": STEP["wire_bytes"],  # both ranks are on this host
            "comm/inter_bytes": 0,
            "comm/total_raw_bytes": step * STEP["raw_bytes"],
            "comm/total_wire_bytes": step * STEP["wire_bytes"],
        }
        for step in steps
    ]
    assert on_rank_1[name] == []


def test_log_every_n_steps_0_logs_nothing(two: Results) -> None:
    """As in Lightning, where 0 switches logging off."""
    for facts in two("csv_logger"):
        assert facts["never stats"]["steps"] == 4
        assert facts["never"] == []


def test_a_second_fit_logs_its_own_steps_only(two: Results) -> None:
    rows = two("csv_logger_two_fits")[0]["rows"]
    assert [row["step"] for row in rows] == list(range(8))
    assert {row["comm/wire_bytes"] for row in rows} == {STEP["wire_bytes"]}


def test_wandb_shows_the_ratio(two: Results) -> None:
    facts = two("wandb_logger")[0]
    if "missing" in facts:
        pytest.skip("wandb is not installed")
    assert facts["summary"]["comm/compression_ratio"] == pytest.approx(
        STEP["raw_bytes"] / STEP["wire_bytes"]
    )
    assert facts["summary"]["comm/total_wire_bytes"] == 4 * STEP["wire_bytes"]
