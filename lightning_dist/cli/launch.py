"""``lightning-dist launch``: torchrun, set so that jobs survive failures."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import typer

from lightning_dist.cli.errors import reported

USAGE = "[OPTIONS] script.py [ARGUMENTS]"
PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,  # --help after the script is for the script
}
DRY = "--dry-run"
"""Ours; it does not reach torchrun."""
SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
RESTARTS = 3
LAST_CALL = {"last_call_timeout": "5"}
KEEP_ALIVE = {"keep_alive_interval": "2", "keep_alive_max_attempt": "5"}
"""A node that died is dropped after their product, in seconds."""
JOIN_TIMEOUT = "600"
"""Seconds for which torchrun waits for the fewest nodes, if nobody says otherwise."""
_ANY = 1 << 20
"""Ranks of a node for which torchrun counts the devices."""


@reported
def launch(context: typer.Context) -> None:
    """Run a script with torchrun, set up for restarts.

    Nodes may join and leave. All options of torchrun work, and win over what is added here, which
    stderr lists. For Lightning, Fabric, Accelerate and plain PyTorch.

    \b
      --nnodes MIN:MAX     number of nodes; default 1
      --nproc-per-node N   ranks on this node, or auto, cpu, gpu; default 1
      --max-restarts N     failures, and workers replaced, that the job survives;
                           planned stops do not count; default 3
      --rdzv-endpoint H:P  rendezvous address; required for several nodes
      --dry-run            print the command, do not run it

    With recovery within the process workers are replaced one by one, and nodes join and leave
    without a restart of the others. LIGHTNING_DIST_MIN_WORKERS, LIGHTNING_DIST_BEAT_TIMEOUT and
    LIGHTNING_DIST_REPORT_TIMEOUT set its limits.

    \b
    One node, restarted when a rank fails:
      lightning-dist launch --nproc-per-node 8 train.py --lr 0.1
    One to four nodes, the same command on each of them:
      lightning-dist launch --nnodes 1:4 --rdzv-endpoint node0:29400 \\
        --nproc-per-node 8 train.py
    A module; and a script of Accelerate's without any change of it:
      lightning-dist launch --nproc-per-node 2 -m package.train
      lightning-dist launch --nproc-per-node 2 -m lightning_dist.run train.py
    """
    made = _plan(context.args, os.environ)
    for note in made.notes:
        typer.echo(f"lightning-dist: {note}", err=True)
    if made.is_dry:
        words = [f"{key}={shlex.quote(value)}" for key, value in made.environment.items()]
        typer.echo(" ".join([*words, shlex.join([sys.executable, *made.arguments])]))
        return
    sys.stderr.flush()
    # In place of this process: signals reach torchrun, and its exit code is ours.
    os.execve(sys.executable, [sys.executable, *made.arguments], {**os.environ, **made.environment})


@dataclass
class _Plan:
    """Arguments of the Python that runs torchrun, additions to its variables, and why."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_dry: bool = False


def _plan(words: Sequence[str], environ: Mapping[str, str]) -> _Plan:
    """Command for the command line ``words``.

    Raises:
        ValueError: there is no script, or the options cannot work.
    """
    given = _parsed(words, environ)
    fewest, most = _nodes(given.nnodes)
    _require_ranks(given.nproc_per_node)
    _require_recovery(given.nproc_per_node, (fewest, most), environ)
    made = _Plan([], is_dry=given.dry_run)
    added: list[str] = []

    def add(option: str, why: str) -> None:
        added.append(option)
        made.notes.append(f"{option} ({why})")

    if given.max_restarts is None:
        add(f"--max-restarts={RESTARTS}", "survives this many failures")
    elif given.max_restarts < 0:
        raise ValueError(f"--max-restarts must be 0 or more, it is {given.max_restarts}")
    backend = _backend(given, fewest, most)
    if backend == "standalone" and not given.standalone:
        add("--standalone", "one node: rendezvous on a free port")
    elif backend == "c10d" and given.rdzv_backend is None:
        add("--rdzv-backend=c10d", "the rendezvous that lets nodes join and leave")
    if backend == "c10d" and most > 1:
        theirs = _settings(given.rdzv_conf or "")
        ours = {**(LAST_CALL if fewest < most else {}), **KEEP_ALIVE}
        settings = ",".join(f"{key}={value}" for key, value in {**ours, **theirs}.items())
        if ours.keys() - theirs.keys():
            add(f"--rdzv-conf={settings}", "do not wait long for nodes that may not come")
        if fewest > 1:
            patience = theirs.get("join_timeout", JOIN_TIMEOUT)
            made.notes.append(
                f"RendezvousTimeoutError means that fewer than {fewest} nodes came in {patience} s "
                "(join_timeout in --rdzv-conf)"
            )
    if SHARING not in environ and backend != "static":
        made.environment[SHARING] = "1"
        made.notes.append(f"{SHARING}=1 (a store for every start, and nodes can join)")
    elif fewest < most and environ.get(SHARING) != "1":
        made.notes.append(f"{SHARING} is {environ.get(SHARING)!r}: nodes will not be able to join")
    options, after = _cut(words, given)
    # Behind -- torchrun takes nothing for an option of its own, such as --n for --nnodes.
    made.arguments += ["-m", "lightning_dist.elastic.agent", *options, *added, "--", *after]
    return made


def _parsed(words: Sequence[str], environ: Mapping[str, str]) -> Any:
    """Arguments in the words, by torchrun's parser; raises ValueError for what it refuses."""
    from lightning_dist.private import torchrun_parser

    parser: argparse.ArgumentParser = torchrun_parser()
    for name in ("max_restarts", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_port"):
        if f"PET_{name.upper()}" not in environ:
            parser.set_defaults(**{name: None})

    def fail(message: str) -> NoReturn:
        if "training_script" in message:
            message = f"No script: lightning-dist launch {USAGE}"
        raise ValueError(message)

    parser.allow_abbrev = False  # --dry would be known here, and then reach the launcher
    parser.error = fail  # type: ignore[method-assign]
    parser.add_argument(DRY, action="store_true")
    given = parser.parse_args(list(words))
    if not (given.module or given.no_python or Path(given.training_script).is_file()):
        raise ValueError(f"There is no script {given.training_script}")
    return given


def _nodes(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        fewest, most = int(first), int(last or first)
    except ValueError:
        fewest, most = 0, 0
    if not 1 <= fewest <= most:
        raise ValueError(f"--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, it is {text}")
    return fewest, most


def _require_ranks(text: str) -> None:
    if not (text.isalpha() or (text.isdecimal() and int(text) > 0)):
        raise ValueError(
            f"--nproc-per-node must be a number above 0, or auto, cpu or gpu, it is {text}"
        )


def _require_recovery(ranks: str, nodes: tuple[int, int], environ: Mapping[str, str]) -> None:
    """Refuse variables of recovery here, and not on every node."""
    from lightning_dist.elastic.recovery.coordinator import RecoverySettings

    most = int(ranks) if ranks.isdecimal() else _ANY
    RecoverySettings.from_env(nodes=nodes, ranks=most, environ=environ)


def _backend(given: Any, fewest: int, most: int) -> str:
    """``"standalone"``, or the rendezvous backend that torchrun will use."""
    static = given.rdzv_backend == "static" or (
        given.rdzv_backend is None
        and not given.rdzv_endpoint
        and (given.master_port is not None or given.master_addr != "127.0.0.1")
    )
    if given.standalone:
        if most > 1:
            raise ValueError(f"--standalone is for one node, and --nnodes is {given.nnodes}")
        return "standalone"
    if static:
        if fewest < most:
            raise ValueError(
                f"A static rendezvous (--master-port) cannot have --nnodes={given.nnodes}: "
                "use --rdzv-endpoint=HOST:PORT, the same on every node"
            )
        return "static"
    if given.rdzv_endpoint:
        return str(given.rdzv_backend or "c10d")
    if most > 1:
        raise ValueError(
            f"--nnodes={given.nnodes} needs --rdzv-endpoint=HOST:PORT, the same on every node"
        )
    return str(given.rdzv_backend or "standalone")


def _settings(text: str) -> dict[str, str]:
    settings = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        key, _, value = pair.partition("=")
        if not (key and value):
            raise ValueError(f"--rdzv-conf must be KEY=VALUE,KEY=VALUE,..., it is {text}")
        settings[key.strip()] = value.strip()
    return settings


def _cut(words: Sequence[str], given: Any) -> tuple[list[str], list[str]]:
    """The options before the script without ours, and the script with what follows it."""
    script = len(words) - 1 - len(given.training_script_args)
    if words[script] != given.training_script:  # argparse drops a -- after it
        script -= 1
    options = [word for word in words[:script] if word not in (DRY, "--")]
    after = words[script + 1 :] if words[script] == "--" else words[script:]
    return options, list(after)
