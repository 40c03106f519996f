"""What CompressedDDPPlugin takes from variables and files, and how it says so."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate
from scenarios.accelerating import forget_accelerators

from lightning_dist import CompressedDDPStrategy
from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin, CompressedFSDPPlugin
from lightning_dist.configuration import OPTIONS
from lightning_dist.configuration.options import OF_DDP
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.settings import Settings


@pytest.fixture
def sidecar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`lightning_dist.yaml` beside the configuration of Accelerate."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    path = tmp_path / "accelerate" / "lightning_dist.yaml"
    path.write_text("codec: sign\nstart_step: 7\nerror_feedback: true\nranks_per_host: 2\n")
    return path


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """What was told of settings from outside since the last call."""
    forget_accelerators()
    yield lambda: [m for m in capsys.readouterr().err.splitlines() if "outside of the code" in m]
    forget_accelerators()


def test_nothing_is_set() -> None:
    plugin = CompressedDDPPlugin()
    assert {name: getattr(plugin, name) for name in OF_DDP} == {
        name: OPTIONS[name].default for name in OF_DDP
    }
    assert tuple(field.name for field in dataclasses.fields(plugin) if field.init) == OF_DDP


def test_what_the_code_leaves_out_is_from_outside(
    sidecar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LIGHTNING_DIST_START_STEP", "9")
    plugin = CompressedDDPPlugin("int4", ranks_per_host=None)
    assert (plugin.codec, plugin.start_step, plugin.error_feedback) == ("int4", 9, True)
    assert plugin.ranks_per_host is None, "None of the code is a value"
    assert CompressedDDPPlugin().codec == "sign"


def test_equal_is_what_is_in_force(sidecar: Path) -> None:
    plugin = CompressedDDPPlugin()
    sidecar.unlink()
    same = CompressedDDPPlugin("sign", start_step=7, error_feedback=True, ranks_per_host=2)
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
    expected = f"error_feedback=True ranks_per_host=2 start_step=7 ({sidecar})"
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
        ("ranks_per_host: 2", {"hierarchical": False}, ["hierarchical=False (the code)"]),
    ],
)
def test_errors_name_the_source(
    sidecar: Path, text: str, code: dict[str, Any], parts: list[str]
) -> None:
    sidecar.write_text(text)
    with pytest.raises(ValueError, match=r"lightning_dist\.yaml") as error:
        CompressedDDPPlugin(**code)
    assert [part for part in (*parts, str(sidecar)) if part not in str(error.value)] == []


def test_a_setting_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match=r"'codek' in CompressedDDPPlugin: did you mean 'codec'\?"):
        CompressedDDPPlugin(codek="int8")


def test_the_strategies_take_nothing_from_outside(sidecar: Path) -> None:
    for strategy in (CompressedDDPStrategy(), FabricStrategy()):
        assert strategy._settings == Settings.check()


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
