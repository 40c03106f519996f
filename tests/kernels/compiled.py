"""Prints the PTX of all passes of some codecs. A process of its own: Triton must not interpret.

No GPU is needed: kernels are compiled for one, and not loaded.
"""

import json
import sys
from typing import Any

import torch
import triton
from eager import laid_out, span_of
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


def compiled(kernel: Any, arguments: tuple[Any, ...], constants: dict[str, Any], sm: int) -> str:
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
    options = {"enable_fp_fusion": False, "num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options).asm["ptx"]


def all_passes(codec_name: str, dtype: torch.dtype, sm: int) -> dict[str, str]:
    found: dict[str, str] = {}

    def compile_launch(kernel: Any, *arguments: Any, only_compile: bool, **constants: Any) -> None:
        found[f"{codec_name} {kernel.__name__}"] = compiled(kernel, arguments, constants, sm)

    passes._launch = compile_launch
    codec = resolve_codec(codec_name)
    kernels = kernels_of(codec, dtype=dtype)
    slices = laid_out(4096, 70016)
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
    every: dict[str, str] = {}
    for name in sys.argv[2:]:
        every |= all_passes(name, torch.bfloat16, int(sys.argv[1]))
    print(json.dumps(every))
