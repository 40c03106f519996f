"""Models that have a say in what they load; others are compared with the checkpoint first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_runs import Net, fit

from lightning_dist import AsyncCheckpoint


class Shrinks(Net):
    """Takes a bias of another name, as a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.register_load_state_dict_pre_hook(self._rename)

    def _rename(self, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if "old" in state:
            state["net.0.bias"] = state.pop("old")


class Overrides(Net):
    def load_state_dict(self, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        state = {name.replace("old", "net.0.bias"): value for name, value in state_dict.items()}
        return super().load_state_dict(state, *args, **kwargs)


@pytest.mark.parametrize("kind", [Shrinks, Overrides])
def test_a_model_that_has_a_say_in_what_it_loads(kind: Any, tmp_path: Path) -> None:
    fit(AsyncCheckpoint(tmp_path, "{step}"), max_epochs=1)
    state = torch.load(tmp_path / "step=3.ckpt")
    state["state_dict"]["old"] = state["state_dict"].pop("net.0.bias")
    torch.save(state, tmp_path / "old.ckpt")
    trainer = fit(AsyncCheckpoint(tmp_path), model=kind(), ckpt_path=tmp_path / "old.ckpt")
    assert trainer.global_step == 6
    with pytest.raises(ValueError, match="is a checkpoint of another model"):
        fit(AsyncCheckpoint(tmp_path), ckpt_path=tmp_path / "old.ckpt")


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net[0] = torch.nn.LazyLinear(6)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net[1:].parameters(), lr=0.1)


def test_parameters_that_are_not_there_yet(tmp_path: Path) -> None:
    model = Lazy()
    model.net(torch.zeros(5, 4))
    fit(AsyncCheckpoint(tmp_path, "{step}"), model=model, max_epochs=1)
    trainer = fit(AsyncCheckpoint(tmp_path), model=Lazy(), ckpt_path=tmp_path / "step=3.ckpt")
    assert trainer.global_step == 6
