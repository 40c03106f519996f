"""``lightning-dist doctor``: planted mistakes of a machine, and their fixes."""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from pathlib import Path

import pytest
from doctor_findings import by_name
from processes import run

from lightning_dist.cli.doctor_clocks import clocks
from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_limits import limits
from lightning_dist.cli.doctor_machine import machine, processors
from lightning_dist.cli.doctor_versions import devices, version_of


def test_clocks(tmp_path: Path) -> None:
    (tmp_path / "current_clocksource").write_text("hpet\n")
    (tmp_path / "available_clocksource").write_text("hpet tsc acpi_pm \n")
    found = by_name(clocks(tmp_path))
    assert found["clock source"].state == "warning"
    assert found["clock source"].fix == f"echo tsc > {tmp_path}/current_clocksource"
    assert found["time stamps"].what.endswith(" ns apart")
    (tmp_path / "current_clocksource").write_text("tsc\n")
    assert by_name(clocks(tmp_path))["clock source"].state == "ok"
    assert by_name(clocks(tmp_path / "no"))["clock source"].state == "n/a"


def test_the_fix_for_few_files_is_one() -> None:
    """In a shell of its own: lower the limit, look, do what is said, look again."""
    look = (
        "import json, resource\n"
        "from lightning_dist.cli.doctor_limits import _files\n"
        "print(json.dumps(vars(_files())))"
    )
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(look)}"
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if 0 <= hard < 4096:
        pytest.skip(f"no more than {hard} open files are allowed here")
    shell = f'ulimit -Sn 256; a=$({program}); eval "$({program} | {_FIX})"; echo $a; {program}'
    done = run(["bash", "-c", shell], limit=60).require_success()
    before, after = (Finding(**json.loads(line)) for line in done.output.splitlines())
    assert (before.state, before.what.split(":")[0]) == ("warning", "256")
    assert after.state == "ok"


_FIX = f"{shlex.quote(sys.executable)} -c 'import json; print(json.loads(input())[\"fix\"])'"


def test_memory(tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").touch()
    assert by_name(limits())["shared memory"].what.startswith("/dev/shm has ")
    assert by_name(limits(tmp_path / "no"))["shared memory"].state == "n/a"
    none = Path("/proc")  # of 0 bytes
    assert by_name(limits(none))["shared memory"].state == "warning"
    assert by_name(limits(infiniband=tmp_path / "no"))["locked memory"].state == "n/a"
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    try:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, locked[1]))
        found = by_name(limits(infiniband=tmp_path))["locked memory"]
    finally:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, locked)
    assert (found.state, found.fix) == ("error", "ulimit -l unlimited")


@pytest.mark.parametrize(
    ("environ", "state", "fix"),
    [
        ({"OMP_NUM_THREADS": "1"}, "ok", ""),
        ({"OMP_NUM_THREADS": "1,1"}, "ok", ""),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "999"}, "warning", "OMP_NUM_THREADS=1"),
        ({"LOCAL_WORLD_SIZE": "999"}, "warning", "OMP_NUM_THREADS=1"),
        ({"OMP_NUM_THREADS": "many"}, "error", "OMP_NUM_THREADS="),
        ({"OMP_NUM_THREADS": "0"}, "error", "OMP_NUM_THREADS="),
    ],
)
def test_threads(environ: dict[str, str], state: str, fix: str, tmp_path: Path) -> None:
    found = by_name(machine(environ, tmp_path))["processors"]
    assert found.state == state
    assert fix in found.fix


def test_a_container_has_fewer_processors(tmp_path: Path) -> None:
    quota = tmp_path / "cpu.max"
    everything = processors(quota)
    assert everything == len(os.sched_getaffinity(0))
    quota.write_text("max 100000\n")
    assert processors(quota) == everything
    quota.write_text("50000 100000\n")
    assert processors(quota) == 1


def test_a_compiler_and_a_folder(tmp_path: Path) -> None:
    bare = by_name(machine({"PATH": str(tmp_path)}, Path("/proc")))
    assert (bare["compiler"].state, bare["compiler"].fix) == ("warning", "apt-get install g++")
    assert bare["results"].state == "error"  # for root too
    assert "cannot be written to" in bare["results"].what
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    found = by_name(machine({"PATH": str(tmp_path)}, tmp_path))
    assert found["compiler"].what == str(compiler)
    assert found["results"].state in ("ok", "warning")


def test_versions_and_devices(tmp_path: Path) -> None:
    from packaging.requirements import Requirement

    old = version_of("torch", Requirement("torch>=99"))
    assert (old.state, old.fix) == ("error", "pip install 'torch>=99'")
    assert version_of("torch", Requirement("torch>=2")).state == "ok"
    assert version_of("no-such-package", None) == Finding("no-such-package", "n/a", "not installed")
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here, so nothing is wrong with a driver that is there")
    assert by_name(devices(tmp_path / "no"))["cuda"].state == "n/a"
    assert by_name(devices(tmp_path))["cuda"].state == "warning"
