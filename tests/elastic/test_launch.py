"""What a rank knows of its launcher."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.rendezvous import Launch

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "6",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "3",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "4711",
    "TORCHELASTIC_RESTART_COUNT": "1",
    "TORCHELASTIC_MAX_RESTARTS": "4",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_USE_AGENT_STORE": "False",
}


def test_what_torchrun_set() -> None:
    assert Launch.from_env(TORCHRUN) == Launch(
        is_elastic=True,
        rank=5,
        world_size=6,
        local_rank=1,
        local_world_size=2,
        node_rank=2,
        nodes=3,
        restart_count=1,
        max_restarts=4,
        run_id="job",
        master_addr="node7",
        master_port=4711,
        shares_store=False,
    )


def test_a_process_of_its_own() -> None:
    launch = Launch.from_env({"RANK": ""})
    assert launch == Launch(is_elastic=False)
    assert launch.missing_settings() == []


def test_a_number_that_is_none() -> None:
    with pytest.raises(ValueError, match=r"WORLD_SIZE must be an integer, it is 'many'"):
        Launch.from_env({**TORCHRUN, "WORLD_SIZE": "many"})


def test_nothing_is_missing() -> None:
    assert Launch.from_env(TORCHRUN).missing_settings() == []


def test_without_restarts() -> None:
    (message,) = Launch.from_env({**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0"}).missing_settings()
    assert "--max-restarts" in message


@pytest.mark.parametrize(
    ("nodes", "run_id", "told"),
    [
        ("3", "job", True),
        ("1", "job", True),  # --nnodes=1:3, and the others have not come yet
        ("1", "0c5a4ab2-7a4e-4f2b-9a54-8f2c4d2a9b10", False),  # --standalone draws such an id
    ],
)
def test_a_shared_store_where_nodes_may_join(nodes: str, run_id: str, told: bool) -> None:
    shared = {
        **TORCHRUN,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GROUP_WORLD_SIZE": nodes,
        "TORCHELASTIC_RUN_ID": run_id,
    }
    messages = Launch.from_env(shared).missing_settings()
    assert [m for m in messages if "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in m] == messages
    assert bool(messages) == told
