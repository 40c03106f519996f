"""``lightning-dist doctor``: planted mistakes are found, and their fixes are fixes."""

from __future__ import annotations

import json
import os
import resource
import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from processes import run
from typer.testing import CliRunner, Result

import lightning_dist
from benchmarks.testbed import Testbed, TestbedUnavailable
from lightning_dist.cli import app
from lightning_dist.cli.doctor import show
from lightning_dist.cli.doctor_clocks import clocks
from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_interfaces import Interface
from lightning_dist.cli.doctor_launcher import launcher
from lightning_dist.cli.doctor_limits import limits
from lightning_dist.cli.doctor_machine import machine, processors
from lightning_dist.cli.doctor_network import network
from lightning_dist.cli.doctor_run import two_ranks
from lightning_dist.cli.doctor_versions import devices, version_of

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"), 65536, None)
FAST = Interface("eth0", True, ("10.0.0.5",), 1500, 10_000)
SLOW = Interface("eth1", True, ("10.1.0.5",), 1500, 100)
DOWN = Interface("ib0", False, ("10.2.0.5",), 2044, None)
NO_ADDRESS = Interface("docker0", True, (), 1500, None)
HERE = [LOOPBACK, FAST, DOWN, NO_ADDRESS]
RANK = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = {**RANK, "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = {}
    for each in findings:
        assert each.name not in found
        assert bool(each.fix) == (each.state in ("warning", "error")), each
        found[each.name] = each
    return found


def doctor(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


def in_network(environ: Mapping[str, str], hostname: str = "localhost") -> dict[str, Finding]:
    return by_name(network(environ, found=HERE, hostname=hostname))


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ELASTIC, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def test_json_has_every_finding_and_the_exit_code_follows_from_it() -> None:
    result = doctor("--no-run", "--json")
    findings = json.loads(result.stdout)["findings"]
    states = {each["state"] for each in findings}
    assert states <= {"ok", "warning", "error", "n/a"}
    assert result.exit_code == (1 if states & {"warning", "error"} else 0)
    found = by_name(Finding(**each) for each in findings)
    assert found["lightning_dist"].what == lightning_dist.__version__
    assert {"torch", "gloo", "interfaces", "clock source", "open files", "results"} <= found.keys()
    assert found["2 ranks here"] == Finding("2 ranks here", "n/a", "left out by --no-run")


def test_a_fix_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = doctor("--no-run")
    assert result.exit_code == 1
    assert "error    launcher variables  RANK is set, WORLD_SIZE, MASTER_ADDR" in result.stdout
    assert "  unset RANK" in result.stdout.splitlines()


@pytest.mark.parametrize("as_json", [True, False])
def test_nothing_wrong_is_exit_code_0(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fine = [Finding("python", "ok", "3.11"), Finding("cuda", "n/a", "no GPU")]
    assert show(fine, as_json=as_json) == 0
    assert ("nothing is wrong" in capsys.readouterr().out) is not as_json
    assert show([*fine, Finding("x", "warning", "y", "z")], as_json=as_json) == 1
    assert show([*fine, Finding("x", "error", "y", "z")], as_json=as_json) == 1


def test_bad_input(tmp_path: Path) -> None:
    result = doctor("--folder", tmp_path / "no")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        f"lightning-dist: --folder must be a folder, and {tmp_path}/no is none\n"
    )


def test_two_ranks_meet() -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    found = two_ranks(environ)
    assert (found.state, found.what.split(";")[0]) == ("ok", "gloo works")


def test_two_ranks_that_cannot_meet() -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "no-such-link", "OMP_NUM_THREADS": "1"}
    found = two_ranks(environ)
    assert found.state == "error"
    assert "no-such-link" in found.what


def test_two_ranks_that_do_not_come_are_given_up_and_killed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, f'pid{{os.getpid()}}').touch()\n"
        "signal.pause()\n"
    )
    found = two_ranks({**os.environ, "PYTHONPATH": str(tmp_path)}, bound=2.0)
    assert (found.state, found.what) == ("error", "they did not find each other within 2 s")
    for path in tmp_path.glob("pid*"):
        assert not Path("/proc", path.name.removeprefix("pid")).exists()


@pytest.mark.parametrize(
    ("environ", "state", "told", "fix"),
    [
        ({}, "ok", "none are set", ""),
        (RANK, "ok", "rank 0 of 4", ""),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "ok", "only where to meet is set", ""),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "error",
            "RANK, WORLD_SIZE are set, MASTER_ADDR, MASTER_PORT are not",
            "unset RANK WORLD_SIZE",
        ),
        ({**RANK, "MASTER_PORT": ""}, "error", "MASTER_PORT is not", "unset RANK WORLD_SIZE"),
        ({**RANK, "RANK": "4"}, "error", "RANK must be below WORLD_SIZE=4, it is 4", "unset"),
        ({**RANK, "RANK": "x"}, "error", "RANK must be an integer, it is 'x'", "unset"),
        ({**RANK, "MASTER_PORT": "70000"}, "error", "from 1 to 65535, it is 70000", "unset"),
        (
            {**ELASTIC, "LOCAL_RANK": "2"},
            "error",
            "LOCAL_RANK must be below LOCAL_WORLD_SIZE=2, it is 2",
            "unset",
        ),
    ],
)
def test_launcher_variables(environ: dict[str, str], state: str, told: str, fix: str) -> None:
    found = by_name(launcher(environ))["launcher variables"]
    assert found.state == state
    assert told in found.what
    assert found.fix.startswith(fix)


def test_what_restarts_need() -> None:
    assert by_name(launcher(RANK))["restarts"].state == "n/a"
    assert by_name(launcher({"RANK": "x"}))["restarts"].state == "n/a"
    allowed = {**ELASTIC, "TORCHELASTIC_MAX_RESTARTS": "3"}
    assert by_name(launcher(allowed))["restarts"].what == "after a failure, 3 times"
    found = by_name(launcher({**ELASTIC, "TORCHELASTIC_USE_AGENT_STORE": "True"}))["restarts"]
    assert found.state == "warning"
    assert "a failed rank ends the job" in found.what
    assert "--max-restarts=3" in found.fix
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in found.fix


def test_settings_left_over_from_debugging() -> None:
    found = by_name(launcher({"TORCH_DISTRIBUTED_DEBUG": "detail"}))["slow setting"]
    assert (found.state, found.fix) == ("warning", "unset TORCH_DISTRIBUTED_DEBUG")
    assert "slow setting" not in by_name(launcher({"TORCH_DISTRIBUTED_DEBUG": "INFO"}))


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("GLOO_SOCKET_IFNAME", "eth7", "there is no interface 'eth7'"),
        ("GLOO_SOCKET_IFNAME", "eth0,eth7", "there is no interface 'eth7'"),
        ("GLOO_SOCKET_IFNAME", "^lo", "gloo takes the name of an interface, and no ^"),
        ("GLOO_SOCKET_IFNAME", "=eth0", "and no = as NCCL does"),
        ("GLOO_SOCKET_IFNAME", "ib0", "ib0 down"),
        ("GLOO_SOCKET_IFNAME", "docker0", "no address"),
        ("NCCL_SOCKET_IFNAME", "eth7", "'eth7' leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "=eth", "'=eth' leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "^lo,eth", "'^lo,eth' leaves no interface"),
        ("NCCL_SOCKET_IFNAME", "ib", "'ib' leaves no interface"),
    ],
)
def test_interfaces_that_do_not_work(name: str, value: str, told: str) -> None:
    found = in_network({name: value})[name]
    assert (found.state, found.fix) == ("error", f"export {name}=eth0")
    assert told in found.what


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GLOO_SOCKET_IFNAME", "eth0"),
        ("NCCL_SOCKET_IFNAME", "eth"),
        ("NCCL_SOCKET_IFNAME", "=eth0"),
        ("NCCL_SOCKET_IFNAME", "^lo,docker"),
        ("NCCL_SOCKET_IFNAME", "^=lo"),
    ],
)
def test_interfaces_that_work(name: str, value: str) -> None:
    assert in_network({name: value})[name].state == "ok"


def test_a_hostname_that_is_loopback() -> None:
    assert in_network({})["gloo address"] == Finding(
        "gloo address",
        "warning",
        "127.0.0.1 (the hostname localhost resolves to it): ranks of several hosts will not find "
        "each other",
        "export GLOO_SOCKET_IFNAME=eth0",
    )
    assert in_network(ELASTIC)["gloo address"].state == "error"
    unknown = in_network({}, "no-such-host.invalid")["gloo address"]
    assert "resolves to no address of this host" in unknown.what
    assert in_network({"GLOO_SOCKET_IFNAME": "eth0"})["gloo address"].state == "ok"
    alone = by_name(network({}, found=[LOOPBACK], hostname="localhost"))
    assert alone["gloo address"].state == "ok"
    assert alone["interfaces"].state == "warning"


def test_a_slow_link() -> None:
    found = by_name(network({}, found=[LOOPBACK, SLOW], hostname="localhost"))["link speed"]
    assert (found.state, found.what) == ("warning", "eth1 runs at 100 Mbit/s")
    assert "link speed" not in in_network({})


def test_where_ranks_meet() -> None:
    assert in_network({})["MASTER_ADDR"].state == "n/a"
    assert in_network(RANK)["MASTER_ADDR"] == Finding(
        "MASTER_ADDR", "ok", "127.0.0.1 (127.0.0.1) through lo"
    )
    found = in_network(ELASTIC)["MASTER_ADDR"]
    assert (found.state, found.what) == (
        "error",
        "127.0.0.1 is 127.0.0.1, which is another host on every host",
    )
    found = in_network({**RANK, "MASTER_ADDR": "no-such-host.invalid"})["MASTER_ADDR"]
    assert found.state == "error"
    assert found.what.startswith("no-such-host.invalid cannot be resolved")


IN_NAMESPACE = f"""
import json, sys, types
package = types.ModuleType("lightning_dist")  # whose own __init__ imports Lightning
package.__path__ = [{str(Path(lightning_dist.__file__).parent)!r}]
sys.modules["lightning_dist"] = package
from lightning_dist.cli.doctor_network import network
print(json.dumps([[vars(each) for each in network(one)] for one in json.loads(sys.argv[1])]))
"""


@pytest.mark.root
def test_real_hosts() -> None:
    other = {**RANK, "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.77.0.2"}
    ways = [other, {**other, "GLOO_SOCKET_IFNAME": "eth0"}, {**other, "MASTER_ADDR": "10.99.0.1"}]
    try:
        with Testbed(hosts=2, link_mbit=None) as testbed:
            inside = ["ip", "netns", "exec", testbed.namespace(0), sys.executable]
            done = run([*inside, "-c", IN_NAMESPACE, json.dumps(ways)], limit=60)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    printed = json.loads(done.require_success().output)
    unset, chosen, lost = (by_name(Finding(**each) for each in findings) for findings in printed)
    assert unset["interfaces"].what.startswith("eth0 up, 10.77.0.1, MTU 1500, ")
    assert unset["MASTER_ADDR"].what == "10.77.0.2 (10.77.0.2) through eth0"
    assert unset["gloo address"].state == "error"  # this machine's name is no address of the host
    assert unset["gloo address"].fix == "export GLOO_SOCKET_IFNAME=eth0"
    assert chosen["gloo address"].what == "10.77.0.1 (GLOO_SOCKET_IFNAME=eth0)"
    assert lost["MASTER_ADDR"].state == "error"
    assert lost["MASTER_ADDR"].what == "there is no route to 10.99.0.1 (10.99.0.1)"


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
    stub = IN_NAMESPACE.partition("from lightning_dist")[0] + look
    program = f"{shlex.quote(sys.executable)} -c {shlex.quote(stub)}"
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
