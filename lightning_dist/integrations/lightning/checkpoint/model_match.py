"""Whether a checkpoint belongs to a model; known before anything is loaded into it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_dist.private import loads_by_itself


def require_same_model(saved: Mapping[str, Tensor], model: nn.Module, path: str) -> None:
    """Raise ValueError unless names and shapes agree.

    A module that has a say in what it loads is not asked in advance: no error then.
    """
    if _has_a_say(model):
        return
    state = model.state_dict()
    differences = [
        *_listed("only in the checkpoint", sorted(saved.keys() - state.keys())),
        *_listed("only in the model", sorted(state.keys() - saved.keys())),
        *_listed("of another shape", _reshaped(saved, state)),
    ]
    if differences:
        raise ValueError(
            f"{path} is a checkpoint of another model; parameters and buffers "
            f"{'; '.join(differences)}. Give another folder, or the path of a checkpoint of this "
            "model, or set strict_loading=False on the module"
        )


def _has_a_say(model: nn.Module) -> bool:
    """Whether parameters get their shape, or names their meaning, while a state is loaded."""
    if any(is_lazy(each) for each in chain(model.parameters(), model.buffers())):
        return True
    return any(map(loads_by_itself, model.modules()))


def _listed(what: str, names: list[str]) -> list[str]:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what}: {shown}"] if names else []


def _reshaped(saved: Mapping[str, Tensor], model: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {tuple(saved[name].shape)} for {tuple(value.shape)}"
        for name, value in model.items()
        if name in saved
        and isinstance(value, Tensor)
        and isinstance(saved[name], Tensor)
        and saved[name].shape != value.shape
    ]
