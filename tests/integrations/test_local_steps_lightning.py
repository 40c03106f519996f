"""`Trainer(strategy="compressed_diloco")` on two ranks."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from results import Results, require_equal


def test_a_trainer_does_what_a_loop_does(two: Results) -> None:
    ranks = two("local_steps_as_in_a_loop")
    for facts in ranks:
        assert facts["trainer"]["own"] == facts["loop"]["own"]
        require_equal(facts["trainer"]["parameters"], facts["loop"]["parameters"])
        require_equal(facts["loop"]["parameters"], ranks[0]["loop"]["parameters"])
    *own, last = zip(*(facts["trainer"]["own"] for facts in ranks), strict=True)
    assert all(first != second for first, second in own)
    assert last[0] == last[1]  # the mean
    norms = [facts["loop"]["norms"] for facts in ranks]
    assert max(map(max, norms)) > 0.1  # each worker clips its own gradient
    assert norms[0] != norms[1]


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_post_local_sgd_is_ddp_until_it_starts(two: Results, framework: str) -> None:
    ranks = two("local_steps_after_ddp")
    for facts in ranks:
        ours, ddp = facts[f"{framework} local"], facts[f"{framework} ddp"]
        assert len(ours) == 4
        assert ours[:2] == ddp[:2]
    first, second = (facts[f"{framework} local"] for facts in ranks)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]


@pytest.mark.parametrize("framework", ["trainer", "fabric"])
def test_a_step_that_a_scaler_skips_on_one_worker_counts(two: Results, framework: str) -> None:
    ranks = [facts[framework] for facts in two("local_steps_that_a_scaler_skips")]
    skips = [facts["own"][0] == facts["own"][1] for facts in ranks]
    assert skips == [True, False]
    assert [facts["attempted"] for facts in ranks] == [8, 8]
    assert [facts["scale"] for facts in ranks] == [2.0**9, 2.0**10]
    require_equal(ranks[0]["parameters"], ranks[1]["parameters"])
    assert all(each.isfinite().all() for each in ranks[0]["parameters"].values())


def test_workers_that_have_skipped_resume_bit_exact(two: Results) -> None:
    for facts in two("local_steps_that_a_scaler_skips"):
        assert facts["resumed"]["own"] == facts["trainer"]["own"][4:]
        assert facts["resumed"]["scale"] == facts["trainer"]["scale"]


def test_a_resumed_training_is_bit_exact(two: Results) -> None:
    for facts in two("local_steps_resume"):
        assert facts["resumed"]["own"] == facts["whole"]["own"][4:]
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])


def test_a_checkpoint_has_the_anchor_as_weights(two: Results) -> None:
    ranks = two("local_steps_resume")
    for facts in ranks:
        require_equal(facts["weights"], facts["anchor"])
        require_equal(facts["other"], facts["anchor"])


def test_the_last_checkpoint_has_the_mean_at_the_end(two: Results) -> None:
    for facts in two("local_steps_resume"):
        require_equal(facts["last"], facts["whole"]["parameters"])


def test_a_restarted_training_is_bit_exact(two: Results) -> None:
    for facts in two("local_steps_elastic"):
        assert facts["resumed"]["own"] == facts["whole"]["own"][5:]
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])


def test_every_rank_writes_its_own_worker_into_a_sharded_checkpoint(two: Results) -> None:
    for rank, facts in enumerate(two("local_steps_in_parts")):
        assert facts["whole"]["own"] == facts["gathered"]
        assert facts["resumed"]["own"] == facts["whole"]["own"][4:]
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])
        for ours, single in zip(facts["workers"], facts["as_single"], strict=True):
            torch.testing.assert_close(ours, single, rtol=0, atol=0)
        of_first = facts["workers"][0]["optimizer_states"]
        torch.testing.assert_close(facts["optimizer"], of_first, rtol=0, atol=0)
        own, other = (facts["workers"][each]["optimizer_states"][0] for each in (rank, 1 - rank))
        assert not torch.equal(own["state"][0]["exp_avg"], other["state"][0]["exp_avg"])


def test_every_worker_resumes_with_its_own_loss_scale(two: Results) -> None:
    assert [facts["scale"] for facts in two("local_steps_of_workers_with_scalers")] == [8.0, 16.0]


def test_workers_that_join_take_the_anchor(three: Results) -> None:
    ranks = three("local_steps_of_two_go_on_as_three")
    for rank, facts in enumerate(ranks):
        require_equal(facts["start"], facts["saved"][rank] if rank < 2 else facts["anchor"])
        before = facts["saved_moments"][rank % 2]
        assert all(torch.equal(a, b) for a, b in zip(facts["moments"], before, strict=True))
        require_equal(facts["parameters"], ranks[0]["parameters"])
        assert facts["steps"] > 5
    assert not torch.equal(ranks[0]["start"]["net.0.weight"], ranks[1]["start"]["net.0.weight"])


def test_a_worker_that_leaves_takes_nothing_of_the_others(three: Results) -> None:
    """Those who stay have their own weights and moments, and all that workers share, exactly."""
    ranks = three("local_steps_of_three_go_on_as_two")
    for facts in ranks[:2]:
        before, after = facts["before"], facts["after"]
        require_equal(after["parameters"], before["parameters"])
        assert all(map(torch.equal, after["moments"], before["moments"]))
        require_equal(after["shared"], before["shared"])
        for name, residual in after["residuals"].items():
            of_all = [each["before"]["residuals"][name] for each in ranks]
            torch.testing.assert_close(residual, sum(of_all) / 3)
        require_equal(facts["end"], ranks[0]["end"])
    assert not torch.equal(ranks[0]["after"]["moments"][0], ranks[1]["after"]["moments"][0])
    runs = [facts[run]["samples"] for facts in ranks for run in ("before", "after") if run in facts]
    seen = Counter(sample for samples in runs for sample in samples)
    assert len(seen) == 64
    assert set(seen.values()) == {2}  # once an epoch


def test_validation_uses_the_anchor_or_the_workers_own_weights(two: Results) -> None:
    first, second = two("local_steps_evaluate")
    assert len(first["anchor"]["validated"]) == 4
    assert first["anchor"]["validated"] == second["anchor"]["validated"]
    assert first["worker"]["validated"] != second["worker"]["validated"]
    for facts in (first, second):  # evaluating changes nothing
        assert facts["anchor"]["own"] == facts["worker"]["own"]
        require_equal(facts["anchor"]["parameters"], facts["worker"]["parameters"])


def test_a_validation_after_the_fit_uses_the_checkpoint_that_it_is_given(two: Results) -> None:
    for facts in two("local_steps_validate_another_checkpoint"):
        assert facts["validated"] == [facts["wanted"]]
        require_equal(facts["saved"], facts["other"])


def test_averaged_weights_are_of_each_worker_and_their_mean_at_the_end(two: Results) -> None:
    first, second = two("local_steps_with_averaged_weights")
    require_equal(first["parameters"], second["parameters"])
    for name, value in first["parameters"].items():
        mean = (first["average"][name] + second["average"][name]) / 2
        torch.testing.assert_close(value, mean)
    assert first["own"] != second["own"]


def test_fabric_resumes_bit_exact_with_the_anchor_as_weights(two: Results) -> None:
    ranks = two("local_steps_fabric")
    for facts in ranks:
        assert facts["resumed"] == facts["whole"][4:]
        require_equal(facts["ends"], facts["end"])
        require_equal(facts["end"], ranks[0]["end"])
        require_equal(facts["saved"], facts["anchor"])
        require_equal(facts["taken"], facts["plain"])
        assert "call fabric.setup(model, optimizer)" in facts["alone"]
        assert "got a second one" in facts["second"]
    assert ranks[0]["whole"][0] != ranks[1]["whole"][0]


def test_by_name_with_statistics_and_metrics(two: Results) -> None:
    ranks = two("local_steps_by_name")
    for facts in ranks:
        require_equal(facts["parameters"], ranks[0]["parameters"])
        assert facts["stats"]["steps"] == 2  # a window of 8, and the end
        assert facts["config"]["sync_every"] == 8
    assert {"outer/cosine", "outer/drift", "comm/wire_bytes"} <= set(ranks[0]["logged"])


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("start_step", "ddp_steps are steps of plain DDP"),
        ("replicas", "replicas must be 'rank' or 'host'"),
        ("both", "give one of the two"),
        ("compiled", "compile_kernels=True has no effect on local updates"),
        ("rates", "set them there"),
        ("one level", "needs several hosts"),
        ("no outer step", "must have an outer step"),
        ("zero", "exchanges between ranks in every step"),
        ("sharded", "sharded over all 2 ranks; call fully_shard over the ranks of a host"),
    ],
)
def test_what_cannot_work_is_refused(two: Results, case: str, says: str) -> None:
    for facts in two("local_steps_refused"):
        assert says in facts[case]


def test_ranks_of_a_host_are_one_worker(three: Results) -> None:
    first, second, other = three("local_steps_inside_hosts")
    assert first["own"] == second["own"]
    assert first["own"][0] != other["own"][0]
    for facts in (first, second, other):
        require_equal(facts["parameters"], first["parameters"])
        assert facts["stats"]["steps"] == 2  # a window of 3, and the end
        for other_way in ("loop", "fabric"):
            assert facts[other_way]["own"] == facts["own"]
            require_equal(facts[other_way]["parameters"], facts["parameters"])


def test_an_elastic_loop_goes_on_bit_exactly(two: Results) -> None:
    ranks = two("local_steps_in_an_elastic_loop")
    for facts in ranks:
        assert facts["resumed"]["own"] == facts["whole"]["own"][3:]
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])
        require_equal(facts["whole"]["parameters"], ranks[0]["whole"]["parameters"])
        refused = facts["whole"]["refused"]
        assert "use recovery='restart'" in refused
        assert "with local steps every worker has its own optimizer state" in refused
    assert ranks[0]["whole"]["own"][0] != ranks[1]["whole"]["own"][0]


def test_an_elastic_loop_of_two_goes_on_as_three(three: Results) -> None:
    ranks = three("local_steps_of_two_loop_on_as_three")
    for rank, facts in enumerate(ranks):
        require_equal(facts["start"], facts["saved"][rank] if rank < 2 else facts["anchor"])
        require_equal(facts["weights"], facts["anchor"])
        require_equal(facts["parameters"], ranks[0]["parameters"])
        assert facts["steps"] == 8
        assert len(facts["own"]) == 5
    assert not torch.equal(ranks[0]["start"]["net.0.weight"], ranks[1]["start"]["net.0.weight"])


def test_workers_count_by_their_samples_in_every_framework(two: Results) -> None:
    ranks = two("local_steps_by_samples")
    for facts in ranks:
        assert facts["loop"]["metrics"]["outer/samples"] == 2 * (2 + 6)
        assert "call strategy.count_samples" in facts["uncounted"]
        for other in ("trainer", "fabric"):
            assert facts[other]["own"] == facts["loop"]["own"]
            require_equal(facts[other]["parameters"], facts["loop"]["parameters"])
    assert ranks[0]["loop"]["own"] != ranks[1]["loop"]["own"]
