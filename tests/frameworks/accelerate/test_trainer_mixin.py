"""`CompressedDDPMixin` and what it relies on in transformers' Trainer."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import transformers
from accelerate.utils import DistributedDataParallelKwargs
from scenarios.accelerating import forget_accelerators

from lightning_dist.accelerate import CompressedDDPPlugin
from lightning_dist.frameworks.accelerate.attach import handler_of
from lightning_dist.transformers import CompressedDDPMixin


class Older(transformers.Trainer):
    """Overwrites the arguments of DDP before every training, as Trainers of 4.x do."""

    def _wrap_model(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.ddp_handler = DistributedDataParallelKwargs(bucket_cap_mb=3)
        return super()._wrap_model(*args, **kwargs)


class Compressed(CompressedDDPMixin, transformers.Trainer):
    pass


class CompressedOlder(CompressedDDPMixin, Older):
    pass


@pytest.fixture
def arguments(tmp_path: Path) -> Iterator[dict[str, Any]]:
    forget_accelerators()
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    args = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], ddp_bucket_cap_mb=7
    )
    yield {"model": transformers.LlamaForCausalLM(config), "args": args}
    forget_accelerators()


@pytest.mark.parametrize(("kind", "bucket"), [(Compressed, 7), (CompressedOlder, 3)])
def test_the_hook_stays_and_so_do_the_trainers_arguments(
    arguments: dict[str, Any], kind: Any, bucket: int
) -> None:
    trainer = kind(compression=CompressedDDPPlugin("int8"), **arguments)
    trainer._wrap_model(trainer.model)
    handler = handler_of(trainer.accelerator)
    assert handler is not None
    assert handler._compress == trainer.compression.compress
    assert handler.to_kwargs()["bucket_cap_mb"] == bucket


@pytest.mark.parametrize(
    "name",
    [
        "create_accelerator_and_postprocess",
        "_wrap_model",
        "_save_optimizer_and_scheduler",
        "_load_optimizer_and_scheduler",
        "log",
    ],
)
def test_what_is_overridden_is_still_there(name: str) -> None:
    assert callable(getattr(transformers.Trainer, name))
