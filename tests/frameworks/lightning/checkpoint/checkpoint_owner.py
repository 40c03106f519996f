"""A trainer that owns FOLDER until it is told to go on, and is then killed in mid-write.

    python checkpoint_owner.py FOLDER FORMAT

Prints its own pid and the writer's once the first checkpoint is there. At the next line of its
input it takes a second snapshot, whose writer is stopped, and kills itself.
"""

import os
import signal
import sys
from pathlib import Path

from checkpoint_runs import Between, checkpointer_of, fit, writer_pid

from lightning_dist import AsyncCheckpoint


def main(folder: Path, format: str) -> None:
    callback = AsyncCheckpoint(
        folder, "{step}", every_n_train_steps=1, writer="process", format=format, save_last=True
    )

    def tell_and_wait() -> None:
        callback.wait()
        print(os.getpid(), writer_pid(callback), flush=True)
        sys.stdin.readline()
        os.kill(writer_pid(callback), signal.SIGSTOP)

    def die() -> None:
        # Behind the snapshot and the jobs that follow it, in the one thread that sends them.
        checkpointer_of(callback)._queue._thread.submit(lambda: None).result()
        for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal or a cluster sends to all
            os.kill(writer_pid(callback), number)
        os.killpg(os.getpgrp(), signal.SIGKILL)

    fit(callback, Between({1: tell_and_wait, 2: die}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
