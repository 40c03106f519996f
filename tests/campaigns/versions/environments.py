"""Environments that have another version of one package, and all others of that of the tests."""

import json
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.campaigns.versions.stand_ins import stand_ins_for
from tests.runner.processes import environment_of

ROOT = Path(__file__).resolve().parents[3]
LIMIT = 1500.0
"""Seconds of a program, or of the tests of a feature."""


@contextmanager
def environment(requirement: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Python with that version before all others, and its variables."""
    with tempfile.TemporaryDirectory(prefix="versions-") as name:
        folder, own = Path(name), sysconfig.get_path("purelib")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        python = str(folder / "bin" / "python")
        command = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())
        (site / "tested.pth").write_text(f"import site; site.addsitedir({own!r})\n")
        pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--no-cache-dir"]
        subprocess.run([*pip, "--no-deps", "--ignore-installed", requirement], check=True)
        variables = {**environment_of({}), "PYTHONPATH": str(ROOT), "TMPDIR": name}
        if (libraries := site / "torch" / "lib").is_dir():
            stand_ins_for(libraries, folder / "stand-ins")
            variables["LD_LIBRARY_PATH"] = str(folder / "stand-ins")
        yield python, variables


def told(python: str, variables: Mapping[str, str], mark: str, *words: str) -> Any:
    """What a program prints behind ``mark``; else its last line, as a text."""
    done = subprocess.run(
        [python, "-W", "ignore", *words],
        cwd=ROOT,
        env=dict(variables),
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    for line in done.stdout.splitlines():
        if line.startswith(mark):
            return json.loads(line.removeprefix(mark))
    return (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
