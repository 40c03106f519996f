"""SIGTERM while a profile is taken: what a program sees of it."""

from pathlib import Path

import pytest
from processes import run

BEGIN = """
import ctypes, os, signal, sys
from lightning_dist.integrations.profiler import sigterm
sigterm._PATIENCE = 0.2
def tell(*words):
    print(*words, flush=True)
def end():
    os.kill(os.getpid(), signal.SIGTERM)
"""
CASES = {
    "raises": """
with sigterm.sigterm_raises():
    end()
    tell("went on")
""",
    "closing": """
with sigterm.sigterm_raises() as state:
    tell(state.came)
    state.closing()
    end()
    tell("went on", state.came)
tell(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
""",
    "stuck": """
import threading
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
waits = f"/proc/self/task/{os.getpid()}/syscall"
def end_when_it_waits():
    while hex(ctypes.addressof(mutex)) not in open(waits).read():
        os.sched_yield()
    end()
with sigterm.sigterm_raises(lambda: tell("the report is made")):
    libc.pthread_mutex_lock(mutex)
    threading.Thread(target=end_when_it_waits).start()
    libc.pthread_mutex_lock(mutex)  # for ever; a signal does not interrupt it
tell("went on")
""",
    "handler of its own": """
signal.signal(signal.SIGTERM, lambda *_: tell("its own"))
with sigterm.sigterm_raises():
    end()
    tell("went on")
""",
}


@pytest.mark.parametrize(
    ("case", "code", "told"),
    [
        ("raises", 143, ""),
        ("closing", 0, "False\nwent on True\nTrue\n"),
        ("stuck", 143, "the report is made\n"),
        ("handler of its own", 0, "its own\nwent on\n"),
    ],
)
def test_sigterm(case: str, code: int, told: str, tmp_path: Path, quick_python: list[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEGIN + CASES[case])
    done = run([*quick_python, script], limit=60)
    assert (done.returncode, done.output) == (code, told)
