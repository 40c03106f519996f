"""``lightning-dist launch``: torchrun or ``accelerate launch``, set so that jobs run well."""

from __future__ import annotations

import ast
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import typer

from lightning_dist.cli.command import reported
from lightning_dist.cli.launch_plan import (
    LaunchPlan,
    is_missing,
    parse_accelerate,
    parse_torchrun,
    plan_accelerate,
    plan_torchrun,
)
from lightning_dist.settings.resolve import accelerate_default, sidecar_of

PASS_ON = {
    "ignore_unknown_options": True,
    "allow_extra_args": True,
    "allow_interspersed_args": False,  # --help after the script is for the script
}

_ACCELERATE = ("accelerate", "lightning_dist.accelerate", "lightning_dist.transformers")
_LIGHTNING = ("lightning", "pytorch_lightning", "lightning_fabric")
_RUN = "lightning_dist.run"


@reported
def launch(context: typer.Context) -> None:
    """Run a script with torchrun or accelerate launch.

    torchrun is set up for restarts and for nodes that join and leave. accelerate launch is used
    with `--config_file`; also if `lightning-dist config` has written its file, accelerate launch
    has all the options given, and the script imports Accelerate and not Lightning. It passes the
    settings of lightning_dist on, and starts several CPU processes as one training. All options of
    both are accepted, and override the defaults set here. The selected launcher and its settings
    are printed to stderr.

    \b
      --nnodes MIN:MAX     number of nodes; default 1
      --nproc-per-node N   ranks on this node, or auto, cpu, gpu; default 1
      --max-restarts N     failures, and workers replaced, that the job survives;
                           planned stops do not count; default 3
      --rdzv-endpoint H:P  rendezvous address; required for several nodes
      --config_file FILE   run accelerate launch with this file
      --torchrun           run torchrun even if accelerate is configured
      --no-preload         import modules anew at every start of a worker
      --dry-run            print the command, do not run it

    Restarted workers are forks of one process per node, which has imported the packages that the
    first ones have imported; their scripts are read anew.

    With recovery within the process workers are replaced one by one, and nodes join and leave
    without a restart of the others. LIGHTNING_DIST_MIN_WORKERS, LIGHTNING_DIST_BEAT_TIMEOUT and
    LIGHTNING_DIST_REPORT_TIMEOUT set its limits.

    \b
    One node, restarted when a rank fails:
      lightning-dist launch --nproc-per-node 8 train.py --lr 0.1
    One to four nodes, the same command on each of them:
      lightning-dist launch --nnodes 1:4 --rdzv-endpoint node0:29400 \\
        --nproc-per-node 8 train.py
    A module instead of a script:
      lightning-dist launch --nproc-per-node 2 -m package.train
    With Accelerate's configuration; and without any change of the script:
      lightning-dist launch --config_file two.yaml train.py
      lightning-dist launch --config_file two.yaml -m lightning_dist.run train.py
    """
    made = _choose(context.args, os.environ)
    for note in made.notes:
        typer.echo(f"lightning-dist: {note}", err=True)
    if made.is_dry:
        words = [f"{key}={shlex.quote(value)}" for key, value in made.environment.items()]
        typer.echo(" ".join([*words, shlex.join([sys.executable, *made.arguments])]))
        return
    sys.stderr.flush()
    # In place of this process: signals reach torchrun, and its exit code is ours.
    os.execve(sys.executable, [sys.executable, *made.arguments], {**os.environ, **made.environment})


def _choose(words: Sequence[str], environ: Mapping[str, str]) -> LaunchPlan:
    """The plan of the launcher that these words are for; its first note says which and why.

    Raises:
        ValueError: the words are for neither, or for both and the script does not say for which.
    """
    default = accelerate_default(environ)
    is_configured = default.is_file() and sidecar_of(default).is_file()
    names_file = any(word.startswith(("--config_file", "--config-file")) for word in words)
    unconfigured = "no --config_file and no file of lightning-dist config"
    torchrun = partial(plan_torchrun, words, environ)
    plain: Any = None  # what torchrun makes of the words, to which --config_file is the script's
    with suppress(ValueError):
        plain = parse_torchrun(words, environ)
    if plain is not None and plain.torchrun:
        return torchrun(why="--torchrun")
    if not is_configured and not names_file:
        return torchrun(why=unconfigured)
    try:
        given = parse_accelerate(words)
    except (ValueError, ImportError) as problem:
        if names_file and plain is None:
            raise
        not_accelerate = f"not accelerate launch with {default}: {problem}"
        return torchrun(why=not_accelerate if is_configured else unconfigured)
    if given.config_file is not None:
        if given.torchrun:
            raise ValueError(
                "--config_file selects accelerate launch and --torchrun torchrun; remove one of "
                "them"
            )
        file, why = Path(given.config_file), f"--config_file={given.config_file}"
        return plan_accelerate(words, environ, given=given, file=file, why=why)
    if not is_configured:
        return torchrun(why=unconfigured)
    if plain is not None and not is_missing(plain):
        framework, reason = needs(plain, Path.cwd())
        if framework == "lightning":
            return torchrun(why=f"{reason}; --config_file={default} for accelerate launch")
        if not framework:
            raise ValueError(
                f"{reason}, and {default} exists: select a launcher with --torchrun, or "
                f"--config_file={default}"
            )
    why = f"{default}; --torchrun for the other"
    return plan_accelerate(words, environ, given=given, file=default, why=why)


def needs(given: Any, folder: Path) -> tuple[Literal["accelerate", "lightning", ""], str]:
    """The framework whose launcher the script needs by its imports, and why; "": it is not clear.

    Args:
        given: what a launcher's parser makes of the command line.
        folder: in which modules of ``-m`` are looked for.
    """
    name = given.training_script
    if given.module and name == _RUN:
        return "accelerate", f"{_RUN} is for scripts of Accelerate's"
    place = folder.joinpath(*name.split("."))
    places = (place.with_name(f"{place.name}.py"), place / "__main__.py", Path(name))
    path = next((place for place in places if place.is_file()), None)
    if given.no_python or path is None:
        return "", f"{name} cannot be read"
    imports = set(_imports(path))
    accelerate, lightning = (_first(imports, packages) for packages in (_ACCELERATE, _LIGHTNING))
    if accelerate and lightning:
        return "", f"{name} imports {accelerate} and {lightning}"
    if lightning:
        return "lightning", f"{name} imports {lightning}"
    accelerate = accelerate or _first(imports, ("transformers",))  # whose Trainer is Accelerate's
    if accelerate:
        return "accelerate", f"{name} imports {accelerate}"
    return "", f"{name} imports neither accelerate nor lightning"


def _first(imports: set[str], packages: tuple[str, ...]) -> str:
    return next((p for p in packages if any(f"{f}.".startswith(f"{p}.") for f in imports)), "")


def _imports(path: Path) -> Iterator[str]:
    """Full names of what is imported in a file, which is read, not run."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
