"""``weights_only=True``, the policy by which checkpoints are read: unpickling must run no code.

The unpickler of ``torch.load(weights_only=True)`` makes tensors, plain values, and what
``torch.serialization.add_safe_globals`` allows. What is saved is proved to load that way.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import torch

from lightning_dist.checkpoint.snapshot.pickling import Pickled, pickled

_REMEDY = (
    "save plain values instead (str(path)), allow the type with "
    "torch.serialization.add_safe_globals([...]) in every start, or give weights_only=False, which "
    "runs any code in the file; do so only if you trust everyone who can write there"
)


def require_loadable(state: Any, content: Pickled | None = None, *, name: str) -> None:
    """Prove that what is about to be saved can be read again.

    Args:
        content: of ``state``, if it is pickled already.
        name: of ``state``, for the message.

    Raises:
        ValueError: the restricted unpickler does not read it; names what, and where it is.
    """
    if _is_loadable(state, content or pickled(state)):
        return
    name, value = _culprit(state, name)
    kind = value if isinstance(value, type) else type(value)
    what = f"{'the class' if kind is value else 'a'} {kind.__module__}.{kind.__qualname__}"
    raise ValueError(
        f"{name} is {what}, which torch.load(weights_only=True) does not read, so no run could "
        f"resume from the checkpoint; {_REMEDY}"
    )


def restricted_load(file: Any, *, path: str, map_location: Any, weights_only: bool | None) -> Any:
    """``torch.load``, which says what to do where the restricted unpickler refuses.

    Args:
        file: open, at its beginning.
        path: of ``file``, for the message.

    Raises:
        ValueError: it holds types that the restricted unpickler does not make.
    """
    try:
        return torch.load(file, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if weights_only is False or not (names := _unsafe_in(file)):
            raise
        raise _refusal(path, names) from error


def problem_with(
    file: Any, *, path: str, load: Callable[..., Any], whole: Callable[[], Any] | None = None
) -> ValueError | None:
    """Reason why the restricted unpickler cannot read a file of ``torch.save``; None if it can.

    Args:
        file: open, at its beginning.
        path: of ``file``, for the message.
        load: ``torch.load``, or what stands in for it.
        whole: the file to read where tensors have to be read too; None: ``file``.
    """
    try:
        load(file, map_location="meta", weights_only=True)  # nothing of tensors is read
        return None
    except pickle.UnpicklingError as error:
        return _refusal(path, _unsafe_in(file) or str(error))
    except Exception:  # nested and quantized tensors cannot be on "meta"
        file.seek(0)
    try:  # to the end: nothing is said of what comes after the tensor that failed
        file = file if whole is None else whole()
        load(file, map_location="cpu", weights_only=True)
        return None
    except pickle.UnpicklingError as error:
        return _refusal(path, _unsafe_in(file) or str(error))
    except Exception as error:
        return _refusal(path, f"what raises {type(error).__name__} ({error})")


def _refusal(path: str, names: str) -> ValueError:
    return ValueError(
        f"{path} holds {names}, which torch.load(weights_only=True) does not read; {_REMEDY}"
    )


def _is_loadable(state: Any, content: Pickled) -> bool:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", content.data)
        archive.writestr("archive/version", b"3\n")
        for index in range(len(content.storages)):  # on "meta" nothing of them is read
            archive.writestr(f"archive/data/{index}", b"")
    file.seek(0)
    problem = problem_with(file, path="", load=torch.load, whole=lambda: _saved(state))
    return problem is None


def _saved(state: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


def _culprit(state: Any, name: str) -> tuple[str, Any]:
    """Name and value of the innermost part of ``state`` that cannot be read."""
    parts: Any = ()
    if isinstance(state, Mapping):
        parts = state.items()
    elif isinstance(state, list | tuple):
        parts = enumerate(state)
    for key, part in parts:
        if not _is_loadable(part, pickled(part)):
            return _culprit(part, f"{name}[{key!r}]")
    return name, state


def _unsafe_in(file: Any) -> str:
    file.seek(0)
    try:
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    except Exception:  # of another format, or damaged
        return ""
