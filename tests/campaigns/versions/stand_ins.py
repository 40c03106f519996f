"""Stand-ins for the CUDA libraries of a torch, so that it is imported where they are not.

torch for CUDA needs some 3 GB of them to be imported, also on a machine without a GPU. A stand-in
has the name and the symbols of a library: each function returns an error, and there is no device.
"""

import re
import subprocess
from collections.abc import Iterable
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice
_ERROR = 999  # cudaErrorUnknown
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_SYMBOL = re.compile(r"\bU ((?:cu|nccl|nv|cudnn|cufft|cusp)\w+)")
_TEXT = re.compile(r"String|Name|Version.*Str|Error.*(Desc|Info)")


def stand_ins_for(libraries: Path, folder: Path) -> list[str]:
    """Makes a stand-in in ``folder`` for each library that those in ``libraries`` lack.

    Returns:
        Their names; ``LD_LIBRARY_PATH=folder`` lets them be found.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shared = [each for each in libraries.glob("*.so*") if each.is_file()]
    own = {each.name for each in shared}
    missing = sorted(name for name in _needed(shared) - own if not _is_known(name))
    source = folder / "stand_ins.c"
    source.write_text(_functions(_undefined(shared)))
    first = None
    for name in missing:
        # All symbols are in the first: a library is asked for a symbol whatever its name.
        files = [] if first else [str(source)]
        command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run([*command, *(files or ["-x", "c", "/dev/null"])], check=True)
        first = first or name
    return missing


def _needed(libraries: Iterable[Path]) -> set[str]:
    found = set()
    for each in libraries:
        told = subprocess.run(["readelf", "-d", each], capture_output=True, text=True).stdout
        found |= set(_NEEDED.findall(told))
    return found


def _undefined(libraries: Iterable[Path]) -> set[str]:
    found = set()
    for each in libraries:
        told = subprocess.run(["nm", "-D", each], capture_output=True, text=True).stdout
        found |= {name.partition("@")[0] for name in _SYMBOL.findall(told)}
    return found


def _is_known(name: str) -> bool:
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    return f"\t{name} " in told or not name.startswith(("libcu", "libnv", "libnccl"))


def _functions(names: Iterable[str]) -> str:
    lines = [f"int cudaGetDeviceCount(int *count) {{ *count = 0; return {_NO_DEVICE}; }}"]
    for name in sorted(set(names) - {"cudaGetDeviceCount"}):
        if _TEXT.search(name):
            lines.append(f'const char *{name}() {{ return "no CUDA library"; }}')
        else:
            lines.append(f"int {name}() {{ return {_ERROR}; }}")
    return "\n".join(lines) + "\n"
