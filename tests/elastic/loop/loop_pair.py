"""Two models that train against each other in one loop: ``torchrun loop_pair.py FOLDER``."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from elastic_runs import Fault, Numbered, hash_of, make_loader
from loop_runs import WIDTH, _note
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_dist import ElasticLoop, compress_ddp, init_process_group

RATES = {"maker": 0.05, "judge": 0.02}


def train(
    folder: Path, *, fail_at: int = 0, scaled: bool = False, **elastic: Any
) -> dict[str, Any]:
    """Hash of both models, and the learning rates after every step."""
    torch.manual_seed(1)
    maker, judge = (nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, n)) for n in (4, 1))
    inner = nn.ModuleDict({"maker": maker, "judge": judge})
    models: dict[str, Any] = dict(inner.items())
    if "RANK" in os.environ:
        models = {name: DistributedDataParallel(each) for name, each in models.items()}
        for each in models.values():
            compress_ddp(each, "int8", min_compress_numel=0, compile_kernels=False)
    optimizers = {
        name: torch.optim.SGD(models[name].parameters(), lr=lr, momentum=0.9)
        for name, lr in RATES.items()
    }
    # It computes from the rate that it began with, which has to be scaled too.
    falling = torch.optim.lr_scheduler.LambdaLR(optimizers["judge"], lambda n: 0.5 ** (n // 5))
    settings = {"every_n_train_steps": 2, "seed": 5, "gradient_accumulation_steps": 2, **elastic}
    state = {
        **{f"{name}_model": each for name, each in models.items()},
        **{f"{name}_optimizer": each for name, each in optimizers.items()},
        "falling": falling,
    }
    rates: list[list[float]] = []
    ids: list[int] = []
    with ElasticLoop(
        folder / "ckpt", loader=make_loader(Numbered(noisy=False)), state=state, **settings
    ) as loop:
        for epoch in loop.epochs(2):
            for numbers, x in loop.batches():
                made = models["maker"](x)
                _backward(loop.scale_loss, models["judge"], real=x, made=made.detach())
                with frozen(inner["judge"]):
                    loop.scale_loss(-inner["judge"](made).mean()).backward()
                ids += numbers.tolist() if loop.micro_batch.weight else []
                if not loop.sync_gradients:
                    continue
                rates.append([each.param_groups[0]["lr"] for each in optimizers.values()])
                for each in optimizers.values():
                    each.step()
                    each.zero_grad()
                falling.step()
                _note(folder / "account", loop.steps + 1, epoch, ids, inner)
                ids = []
                loop.step_done()
                if loop.steps == fail_at:
                    raise Fault
    return {"hash": hash_of(inner), "steps": loop.steps, "rates": rates}


def _backward(weighted: Callable[[Any], Any], judge: Any, *, real: Any, made: Any) -> None:
    said, count = judge(torch.cat([real, made])), len(real)
    loss = (
        nn.functional.softplus(-said[:count]).mean() + nn.functional.softplus(said[count:]).mean()
    )
    weighted(loss).backward()


class frozen:
    """Gradients of what goes through a model, and none of its own."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> None:
        self.model.requires_grad_(False)

    def __exit__(self, *_: Any) -> None:
        self.model.requires_grad_(True)


def main(folder: Path) -> None:
    init_process_group("gloo")
    found = {"quiet": train(folder / "quiet")}
    with suppress(Fault):
        train(folder / "run", fail_at=5)
    found["run"] = train(folder / "run")
    for policy in ("scale_lr", "scale_lr:sqrt", "fixed_global_batch"):
        with suppress(Fault):
            train(folder / policy, fail_at=5, batch_policy=policy)
    (folder / f"found-{os.environ['RANK']}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
