"""``lightning-dist launch``: torchrun or ``accelerate launch``, set so that jobs run well."""

from __future__ import annotations

import os
import shlex
import sys

import typer

from lightning_dist.cli.errors import reported
from lightning_dist.cli.launch_choice import choose

USAGE = "[OPTIONS] script.py [ARGUMENTS]"
PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,  # --help after the script is for the script
}


@reported
def launch(context: typer.Context) -> None:
    """Run a script with torchrun, or with accelerate launch where that was configured.

    torchrun: so that the script is restarted and nodes may come and go. accelerate launch: with
    `--config_file`, or where `lightning-dist config` has written its file, every option is one that
    accelerate launch has, and the script imports Accelerate and not Lightning; the settings of
    lightning_dist reach the training, and several CPU processes are one training. Every option of
    either works, and wins over what is set here. What is set, and which of the two is run, is told
    on stderr.

    \b
      --nnodes MIN:MAX     nodes with which the job runs; default 1
      --nproc-per-node N   ranks on this node, or auto, cpu, gpu; default 1
      --max-restarts N     after so many failures the job ends, planned stops not
                           counted; torchrun's default here 3
      --rdzv-endpoint H:P  where the nodes meet; needed for more than one
      --config_file FILE   run accelerate launch with this
      --torchrun           run torchrun, whatever is configured
      --dry-run            print the command, do not run it

    \b
    One node, restarted when a rank fails:
      lightning-dist launch --nproc-per-node 8 train.py --lr 0.1
    One to four nodes, the same command on each of them:
      lightning-dist launch --nnodes 1:4 --rdzv-endpoint node0:29400 \\
        --nproc-per-node 8 train.py
    A module instead of a script:
      lightning-dist launch --nproc-per-node 2 -m package.train
    As configured for Accelerate; and with no change of the script at all:
      lightning-dist launch --config_file two.yaml train.py
      lightning-dist launch --config_file two.yaml -m lightning_dist.run train.py
    """
    made = choose(context.args, os.environ)
    for note in made.notes:
        typer.echo(f"lightning-dist: {note}", err=True)
    if made.is_dry:
        words = [f"{key}={shlex.quote(value)}" for key, value in made.environment.items()]
        typer.echo(" ".join([*words, shlex.join([sys.executable, *made.arguments])]))
        return
    sys.stderr.flush()
    # In place of this process: signals reach torchrun, and its exit code is ours.
    os.execve(sys.executable, [sys.executable, *made.arguments], {**os.environ, **made.environment})
