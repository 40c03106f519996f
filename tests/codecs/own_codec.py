"""Script: the codecs of the page "Write your own codec" in a package outside of the repository.

Arguments: ``registered``, where the package is imported, or ``installed``, by its entry points.
"""

import os
import sys
from typing import Any

import torch
from feeding import Fed, backward, compressed, digest, feed, residuals
from layouts import PAIRS, Layout
from saving import Resumed, lost, totals
from torch import Tensor, nn
from worlds import Rank, run_threads

from lightning_dist.cli.codecs import describe
from lightning_dist.codecs import CODECS, resolve_codec
from lightning_dist.codecs.laws import check_codec
from lightning_dist.measurement.calibration import calibrate

NAMES = ("rowint8", "int8_decay")
SHAPES = {"matrix": (40, 48), "odd": (33, 50), "bias": (40,)}
DECAY = 0.5


def is_found(way: str) -> None:
    if way == "registered":
        import own_package.codecs  # noqa: F401
        from lightning.pytorch.strategies import StrategyRegistry

        assert {f"compressed_ddp_{name}" for name in NAMES} <= set(StrategyRegistry)
    assert type(resolve_codec("rowint8:block=64")).__module__ == "own_package.codecs"
    assert list(CODECS)[-3:] == [*NAMES, "int8_broadcast"]
    assert describe(CODECS["rowint8"]())["options"] == {"block": 256}
    assert calibrate(["rowint8"], units=1, rounds=1)["rowint8"].wire == 1 + 2 / 1024


def keeps_the_laws() -> None:
    for row in (1, 50, 256):
        check_codec(resolve_codec(f"rowint8:block={row}"))  # type: ignore[arg-type]
    check_codec(resolve_codec("int8_decay"))  # type: ignore[arg-type]


def trains(rank: Rank, codec: str) -> str:
    """A regression with DDP; digest of the parameters."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    with compressed(rank, module, codec, min_compress_numel=0) as (model, reducer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(1 + rank.rank)
        target = torch.randn(16, 4, generator=torch.Generator().manual_seed(9))
        losses = []
        for _ in range(60):
            x = torch.randn(64, 16, generator=generator)
            loss = nn.functional.mse_loss(model(x), x @ target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 4
        assert reducer.comm_stats()["ratio"] > 2
    return digest([p.detach() for p in module.parameters()])


def rows_have_scales_of_their_own(rank: Rank, layout: Layout | None) -> None:
    """Beside a row of 1e6 one of 1e-6 keeps its precision: blocks are rows, between nodes too."""
    rows = torch.logspace(-6, 6, 40).unsqueeze(1)
    form: dict[str, Any] = {} if layout is None else layout.form
    with compressed(rank, Fed({"w": (40, 48)}), "rowint8", **form) as (model, _):
        got = backward(model, {"w": feed(0, 0, {"w": (40, 48)})["w"] * rows})["w"]
        given = feed(0, 0, {"w": (40, 48)})["w"] * rows
        assert ((got - given).abs() <= 2 * given.abs().amax(1, keepdim=True) / 250).all()
        assert not torch.equal(got, given)


def decays(rank: Rank) -> list[Tensor]:
    """What arrives, and what this rank gave to it by the definition of the memory."""
    found = []
    codec = f"int8_decay:decay={DECAY},block_size=64"
    shapes = {"w": (40, 48)}
    with compressed(rank, Fed(shapes, torch.float64), codec, min_compress_numel=0) as (model, red):
        before = torch.zeros(40 * 48, dtype=torch.float64)
        for step in range(4):
            given = feed(rank.rank, step, shapes, torch.float64)
            got = backward(model, given)["w"]
            after = residuals(red)["w"].flatten()
            found.append((got.flatten(), given["w"].flatten() + DECAY * before - after))
            before = after
    return [torch.stack(each) for each in zip(*found, strict=True)]


def broadcasts(rank: Rank) -> None:
    """The exchange of the page: two ranks get the bits that they get with the one of ``int8``."""
    shapes = {"w": (40, 48)}
    found = []
    for codec in ("int8", "int8_broadcast"):
        with compressed(rank, Fed(shapes), codec, min_compress_numel=0) as (model, _):
            found.append(backward(model, feed(rank.rank, 0, shapes))["w"])
    assert torch.equal(*found)


def main(way: str) -> None:
    torch.set_num_threads(1)
    is_found(way)
    keeps_the_laws()
    for size in (2, 3):
        for codec in NAMES:
            assert len(set(run_threads(lambda rank: trains(rank, codec), size))) == 1  # noqa: B023
    everything: dict[str, Any] = {"min_compress_numel": 0, "shapes": SHAPES}
    for layout, size in ((None, 2), (None, 3), (Layout(PAIRS), 4)):
        ranks = run_threads(
            lambda rank: totals(rank, "rowint8", 20, layout=layout, **everything),  # noqa: B023
            size,
        )
        assert lost(ranks) < 1e-10, (layout, size)
        assert len({str(rank.digests) for rank in ranks}) == 1
        holders = [rank for rank in ranks if rank.norms[-1]]
        assert holders
        assert all(rank.norms[-1] < 3 * rank.norms[4] for rank in holders)
        run_threads(lambda rank: rows_have_scales_of_their_own(rank, layout), size)  # noqa: B023
    one, two = run_threads(decays, 2)
    torch.testing.assert_close(one[0], (one[1] + two[1]) / 2, rtol=1e-9, atol=1e-9)
    for codec in NAMES:
        for rank in run_threads(
            lambda rank: Resumed(rank, stop=3, steps=6, codec=codec),  # noqa: B023
            2,
        ):
            assert rank.resumed == rank.whole
    run_threads(broadcasts, 2)
    print("all is well", flush=True)
    os._exit(0)  # not after the interpreter: threads of recent groups are still there


if __name__ == "__main__":
    main(sys.argv[1])
