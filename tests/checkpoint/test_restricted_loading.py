"""What is read runs no code unless the user says so, and what is written can be read that way."""

import functools
import io
import pathlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from elastic_runs import FailAt, Fault, Net, fit
from loop_runs import net, numbered, train
from scenarios.accelerating import Tally, saving
from torch import nn

from lightning_dist import ElasticLoop
from lightning_dist.checkpoint.checkpointer import Checkpointer
from lightning_dist.checkpoint.reading import require_loadable
from lightning_dist.elastic.progress import KEY
from lightning_dist.settings.run import CheckpointSettings

ODD = {
    "path": (pathlib.PurePosixPath("data"), "PurePosixPath"),
    "class": (nn.Linear, "class torch.nn.modules.linear.Linear"),
    "partial": (functools.partial(max, 1), "functools.partial"),
}


class WithHparams(Net):
    """Keeps its arguments in the checkpoint, as most modules do."""

    def __init__(self, nested: dict[str, Any]) -> None:
        super().__init__()
        self.save_hyperparameters()


class Adds(L.Callback):
    """A callback with a state that the restricted unpickler does not read."""

    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["added"] = [torch.ones(2), pathlib.PurePosixPath("data")]


@pytest.mark.parametrize("name", ODD)
def test_hyperparameters_that_no_start_could_load_are_refused_before_training(
    tmp_path: Path, name: str
) -> None:
    value, said = ODD[name]
    module = WithHparams({"lr": 0.1, "odd": value})
    with pytest.raises(ValueError, match=said) as refused:
        fit(tmp_path, FailAt("on_train_batch_start", 0), module=module, validate=False)
    text = str(refused.value)
    assert "['nested']['odd']" in text
    for remedy in ("str(path)", "torch.serialization.add_safe_globals", "weights_only=False"):
        assert remedy in text


def test_what_hooks_add_is_proved_at_the_first_save(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"checkpoint\['added'\]\[1\] is a pathlib"):
        fit(tmp_path, Adds(), FailAt("on_train_batch_start", 3), validate=False)
    assert not list((tmp_path / "ckpt").glob("*.ckpt"))


@pytest.mark.parametrize(
    "how", ["callback", pytest.param("fit", marks=pytest.mark.slow), "allowed"]
)
def test_a_user_who_trusts_the_folder_goes_on(tmp_path: Path, how: str) -> None:
    elastic = {"weights_only": False} if how == "callback" else {}

    def start(*callbacks: L.Callback) -> int:
        module = WithHparams({"odd": ODD["path"][0]})
        arguments = {"weights_only": False} if how == "fit" else {}
        trainer, _ = fit(
            tmp_path, *callbacks, module=module, validate=False, elastic=elastic, fitting=arguments
        )
        return trainer.global_step

    with torch.serialization.safe_globals([pathlib.PurePosixPath] if how == "allowed" else []):
        with pytest.raises(Fault):
            start(FailAt("on_train_batch_start", 5))
        assert start() == 36


def test_a_checkpoint_of_another_policy_says_what_to_do(tmp_path: Path) -> None:
    module = WithHparams({"odd": ODD["path"][0]})
    fit(tmp_path, module=module, validate=False, elastic={"weights_only": False}, max_epochs=1)
    with pytest.raises(ValueError, match=r"PurePosixPath.*weights_only=False"):
        fit(tmp_path, module=Net(), validate=False)


class Crafted:
    """Runs code when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return pathlib.Path.touch, (self.file,)


def craft(folder: Path, file: Path) -> None:
    """A checkpoint that is newer than those in ``folder``, as anybody could write one."""
    checkpointer = Checkpointer(CheckpointSettings(writer="thread"))
    checkpointer.open(str(folder))
    state = {KEY: {"version": 1}, "objects": Crafted(file)}
    checkpointer.save(state, f"{folder}/epoch=9-step=99.ckpt", step=99)
    checkpointer.close(30.0)


def test_a_crafted_checkpoint_runs_no_code_in_a_loop(tmp_path: Path) -> None:
    train(tmp_path, "plain", epochs=1)
    craft(tmp_path / "ckpt", tmp_path / "ran")
    with pytest.raises(ValueError, match=r"epoch=9-step=99.ckpt.*weights_only=False.*trust"):
        train(tmp_path, "plain")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(KeyError):  # it is no state of a loop
        train(tmp_path, "plain", elastic={"weights_only": False})
    assert (tmp_path / "ran").exists()


def loop_with(folder: Path, value: Any, **settings: Any) -> ElasticLoop:
    state = {"model": net(), "mine": (mine := Tally())}
    mine.seen = value
    return ElasticLoop(folder, loader=numbered(48, noisy=False), state=state, seed=1, **settings)


def one_epoch(loop: ElasticLoop) -> None:
    for _ in loop.epochs(1):
        for _batch in loop.batches():
            loop.scale_loss(torch.ones((), requires_grad=True)).backward()
            loop.step_done()


def test_a_loop_refuses_at_once_what_it_could_not_load(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"\['mine'\]\['seen'\] is a pathlib.*weights_only=False"),
        loop_with(tmp_path, pathlib.PurePosixPath("data")),
    ):
        pass
    with loop_with(tmp_path, pathlib.PurePosixPath("data"), weights_only=False) as loop:
        one_epoch(loop)
    with loop_with(tmp_path, 0, weights_only=False) as loop:
        assert loop.resumed is not None
    with pytest.raises(ValueError, match="PurePosixPath"):
        loop_with(tmp_path, 0).__enter__()


def test_a_loop_refuses_at_the_first_save_what_came_later(tmp_path: Path) -> None:
    with (  # noqa: PT012
        pytest.raises(ValueError, match=r"\['mine'\]\['seen'\] is a pathlib"),
        loop_with(tmp_path, 0) as loop,
    ):
        loop._run.objects._given["mine"].seen = pathlib.PurePosixPath("data")
        one_epoch(loop)


@contextmanager
def _state(folder: Path, value: Any, **settings: Any) -> Iterator[Any]:
    with saving(folder, writer="thread", **settings) as (state, training):
        training.tally.seen = value
        yield state


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.zeros(2), torch.ones(3)])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.parametrize("first", [lambda: None, nested, quantized])
def test_an_accelerator_is_not_given_what_runs_code(
    tmp_path: Path, first: Callable[[], torch.Tensor | None]
) -> None:
    """Also behind tensors that cannot be on meta."""
    file = tmp_path / "ran"
    value = [first(), Crafted(file)]
    with _state(tmp_path, value, weights_only=False) as state:
        state.save_state()
        state.wait()
    with (
        _state(tmp_path, 0) as state,
        pytest.raises(ValueError, match=r"custom_checkpoint_0.pkl.*weights_only=False"),
    ):
        state.load_state()
    assert not file.exists()
    with _state(tmp_path, 0, weights_only=False) as state:
        state.load_state()
    assert file.exists()
    with _state(tmp_path, value) as state, pytest.raises(ValueError, match="weights_only=False"):
        state.save_state()
    with pytest.raises(ValueError, match=r"checkpoint\[1\] is a .*Crafted.*weights_only=False"):
        require_loadable(value, name="checkpoint")


def test_what_cannot_be_read_at_all_is_not_given_to_an_accelerator(tmp_path: Path) -> None:
    from lightning_dist.frameworks.accelerate.async_state.files import OBJECTS, problem_in

    file = io.BytesIO()
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), file)  # torch.load would run its code
    path = tmp_path / "custom_checkpoint_0.pkl"
    path.write_bytes(file.getvalue())
    problem = problem_in(str(tmp_path), OBJECTS)
    assert problem is not None
    assert f"{path} " in str(problem)
    assert "weights_only=False" in str(problem)


def test_tensors_that_cannot_be_on_meta_are_saved_and_loaded(tmp_path: Path) -> None:
    for value in (nested(), quantized()):
        require_loadable({"value": value}, name="checkpoint")
        with _state(tmp_path, value) as state:
            state.save_state(tmp_path / "folder")
            state.wait()
        with _state(tmp_path, 0) as state:
            state.load_state(tmp_path / "folder")
            (loaded,) = state._accelerator._custom_objects
        expected, found = (
            t.unbind() if t.is_nested else [t.dequantize()] for t in (value, loaded.seen)
        )
        assert all(map(torch.equal, found, expected))


def test_a_state_that_could_not_be_loaded_is_not_saved(tmp_path: Path) -> None:
    with (
        _state(tmp_path, {"odd": pathlib.PurePosixPath("data")}) as state,
        pytest.raises(ValueError, match=r"custom_checkpoint_0.pkl.*PurePosixPath.*str\(path\)"),
    ):
        state.save_state()
    with _state(tmp_path, {"odd": "data"}) as state:
        state.save_state()
        state.wait()
        state.load_state()
