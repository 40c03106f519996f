"""What a launcher, or somebody by hand, has set for this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.elastic.launch import Launch

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "every kernel waits for the one before it"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "every collective is preceded by a check on all ranks"),
    "NCCL_P2P_DISABLE": ("1", "GPUs of one host exchange through its memory"),
    "NCCL_IB_DISABLE": ("1", "InfiniBand is not used"),
}
"""Values that are for debugging and are easily forgotten."""


def launcher(environ: Mapping[str, str]) -> Iterator[Finding]:
    """The variables from which ranks find each other, and what restarts need."""
    yield from _place(environ)
    yield _restarts(environ)
    for name, (value, why) in SLOW.items():
        if environ.get(name, "").upper() == value:
            what = f"{name}={environ[name]}: {why}"
            yield Finding("slow setting", "warning", what, f"unset {name}")


def several_hosts(environ: Mapping[str, str]) -> bool:
    """Whether the launcher says that ranks are on other hosts too."""
    try:
        launch = Launch.from_env(environ)
    except ValueError:
        return False
    here = launch.local_world_size or launch.world_size
    return launch.nodes > 1 or launch.world_size > here


def _place(environ: Mapping[str, str]) -> Iterator[Finding]:
    name = "launcher variables"
    there = [each for each in NEEDED if environ.get(each)]
    missing = [each for each in NEEDED if each not in there]
    if not there:
        yield Finding(name, "ok", "none are set; a launcher sets them")
        return
    if missing == ["RANK", "WORLD_SIZE"]:
        what = "only where to meet is set; Lightning starts the ranks of this host itself"
        yield Finding(name, "ok", what)
        return
    if missing:
        what = f"{_list(there)} set, {_list(missing)} not: ranks wait for each other or fail"
        yield Finding(name, "error", what, f"unset {' '.join(there)}")
        return
    problem = _problem(environ)
    if problem is None:
        yield Finding(name, "ok", f"rank {environ['RANK']} of {environ['WORLD_SIZE']}")
    else:
        yield Finding(name, "error", problem, f"unset {' '.join(NEEDED)}")


def _problem(environ: Mapping[str, str]) -> str | None:
    try:
        launch = Launch.from_env(environ)
    except ValueError as error:
        return str(error)
    if not 0 <= launch.rank < launch.world_size:
        return f"RANK must be below WORLD_SIZE={launch.world_size}, it is {launch.rank}"
    number = launch.local_world_size
    if number is not None and not 0 <= launch.local_rank < number:
        return f"LOCAL_RANK must be below LOCAL_WORLD_SIZE={number}, it is {launch.local_rank}"
    if not 0 < launch.master_port < 1 << 16:
        return f"MASTER_PORT must be from 1 to 65535, it is {launch.master_port}"
    return None


def _restarts(environ: Mapping[str, str]) -> Finding:
    try:
        launch = Launch.from_env(environ)
    except ValueError:
        return Finding("restarts", "n/a", "the launcher variables are wrong")
    if not launch.is_elastic:
        return Finding("restarts", "n/a", "torchrun did not start this process")
    missing = launch.missing_settings()
    if not missing:
        return Finding("restarts", "ok", f"after a failure, {launch.max_restarts} times")
    said = [each.partition(": ") for each in missing]
    what, fix = ("; ".join(part[i] for part in said) for i in (0, 2))
    return Finding("restarts", "warning", what, fix)


def _list(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
