"""Exit code of a launcher: that of its script, where torchrun and Accelerate exit with 1."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from lightning_dist.elastic.process.lifecycle import EXIT_RESTART

_SIGNALLED = 128
"""Shells add it to the number of the signal that ended a program."""


@contextmanager
def exit_code_of_script() -> Iterator[None]:
    """End this program as the rank ended that failed first; what the launcher says is printed.

    Raises:
        SystemExit: with the exit code of a script that failed, or 128 and the number of the signal
            that ended it.
    """
    try:
        yield
    except (ChildFailedError, subprocess.CalledProcessError) as error:
        traceback.print_exception(error)
        if isinstance(error, ChildFailedError):
            # Those that had to stop because of another have failed, too.
            real = [each for each in error.failures.values() if each.exitcode != EXIT_RESTART]
            first = min(real or error.failures.values(), key=lambda each: each.timestamp)
            code = first.exitcode
        else:
            code = error.returncode
        raise SystemExit(code if code > 0 else _SIGNALLED - code) from None
