"""Launchers of torch's elastic agents, with ours in their place."""

from __future__ import annotations

import subprocess
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_dist.base.features import AGENT
from lightning_dist.elastic.launcher.agent import LauncherAgent
from lightning_dist.elastic.private import replace_agent
from lightning_dist.elastic.process.lifecycle import EXIT_RESTART
from lightning_dist.elastic.process.outcome import Outcome


def run_launcher(launch: Callable[[], object]) -> None:
    """Call ``launch``, a command line of torchrun's, with our agent.

    Workers that recover within their processes are replaced one by one
    (:class:`~lightning_dist.elastic.recovery.agent.RecoveringAgent`).

    Raises:
        SystemExit: see :func:`exit_code_of_script`.
    """
    agent: type[LauncherAgent] = LauncherAgent
    if AGENT.missing is None:  # otherwise workers refuse recovery='in_process'
        from lightning_dist.elastic.recovery.agent import RecoveringAgent

        agent = RecoveringAgent
    replace_agent(agent)
    with exit_code_of_script():
        launch()


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
            causes = [each for each in error.failures.values() if not _is_echo(each)]
            first = min(causes or error.failures.values(), key=lambda failure: failure.timestamp)
            code = first.exitcode
        else:
            code = error.returncode
        raise SystemExit(code if code > 0 else _SIGNALLED - code) from None


def _is_echo(failure: ProcessFailure) -> bool:
    outcome = Outcome.read(failure.message)
    return failure.exitcode == EXIT_RESTART or (outcome is not None and outcome.is_echo)
