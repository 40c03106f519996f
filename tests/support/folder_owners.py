"""Other processes that own a folder of checkpoints."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OWNER = """
import sys
from lightning_dist.checkpoint.disk import folder_owner
lock = None
for call in sys.argv[2:]:
    before, lock = lock, getattr(folder_owner, call)(sys.argv[1])
    if before is not None:
        before.release()
print("owned", flush=True)
sys.stdin.read()
lock.release()
"""


@contextmanager
def owner(folder: Path, *calls: str) -> Iterator[subprocess.Popen[str]]:
    """A process that owns ``folder`` until its input ends or it is killed.

    calls: functions of `folder_owner`, one after the other; the lock of the last one is kept.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, folder, *calls],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "owned\n"
        yield process
    finally:
        process.stdin.close()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.stdout.close()
