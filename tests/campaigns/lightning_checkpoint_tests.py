"""Lightning's own tests of ModelCheckpoint, run with AsyncCheckpoint in its place.

The tests are Lightning's, of the installed version, and are not part of this repository::

    git clone --depth 1 --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning lightning
    python -m tests.campaigns.lightning_checkpoint_tests lightning

Prints the tests that fail with AsyncCheckpoint and pass with ModelCheckpoint: those of ``EXPECTED``
with the reason, and others, which there should be none of. In each pytest this module is the plugin
that substitutes the class.
"""

import argparse
import os
import re
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
    "callbacks/test_model_checkpoint_additional_cases.py",
    "callbacks/test_model_checkpoint_edge_cases.py",
    "callbacks/test_model_checkpoint_manual_opt.py",
    "callbacks/test_model_checkpoint_step_interval_val_metric.py",
)
_MOCKS = "counts calls of torch.save or Trainer.save_checkpoint, which it has mocked"
_EMPTY = "takes empty files for checkpoints, which are not complete"
_LOCK = "finds the folder's lock, or a checkpoint that is still being written"
_OPEN = "sets the callback up and never tears it down, so that the lock and a thread remain"
EXPECTED = {
    "test_checkpointing_with_nan_as_first": _MOCKS,
    "test_default_checkpoint_behavior": _MOCKS,
    "test_default_checkpoint_freq": _MOCKS,
    "test_find_last_checkpoints": _EMPTY,
    "test_model_checkpoint_saveload_ckpt": _OPEN,
    "test_none_monitor_not_alternating": _LOCK,
    "test_save_last_every_n_epochs_interaction": _MOCKS,
    "test_top_k": _MOCKS,
}
"""Reason by test."""
_CAMPAIGNS = Path(__file__).resolve().parent
_SUBSTITUTES = "LIGHTNING_DIST_SUBSTITUTES"
"""Set in the environment of the pytest whose tests get AsyncCheckpoint."""


def pytest_configure() -> None:
    """Give AsyncCheckpoint to tests that import ModelCheckpoint, and to trainers without one."""
    from lightning.pytorch import callbacks
    from lightning.pytorch.callbacks import model_checkpoint
    from lightning.pytorch.trainer.connectors import callback_connector

    from lightning_dist import AsyncCheckpoint

    if _SUBSTITUTES in os.environ:
        for module in (callbacks, model_checkpoint, callback_connector):
            module.ModelCheckpoint = AsyncCheckpoint  # type: ignore[attr-defined]


def outcomes(tests: Path, *options: str, substitutes: bool) -> dict[str, str]:
    """Outcome of each test by its name: ``"passed"``, ``"skipped"``, or the message of a failure.

    Args:
        tests: folder of Lightning's tests.
        options: of pytest, such as the tests to run.
        substitutes: whether they get AsyncCheckpoint.
    """
    paths = os.pathsep.join(map(str, (tests, _CAMPAIGNS.parents[1], _CAMPAIGNS)))
    environment = {**os.environ, "PYTHONPATH": paths}
    if substitutes:
        environment[_SUBSTITUTES] = "1"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", Path(__file__).stem]
        command += ["-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(tests)]
        command += [f"--junitxml={report}", f"--basetemp={folder}/tests", *options]
        subprocess.run(command, env=environment, cwd=tests)
        if not report.exists():
            raise SystemExit("pytest did not run; see above")
        return dict(map(_outcome, ElementTree.parse(report).iter("testcase")))


def _outcome(case: ElementTree.Element) -> tuple[str, str]:
    name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
    for kind in ("failure", "error"):
        if (found := case.find(kind)) is not None:
            return name, " ".join(found.get("message", "").split()) or kind
    return name, "passed" if case.find("skipped") is None else "skipped"


def main() -> int:
    """Run the tests with AsyncCheckpoint, and those that fail with ModelCheckpoint too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a checkout of Lightning")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="tests to run, as of pytest")
    given = parser.parse_args()
    tests = (given.checkout / "tests").resolve()
    files = [str(tests / "tests_pytorch" / name) for name in FILES]
    ours = outcomes(tests, *files, "-k", given.k, substitutes=True)
    failed = {name: o for name, o in ours.items() if o not in ("passed", "skipped")}
    stock = outcomes(tests, *failed, substitutes=False) if failed else {}
    counts = Counter("failed" if name in failed else outcome for name, outcome in ours.items())
    worse = [name for name in failed if stock.get(name) == "passed"]
    reasons = {name: EXPECTED.get(re.split(r"::|\[", name)[1]) for name in worse}
    unexpected = [name for name, reason in reasons.items() if reason is None]
    print(
        f"With AsyncCheckpoint {counts['passed']} passed, {counts['skipped']} skipped, "
        f"{counts['failed']} failed, of which {len(worse)} pass with ModelCheckpoint, "
        f"{len(unexpected)} of them unexpectedly."
    )
    for reason, number in Counter(filter(None, reasons.values())).items():
        print(f"{number:4d} expected: the test {reason}")
    for name in unexpected:
        print(f"\n{name}\n    {failed[name][:300]}")
    return bool(unexpected)


if __name__ == "__main__":
    sys.exit(main())
