"""What the interpreter cannot show: the instructions that NVIDIA's GPUs are given."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

CODECS = ["int8", "int4", "fp8", "sign", "qsgd:norm=l2", "terngrad:clip_sigma=2.5", "none"]


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    ("architecture", "codecs"),
    [(80, CODECS[:1]), pytest.param(90, CODECS, marks=pytest.mark.exhaustive)],
)
def test_arithmetic_is_rounded_and_not_contracted(architecture: int, codecs: list[str]) -> None:
    """No approximate division or root, no flush to zero, no multiply-add of floats."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, str(here / "compiled.py"), str(architecture), *codecs],
        env={**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    assert len(found) == 3 * len(codecs)
    for name, ptx in found.items():
        floats = set(re.findall(r"\b(?:div|fma|mul|add|sub|sqrt)\.\S*f(?:32|64)\b", ptx))
        assert floats or name == "none encode_kernel", name
        assert all(re.fullmatch(r"(?:div|mul|add|sub|sqrt)\.rn\.f\d+", op) for op in floats), name
        assert not re.search(r"\.ftz|\.approx|\.full\b|\bfma\b", ptx), name
        assert "ld.global.b8" not in ptx, f"{name}: codes are loaded byte by byte"
