"""Compiled passes of the sparse codecs: a search and a scatter are no loop for torch's compiler.

``native.cpp`` is compiled at set-up with the compiler that torch uses, once for a machine, and kept
in the folder where torch keeps compiled kernels. Its functions run on one thread, without Python's
lock, and give the bytes of the eager passes; of NaN only that it is one.
"""

from __future__ import annotations

import ctypes
import fcntl
import getpass
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_dist.base.exchanges import EXCHANGES
from lightning_dist.codecs.base import Payload
from lightning_dist.codecs.scales import HEADROOM
from lightning_dist.codecs.threshold import Threshold
from lightning_dist.kernels.passes import Pass, Passes

_SOURCE = Path(__file__).with_name("native.cpp")
_OPTIONS = ("-O3", "-march=native", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC")
_VALUES = (torch.bfloat16, torch.float32, torch.int8)  # in the order of ValueType
_KINDS = ((), ("residual",), ("residual", "momentum"))


class _Call(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("grad", "residual", "velocity", "keys", "scale")),
        *((name, c_int64) for name in ("blocks", "block", "k", "values", "received")),
        *((name, c_float) for name in ("momentum", "encode_factor", "own_factor", "weight")),
        *((name, c_float) for name in ("gain", "per_level")),
    )


class _Planes(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("places", "values", "scales"))


def block_passes(passes: Passes, dtype: torch.dtype, received: int) -> dict[str, Pass]:
    """Compiled passes by name for gradients of ``dtype``; none where the C++ has none.

    Raises:
        OSError: there is no compiler, or no folder.
        RuntimeError: the compiler has failed.
    """
    codec, memory, factors = passes.codec, passes.memory, passes.factors
    native = codec.native
    linear = EXCHANGES[codec.exchange].linear  # whose payloads are added densely elsewhere
    if native is None or dtype != torch.float32 or memory.kinds not in _KINDS:
        return {}
    if linear and received > 1:
        return {}
    library, planes = _library(), native.planes

    def call(given: Sequence[Any], *, received: int = 0) -> _Call:
        grad, state, scale, keys = given
        residual, velocity = (*(_pointer(held) for held in state), None, None)[:2]
        return _Call(
            grad=_pointer(grad),
            residual=residual,
            velocity=velocity,
            keys=None if keys is None else _pointer(keys),
            scale=scale.data_ptr(),
            blocks=grad.shape[1],
            block=codec.block,
            k=native.k,
            values=_VALUES.index(native.values),
            received=received,
            momentum=getattr(memory, "momentum", 0.0),
            encode_factor=factors.encode,
            own_factor=factors.own,
            weight=factors.mean,
            gain=native.gain,
            per_level=HEADROOM / 127,
        )

    def planes_of(payload: Payload) -> _Planes:
        return _Planes(**dict(zip(planes, map(_pointer, payload), strict=False)))

    def encode(function: Any, *of_call: Any) -> None:
        *given, own = of_call
        function(byref(call(given)), byref(planes_of(own)))

    def decode_and_commit(function: Any, *of_call: Any) -> None:
        *given, own, payloads = of_call
        others = (_Planes * len(payloads))(*map(planes_of, payloads))
        function(byref(call(given, received=len(payloads))), byref(planes_of(own)), others)

    return {
        name: partial(run, getattr(library, f"{native.functions}_{name}"))
        for name, run in (
            ("encode", encode),
            ("encode_and_commit", encode),
            ("decode_and_commit", decode_and_commit),
        )
    }


def _pointer(blocks: Tensor) -> int:
    """Address of ``(1, B, m)``, blocks one after the other."""
    assert blocks[0].is_contiguous(), blocks.stride()
    assert len(blocks) == 1, "a sparse payload is gathered as a whole"
    return blocks.data_ptr()


def sparse_passes() -> dict[str, Pass]:
    """Compiled passes of ``threshold`` by name, for gradients in float32.

    Raises:
        OSError: there is no compiler, or no folder.
        RuntimeError: the compiler has failed.
    """
    library = _library()

    def select(
        codec: Threshold, compensated: Tensor, residual: Tensor | None, scale: Tensor, offset: int
    ) -> Payload:
        numel = len(compensated)
        # Memory that is not written takes none.
        places = compensated.new_empty(numel, dtype=torch.int32)
        values = compensated.new_empty(numel, dtype=codec.value_dtype)
        count = library.threshold_select(
            compensated.data_ptr(),
            None if residual is None else residual.data_ptr(),
            scale.data_ptr(),
            numel,
            codec.tau,
            codec.unit == "rms",
            offset,
            _VALUES.index(values.dtype),
            places.data_ptr(),
            values.data_ptr(),
        )
        return places[:count], values[:count]

    def keep(compensated: Tensor, residual: Tensor | None, scale: Tensor) -> None:
        held = None if residual is None else residual.data_ptr()
        library.threshold_keep(compensated.data_ptr(), held, scale.data_ptr(), len(compensated))

    def scatter(compensated: Tensor, payload: Payload, weight: float) -> None:
        places, values = payload
        pointers = (tensor.data_ptr() for tensor in (compensated, places, values))
        kind = _VALUES.index(values.dtype)
        library.threshold_scatter(*pointers, len(places), kind, weight)

    return {function.__name__: function for function in (select, keep, scatter)}


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(_built()))
    call, planes, pointer, number = POINTER(_Call), POINTER(_Planes), c_void_p, c_int64
    arguments: dict[str, list[Any]] = {
        "threshold_select": [
            *(pointer, pointer, pointer, number),
            *(c_float, number, number, number),
            *(pointer, pointer),
        ],
        "threshold_scatter": [pointer, pointer, pointer, number, number, c_float],
        "threshold_keep": [pointer, pointer, pointer, number],
    }
    for codec in ("topk", "randomk"):
        for name in ("encode", "encode_and_commit"):
            arguments[f"{codec}_{name}"] = [call, planes]
        arguments[f"{codec}_decode_and_commit"] = [call, planes, planes]
    for name, types in arguments.items():
        function = getattr(library, name)
        function.argtypes = types
        function.restype = number if name == "threshold_select" else None
    return library


def _built() -> Path:
    """The compiled library; the first process of a machine makes it, the others wait for it."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise FileNotFoundError("found neither g++ nor clang++")
    # Predefined macros tell the compiler's version and the machine's instructions.
    macros = _output_of([compiler, *_OPTIONS, "-dM", "-E", "-x", "c++", os.devnull])
    key = hashlib.sha256(f"{_OPTIONS}{macros}{_SOURCE.read_text()}".encode()).hexdigest()[:16]
    folder = _folder()
    library = folder / f"native-{key}.so"
    with (folder / "native.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".part")
            _output_of([compiler, *_OPTIONS, "-o", str(unfinished), str(_SOURCE)])
            unfinished.replace(library)
    return library


def _folder() -> Path:
    """Folder of torch's compiled kernels; files of other users are not loaded."""
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    default = Path(tempfile.gettempdir(), f"torchinductor_{_user()}")
    folder = Path(given or default, "lightning_dist")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user")
    return folder


def _user() -> str:
    """Name of the user, or its number: in a container it often has no name."""
    try:
        return getpass.getuser()
    except (KeyError, ModuleNotFoundError, OSError):
        return f"uid_{os.getuid()}"


def _output_of(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
