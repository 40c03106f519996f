"""Train the same model with `ddp` and with `compressed_ddp`; show the losses and the bytes sent.

Run it with `python examples/demo.py [--strategy NAME] [--steps N] [--out DIR] [--timeout S]`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from byte_gpt.report import counted_line, results_table, save_picture
from rich.console import Console

BASELINE = "ddp"
NEXT = """\
Next:
  is your network the bottleneck?   docs/choosing-a-codec.md
  profile a training                lightning-dist launch --nproc-per-node 2 examples/profile_ddp.py
  your own training                 docs/quick-start.md: one argument of Trainer, Fabric or DDP"""
STEPS = 100
# Frames of a traceback, warnings, rulers and wandb's farewell do not say why a run failed.
NOISE = re.compile(r"(\[rank\d+\]:\s*)?(Traceback |\s{2,}|\S+\.py:\d+: |-{5,}|wandb:|\s*$)")
WORKER_ENV = {
    "OMP_NUM_THREADS": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_CONSOLE": "off",
}


class RunFailed(Exception):
    """A training run ended without a result; the text says how, for the reader of the demo."""


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    if (value := int(text)) < 1:
        raise ValueError(text)
    return value


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--strategy", default="compressed_ddp", help="beside plain ddp")
    parser.add_argument("--steps", type=positive, default=STEPS, help="training steps of each run")
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder of the results")
    parser.add_argument("--timeout", type=positive, default=300, help="seconds that a run may take")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {arguments.out}: {error.strerror}")
    return arguments


def end_all(process: subprocess.Popen[bytes]) -> None:
    """End the run and the ranks it started, which share its process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def train(strategy: str, *, steps: int, out: Path, limit_s: int) -> dict[str, Any]:
    """One run in a process of its own, so that no run finds what another left in the process."""
    result_file, log_file = out / f"{strategy}.json", out / f"{strategy}.log"
    result_file.unlink(missing_ok=True)
    options = ["--strategy", strategy, "--steps", str(steps), "--out", str(out)]
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker", *options],
            stderr=log,
            env=os.environ | WORKER_ENV,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=limit_s)
            ended = f"ended with exit code {code}"
        except subprocess.TimeoutExpired:
            ended = f"took longer than {limit_s} s (--timeout) and was stopped"
        finally:
            end_all(process)
    if process.returncode == 0 and result_file.exists():
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result
    lines = log_file.read_text(errors="replace").splitlines()
    last = [line for line in lines if not NOISE.match(line)][-6:]
    raise RunFailed("\n  ".join([f"{strategy} {ended}. Full output: {log_file}", *last]))


def main() -> int:
    arguments = parse_arguments()
    out: Path = arguments.out
    if arguments.worker:
        # Imported here, so that the process that only waits and reports does not load torch.
        from byte_gpt.measured_run import run

        run(arguments.strategy, steps=arguments.steps, out=out)
        return 0
    if missing := [name for name in ("matplotlib", "wandb") if find_spec(name) is None]:
        print(f"The demo needs: pip install {' '.join(missing)}", file=sys.stderr)
        return 1
    # SIGTERM is handled as Ctrl-C: the ranks must not outlive the demo.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    results = []
    # The chosen one runs first, so that a mistake in its name shows at once.
    for strategy in dict.fromkeys([arguments.strategy, BASELINE]):
        console.print(f'Training with strategy="{strategy}", {arguments.steps} steps ...')
        try:
            result = train(strategy, steps=arguments.steps, out=out, limit_s=arguments.timeout)
            results.insert(0, result)
        except RunFailed as failure:
            console.print(str(failure), style="red", markup=False, highlight=False, soft_wrap=True)
            return 1
        except KeyboardInterrupt:
            console.print("Stopped.")
            return 130
        finally:
            console.show_cursor()  # a progress bar that was killed has left it hidden
    console.print(results_table(results))
    for result in results:
        if line := counted_line(result):
            console.print(line, highlight=False, soft_wrap=True)
    (out / "result.json").write_text(json.dumps({"runs": results}, indent=1))
    save_picture(results, path=out / "loss.png")
    saved = ", ".join(str(out / name) for name in ("loss.png", "result.json", "wandb"))
    console.print(f"Saved {saved} (offline runs)", highlight=False, soft_wrap=True)
    console.print(NEXT, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
