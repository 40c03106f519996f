"""A worker with an ElasticLoop of four epochs of four steps that ends as it is told.

    ending.py FOLDER HOW STEP RECOVERY

``HOW``: ``bug`` raises after so many steps, ``one`` in rank 1 only, ``database`` in the dataset
with the text of gloo, ``planned`` exits all ranks with the code of a planned stop, ``set-up``
raises before the loop.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from lightning_dist import ElasticLoop, compress_ddp, init_process_group
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART, Ended


class Samples(Dataset[Tensor]):
    """Sixteen of them."""

    steps = 0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        if HOW == "database" and self.steps == STEP:
            raise RuntimeError("Connection reset by peer: my database")
        return torch.full((4,), float(index))


FOLDER, HOW, STEP, RECOVERY = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
with (Path(FOLDER) / "starts").open("a") as file:
    file.write(f"{os.environ['RANK']}\n")
if HOW == "set-up":
    raise ValueError("a setting of the user's")
init_process_group("gloo", recovery=RECOVERY)  # type: ignore[arg-type]
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 4))
compress_ddp(model, "int8", min_compress_numel=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
data = Samples()
with ElasticLoop(
    Path(FOLDER) / "ckpts",
    loader=DataLoader(data, batch_size=2),
    state={"model": model, "optimizer": optimizer},
    every_n_train_steps=2 if RECOVERY == "restart" else None,
    recovery=RECOVERY,
) as loop:
    for _ in loop.epochs(4):
        data.steps = loop.steps
        for x in loop.batches():
            is_here = HOW == "bug" or (HOW == "one" and dist.get_rank() == 1)
            if is_here and loop.steps == STEP:
                raise ValueError("a bug of the user's")
            if HOW == "planned" and loop.steps == STEP:
                raise Ended(EXIT_RESTART)
            loop.scale_loss(model(x).sum()).backward()
            if loop.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                loop.step_done()
                data.steps = loop.steps
