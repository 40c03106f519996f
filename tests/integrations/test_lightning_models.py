"""Models of all kinds on two ranks: several optimizers, unused, frozen, tied, compiled."""

from __future__ import annotations

import torch
from results import Results, pick, require_compressed, require_equal, require_replicas

WEIGHT = 16 * 32  # elements of either weight of `Regression`


def _of(tensors: dict[str, torch.Tensor], network: str) -> dict[str, torch.Tensor]:
    return {name: value for name, value in tensors.items() if name.startswith(network)}


def test_a_gan_trains_as_under_ddp(two: Results) -> None:
    ranks = two("gan")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        assert facts["int8"]["digests"][0] != facts["ddp"]["digests"][0]
    require_compressed(pick(ranks, "int8"), steps=16)  # two backward passes a batch
    require_replicas(pick(ranks, "int8"))


def test_manual_optimisation_with_a_static_graph(two: Results) -> None:
    ranks = two("manual_static_graph")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        assert facts["int8"]["ddp"]["static_graph"] == 1
        assert facts["int8"]["digests"][0] != facts["ddp"]["digests"][0]
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_a_backward_of_one_network_leaves_the_other_ones_residual(two: Results) -> None:
    for facts in pick(two("gan"), "int8"):
        backwards = facts["backwards"]
        assert [step["network"] for step in backwards] == ["critic", "generator"] * 8
        for step in backwards:
            mine = step["network"]
            other = "critic" if mine == "generator" else "generator"
            owed_before, owed_after = _of(step["before"], other), _of(step["after"], other)
            # Buffers are made, filled with zeros, in the very first backward.
            assert all(torch.equal(owed_after[n], owed_before[n]) for n in owed_before)
            assert owed_before or not any(owed.any() for owed in owed_after.values())
            moved = _of(step["after"], mine)
            weight = f"{mine}.0.weight"
            assert not torch.equal(moved[weight], step["before"].get(weight, torch.zeros(())))
        assert all(residual.any() for residual in _of(backwards[-1]["after"], "gen").values())


def test_a_branch_that_no_rank_uses_keeps_what_it_owes(two: Results) -> None:
    """Neither its parameters nor its residual move, as under DDP; and both do when it is used."""
    ranks = two("unused_on_all_ranks")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        for step in facts["int8"]["steps"][2:]:
            used, unused = ("a", "b") if step["head"] == "a" else ("b", "a")
            for kind in ("parameters", "residuals"):
                before, after = step["before"][kind], step["after"][kind]
                require_equal(_of(after, f"net.{unused}"), _of(before, f"net.{unused}"))
                weight = f"net.{used}.weight"
                assert not torch.equal(after[weight], before[weight])
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_a_branch_that_one_rank_uses_is_averaged_on_both(two: Results) -> None:
    ranks = two("unused_on_one_rank")
    assert [step["head"] for step in ranks[0]["int8"]["steps"]] == list("abababab")
    assert [step["head"] for step in ranks[1]["int8"]["steps"]] == list("babababa")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        for step in facts["int8"]["steps"]:
            before, after = step["before"]["parameters"], step["after"]["parameters"]
            assert not any(torch.equal(after[name], before[name]) for name in before)
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_without_the_flag_the_message_names_our_strategy(two: Results) -> None:
    for facts in two("unused_without_the_flag"):
        ours = facts["ddp"].replace("='ddp_find", "='compressed_ddp_find")
        assert facts["int8"] == ours.replace("=DDPStrategy(", "=CompressedDDPStrategy(")
        assert "strategy='compressed_ddp_find_unused_parameters_true'" in facts["int8"]


def test_frozen_parameters_stay_and_cost_nothing(two: Results) -> None:
    ranks = two("frozen")
    for facts in ranks:
        require_equal(_of(facts["parameters"], "net.0"), _of(facts["before"], "net.0"))
        assert list(facts["residuals"]) == ["net.2.weight"]
        assert facts["stats"]["raw_bytes"] == 8 * 4 * WEIGHT
    require_compressed(ranks, steps=8)
    require_replicas(ranks)


def test_tied_weights_travel_once(two: Results) -> None:
    ranks = two("tied")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        assert facts["int8"]["still tied"]
        assert sorted(facts["int8"]["residuals"]) == ["net.0.bias", "net.0.weight"]
        assert facts["int8"]["stats"]["raw_bytes"] == 8 * 4 * (16 * 16 + 16)
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_sync_batchnorm_is_left_to_lightning(two: Results) -> None:
    """On the CPU DDP itself refuses SyncBatchNorm: ours converts, and fails, exactly as DDP."""
    ranks = two("batchnorm")
    for facts in ranks:
        assert facts["int8 sync"] == facts["ddp sync"]
        assert "SyncBatchNorm layers only work with GPU modules" in facts["int8 sync"]
        assert facts["int8 layer"] == facts["ddp layer"]
    require_compressed(pick(ranks, "int8"), steps=8)
    require_replicas(pick(ranks, "int8"))


def test_compiled_modules_train_as_eager_ones_under_the_same_names(two: Results) -> None:
    ranks = two("compiled")
    for facts in ranks:
        names = {"net.0.weight", "net.0.bias", "net.2.weight"}
        for variant in ("whole", "part"):
            run = facts[variant]
            for name, value in facts["eager"]["parameters"].items():
                own = "net.2._orig_mod.weight" if name == "net.2.weight" else name
                own = own if variant == "part" else name
                torch.testing.assert_close(run["parameters"][own], value, rtol=1e-4, atol=1e-5)
            assert run["residuals"].keys() == names
        assert not any("_orig_mod" in name for name in facts["whole"]["state_dict"])
    for variant in ("whole", "part"):
        assert ranks[0][variant]["checkpoint"]["residuals"].keys() == names
        require_compressed(pick(ranks, variant), steps=8)
        require_replicas(pick(ranks, variant))
