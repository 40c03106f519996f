"""Prints PTX and resources of all passes of some codecs, as JSON.

    python compiled.py ARCHITECTURE DTYPE KIND [CODEC...]

A process of its own: Triton must not interpret. No GPU is needed: kernels are compiled for one, and
not loaded. ``KIND`` of the slices is ``aligned`` or ``odd``.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import triton
from eager import CODECS, laid_out, span_of
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lightning_dist.codecs import resolve_codec
from lightning_dist.kernels.triton import SliceTable, kernels_of, passes

_TYPES = {
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}
_ALIGNED = [["tt.divisibility", 16]]
_SLICES = {"aligned": (4096, 70016), "odd": (4095, 70013)}
_ACCESS = re.compile(r"\b(LDG|STG)\.E((?:\.[A-Z0-9_]+)*)")
_BITS = re.compile(r"\.(128|64|[US]16|[US]8)\b")


def compiled(
    kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], sm: int
) -> dict[str, Any]:
    constants = dict(constants)
    signature, attributes = {}, {}
    for i, (name, value) in enumerate(zip(kernel.arg_names, arguments, strict=False)):
        if value is None:
            constants[name] = None
        elif isinstance(value, int):
            signature[name] = "i32"
        else:
            signature[name] = _TYPES[value.dtype]
            attributes[(i,)] = _ALIGNED
    types = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    options = {"enable_fp_fusion": False, "num_warps": passes.warps_of(constants["OF"])}
    made = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
    return {"ptx": made.asm["ptx"], **resources(made.asm["cubin"])}


def resources(cubin: bytes) -> dict[str, Any]:
    """Registers, bytes of memory for what does not fit into them, and accesses by their bits."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

    def told(*words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        return done.stdout

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = told(str(tools / "cuobjdump"), "-res-usage", file.name)
        code = told(str(tools / "nvdisasm"), "-c", file.name)
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    accesses: dict[str, Counter[str]] = {"LDG": Counter(), "STG": Counter()}
    for kind, suffixes in _ACCESS.findall(code):
        bits = _BITS.search(suffixes)
        accesses[kind][bits[1].strip("US") if bits else "32"] += 1
    return {
        "registers": found["REG"],
        "spilled": found["STACK"] + found["LOCAL"],
        "loads": accesses["LDG"],
        "stores": accesses["STG"],
    }


def all_passes(codec_name: str, dtype: torch.dtype, sm: int, kind: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def compile_launch(kernel: Any, *arguments: Any, only_compile: bool, **constants: Any) -> None:
        found[f"{codec_name} {kernel.__name__}"] = compiled(kernel, arguments, constants, sm)

    passes._launch = compile_launch
    codec = resolve_codec(codec_name)
    kernels = kernels_of(codec, dtype=dtype)
    slices = laid_out(*_SLICES[kind])
    cpu = torch.device("cpu")
    table = SliceTable.of(codec, [slices], rows=2, device=cpu, dtype=dtype, tile_elements=4096)
    flat = torch.zeros(span_of(slices), dtype=dtype)
    residual = None if codec.lossless else torch.zeros(span_of(slices))
    own = torch.zeros(table.payload_bytes, dtype=torch.uint8)
    mean, flag = own[: table.row_bytes(0)], torch.tensor(True)
    salts = torch.zeros(2, dtype=torch.int32) if codec.stochastic else None
    scale = torch.ones(())
    kernels.encode(flat, residual, scale, table=table, payload=own, finite=flag, salts=salts)
    kernels.reduce(own, mean, table=table, row=1, residual=residual, scale=scale, salts=salts)
    kernels.decode(torch.cat([own, own]), flat, table=table, weight=0.5)
    return found


if __name__ == "__main__":
    architecture, dtype, kind, *codecs = sys.argv[1:]
    every: dict[str, Any] = {}
    for name in codecs or CODECS:
        every |= all_passes(name, getattr(torch, dtype), int(architecture), kind)
    print(json.dumps(every))
