"""CompressedDDPPlugin in one process: its settings, also from variables and files; refusals."""

import copy
import dataclasses
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

import accelerate
from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs
from scenarios.accelerating import forget_accelerators

from lightning_dist import CompressedDDPStrategy
from lightning_dist.accelerate import (
    Accelerator,
    CompressedDDPPlugin,
    CompressedFSDPPlugin,
    LocalUpdatesPlugin,
    local_updates,
)
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.frameworks.accelerate.attach import handler_of
from lightning_dist.settings.declared import settings_of
from lightning_dist.settings.exchange import ExchangeSettings


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    forget_accelerators()
    yield
    forget_accelerators()


@pytest.fixture
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`lightning_dist.yaml` beside the configuration of Accelerate."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    path = tmp_path / "accelerate" / "lightning_dist.yaml"
    path.write_text("codec: sign\nstart_step: 7\nerror_feedback: true\nranks_per_node: 2\n")
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Any:
    """What was told of settings from outside since the last call."""
    return lambda: [m for m in capsys.readouterr().err.splitlines() if "outside of the code" in m]


def test_the_code_takes_every_option() -> None:
    options: dict[str, Any] = {
        "codec": {"intra": "bf16", "inter": "int4"},
        "error_feedback": False,
        "hierarchical": "leader",
        "ranks_per_node": 2,
        "rank_groups": None,
        "min_compress_numel": 0,
        "start_step": 5,
        "compile_kernels": False,
        "state_update": "immediate",
        "delay": 1,
        "exchange_timeout": 30.0,
    }
    known = settings_of(ExchangeSettings)
    assert tuple(options) == tuple(known)
    plugin, nothing = CompressedDDPPlugin(**options), CompressedDDPPlugin()
    assert {name: getattr(plugin, name) for name in known} == options
    of_nothing = {name: getattr(nothing, name) for name in known}
    assert of_nothing == {name: each.default for name, each in known.items()}
    assert tuple(field.name for field in dataclasses.fields(plugin) if field.init) == tuple(known)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plugin.codec = "int8"


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"codec": "int9"}, "codec must be one of"),
        ({"codek": "int8"}, r"'codek' in CompressedDDPPlugin: did you mean 'codec'\?"),
        ({"start_step": "3"}, "start_step must be 0 or more"),
        ({"codec": "qsgd", "error_feedback": True}, "Error feedback diverges"),
        ({"ranks_per_node": 2, "rank_groups": [[0], [1]]}, "give one"),
    ],
    ids=str,
)
def test_options_that_cannot_take_effect(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        CompressedDDPPlugin(**options)


def test_what_the_code_leaves_out_is_from_outside(
    sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_DIST_START_STEP", "9")
    plugin = CompressedDDPPlugin("int4", ranks_per_node=None)
    assert (plugin.codec, plugin.start_step, plugin.error_feedback) == ("int4", 9, True)
    assert plugin.ranks_per_node is None, "None of the code is a value"
    assert CompressedDDPPlugin().codec == "sign"


def test_equal_is_what_is_in_force(sidecar: Path) -> None:
    plugin = CompressedDDPPlugin()
    sidecar.unlink()
    same = CompressedDDPPlugin("sign", start_step=7, error_feedback=True, ranks_per_node=2)
    assert plugin == same
    assert repr(plugin) == repr(same)
    assert hash(plugin) == hash(same)
    assert "codec='sign', error_feedback=True" in repr(plugin)
    for again in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert again == plugin, "nothing is read again"
    assert dataclasses.replace(plugin, codec="int4").start_step == 7


def test_settings_from_outside_are_logged_once(sidecar: Path, said: Any) -> None:
    plugin = CompressedDDPPlugin("int4")
    assert said() == [], "who makes a plugin may never attach it"
    plugin.attach(accelerate.Accelerator(cpu=True))
    expected = f"error_feedback=True ranks_per_node=2 start_step=7 ({sidecar})"
    assert said() == [f"[lightning_dist] set outside of the code: {expected}"]


def test_our_accelerator_takes_them_too(sidecar: Path, said: Any) -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[CompressedDDPPlugin()])
    assert accelerator.compression is not None
    assert accelerator.compression.configuration()["lightning_dist/start_step"] == 7
    (message,) = said()
    assert "codec='sign'" in message


def test_settings_that_equal_the_defaults_are_not_logged(sidecar: Path, said: Any) -> None:
    sidecar.write_text("codec: int8\n")  # which is the default
    CompressedDDPPlugin(start_step=3).attach(accelerate.Accelerator(cpu=True))
    assert said() == []


@pytest.mark.parametrize(
    ("text", "code", "parts"),
    [
        ("codec: int9", {}, ["got 'int9'", "codec from "]),
        ("codek: int8", {}, ["did you mean 'codec'?"]),
        ("error_feedback: true", {"codec": "qsgd"}, ["diverges", "error_feedback from "]),
        ("ranks_per_node: 2", {"hierarchical": False}, ["hierarchical=False (the code)"]),
    ],
)
def test_errors_name_the_source(
    sidecar: Path, text: str, code: dict[str, Any], parts: list[str]
) -> None:
    sidecar.write_text(text)
    with pytest.raises(ValueError, match=r"lightning_dist\.yaml") as error:
        CompressedDDPPlugin(**code)
    assert [part for part in (*parts, str(sidecar)) if part not in str(error.value)] == []


def test_the_strategies_take_nothing_from_outside(sidecar: Path) -> None:
    for strategy in (CompressedDDPStrategy(), FabricStrategy()):
        assert strategy._settings == ExchangeSettings()


def test_settings_of_a_sharded_model_are_from_outside(
    sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sidecar.write_text("codec: qsgd:bits=8\nparameters: int8\n")
    plugin = CompressedFSDPPlugin()
    assert (plugin.codec, plugin.parameters) == ("qsgd:bits=8", "int8")
    assert CompressedFSDPPlugin(parameters=None).parameters is None, "the code takes precedence"
    monkeypatch.setenv("LIGHTNING_DIST_CODEC", "int8")
    with pytest.raises(ValueError, match=r"biased.*set outside of the code: .*parameters from "):
        CompressedFSDPPlugin()
    with pytest.raises(ValueError, match="parameters is a setting of FSDP2"):
        CompressedDDPPlugin()


def test_none_of_the_code_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_DIST_CODEC", "int4")
    with pytest.raises(ValueError, match="codec must be"):
        CompressedDDPPlugin(codec=None)
    with pytest.raises(ValueError, match="method must be"):
        LocalUpdatesPlugin(method=None)
    with pytest.raises(ValueError, match="codec must be"):
        CompressedDDPPlugin(CompressedDDPPlugin())


class _OwnHook(DistributedDataParallelKwargs):
    def register_comm_hook(self, model: nn.Module) -> None: ...


def hook(**arguments: Any) -> Any:
    return {"ddp_handler": DistributedDataParallelKwargs(**arguments)}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        *(
            ({"distributed_type": kind}, f"with {kind}, which exchanges them itself")
            for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
        ),
        ({"parallelism_config": SimpleNamespace(tp_enabled=True, tp_size=2)}, "got tp_size=2"),
        (hook(comm_hook=DDPCommunicationHookType.FP16), "comm_hook=fp16"),
        (hook(comm_wrapper=DDPCommunicationHookType.BF16), "comm_wrapper=bf16"),
        (hook(comm_state_option={"x": 1}), "comm_state_option"),
        ({"ddp_handler": _OwnHook()}, "a _OwnHook with a register_comm_hook of its own"),
    ],
    ids=["FSDP", "DeepSpeed", "Megatron", "XLA", "tensors", "hook", "wrapper", "state", "own"],
)
def test_accelerators_that_do_not_use_ddp_or_have_a_hook(
    accelerator: Any, changed: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((name, value),) = changed.items()
    owner = accelerator if name in vars(accelerator) else accelerate.Accelerator
    monkeypatch.setattr(owner, name, value)
    with pytest.raises(ValueError, match=named):
        CompressedDDPPlugin().attach(accelerator)
    assert getattr(accelerator, name) is value
    assert handler_of(accelerator) is None


def test_local_updates_of_sharded_models(accelerator: Any) -> None:
    accelerator.state.distributed_type = "FSDP"
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="local_updates in a loop of plain PyTorch"):
        local_updates(accelerator, net, optimizer)


def test_two_plugins_in_kwargs_handlers() -> None:
    plugins = [CompressedDDPPlugin("int8"), CompressedDDPPlugin("int4")]
    with pytest.raises(ValueError, match="takes one CompressedDDPPlugin, got 2"):
        Accelerator(cpu=True, kwargs_handlers=plugins)


def test_attaching_after_prepare_and_twice(accelerator: Any) -> None:
    CompressedDDPPlugin().attach(accelerator)
    with pytest.raises(ValueError, match="one is attached already; attach it once"):
        CompressedDDPPlugin().attach(accelerator)
    forget_accelerators()
    late = accelerate.Accelerator(cpu=True)
    late.prepare(nn.Linear(2, 2))
    refused = r"before accelerator\.prepare.* with a prepared Linear; attach it right after"
    with pytest.raises(ValueError, match=refused):
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
