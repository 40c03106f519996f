"""A worker that knows the store of recovery only: its steps are nothing, its peers are keys.

    recovering.py FOLDER

It tells in ``FOLDER/<worker>.<pid>`` which generations it has been in, a line of JSON each, and
ends with 0 when there is ``FOLDER/end``. ``FOLDER/exit-<worker>`` has the code with which it ends
before, ``FOLDER/other-<worker>`` makes it one of another training, and ``FOLDER/late-<worker>``
keeps it from being ready.
"""

import json
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

from torch.distributed import (  # type: ignore[attr-defined]  # torch re-exports them silently
    PrefixStore,
    TCPStore,
)

from lightning_dist.elastic.process.lifecycle import EXIT_EVICTED, EXIT_RESTART
from lightning_dist.elastic.process.outcome import Outcome
from lightning_dist.elastic.recovery.protocol import (
    ROOT,
    Generation,
    Keys,
    WorkerReport,
    decode_generation,
    encode,
)

LOOK = 0.005


def connect() -> PrefixStore:
    host, _, port = os.environ["LIGHTNING_DIST_RECOVERY_STORE"].rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=60))
    return PrefixStore(ROOT, store)


def beat(name: str) -> None:
    store = connect()
    count = 0
    try:
        while True:
            store.set(Keys.beat(name), str(count := count + 1))
            time.sleep(0.05)
    except RuntimeError:  # the store is gone
        os._exit(EXIT_RESTART)


def end(code: int) -> NoReturn:
    """Without the end of the interpreter: the thread that beats may be in torch then, and abort."""
    sys.stdout.flush()
    os._exit(code)


def next_generation(store: PrefixStore, name: str, after: int) -> Generation:
    while True:
        if store.check([Keys.newest]):
            made = decode_generation(store.get(Keys.generation(int(store.get(Keys.newest)))))
            if made.ends:
                Outcome(1).write()
                os._exit(EXIT_RESTART)
            if name in made.refused:
                os._exit(1)
            if made.number > after and name in made.members:
                return made
            if made.number > after >= 0:
                os._exit(EXIT_EVICTED)
        time.sleep(LOOK)


def main(folder: Path) -> None:
    name = os.environ["LIGHTNING_DIST_WORKER"]
    log = (folder / f"{name}.{os.getpid()}").open("w", buffering=1)
    print(f"worker {name} has come", flush=True)
    threading.Thread(target=beat, args=(name,), daemon=True).start()
    store = connect()
    while (folder / f"late-{name}").exists():
        time.sleep(LOOK)
    facts = {"model": name} if (folder / f"other-{name}").exists() else {}
    store.set(Keys.report(-1, name), encode(WorkerReport(name, facts=facts)))
    made, step = Generation(-1), 0
    while True:
        made = next_generation(store, name, made.number)
        step = max(step, made.step)
        facts = {"number": made.number, "members": made.members, "step": step}
        print(json.dumps({**facts, "time": time.monotonic()}), file=log)
        failed = False
        while True:
            if (folder / "end").exists():
                end(0)
            if (told := folder / f"exit-{name}").exists():
                code = int(told.read_text())
                told.unlink()
                Outcome(step + 1).write()  # it has done more than those before it
                end(code)
            failed = store.check([Keys.broken(made.number)])
            if failed or store.check([pause := f"pause/{made.number}"]):
                break
            if store.add(Keys.waiting, 0) > made.waiting:
                store.set(pause, "1")  # in place of the vote: all pause, or nobody
            time.sleep(LOOK)
        report = WorkerReport(name, made.number, step, failed=failed)
        store.set(Keys.report(made.number, name), encode(report))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]))
    except RuntimeError:  # the store is gone
        Outcome(0).write()
        sys.exit(EXIT_RESTART)
