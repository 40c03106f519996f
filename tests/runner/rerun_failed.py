"""A run of pytest whose failed tests are run once more, alone: whether they fail by chance.

    python -m tests.runner.rerun_failed FOLDER PYTEST_ARGUMENTS...

Failed tests run again after all others, those of a file in one process, with nothing beside it. A
line that begins with FLAKY names a test that passes then, and the run passes. A line that begins
with FAILED names one that fails again, with the command that repeats it. These lines are the last
ones, and those of ``FOLDER/summary.txt``. A test that leaves something behind has failed
(`left_behind`). Nothing else is repeated: a run that pytest could not finish fails. The output of
the first run and of the repeats is kept in the folder.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import pytest

from tests.runner.left_behind import EXIT_CODE

LIMIT = 900.0  # seconds, for all repeats


def main(out: Path, arguments: Sequence[str]) -> int:
    shutil.rmtree(out, ignore_errors=True)
    code, failed = run(out, "first", arguments)
    if code not in (pytest.ExitCode.TESTS_FAILED, EXIT_CODE) or not failed:
        return code
    end, again = time.monotonic() + LIMIT, set[str]()
    outputs = {}
    for file, of_file in groupby(failed, key=lambda test: test.partition("::")[0]):
        tests = [*of_file]
        print(f"\n{file}: {len(tests)} failed, once more, alone", flush=True)
        name = file.replace("/", "-")
        outputs.update(dict.fromkeys(tests, out / f"{name}.txt"))
        options = ["-n", "0", "-m", "", *tests]
        code, still = run(out, name, options, limit=max(0.0, end - time.monotonic()))
        # Where pytest was ended, as at the limit of a test, it has recorded nothing.
        again |= {*tests} & {*still} or ({*tests} if code else set())
    lines = []
    for test in sorted(failed, key=lambda test: test in again):
        kept = f"outputs: {out / 'first.txt'}, {outputs[test]}"
        if test in again:
            python = os.path.relpath(sys.executable)
            repeat = f'{python} -m pytest -m "" {shlex.quote(test)}'
            lines += [f"FAILED {test}", f"       failed twice ({kept}), repeat: {repeat}"]
        else:
            lines += [f"FLAKY {test}", f"       failed beside others, passed alone ({kept})"]
    (out / "summary.txt").write_text("".join(f"{line}\n" for line in lines))
    print("", *lines, sep="\n")
    return int(bool(again))


def run(
    out: Path, name: str, arguments: Sequence[str], limit: float | None = None
) -> tuple[int, list[str]]:
    """Exit code of pytest and the tests that failed; its output is shown, and kept."""
    cache = out / "caches" / name
    cache.mkdir(parents=True)
    pytest_run = [sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache.resolve()}"]
    output = out / f"{name}.txt"
    tee = subprocess.Popen(["tee", output], stdin=subprocess.PIPE)
    assert tee.stdin is not None
    try:
        code = subprocess.run(
            pytest_run, stdout=tee.stdin, stderr=subprocess.STDOUT, timeout=limit
        ).returncode
    except subprocess.TimeoutExpired:
        code = int(pytest.ExitCode.INTERRUPTED)
    tee.stdin.close()
    try:
        tee.wait(10)
    except subprocess.TimeoutExpired:  # a process that a test left behind has its input too
        tee.kill()
    record = cache / "v/cache/lastfailed"
    failed = set(json.loads(record.read_text())) if record.exists() else set[str]()
    failed |= {*re.findall(r"(?m)^LEFT (\S.*?) (?:left|ends with) ", output.read_text())}
    return code, sorted(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
