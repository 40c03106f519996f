"""Registers and spills of all kernels for GPUs, with the lowest and the newest Triton.

    python -m tests.campaigns.versions.registers --json FILE [--only triton==3.6.0 --renew]

No GPU is needed: kernels are compiled for one. A codec takes 5 s for each architecture.
"""

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.harness.results import parser_of, recording, say
from benchmarks.versions import REGISTERS
from tests.campaigns.versions.environments import ROOT, environment, told

VERSIONS = ("triton==3.6.0", "triton==3.9.0")
ARCHITECTURES = (80, 90, 100)


def rows_of(version: str) -> Iterator[list[dict[str, Any]]]:
    """Rows of one version of Triton, by architecture."""
    program = str(ROOT / "tests" / "kernels" / "compiled.py")
    with environment(version) as (python, variables):
        path = f"{ROOT}:{ROOT / 'tests' / 'kernels'}"
        variables |= {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
        for sm in ARCHITECTURES:
            found = told(python, variables, "", program, str(sm), "float32", "aligned")
            if not isinstance(found, dict):
                sys.exit(f"{version} for sm_{sm}: {found}")
            say(f"{version} for sm_{sm}: {len(found)} kernels")
            rows = []
            for name, each in found.items():
                codec, kernel = name.split()
                named = {"codec": codec, "pass": kernel.removesuffix("_kernel")}
                del each["ptx"]
                rows.append({"kind": version, "architecture": sm, **named, **each})
            yield rows


def main() -> None:
    """Compile with all versions, or with some."""
    parser = parser_of(__doc__, renews=True)
    parser.add_argument("--only", choices=VERSIONS, action="append", help="repeatable")
    given = parser.parse_args()
    with recording(given) as record:
        for version in given.only or VERSIONS:
            for rows in rows_of(version):
                record.add(rows)
        record.show(REGISTERS)


if __name__ == "__main__":
    main()
