"""What CompressedDDPPlugin refuses, and what to do instead: in one process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import FrozenInstanceError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import torchrun
from torch import nn

pytest.importorskip("accelerate")

import accelerate
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from scenarios.accelerating import forget_accelerators

from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin, local_updates
from lightning_dist.configuration.options import OF_DDP
from lightning_dist.integrations.accelerate.attach import handler_of

HERE = Path(__file__).parent


@pytest.fixture
def accelerator() -> Iterator[Any]:
    forget_accelerators()
    yield accelerate.Accelerator(cpu=True)
    forget_accelerators()


def test_the_plugin_is_frozen_and_equal_by_value() -> None:
    plugin = CompressedDDPPlugin("int4", start_step=3)
    assert plugin == CompressedDDPPlugin(codec="int4", start_step=3)
    with pytest.raises(FrozenInstanceError):
        plugin.codec = "int8"


def test_the_code_takes_every_option() -> None:
    options: dict[str, Any] = {
        "codec": {"intra": "bf16", "inter": "int4"},
        "error_feedback": False,
        "hierarchical": "leader",
        "ranks_per_host": 2,
        "rank_groups": None,
        "min_compress_numel": 0,
        "start_step": 5,
        "compile_kernels": False,
        "commit": "immediate",
        "delay": 1,
        "exchange_timeout": 30.0,
    }
    plugin = CompressedDDPPlugin(**options)
    assert {name: getattr(plugin, name) for name in options} == options
    assert tuple(options) == OF_DDP


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"codec": "int9"}, "codec must be one of"),
        ({"start_step": "3"}, "start_step must be 0 or more"),
        ({"codec": "qsgd", "error_feedback": True}, "Error feedback diverges"),
        ({"ranks_per_host": 2, "rank_groups": [[0], [1]]}, "give one"),
    ],
    ids=str,
)
def test_options_that_cannot_take_effect(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        CompressedDDPPlugin(**options)


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"])
def test_accelerators_that_do_not_use_ddp(accelerator: Any, kind: str) -> None:
    accelerator.state.distributed_type = kind
    with pytest.raises(ValueError, match=f"Accelerator with {kind}, which exchanges them itself"):
        CompressedDDPPlugin().attach(accelerator)
    assert handler_of(accelerator) is None


def test_local_updates_of_sharded_models(accelerator: Any) -> None:
    accelerator.state.distributed_type = "FSDP"
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="local_updates in a loop of plain PyTorch"):
        local_updates(accelerator, net, optimizer)


def test_tensor_parallelism(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SimpleNamespace(tp_enabled=True, tp_size=2)
    monkeypatch.setattr(accelerate.Accelerator, "parallelism_config", config)
    with pytest.raises(ValueError, match="got tp_size=2"):
        CompressedDDPPlugin().attach(accelerator)


class _OwnHook(DistributedDataParallelKwargs):
    def register_comm_hook(self, model: nn.Module) -> None: ...


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16), "comm_hook=fp16"),
        (
            DistributedDataParallelKwargs(comm_wrapper=DDPCommunicationHookType.BF16),
            "comm_wrapper=bf16",
        ),
        (DistributedDataParallelKwargs(comm_state_option={"x": 1}), "comm_state_option"),
        (_OwnHook(), "a _OwnHook with a register_comm_hook of its own"),
    ],
    ids=["hook", "wrapper", "state", "own"],
)
def test_a_hook_of_the_users(accelerator: Any, given: Any, named: str) -> None:
    accelerator.ddp_handler = given
    with pytest.raises(ValueError, match=named):
        CompressedDDPPlugin().attach(accelerator)
    assert accelerator.ddp_handler is given


def test_two_plugins_in_kwargs_handlers() -> None:
    forget_accelerators()
    plugins = [CompressedDDPPlugin("int8"), CompressedDDPPlugin("int4")]
    with pytest.raises(ValueError, match="takes one CompressedDDPPlugin, got 2"):
        Accelerator(cpu=True, kwargs_handlers=plugins)
    forget_accelerators()


def test_attaching_after_prepare_and_twice(accelerator: Any) -> None:
    CompressedDDPPlugin().attach(accelerator)
    with pytest.raises(ValueError, match="one is attached already"):
        CompressedDDPPlugin().attach(accelerator)
    forget_accelerators()
    late = accelerate.Accelerator(cpu=True)
    late.prepare(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="with a prepared Linear; attach it right after"):
        CompressedDDPPlugin().attach(late)


def test_residuals_for_which_there_is_no_compressed_model(
    accelerator: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    CompressedDDPPlugin("int8").attach(accelerator)
    accelerator.prepare(nn.Linear(2, 2))
    accelerator.save_state(str(tmp_path))
    (tmp_path / "lightning_dist_reducer_0.bin").touch()
    accelerator.load_state(str(tmp_path))
    (warned,) = [message for message in caplog.messages if str(tmp_path) in message]
    assert "holds residuals of a compressed model" in warned
    assert "a CompressedDDPPlugin attached before prepare, which needs several processes" in warned
    assert "or with compress_ddp after it" in warned


def test_one_process_is_warned_of_once_and_trains(
    accelerator: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with caplog.at_level(logging.WARNING, "lightning_dist"):
        compression = CompressedDDPPlugin().attach(accelerator)
        model = accelerator.prepare(nn.Linear(2, 2))
    (record,) = caplog.records
    assert "one process, so nothing is exchanged" in record.getMessage()
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu" in record.getMessage()
    assert type(model) is nn.Linear
    assert (compression.reducers, compression.metrics()) == ([], {})
    accelerator.save_state(str(tmp_path))
    accelerator.load_state(str(tmp_path))


def test_several_processes_that_would_train_for_themselves(
    tmp_path: Path, quick_python: list[str]
) -> None:
    """torchrun on CPU without ACCELERATE_USE_CPU: Accelerate sees one process in each."""
    script = tmp_path / "alone.py"
    script.write_text(
        "import sys, torch\n"
        "sys.stdout.reconfigure(line_buffering=True)\n"
        "from accelerate import Accelerator\n"
        "from lightning_dist.accelerate import CompressedDDPPlugin\n"
        "accelerator = Accelerator(cpu=True) if torch.cuda.is_available() else Accelerator()\n"
        "if accelerator.num_processes > 1: sys.exit('they know of each other')\n"
        "try:\n"
        "    CompressedDDPPlugin().attach(accelerator)\n"
        "except ValueError as error:\n"
        "    sys.stdout.write(f'refused: {error}\\n')  # in one piece, beside the other rank's\n"
        "if torch.distributed.is_initialized():  # the other rank may still wait for this one\n"
        "    torch.distributed.barrier()\n"
    )
    done = torchrun(script, ranks=2, limit=60, python=quick_python).require_success()
    refused = [line for line in done.output.splitlines() if "refused:" in line]
    assert len(refused) == 2
    assert all("WORLD_SIZE=2 and this Accelerator has num_processes=1" in line for line in refused)
