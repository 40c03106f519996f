"""Lightning's own tests of ModelCheckpoint, run with AsyncCheckpoint in its place.

The tests are Lightning's, of the installed version, and are not part of this repository::

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning lightning
    python -m tests.campaigns.lightning_checkpoint_tests lightning

Prints the tests that fail with AsyncCheckpoint and pass with ModelCheckpoint, with the reason. In
each pytest this module is the plugin that substitutes the class.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

FILES = (
    "checkpointing/test_model_checkpoint.py",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_trainer_checkpoint.py",
)
_CAMPAIGNS = Path(__file__).resolve().parent
_SUBSTITUTES = "LIGHTNING_DIST_SUBSTITUTES"
"""Set in the environment of the pytest whose tests get AsyncCheckpoint."""


def pytest_configure() -> None:
    """Give tests that import ModelCheckpoint from now on AsyncCheckpoint."""
    import lightning.pytorch
    from lightning.pytorch import callbacks

    from lightning_dist import AsyncCheckpoint

    if _SUBSTITUTES in os.environ:
        callbacks.ModelCheckpoint = AsyncCheckpoint  # type: ignore[misc]
        assert lightning.pytorch.callbacks is callbacks


def outcomes(tests: Path, *options: str, substitutes: bool) -> dict[str, str]:
    """Outcome of every test: ``"passed"``, ``"skipped"``, or the message of its failure."""
    paths = os.pathsep.join(map(str, (tests, _CAMPAIGNS.parents[1], _CAMPAIGNS)))
    environment = {**os.environ, "PYTHONPATH": paths}
    if substitutes:
        environment[_SUBSTITUTES] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests)]
        command += [f"--junitxml={report}", f"--basetemp={folder}/tests", *options]
        command += [str(tests / "tests_pytorch" / name) for name in FILES]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not report.exists():
            raise SystemExit(f"pytest did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, " ".join(found.get("message", "").split()) or kind
    return name, "passed" if case.find("skipped") is None else "skipped"


def main() -> int:
    """Run both, and print what differs; 1 where there is something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="tests to run, as of pytest")
    given = parser.parse_args()
    tests = (given.checkout / "tests").resolve()
    options = ["-k", given.k] if given.k else []
    stock = outcomes(tests, *options, substitutes=False)
    ours = outcomes(tests, *options, substitutes=True)
    for name, found in (("ModelCheckpoint", stock), ("AsyncCheckpoint", ours)):
        counts = Counter(o if o in ("passed", "skipped") else "failed" for o in found.values())
        print(f"{name}: {', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}")
    worse = [name for name, outcome in ours.items() if outcome != stock.get(name) == "passed"]
    for name in worse:
        print(f"\n{name}\n    {ours[name][:300]}")
    return bool(worse)


if __name__ == "__main__":
    sys.exit(main())
