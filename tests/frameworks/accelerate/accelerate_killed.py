"""A training that is killed right after a save was handed over: PROJECT of one rank or several."""

import faulthandler
import os
import signal
import sys
from pathlib import Path

faulthandler.dump_traceback_later(100, exit=True)

from scenarios.accelerating import Training  # noqa: E402

from lightning_dist.accelerate import AsyncStateCheckpointer  # noqa: E402

training = Training(Path(sys.argv[1]))
state = AsyncStateCheckpointer(training.accelerator)
training.train(2)
state.save_state()
training.train(2)
state.save_state()
training.accelerator.wait_for_everyone()
os.kill(os.getpid(), signal.SIGKILL)
