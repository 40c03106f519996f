"""Stand-ins for the CUDA libraries of a torch, so that it is imported where they are not.

torch for CUDA needs some 3 GB of them to be imported, also on a machine without a GPU. A stand-in
has the name and the symbols of a library: each function returns an error, and there is no device.

    python -m tests.campaigns.versions.stand_ins ENVIRONMENT
"""

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

_NO_DEVICE = 100  # cudaErrorNoDevice
_ERROR = 999  # cudaErrorUnknown
_NEEDED = re.compile(r"\(NEEDED\).*\[(.+)\]")
_SYMBOL = re.compile(r"\bU (?:(\w+)@+(\S+)|((?:cu|nccl|nv)\w+)$)", re.MULTILINE)
_VERSION = re.compile(r"File: (\S+)|Name: (\S+)")
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
    symbols, versions = _undefined(shared), _versions(shared)
    # A library whose symbols have versions is asked for those; one without may have any symbol.
    for name in missing:
        of_version = {each: symbols[each] for each in sorted(versions[name] or {""})}
        source, script = folder / "stand_in.c", folder / "versions"
        source.write_text(_functions(set().union(*of_version.values())))
        lines = [
            f"{version} {{ {'global: ' if of else ''}{'; '.join([*sorted(of), ''])}}};\n"
            for version, of in of_version.items()
            if version
        ]
        script.write_text("".join(lines))
        options = [f"-Wl,-soname,{name}", *([f"-Wl,--version-script={script}"] if lines else [])]
        command = ["gcc", "-shared", "-fPIC", "-w", *options, "-o", folder / name, source]
        subprocess.run(command, check=True)
    return missing


def _needed(libraries: Iterable[Path]) -> set[str]:
    found = set()
    for each in libraries:
        told = subprocess.run(["readelf", "-d", each], capture_output=True, text=True).stdout
        found |= set(_NEEDED.findall(told))
    return found


def _undefined(libraries: Iterable[Path]) -> defaultdict[str, set[str]]:
    """Symbols by their version, empty where they have none."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for each in libraries:
        told = subprocess.run(["nm", "-D", each], capture_output=True, text=True).stdout
        for name, version, without in _SYMBOL.findall(told):
            found[version].add(name or without)
    return found


def _versions(libraries: Iterable[Path]) -> defaultdict[str, set[str]]:
    """Versions of symbols, by the library that is to have them."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for each in libraries:
        told = subprocess.run(["readelf", "-V", each], capture_output=True, text=True).stdout
        library = ""
        for file, version in _VERSION.findall(told.partition("Version needs section")[2]):
            library = file or library
            if version:
                found[library].add(version)
    return found


def _is_known(name: str) -> bool:
    told = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True).stdout
    return f"\t{name} " in told or not name.startswith(("libcu", "libnv", "libnccl"))


def _functions(names: Iterable[str]) -> str:
    lines = []
    for name in sorted(names):
        if name == "cudaGetDeviceCount":
            lines.append(f"int {name}(int *count) {{ *count = 0; return {_NO_DEVICE}; }}")
        elif name == "cuInit":
            lines.append(f"int {name}() {{ return {_NO_DEVICE}; }}")
        elif _TEXT.search(name):
            lines.append(f'const char *{name}() {{ return "no CUDA library"; }}')
        else:
            lines.append(f"int {name}() {{ return {_ERROR}; }}")
    return "\n".join(lines) + "\n"


def main(environment: str) -> None:
    """Make them in ``environment/stand-ins``, for the torch that is installed there."""
    (libraries,) = Path(environment).glob("lib/python*/site-packages/torch/lib")
    stand_ins_for(libraries, Path(environment) / "stand-ins")


if __name__ == "__main__":
    main(sys.argv[1])
