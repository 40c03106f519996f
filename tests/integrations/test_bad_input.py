"""Settings that cannot take effect are refused, before any process group exists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from lightning_dist import CompressedDDPStrategy
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy

BAD: list[tuple[Mapping[str, Any], str]] = [
    ({"codec": "int9"}, "codec must be one of 'none', 'fp16', 'bf16', 'int8', .* got 'int9'"),
    ({"codec": 8}, "codec must be one of .* got 8"),
    ({"codec": None}, "codec must be one of .* got None"),
    ({"error_feedback": "yes"}, "error_feedback must be True, False or 'auto', got 'yes'"),
    ({"hierarchical": 2}, "hierarchical must be 'auto', True, False or 'leader', got 2"),
    ({"ranks_per_host": 0}, "ranks_per_host must be 1 or more ranks, got 0"),
    ({"rank_groups": [0, 1]}, r"rank_groups must be groups of ranks .* got \[0, 1\]"),
    ({"min_compress_numel": -1}, "min_compress_numel must be 0 .* got -1"),
    ({"start_step": -5}, "start_step must be 0 or more synchronised steps, got -5"),
    ({"compile_kernels": "always"}, "compile_kernels must be .* got 'always'"),
    ({"ddp_comm_hook": fp16_compress_hook}, "one communication hook .* got ddp_comm_hook="),
    ({"ddp_comm_state": object()}, "one communication hook .* got ddp_comm_state="),
    ({"ddp_comm_wrapper": fp16_compress_hook}, "one communication hook .* ddp_comm_wrapper="),
    ({"model_averaging_period": 4}, "one communication hook .* model_averaging_period=4"),
    ({"mixed_precision": object()}, "mixed_precision= installs .* use precision='bf16-mixed'"),
    ({"codek": "int8"}, "'codek' in CompressedDDPStrategy: did you mean 'codec'"),
    ({"bucket_cap": 5}, "'bucket_cap' in CompressedDDPStrategy: did you mean 'bucket_cap_mb'"),
    ({"module": None}, "'module' in .*: valid names: codec, .*, and those of DDPStrategy$"),
]


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[next(iter(bad)) for bad, _ in BAD])
def test_a_strategy_refuses(
    strategy: Callable[..., Any], arguments: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        strategy(**arguments)
    assert not dist.is_initialized()


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
def test_a_strategy_takes_what_is_ddps_or_its_subclass(strategy: type) -> None:
    class Mine(strategy):
        def __init__(self, mine: int, **others: Any) -> None:
            super().__init__(**others)

    made = Mine(mine=3, codec="int4", bucket_cap_mb=5, start_method="fork", static_graph=True)
    assert made._ddp_kwargs["bucket_cap_mb"] == 5
    with pytest.raises(ValueError, match=r"'mime' in Mine: did you mean 'mine'\?"):
        Mine(mine=3, mime=4)


def of_pytorch_lightning(name: str, package: str = "pytorch_lightning") -> Any:
    """An object as that package would make it; it need not be installed."""
    return type(name, (), {"__module__": f"{package}.somewhere"})()


def test_a_module_of_pytorch_lightning() -> None:
    strategy = CompressedDDPStrategy()
    with pytest.raises(ValueError, match=r"model \(Net\) comes from 'pytorch_lightning'"):
        strategy.connect(of_pytorch_lightning("Net"))


def test_a_subclass_in_the_users_own_module_of_a_class_of_pytorch_lightning() -> None:
    base = type(of_pytorch_lightning("LightningModule"))
    mine = type("Mine", (base,), {"__module__": "my_project.models"})()
    with pytest.raises(ValueError, match="write 'import lightning as L'"):
        CompressedDDPStrategy().connect(mine)


def test_a_callback_of_pytorch_lightning() -> None:
    class Trainer:
        callbacks = (Callback(), of_pytorch_lightning("EarlyStopping"))

    with pytest.raises(ValueError, match=r"callback \(EarlyStopping\) comes from"):
        CompressedDDPStrategy().setup(Trainer())


@pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning_fabric"])
def test_a_plugin_of_pytorch_lightning(strategy: Callable[..., Any], package: str) -> None:
    """Its environments, IO plugins and precisions live in its other half, lightning_fabric."""
    with pytest.raises(ValueError, match=r"checkpoint_io \(TorchCheckpointIO\) comes from"):
        strategy(checkpoint_io=of_pytorch_lightning("TorchCheckpointIO", package))


def test_an_exception_on_its_way_out_keeps_its_arguments() -> None:
    """Only the message that names DDP's own strategy is changed."""
    error = ValueError("of the user", 42)
    CompressedDDPStrategy().on_exception(error)
    assert error.args == ("of the user", 42)
