"""With which code a rank ends when all ranks stop because some were told to."""

from __future__ import annotations

import pytest

from lightning_dist.elastic.process.lifecycle import (
    EXIT_LEAVE,
    EXIT_RESTART,
    EXIT_UNSAVED,
    ProcessLifecycle,
)
from lightning_dist.elastic.process.preemption import PREEMPTED, PreemptionListener
from lightning_dist.elastic.settings import RunSettings


class Account:
    """Takes note of the end."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, bool]] = []

    def end(self, reason: str, *, is_echo: bool = False) -> None:
        self.ends.append((reason, is_echo))


def codes_of(
    patch: pytest.MonkeyPatch,
    reasons: list[str],
    *,
    nodes: tuple[int, ...] = (0, 0, 1, 1),
    is_saved: bool = True,
) -> list[int]:
    """Exit codes of all ranks under torchrun, which are on ``nodes``."""
    codes = []
    patch.setenv("TORCHELASTIC_RUN_ID", "job")
    told = [*zip(nodes, reasons, strict=True)]
    for node, reason in told:
        patch.setenv("GROUP_RANK", str(node))
        account = Account()
        life = ProcessLifecycle(RunSettings("folder"), account)
        life._notices = PreemptionListener([])
        life._notices.reason = reason
        codes.append(life.stop(told, is_saved=is_saved))
        assert account.ends == [(reason or "peer preempted", not reason)]
    return codes


def test_preempted_ranks_exit_with_0_and_others_ask_for_a_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = codes_of(monkeypatch, ["", "SIGTERM", "", ""])
    assert codes == [EXIT_RESTART, 0, EXIT_RESTART, EXIT_RESTART]


def test_no_rank_of_a_machine_that_goes_asks_for_a_restart_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One rank of each machine asks the cloud, and its notice is for all of them."""
    codes = codes_of(monkeypatch, ["", "", PREEMPTED, ""])
    assert codes == [EXIT_RESTART, EXIT_RESTART, 0, EXIT_LEAVE]


@pytest.mark.parametrize(
    ("nodes", "goes"), [((1, 1, 2, 2), 1), ((1, 1, 2, 2), 2), ((0, 2, 2), 2), ((1, 2, 0, 0), 0)]
)
def test_the_machine_that_goes_is_known_where_nodes_have_left_or_joined(
    nodes: tuple[int, ...], goes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then the rank that the launcher has given to a process is not that among the members."""
    first = nodes.index(goes)
    reasons = [PREEMPTED if rank == first else "" for rank in range(len(nodes))]
    here = [0 if rank == first else EXIT_LEAVE for rank in range(len(nodes))]
    codes = codes_of(monkeypatch, reasons, nodes=nodes)
    wanted = zip(nodes, here, strict=True)
    assert codes == [code if node == goes else EXIT_RESTART for node, code in wanted]


def test_without_a_checkpoint_nobody_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = codes_of(monkeypatch, ["", "SIGTERM"], nodes=(0, 0), is_saved=False)
    assert codes == [EXIT_UNSAVED] * 2


def test_a_machine_that_goes_is_left_without_a_checkpoint_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes = codes_of(monkeypatch, ["", "", PREEMPTED, ""], is_saved=False)
    assert codes == [EXIT_UNSAVED, EXIT_UNSAVED, EXIT_LEAVE, EXIT_LEAVE]


def test_where_nobody_restarts_ranks_all_end_well() -> None:
    life = ProcessLifecycle(RunSettings("folder"), Account())
    assert life.stop([(0, ""), (0, "SIGTERM")], is_saved=True) == 0
