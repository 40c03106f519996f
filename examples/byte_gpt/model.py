"""A byte-level GPT in plain torch: nothing in it depends on how gradients are exchanged."""

from __future__ import annotations

import math

import lightning as L
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.text import Perplexity

BYTES = 256


class Block(nn.Module):
    """Causal attention, then an MLP, each added to the stream it reads."""

    def __init__(self, d_model: int, *, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * d_model, bias=False)
        self.attention_out = nn.Linear(d_model, d_model, bias=False)
        self.mlp_norm = nn.LayerNorm(d_model)
        self.mlp_in = nn.Linear(d_model, 4 * d_model, bias=False)
        self.mlp_out = nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(mixed.transpose(1, 2).flatten(-2))
        x = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class ByteGPT(L.LightningModule):
    """Predicts the next byte; the embedding also serves as the output layer."""

    def __init__(
        self,
        context: int = 128,
        *,
        d_model: int = 192,
        n_layers: int = 3,
        n_heads: int = 4,
        lr: float = 2e-3,
        warmup_steps: int = 20,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(
                f"d_model must be a multiple of n_heads, got d_model={d_model}, n_heads={n_heads}"
            )
        self.save_hyperparameters()
        self.lr = lr
        self.warmup_steps = warmup_steps
        self.weight_decay = weight_decay
        self.embedding = nn.Embedding(BYTES, d_model)
        self.position = nn.Parameter(torch.zeros(context, d_model))
        self.blocks = nn.ModuleList(Block(d_model, n_heads=n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(d_model)
        self.accuracy = MulticlassAccuracy(BYTES, average="micro")
        self.perplexity = Perplexity()
        self._init_weights(n_layers)

    def _init_weights(self, n_layers: int) -> None:
        """Small weights, so that training starts near ln(256) nats: hardly a byte is favoured."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_stream = name.endswith(("attention_out.weight", "mlp_out.weight"))
                nn.init.normal_(
                    parameter, std=0.02 / math.sqrt(2 * n_layers) if into_stream else 0.02
                )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embedding.weight)

    def training_step(self, window: Tensor, batch_idx: int) -> Tensor:
        loss = loss_of(self(window[:, :-1]), window[:, 1:])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, window: Tensor, batch_idx: int) -> None:
        # Over all ranks: each validates on its own share of the windows.
        logits, following = self(window[:, :-1]), window[:, 1:]
        self.log("val_loss", loss_of(logits, following), prog_bar=True, sync_dist=True)
        self.perplexity(logits, following)
        self.accuracy(logits.flatten(0, 1), following.flatten())
        self.log_dict({"val_perplexity": self.perplexity, "val_accuracy": self.accuracy})

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """AdamW with a linear warm-up, then a linear decay to a tenth over the whole training."""
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        plain = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": self.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=self.lr,
            betas=(0.9, 0.95),
        )
        steps = max(1.0, float(self.trainer.estimated_stepping_batches))

        def factor(step: int) -> float:
            return min((step + 1) / max(1, self.warmup_steps), max(0.1, 1 - 0.9 * step / steps))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }
