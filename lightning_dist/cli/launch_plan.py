"""The commands that ``lightning-dist launch`` runs: torchrun or ``accelerate launch``, set up."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from lightning_dist.cli import config_accelerate
from lightning_dist.cli.config import require_possible
from lightning_dist.elastic.launcher import PRELOAD
from lightning_dist.settings import CONFIG, resolve
from lightning_dist.settings.resolve import sidecar_of

USAGE = "[OPTIONS] script.py [ARGUMENTS]"
FLAGS = ("--dry-run", "--torchrun", "--no-preload")
"""Ours; they do not reach the launcher."""
SHARING = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
RESTARTS = 3
LAST_CALL = {"last_call_timeout": "5"}
KEEP_ALIVE = {"keep_alive_interval": "2", "keep_alive_max_attempt": "5"}
"""A node that died is dropped after their product, in seconds."""
JOIN_TIMEOUT = "600"
"""Seconds for which torchrun waits for the fewest nodes, if nobody says otherwise."""
_ANY = 1 << 20
"""Ranks of a node for which torchrun counts the devices."""
ON_CPU = "ACCELERATE_USE_CPU"
_NO_HOOK = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds of training without DDP, whose gradients we never see; but those of FSDP2."""


@dataclass
class LaunchPlan:
    """Arguments of the Python that runs the launcher, additions to its variables, and why."""

    arguments: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_dry: bool = False


def plan_torchrun(words: Sequence[str], environ: Mapping[str, str], *, why: str) -> LaunchPlan:
    """The torchrun for the command line ``words``.

    Args:
        why: reason for this launcher, in the first note.

    Raises:
        ValueError: there is no script, or the options cannot work.
    """
    given = parse_torchrun(words, environ)
    _require_all(
        (require_script, given),
        (_require_ranks, given.nproc_per_node),
        (_require_restarts, given.max_restarts),
        (_nodes, given.nnodes),
    )
    fewest, most = _nodes(given.nnodes)
    _require_recovery(given.nproc_per_node, (fewest, most), environ)
    made = LaunchPlan([], notes=[f"torchrun ({why})"], is_dry=given.dry_run)
    added: list[str] = []

    def add(option: str, why: str) -> None:
        added.append(option)
        made.notes.append(f"{option} ({why})")

    if given.max_restarts is None:
        add(f"--max-restarts={RESTARTS}", "survives this many failures")
    backend = _backend(given, fewest, most)
    if backend == "standalone" and not given.standalone:
        add("--standalone", "one node: rendezvous on a free port")
    elif backend == "c10d" and given.rdzv_backend is None:
        add("--rdzv-backend=c10d", "the rendezvous that lets nodes join and leave")
    if backend == "c10d" and most > 1:
        chosen = _settings(given.rdzv_conf or "")
        ours = {**(LAST_CALL if fewest < most else {}), **KEEP_ALIVE}
        settings = ",".join(f"{key}={value}" for key, value in {**ours, **chosen}.items())
        if ours.keys() - chosen.keys():
            add(f"--rdzv-conf={settings}", "limits the wait for nodes that may not return")
        if fewest > 1:
            patience = chosen.get("join_timeout", JOIN_TIMEOUT)
            made.notes.append(
                f"RendezvousTimeoutError means that fewer than {fewest} nodes joined within "
                f"{patience} s (join_timeout in --rdzv-conf)"
            )
    if SHARING not in environ and backend != "static":
        made.environment[SHARING] = "1"
        made.notes.append(f"{SHARING}=1 (a store for every start, and nodes can join)")
    elif fewest < most and environ.get(SHARING) != "1":
        made.notes.append(f"{SHARING} is {environ.get(SHARING)!r}: nodes will not be able to join")
    _start_as_usual(made, given)
    options, after = cut(words, given)
    # Behind -- torchrun takes nothing for an option of its own, such as --n for --nnodes.
    made.arguments += ["-m", "lightning_dist.elastic.launcher", *options, *added, "--", *after]
    return made


def _start_as_usual(made: LaunchPlan, given: Any) -> None:
    """Let no worker be a fork, if the user says so."""
    if given.no_preload:
        made.environment[PRELOAD] = "0"
        made.notes.append(f"{PRELOAD}=0 (each start of a worker imports its modules)")


def parse_torchrun(words: Sequence[str], environ: Mapping[str, str]) -> Any:
    """Arguments of torchrun in the words; raises ValueError for what it does not take."""
    from lightning_dist.elastic.private import torchrun_parser

    parser: argparse.ArgumentParser = torchrun_parser()
    for name in ("max_restarts", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "master_port"):
        if f"PET_{name.upper()}" not in environ:
            parser.set_defaults(**{name: None})
    return parsed(parser, words)


def _nodes(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    try:
        fewest, most = int(first), int(last or first)
    except ValueError:
        fewest, most = 0, 0
    if not 1 <= fewest <= most:
        raise ValueError(f"--nnodes must be N or MIN:MAX with 1 <= MIN <= MAX, got {text}")
    return fewest, most


def _require_ranks(text: str) -> None:
    devices = ("auto", "cpu", "gpu", "xpu", "npu")
    if not (text in devices or (text.isdecimal() and int(text) > 0)):
        raise ValueError(
            "--nproc-per-node must be a number above 0, or auto, cpu, gpu, xpu or npu, got " + text
        )


def _require_restarts(count: int | None) -> None:
    if count is not None and count < 0:
        raise ValueError(f"--max-restarts must be 0 or more, got {count}")


def _require_all(*checks: tuple[Callable[..., object], object]) -> None:
    """Raise one ValueError with the messages of all checks that fail."""
    problems: list[str] = []
    for check, argument in checks:
        try:
            check(argument)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("; ".join(problems))


def _require_recovery(ranks: str, nodes: tuple[int, int], environ: Mapping[str, str]) -> None:
    """Refuse variables of recovery here, and not on every node."""
    from lightning_dist.elastic.recovery.coordinator import CoordinatorSettings

    most = int(ranks) if ranks.isdecimal() else _ANY
    CoordinatorSettings.from_env(nodes=nodes, ranks=most, environ=environ)


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
                f"A static rendezvous (--master-port) cannot have --nnodes={given.nnodes}: use "
                "--rdzv-endpoint=HOST:PORT, the same on every node"
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
            raise ValueError(f"--rdzv-conf must be KEY=VALUE,KEY=VALUE,..., got {text}")
        settings[key.strip()] = value.strip()
    return settings


def parse_accelerate(words: Sequence[str]) -> Any:
    """Arguments of ``accelerate launch`` in the words.

    Raises:
        ValueError: it does not take them.
        ImportError: it is not installed.
    """
    config_accelerate.require_accelerate()
    from lightning_dist.frameworks.accelerate.private import launch_parser

    return parsed(launch_parser(), words)


def plan_accelerate(
    words: Sequence[str], environ: Mapping[str, str], *, given: Any, file: Path, why: str
) -> LaunchPlan:
    """The ``accelerate launch`` for these words, with settings that reach the training.

    Args:
        given: of :func:`parse_accelerate`.
        file: Accelerate's configuration.
        why: reason for this launcher, in the first note.

    Raises:
        ValueError: no script, a file that is wrong, settings that cannot take effect, or
            processes that would not find each other.
    """
    require_script(given)
    made = LaunchPlan([], notes=[f"accelerate launch ({why})"], is_dry=given.dry_run)
    _hand_on(made, environ, file)
    resolved = resolve(environ={**environ, **made.environment})
    if resolved.outside and CONFIG not in made.environment:
        made.notes.append(f"in force: {resolved.outside_text() or 'default settings'}")
    config = config_accelerate.load(file)
    by_fsdp2 = _is_fsdp2(given, config)
    with resolved.named_in_errors():
        require_possible(resolved.options, shards=by_fsdp2)
    _start_as_usual(made, given)
    options, after = cut(words, given)
    if given.config_file is None:
        options = [f"--config_file={file}", *options]
    if "AMAZON" not in config_accelerate.text_of(config.compute_environment):
        kind = _kind(given, config)
        if not by_fsdp2 and resolved.outside and kind in _NO_HOOK:
            origins = ", ".join(dict.fromkeys(resolved.outside.values()))
            raise ValueError(
                f"The training of {file} is {kind}, which has no DDP whose gradients could be "
                "compressed; set accelerate.distributed_type=MULTI_GPU, or for FSDP fsdp_version: "
                f"2, or remove the settings of {origins}"
            )
        options = _as_several(made, options, environ, given=given, config=config, file=file)
    made.arguments += ["-m", "lightning_dist.frameworks.accelerate.launch", *options, *after]
    return made


def _hand_on(made: LaunchPlan, environ: Mapping[str, str], file: Path) -> None:
    """The variable that names the file in use to the training."""
    sidecar = sidecar_of(file).absolute()
    if not sidecar.is_file():
        made.notes.append(f"no {sidecar.name} next to {file}")
    elif named := environ.get(CONFIG, "").strip():
        if Path(named).expanduser().absolute() != sidecar:
            made.notes.append(f"{CONFIG} is {named} already: {sidecar} is not passed on")
    else:
        made.environment[CONFIG] = str(sidecar)
        reader = "a script that uses lightning_dist, or python -m lightning_dist.run"
        made.notes.append(f"{CONFIG}={sidecar} (read by {reader})")


def _as_several(
    made: LaunchPlan,
    options: list[str],
    environ: Mapping[str, str],
    *,
    given: Any,
    config: Any,
    file: Path,
) -> list[str]:
    """Options with which the ranks that were asked for are one training."""
    kind = _kind(given, config)
    count = config.num_processes if given.num_processes is None else given.num_processes
    machines = config.num_machines if given.num_machines is None else given.num_machines
    by_mpi = given.mpirun_hostfile or (config.mpirun_config or {}).get("mpirun_hostfile")
    if kind in _NO_HOOK or by_mpi or (count or 1) < 2:
        return options
    asked = environ.get(ON_CPU, "").lower() in ("1", "true", "yes", "on", "y", "t")
    if given.cpu or config.use_cpu or kind == "MULTI_CPU" or asked:
        # accelerate launch starts one process for CPUs unless under MPI, or several that each
        # train alone: its launcher for several is that of GPUs, and a variable says CPU.
        options = [word for word in options if word != "--cpu"]
        if not given.multi_gpu:
            options.append("--multi_gpu")
            made.notes.append(f"--multi_gpu (its launcher of several processes, {count} here)")
        if not asked:
            made.environment[ON_CPU] = "true"
            made.notes.append(f"{ON_CPU}=true (they run on the CPU, as one training)")
    elif kind == "NO":
        raise ValueError(
            f"num_processes is {count} and distributed_type is NO: accelerate would start one "
            f"process; lightning-dist config --config_file {file} --set "
            f"accelerate.num_processes={count}"
        )
    if machines <= 1 and given.main_process_port is None and config.main_process_port is None:
        options.append("--main_process_port=0")
        made.notes.append("--main_process_port=0 (one node: rendezvous on a free port)")
    return options


def _is_fsdp2(given: Any, config: Any) -> bool:
    version = given.fsdp_version if given.use_fsdp else config_accelerate.fsdp_version(config)
    return _kind(given, config) == "FSDP" and str(version) == "2"


def _kind(given: Any, config: Any) -> str:
    for is_set, kind in (
        (given.multi_gpu, "MULTI_GPU"),
        (given.use_fsdp, "FSDP"),
        (given.use_deepspeed, "DEEPSPEED"),
        (given.use_megatron_lm, "MEGATRON_LM"),
        (given.tpu, "XLA"),
        (given.cpu, "NO"),
    ):
        if is_set:
            return kind
    return config_accelerate.text_of(config.distributed_type)


def parsed(parser: argparse.ArgumentParser, words: Sequence[str]) -> Any:
    """Arguments in the words, by the parser of a launcher and our flags.

    Raises:
        ValueError: what it would have ended the program for.
    """

    def fail(message: str) -> NoReturn:
        if "training_script" in message:
            message = f"No script: lightning-dist launch {USAGE}"
        raise ValueError(message)

    parser.allow_abbrev = False  # --dry would be known here, and then reach the launcher
    parser.error = fail  # type: ignore[method-assign]
    for flag in FLAGS:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args(list(words))


def require_script(given: Any) -> None:
    """Refuse a script that is not there."""
    if is_missing(given):
        raise ValueError(
            f"There is no script {given.training_script}; give its path from the current folder, "
            "or -m MODULE"
        )


def is_missing(given: Any) -> bool:
    """True if a script is named that is not there."""
    return not (given.module or given.no_python or Path(given.training_script).is_file())


def cut(words: Sequence[str], given: Any) -> tuple[list[str], list[str]]:
    """The options before the script without ours, and the script with what follows it."""
    script = len(words) - 1 - len(given.training_script_args)
    if words[script] != given.training_script:  # argparse drops a -- after it
        script -= 1
    options = [word for word in words[:script] if word not in (*FLAGS, "--")]
    after = words[script + 1 :] if words[script] == "--" else words[script:]
    return options, list(after)
