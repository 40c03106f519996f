"""`CompressedDDPPlugin` on two ranks, and on three that load their checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from processes import torchrun
from results import Results, pick, require_compressed, require_equal, require_replicas
from wandb_runs import config, history

pytest.importorskip("accelerate")

RUNNER = Path(__file__).with_name("run_scenarios.py")
OF_TWO = (
    "accelerate_plugin",
    "accelerate_plugin_saves",
    "accelerate_plugin_tells",
    "accelerate_local",
)
WEIGHT, BIAS = 16 * 256, 256  # elements; the bias stays uncompressed
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Results:
    folder = tmp_path_factory.mktemp("plugin")
    finished = torchrun(RUNNER, folder, *OF_TWO, ranks=2, limit=170, python=quick_python)
    return Results(folder, finished, ranks=2)


@pytest.fixture(scope="module")
def trio(pair: Results, quick_python: list[str]) -> Results:
    name = "accelerate_plugin_of_three"
    finished = torchrun(RUNNER, pair.folder, name, ranks=3, limit=100, python=quick_python)
    return Results(pair.folder, finished, ranks=3)


def test_replicas_train_with_the_bytes_of_int8(pair: Results) -> None:
    ranks = pair("plugin_trains")
    for facts in ranks:
        require_equal(facts["none"]["parameters"], facts["ddp"]["parameters"])
        require_equal(facts["in kwargs_handlers"]["parameters"], facts["int8"]["parameters"])
        stats = facts["int8"]["stats"]
        assert stats["raw_bytes"] == 8 * 4 * (2 * WEIGHT + BIAS)
        assert stats["per_codec"]["int8"]["wire_bytes"] == 8 * 2 * (WEIGHT + 16 * 2)
        for name, value in facts["ddp"]["parameters"].items():
            torch.testing.assert_close(facts["int8"]["parameters"][name], value, rtol=0, atol=1e-2)
    for name in ("int8", "in kwargs_handlers"):
        require_compressed(pick(ranks, name), steps=8)
        require_replicas(pick(ranks, name))


def test_accumulate_sends_at_every_second_batch(pair: Results) -> None:
    ranks = pair("plugin_accumulates")
    require_compressed(ranks, steps=4)
    require_replicas(ranks)


def test_residuals_are_unscaled(pair: Results) -> None:
    """A GradScaler whose scale doubles at every step gives the bits of a constant one."""
    ranks = pair("plugin_scaler")
    for facts in ranks:
        assert (facts["constant"]["scale"], facts["growing"]["scale"]) == (2.0**10, 2.0**18)
        require_equal(facts["growing"]["residuals"], facts["constant"]["residuals"])
        require_equal(facts["growing"]["parameters"], facts["constant"]["parameters"])
    require_compressed(pick(ranks, "growing"), steps=8)


def test_bf16_mixed_precision(pair: Results) -> None:
    ranks = pair("plugin_bf16")
    require_compressed(ranks, steps=8)
    require_replicas(ranks)


@pytest.mark.parametrize("way", ["save_state", "AsyncStateCheckpointer"])
def test_residuals_of_every_rank_and_model_come_back(pair: Results, way: str) -> None:
    """4 + 4 steps with a load between are 8 steps, bit for bit."""
    ranks = pick(pair("plugin_resumes"), way)
    for facts in ranks:
        require_equal(facts["resumed"]["parameters"], facts["whole"]["parameters"])
        require_equal(facts["resumed"]["residuals"], facts["whole"]["residuals"])
        assert facts["resumed"]["step"] == facts["whole"]["step"] == [8, 8]
        assert any(residual.any() for residual in facts["whole"]["residuals"].values())
        assert facts["messages"] == []
    names = ("0.0.weight", "1.0.weight")
    owed = [facts["whole"]["residuals"][name] for facts in ranks for name in names[:1]]
    assert not torch.equal(*owed), "every rank owes something of its own"
    files = {path.name for path in (pair.folder / f"plugin_{way}").iterdir()}
    assert {"lightning_dist_reducer_0.bin", "lightning_dist_reducer_1.bin"} <= files
    assert "lightning_dist_reducer_2.bin" not in files


def test_adversaries_have_a_compression_each(pair: Results) -> None:
    """A generator and a critic, two optimizers, in turn; bit for bit through a checkpoint."""
    ranks = pair("plugin_adversaries")
    numel = [WEIGHT + BIAS + WEIGHT + 16, 16 * 512 + 512 + 512 + 1]
    for facts in ranks:
        whole, resumed = facts["whole"], facts["resumed"]
        assert [each["steps"] for each in whole["stats"]] == [4, 4]
        assert [each["raw_bytes"] for each in whole["stats"]] == [4 * 4 * n for n in numel]
        assert all(each["ratio"] > 2 for each in whole["stats"])
        assert whole["metrics"]["comm/total_wire_bytes"] == sum(
            each["wire_bytes"] for each in whole["stats"]
        )
        assert all(each["2.weight"].any() for each in whole["residuals"])
        require_equal(resumed["parameters"], whole["parameters"])
        for one, other in zip(resumed["residuals"], whole["residuals"], strict=True):
            require_equal(one, other)
        loud = [each["steps"] for each in facts["loud"]["stats"]]
        assert loud == [4, 8], "without no_sync the critic exchanges while the generator learns"
    first, second = ranks
    require_equal(first["whole"]["parameters"], second["whole"]["parameters"])
    for one, other in zip(first["whole"]["residuals"], second["whole"]["residuals"], strict=True):
        assert not torch.equal(one["0.weight"], other["0.weight"])


def test_checkpoints_of_plain_ddp_load_and_ours_load_there(pair: Results) -> None:
    ranks = pair("plugin_other_checkpoints")
    for facts in ranks:
        assert any(residual.any() for residual in facts["owed"]["residuals"].values())
        assert not any(residual.any() for residual in facts["loaded"]["residuals"].values())
        assert facts["loaded"]["step"] == [0]
        require_equal(facts["plain"]["parameters"], facts["saved"]["parameters"])
    assert "holds no residuals for compressed model 0" in ranks[0]["messages"][0]
    assert ranks[1]["messages"] == []


def test_a_folder_that_one_rank_sees_is_refused_by_all(pair: Results) -> None:
    for facts in pair("plugin_folder_of_one_rank"):
        assert "ranks [1] do not see the files that rank 0 sees" in facts["loading"]
        assert "save_on_each_node=True cannot take effect" in facts["saving"]


def test_three_ranks_go_on_with_what_two_owe(pair: Results, trio: Results) -> None:
    two, three = pair("plugin_for_others"), trio("plugin_of_three")
    for facts in three:
        require_equal(facts["parameters"], two[0]["parameters"])
        assert facts["step"] == [3]
        for name, residual in facts["residuals"].items():
            mean = (two[0]["residuals"][name] + two[1]["residuals"][name]) / 2
            torch.testing.assert_close(residual, mean)
            assert name != "0.0.weight" or residual.any()
    require_replicas([{**facts, "digests": ["", *facts["digests"]]} for facts in three])


def test_the_users_arguments_of_ddp_stay(pair: Results) -> None:
    expected = {"unused": True, "views": True, "bucket": 1 << 20, "hooks": 1}
    for facts in pair("plugin_ddp_arguments"):
        assert facts == {"True": expected, "False": expected}


@pytest.mark.parametrize("by_hand", ["True", "False"])
def test_trackers_get_bytes_and_configuration_from_rank_0(pair: Results, by_hand: str) -> None:
    first, second = pick(pair("plugin_tells_trackers"), by_hand)
    ((step, logged),) = first["logged"]
    last = first["stats"]["last_step"]
    assert step == 2
    assert logged["comm/wire_bytes"] == last["wire_bytes"] > 0
    assert logged["comm/total_wire_bytes"] == first["stats"]["wire_bytes"] == 2 * last["wire_bytes"]
    assert logged["comm/compression_ratio"] == last["ratio"] > 1
    configuration = first["configuration"]
    assert configuration["lr"] == 0.1
    assert configuration["lightning_dist/codec"].startswith("Int8(")
    assert configuration["lightning_dist/world_size"] == 2
    assert configuration["lightning_dist/topology"] == "1 host x 2 ranks"
    assert configuration["lightning_dist/versions/torch"] == torch.__version__
    assert {type(value) for value in configuration.values()} <= {str, int, float, bool}
    assert (second["logged"], second["configuration"]) == ([], {})


def test_configuration_is_that_of_the_other_frameworks(pair: Results) -> None:
    (facts, _) = pair("plugin_tells_trackers")
    before, after = facts["before prepare"], facts["True"]["configuration"]
    ranks = {f"lightning_dist/{name}" for name in ("exchange", "topology", "hosts", "world_size")}
    assert set(before) == {*after} - ranks - {"lr"}
    nested = dict(facts["comm_config"])
    versions = nested.pop("versions")
    flat = {**nested, **{f"versions/{name}": value for name, value in versions.items()}}
    assert set(after) == {f"lightning_dist/{name}" for name in flat} | {"lr"}


@pytest.mark.slow
def test_wandb_through_accelerate(pair: Results) -> None:
    pytest.importorskip("wandb")
    first, second = pair("plugin_in_wandb")
    (run,) = (pair.folder / "accelerate_wandb").glob("wandb/offline-run-*/run-*.wandb")
    found, logged = config(run), history(run)
    assert found["lr"] == 0.1
    wanted = first["config"]
    assert found["lightning_dist/codec"] == wanted["codec"] == "Int8(block_size=256)"
    assert found["lightning_dist/world_size"] == wanted["world_size"] == 2
    assert found["lightning_dist/min_compress_numel"] == "None"
    assert found["lightning_dist/versions/lightning_dist"] == wanted["versions"]["lightning_dist"]
    assert {name: json.loads(values[-1]) for name, values in logged.items() if "comm/" in name} == (
        first["metrics"]
    )
    total = [json.loads(value) for value in logged["comm/total_wire_bytes"]]
    assert total == [first["metrics"]["comm/wire_bytes"] * steps for steps in (1, 2)]
    assert first["metrics"] == second["metrics"], "rank 1 sent as much and logged nothing"


def test_optimizers_are_connected(pair: Results) -> None:
    ranks = pair("plugin_connects_optimizers")
    for facts in ranks:
        assert facts["connected"]
        assert "codec 'dgc' gives the gradients momentum, and SGD has its own" in facts["refused"]
    require_replicas(ranks)


def test_end_training_waits_for_checkpoints_and_stops_threads(pair: Results) -> None:
    for facts in pair("plugin_end_training"):
        assert facts == {"committed": True, "manifest": True, "closed": [True]}


def test_a_model_may_be_prepared_again(pair: Results) -> None:
    ranks = pair("plugin_prepared_again")
    require_compressed(ranks, steps=2)
    require_replicas(ranks)
    assert all(facts["closed"] for facts in ranks)


def test_attaching_twice_or_late(pair: Results) -> None:
    for facts in pair("plugin_refused_in_a_world"):
        assert "one is attached already; attach it once" in facts["twice"]
        assert "must be attached before accelerator.prepare" in facts["late"]
        assert "attach it right after Accelerator" in facts["late"]


def test_what_accelerate_does_not_document_is_still_there(pair: Results) -> None:
    for facts in pair("canary_of_ddp_handler"):
        assert facts["before"], "ddp_handler is None where none was given"
        assert facts["asked"] == ["DistributedDataParallel"] * 2, "once for every prepared model"
        assert facts["bucket"] == [3 << 20] * 2
        assert facts["models"] == [True, True], "_models are the modules before DDP wraps them"
        assert facts["others"] == [None, None, None]
        assert facts["rejected"].startswith("KeyError"), (
            "Accelerate takes subclasses in kwargs_handlers now: ours needs no subclass any more"
        )


def test_the_launch_ended_well(pair: Results, trio: Results) -> None:
    pair.finished.require_success()
    trio.finished.require_success()


def test_local_updates_are_those_of_a_loop_and_resume_bit_exact(pair: Results) -> None:
    ranks = pair("accelerate_local")
    for facts in ranks:
        assert facts["whole"] == facts["loop"]
        assert facts["resumed"] == facts["whole"][4:]
        require_equal(facts["end"], ranks[0]["end"])
        require_equal(facts["weights"], facts["anchor"])
    assert ranks[0]["whole"][0] != ranks[1]["whole"][0]


def test_a_plugin_takes_local_steps_in_a_loop_that_knows_nothing_of_them(pair: Results) -> None:
    ranks = pair("accelerate_local_plugin")
    for facts, expected in zip(ranks, pair("accelerate_local"), strict=True):
        assert facts["own"] == expected["whole"]
        assert facts["attempted"] == len(facts["own"]) == 8
        require_equal(facts["end"], expected["end"])
        assert facts["anchor"]
        assert "by a LocalUpdatesPlugin" in facts["twice"]


def test_post_local_sgd_is_ddp_until_it_starts(pair: Results) -> None:
    ranks = pair("accelerate_local_after_ddp")
    for facts in ranks:
        assert facts["local"][:2] == facts["ddp"][:2]
    first, second = (facts["local"] for facts in ranks)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, True, False, True]


def test_a_step_that_a_scaler_skips_on_one_worker_counts(pair: Results) -> None:
    ranks = pair("accelerate_local_skips")
    assert [facts["own"][0] == facts["own"][1] for facts in ranks] == [True, False]
    assert [facts["attempted"] for facts in ranks] == [8, 8]
    assert [facts["scale"] for facts in ranks] == [8.0, 16.0]
    require_equal(ranks[0]["parameters"], ranks[1]["parameters"])
    assert all(each.isfinite().all() for each in ranks[0]["parameters"].values())


def test_ranks_of_a_host_are_one_worker_as_in_a_loop(trio: Results) -> None:
    ranks = trio("accelerate_local_inside_hosts")
    for facts in ranks:
        assert facts["own"] == facts["loop"]
        require_equal(facts["parameters"], ranks[0]["parameters"])
        assert facts["stats"]["steps"] == 2
    assert ranks[0]["own"] == ranks[1]["own"]
    assert ranks[0]["own"][0] != ranks[2]["own"][0]


def test_local_updates_refuse_what_cannot_work(pair: Results) -> None:
    for facts in pair("accelerate_local_refused"):
        assert "compressed in every step by a CompressedDDPPlugin" in facts["plugin"]
        assert "did you mean 'sync_every'?" in facts["unknown"]
        assert "launch several processes" in facts["bare"]
        assert "delay is a setting of DDP and cannot take effect with" in facts["outside"]
        assert "attach it right after" in facts["late"]
        assert "replicas='host' needs several hosts" in facts["one host"]
        assert "give one of the two" in facts["both"]
        assert "use CompressedDDPMixin" in facts["transformers"]
