"""`Fabric(strategy="compressed_ddp")` on two ranks; the training loop is the user's."""

from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from replicas import mean_of_all, require_compressed, require_equal, require_replicas, world_of
from scenarios.fabric_runs import Run
from scenarios.models import WIDTH
from scenarios.world import rank
from torch import nn

from lightning_dist import OneBitAdam
from lightning_dist.fabric import CompressedDDPStrategy

pytestmark = pytest.mark.on_ranks(2)
WEIGHT, BIAS = 16 * 256, 256  # elements; the bias stays uncompressed


def trained(run: Run, batches: int = 8) -> Run:
    run.train(batches)
    return run


def test_fabric_trains_replicas_with_the_bytes_of_int8() -> None:
    of_ddp, of_none, ours = (
        trained(Run(strategy)).facts()
        for strategy in ("ddp", CompressedDDPStrategy("none"), "compressed_ddp")
    )
    require_equal(of_none["parameters"], of_ddp["parameters"])
    stats = ours["stats"]
    assert stats["raw_bytes"] == 8 * 4 * (2 * WEIGHT + BIAS)
    assert stats["per_codec"]["int8"]["wire_bytes"] == 8 * 2 * (WEIGHT + 16 * 2)
    assert stats["per_codec"]["none"]["wire_bytes"] == 8 * 4 * BIAS
    for name, value in of_ddp["parameters"].items():
        torch.testing.assert_close(ours["parameters"][name], value, rtol=0, atol=1e-2)
    require_compressed(ours, steps=8)


def test_no_backward_sync_accumulates() -> None:
    """8 batches by twos: 4 steps on the wire."""
    require_compressed(trained(Run(accumulate=2)).facts(), steps=4)


def test_a_compiled_module_trains_as_an_eager_one() -> None:
    eager, ours = (trained(Run(compiled=compiled)).facts() for compiled in (False, True))
    expected, found = (list(each["parameters"].values()) for each in (eager, ours))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert list(ours["residuals"]) == ["0.weight", "2.weight"]
    require_compressed(ours, steps=8)


def test_residuals_are_unscaled() -> None:
    """A GradScaler whose scale doubles at every step gives the bits of a constant one."""
    found = []
    for growth_interval, scale in {1000: 2.0**10, 1: 2.0**18}.items():
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=growth_interval)
        plugins = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        found.append(trained(Run(plugins=plugins)).facts())
        assert scaler.get_scale() == scale
    constant, growing = found
    require_equal(growing["residuals"], constant["residuals"])
    require_equal(growing["parameters"], constant["parameters"])
    require_compressed(growing, steps=8)


def test_fabric_save_and_load_carry_the_residuals(tmp_path: Path) -> None:
    """4 + 4 steps with a load between are 8 steps, bit for bit."""
    whole, path = trained(Run(), 4), tmp_path / "fabric.ckpt"
    whole.fabric.save(path, whole.state())
    whole.train(4)
    assert sorted(torch.load(path, weights_only=True)) == ["lightning_dist", "model", "optimizer"]
    resumed = Run()
    for _ in range(4):
        next(resumed.batches)
    assert resumed.fabric.load(path, resumed.state()) == {}
    resumed.train(4)
    expected, found = whole.facts(), resumed.facts()
    assert found["digests"] == expected["digests"][4:]
    require_equal(found["residuals"], expected["residuals"])
    require_compressed(found, steps=4)


def test_a_plain_checkpoint_leaves_no_residual_and_what_is_not_for_us_changes_none(
    tmp_path: Path,
) -> None:
    """As in Lightning: what was owed belonged to the weights that the load replaced."""
    plain, ours, teacher = trained(Run("ddp"), 2), trained(Run(), 2), nn.Linear(2, 2)
    plain.fabric.save(tmp_path / "plain.ckpt", plain.state())
    if rank() == 0:
        torch.save(teacher.state_dict(), tmp_path / "teacher.pt")
    ours.fabric.barrier()
    before = ours.facts()["residuals"]
    assert any(residual.any() for residual in before.values())
    ours.fabric.load(tmp_path / "plain.ckpt")  # returns what is in it
    require_equal(ours.facts()["residuals"], before)
    ours.fabric.load_raw(tmp_path / "teacher.pt", teacher)
    require_equal(ours.facts()["residuals"], before)
    ours.fabric.load(tmp_path / "plain.ckpt", ours.state())
    assert not any(residual.any() for residual in ours.facts()["residuals"].values())
    assert ours.fabric.strategy.reducers[0].step == 0


def test_every_module_has_a_reducer_of_its_own() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="compressed_ddp")
    fabric.launch()
    modules = [fabric.setup_module(nn.Linear(WIDTH, 256, bias=False)) for _ in range(2)]
    fabric.backward(sum(module(torch.ones(1, WIDTH)).square().mean() for module in modules))
    sent = [stats["wire_bytes"] for stats in fabric.strategy.comm_stats()]
    assert sent == [pytest.approx(WEIGHT + 16 * 2)] * 2


@pytest.mark.on_ranks(3)
def test_another_number_of_ranks_keeps_the_mean_residual(tmp_path: Path) -> None:
    """What is owed to the model is the mean over ranks."""
    path, owed = tmp_path / "fabric.ckpt", tmp_path / "owed.pt"
    with world_of(2) as is_here:
        if is_here:
            run = trained(Run(), 4)
            run.fabric.save(path, run.state())
            torch.save(mean_of_all(run.facts()["residuals"]), owed)
    run = Run()
    run.fabric.load(path, run.state())
    before, after = torch.load(owed), mean_of_all(run.facts()["residuals"])
    assert before.keys() == after.keys() != set()
    for name, mean in before.items():
        assert mean.any()
        torch.testing.assert_close(after[name], mean, rtol=1e-6, atol=1e-9)
    require_replicas(trained(run, 4).facts())


def test_momenta_are_not_clipped_as_gradients() -> None:
    model = nn.Linear(2, 2)
    optimizer, strategy = OneBitAdam(model.parameters(), freeze_step=1), CompressedDDPStrategy()
    for clip in (strategy.clip_gradients_norm, strategy.clip_gradients_value):
        with pytest.raises(ValueError, match="clipping would clip OneBitAdam's momenta"):
            clip(model, optimizer, 1.0)
    model(torch.ones(1, 2)).sum().backward()
    stock = torch.optim.Adam(model.parameters())
    assert strategy.clip_gradients_norm(model, stock, 1.0) > 1
