"""One rank of four: train the demo's model with Lightning and print what came of it."""

import hashlib
import json
import sys

import lightning as L
import torch
import torch.distributed as dist
from byte_gpt.data import StdlibBytes
from byte_gpt.model import ByteGPT

import lightning_dist

STEPS = 12


def main() -> None:
    torch.set_num_threads(1)
    L.seed_everything(7)
    nodes, devices = int(sys.argv[1]), int(sys.argv[2])
    strategy = lightning_dist.CompressedDDPStrategy(**json.loads(sys.argv[3]))
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        max_epochs=1,
        limit_train_batches=STEPS,
        limit_val_batches=4,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    model = ByteGPT()
    trainer.fit(model, StdlibBytes())
    parameters = torch.cat([p.detach().flatten() for p in model.parameters()])
    topology = strategy.topology
    assert topology is not None
    stats = strategy.comm_stats()
    found = {
        "digest": hashlib.sha256(parameters.numpy().tobytes()).hexdigest(),
        "norm": float(parameters.norm()),
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "topology": topology.describe(),
        "local_rank": topology.local_rank,
        "groups": [
            None if group is None else dist.get_process_group_ranks(group)
            for group in (topology.intra_group, topology.inter_group)
        ],
        **{key: stats[key] for key in ("raw_bytes", "intra_bytes", "inter_bytes")},
    }
    sys.stdout.write(f"{json.dumps(found)}\n")  # at once: ranks share the output


if __name__ == "__main__":
    main()
