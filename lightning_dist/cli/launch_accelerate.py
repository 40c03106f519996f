"""The ``accelerate launch`` that ``lightning-dist launch`` runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_dist.cli import config_accelerate as theirs
from lightning_dist.cli.config import require_possible
from lightning_dist.cli.launch_plan import LaunchPlan, cut, parsed, require_script
from lightning_dist.settings import CONFIG, resolve
from lightning_dist.settings.resolve import sidecar_of

ON_CPU = "ACCELERATE_USE_CPU"
_NO_HOOK = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA")
"""Kinds of training without DDP, whose gradients we never see; but those of FSDP2."""


def parse(words: Sequence[str]) -> Any:
    """Arguments of ``accelerate launch`` in the words.

    Raises:
        ValueError: it does not take them.
        ImportError: it is not installed.
    """
    theirs.require_accelerate()
    from lightning_dist.frameworks.accelerate.private import launch_parser

    return parsed(launch_parser(), words)


def plan(words: Sequence[str], environ: Mapping[str, str], *, given: Any, file: Path) -> LaunchPlan:
    """The ``accelerate launch`` for these words, with settings that reach the training.

    Args:
        given: of :func:`parse`.
        file: Accelerate's configuration.

    Raises:
        ValueError: no script, a file that is wrong, settings that cannot take effect, or
            processes that would not find each other.
    """
    require_script(given)
    made = LaunchPlan([], is_dry=given.dry_run)
    _hand_on(made, environ, file)
    resolved = resolve(environ={**environ, **made.environment})
    if resolved.outside and CONFIG not in made.environment:
        made.notes.append(f"in force: {resolved.outside_text() or 'default settings'}")
    config = theirs.load(file)
    by_fsdp2 = _is_fsdp2(given, config)
    with resolved.named_in_errors():
        require_possible(resolved.options, shards=by_fsdp2)
    options, after = cut(words, given)
    if given.config_file is None:
        options = [f"--config_file={file}", *options]
    if "AMAZON" not in theirs.text_of(config.compute_environment):
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
    version = given.fsdp_version if given.use_fsdp else theirs.fsdp_version(config)
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
    return theirs.text_of(config.distributed_type)
