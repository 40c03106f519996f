"""Settings that make no sense are refused with what to do."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_dist.checkpoint.settings import CheckpointSettings


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"snapshot": "lazy"}, "snapshot must be one of 'auto', 'overlap', 'blocking', 'sync'"),
        ({"on_busy": "drop"}, "on_busy must be one of 'wait', 'skip'; got 'drop'"),
        ({"writer": None}, "writer must be one of 'auto', 'process', 'thread'; got None"),
        ({"verify": True}, "verify must be one of 'resume', 'always', 'never'; got True"),
        ({"on_error": "ignore"}, "on_error must be one of 'raise', 'warn'; got 'ignore'"),
        ({"max_in_flight": 0}, "max_in_flight must be an integer >= 1; got 0"),
        ({"max_in_flight": 1.5}, "max_in_flight must be an integer >= 1; got 1.5"),
        (
            {"host_memory_limit": 0},
            "host_memory_limit must be a number of bytes >= 1, or None; got 0",
        ),
        ({"snapshot": "sync", "on_busy": "skip"}, "waits for every save, so on_busy='skip' cannot"),
    ],
)
def test_a_bad_value_is_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"^") as error:
        CheckpointSettings(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"snapshot": "overlap", "max_in_flight": 3, "on_busy": "skip", "writer": "process"},
        {"snapshot": "sync", "verify": "always", "on_error": "warn", "host_memory_limit": 1},
    ],
)
def test_good_values_pass(arguments: dict[str, Any]) -> None:
    made = CheckpointSettings(**arguments)
    assert {name: getattr(made, name) for name in arguments} == arguments
