"""One row: how the tests that are marked `gpu` end.

python -m benchmarks.gpu_check.marked --json FILE
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness.launch import REPOSITORY
from benchmarks.harness.results import of_tests, parser_of, recording

_TAIL = 300  # characters


def main() -> None:
    """Run them, and write."""
    given = parser_of(__doc__).parse_args()
    with recording(given) as record, tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
        if not report.exists():
            sys.exit(f"pytest has not run: {done.stdout[-_TAIL:]}")
        record.add([of_tests(report)])


if __name__ == "__main__":
    main()
