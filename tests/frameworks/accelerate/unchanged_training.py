"""A script of Accelerate's that does nothing for compression; at its end it looks what happened."""

import json
import sys

import torch
from accelerate import Accelerator


def main() -> None:
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    if "--no-model" in sys.argv:
        return
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        x = torch.full((4, 64), float(accelerator.process_index + step))
        accelerator.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    from lightning_dist.sync.base import sync_of  # only to look

    sync = sync_of(model)
    is_local = sync is not None and sync.of_one_model
    reducer = None if sync is None or is_local else sync.reducer
    said = {
        "name": __name__,
        "arguments": sys.argv[1:],
        "ranks": accelerator.num_processes,
        "codec": None if reducer is None else repr(reducer.settings.inter),
        "steps": None if reducer is None else reducer.step,
    }
    if is_local:
        said["attempted"] = sync.updates.attempted
    print("SAID" + json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
