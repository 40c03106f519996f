"""transformers' Trainer with compressed gradients: a small Llama from a config, no downloads.

    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/transformers_trainer.py

--resume goes on from the last checkpoint, residuals of every rank included.
"""

import argparse
import os

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.transformers import CompressedDDPMixin


class CompressedTrainer(CompressedDDPMixin, Trainer):
    """Also for SFTTrainer and others: put the mixin before them."""


class Counting(Dataset):
    """Runs of numbers that follow each other."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = (torch.arange(16) + index) % 64
        return {"input_ids": tokens, "labels": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--codec", default="int8")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", default="transformers_out")
    parser.add_argument("--resume", action="store_true")
    arguments = parser.parse_args()

    os.environ.setdefault("WANDB_MODE", "offline")  # "online" with an account
    os.environ.setdefault("WANDB_PROJECT", "lightning_dist")
    os.environ.setdefault("WANDB_DIR", arguments.folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    trainer = CompressedTrainer(
        model=LlamaForCausalLM(config),
        args=TrainingArguments(
            output_dir=arguments.folder,
            max_steps=arguments.steps,
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            save_steps=5,
            logging_steps=5,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=True,
            report_to=["wandb"],
        ),
        train_dataset=Counting(),
        compression=CompressedDDPPlugin(arguments.codec, min_compress_numel=0),
    )
    trainer.train(resume_from_checkpoint=arguments.resume)
    (stats,) = trainer.compression.comm_stats()
    if trainer.is_world_process_zero():
        print(f"{stats['steps']} steps, {stats['ratio']:.1f} times fewer bytes than DDP")
    digest = sum(parameter.double().sum().item() for parameter in trainer.model.parameters())
    print(f"rank {trainer.args.process_index}: parameters add up to {digest!r}", flush=True)


if __name__ == "__main__":
    main()
