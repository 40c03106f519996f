"""Files of tests among workers, also after a worker has crashed."""

from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling


class FileScheduling(LoadFileScheduling):
    """Each file runs in one worker.

    xdist puts all files of a worker that has crashed into its queue again, those that are done too.
    A worker that is given one of these hears nothing, and waits for ever.
    """

    def remove_node(self, node: Any) -> str | None:
        """The test during which the worker of ``node`` has crashed, which does not run again."""
        files = {
            name: tests
            for name, tests in self.assigned_work.pop(node).items()
            if not all(tests.values())
        }
        crashed = next(
            (test for tests in files.values() for test in tests if not tests[test]), None
        )
        for name, tests in files.items():
            if crashed in tests:
                tests[crashed] = True
            if not all(tests.values()):
                self.workqueue[name] = tests
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    return FileScheduling(config, log) if config.option.dist == "loadfile" else None
