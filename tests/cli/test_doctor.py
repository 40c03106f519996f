"""``lightning-dist doctor``: planted mistakes of a node, and their fixes; what it prints."""

import json
import os
import re
import resource
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest
import torch
import typer
from calls import program
from click.testing import Result
from processes import run

import lightning_dist
from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from lightning_dist.cli.doctor import (
    Finding,
    Interface,
    devices,
    launcher,
    limits,
    machine,
    network,
    processors,
    show,
    two_ranks,
)

command = import_module("lightning_dist.cli.doctor")  # the name is that of the command
RANK = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = {**RANK, "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"), 65536, None)
FAST = Interface("eth0", True, ("10.0.0.5",), 1500, 10_000)
DOWN = Interface("ib0", False, ("10.2.0.5",), 2044, None)
NO_ADDRESS = Interface("docker0", True, (), 1500, None)
HERE = [LOOPBACK, FAST, DOWN, NO_ADDRESS]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ELASTIC, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def doctor(*words: str | Path) -> Result:
    return program("doctor", *words)


def in_network(environ: Mapping[str, str], hostname: str = "localhost") -> dict[str, Finding]:
    return network(environ, found=HERE, hostname=hostname)


# What it prints.


def test_two_ranks_meet(monkeypatch: pytest.MonkeyPatch, quick_executable: str) -> None:
    """The whole command, for programs: all findings on stdout, and that it is busy on stderr."""
    monkeypatch.setattr(sys, "executable", quick_executable)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    result = doctor("--json")
    assert result.stderr == (
        "Checking this environment and starting two ranks; this takes several seconds.\n"
    )
    findings = json.loads(result.stdout)["findings"]
    found = {each.pop("name"): Finding(**each) for each in findings}
    assert len(found) == len(findings)
    for each in found.values():
        assert bool(each.fix) == (each.state in ("warning", "error")), each
    states = {each.state for each in found.values()}
    assert states <= {"ok", "warning", "error", "n/a"}
    assert result.exit_code == (1 if "error" in states else 0)
    assert found["lightning_dist"].what == lightning_dist.__version__
    assert {"torch", "gloo", "interfaces", "open files", "compiler"} <= found.keys()
    last = found["2 ranks here"]
    assert (last.state, last.what.split(";")[0]) == ("ok", "gloo works")


def test_a_line_comes_before_the_checks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = []
    monkeypatch.setattr(command, "versions", lambda: printed.append(capsys.readouterr().err) or {})
    with pytest.raises(typer.Exit):
        command.doctor(run=False)
    assert printed == ["Checking this environment; this takes several seconds.\n"]


def test_two_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, quick_executable: str) -> None:
    monkeypatch.setattr(sys, "executable", quick_executable)
    found = two_ranks({**os.environ, "GLOO_SOCKET_IFNAME": "no-such-link"})
    assert found.state == "error"
    assert "no-such-link" in found.what


def test_two_ranks_that_do_not_come_are_given_up_and_killed(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, pathlib\n"
        f"pathlib.Path({str(tmp_path)!r}, f'pid{{os.getpid()}}').touch()\n"
        "signal.pause()\n"
    )
    found = two_ranks({**os.environ, "PYTHONPATH": str(tmp_path)}, timeout=1.0)
    assert (found.state, found.what) == ("error", "no connection between them within 1 s")
    for path in tmp_path.glob("pid*"):
        assert not Path("/proc", path.name.removeprefix("pid")).exists()


def test_a_fix_is_a_line_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    result = doctor("--no-run")
    assert result.exit_code == 1
    assert re.search("error +launcher variables +RANK without WORLD_SIZE, MASTER", result.stdout)
    assert {"Suggested fixes:", "  unset RANK"} <= set(result.stdout.splitlines())
    (row,) = [line for line in result.stdout.splitlines() if "2 ranks here" in line]
    assert (row.split()[0], row.split(" here ")[1].strip()) == ("n/a", "skipped by --no-run")


@pytest.mark.parametrize("as_json", [True, False])
def test_only_errors_are_exit_code_1(as_json: bool, capsys: pytest.CaptureFixture[str]) -> None:
    fine = {"python": Finding("ok", "3.11"), "cuda": Finding("n/a", "no GPU")}
    assert show(fine, as_json=as_json) == 0
    assert ("No problems." in capsys.readouterr().out) is not as_json
    assert show({**fine, "x": Finding("warning", "y", "z")}, as_json=as_json) == 0
    assert show({**fine, "x": Finding("error", "y", "z")}, as_json=as_json) == 1


# This node.


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_devices(tmp_path: Path) -> None:
    assert devices(tmp_path / "no")["cuda"].state == "n/a"
    assert devices(tmp_path)["cuda"].state == "warning"


def test_the_fix_for_few_files_is_one() -> None:
    """Lower the limit, look, do what is said in a shell, look again there."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 4096:
        pytest.skip(f"no more than {hard} open files are allowed here")
    highest = max(map(int, os.listdir("/proc/self/fd")))  # of groups that other tests have left
    low = max(256, highest + 64)
    assert low < 4096
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
        found = limits()["open files"]
        assert (found.state, found.what.split(":")[0]) == ("warning", str(low))
        done = run(["bash", "-c", f"{found.fix} && ulimit -Sn"], limit=60).require_success()
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(done.output), hard))
        assert limits()["open files"] == Finding("ok", done.output.strip())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_memory(tmp_path: Path) -> None:
    assert limits()["shared memory"].what.startswith("/dev/shm has ")
    assert limits(tmp_path / "no")["shared memory"].state == "n/a"
    assert limits(Path("/proc"))["shared memory"].state == "warning"  # of 0 bytes


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
def test_threads(environ: dict[str, str], state: str, fix: str) -> None:
    found = machine(environ)["processors"]
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


def test_a_compiler(tmp_path: Path) -> None:
    bare = machine({"PATH": str(tmp_path)})["compiler"]
    assert (bare.state, bare.fix) == ("warning", "apt-get install g++")
    compiler = tmp_path / "clang++"
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    assert machine({"PATH": str(tmp_path)})["compiler"].what == str(compiler)


# The way to other ranks.


@pytest.mark.parametrize(
    ("environ", "state", "told", "fix"),
    [
        ({}, "ok", "not set", ""),
        (RANK, "ok", "rank 0 of 4", ""),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "ok", "only the rendezvous address is set", ""),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            "error",
            "RANK, WORLD_SIZE without MASTER_ADDR, MASTER_PORT",
            "unset RANK WORLD_SIZE",
        ),
        ({**RANK, "MASTER_PORT": ""}, "error", "without MASTER_PORT", "unset RANK WORLD_SIZE"),
        ({**RANK, "RANK": "4"}, "error", "RANK must be below WORLD_SIZE=4, got 4", "unset"),
        ({**RANK, "RANK": "x"}, "error", "RANK must be an integer, got 'x'", "unset"),
        ({**RANK, "MASTER_PORT": "70000"}, "error", "from 1 to 65535, got 70000", "unset"),
        (
            {**ELASTIC, "LOCAL_RANK": "2"},
            "error",
            "LOCAL_RANK must be below LOCAL_WORLD_SIZE=2, got 2",
            "unset",
        ),
    ],
)
def test_launcher_variables(environ: dict[str, str], state: str, told: str, fix: str) -> None:
    found = launcher(environ)
    assert found.state == state
    assert told in found.what
    assert found.fix.startswith(fix)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("eth7", "no interface 'eth7'"),
        ("eth0,eth7", "no interface 'eth7'"),
        ("^lo", "gloo takes an interface name without ^"),
        ("=eth0", "without =, unlike NCCL"),
        ("ib0", "ib0 down"),
        ("docker0", "no address"),
        ("eth0", None),
    ],
)
def test_the_interface_that_is_chosen(value: str, told: str | None) -> None:
    found = in_network({"GLOO_SOCKET_IFNAME": value})["gloo address"]
    if told is None:
        assert found.state == "ok"
    else:
        assert (found.state, found.fix) == ("error", "export GLOO_SOCKET_IFNAME=eth0")
        assert told in found.what


def test_a_hostname_that_is_loopback() -> None:
    assert in_network({})["gloo address"] == Finding(
        "warning",
        "127.0.0.1 (the hostname localhost resolves to it): ranks of other nodes cannot connect",
        "export GLOO_SOCKET_IFNAME=eth0",
    )
    assert in_network(ELASTIC)["gloo address"].state == "error"
    unknown = in_network({}, "no-such-node.invalid")["gloo address"]
    assert "resolves to no address of this node" in unknown.what
    alone = network({}, found=[LOOPBACK], hostname="localhost")
    assert alone["gloo address"].state == "ok"
    assert alone["interfaces"].state == "warning"


def test_where_ranks_meet() -> None:
    assert in_network({})["MASTER_ADDR"].state == "n/a"
    assert in_network(RANK)["MASTER_ADDR"] == Finding("ok", "127.0.0.1 (127.0.0.1) through lo")
    found = in_network(ELASTIC)["MASTER_ADDR"]
    assert (found.state, found.what) == (
        "error",
        "127.0.0.1 is 127.0.0.1, which is each node itself",
    )
    found = in_network({**RANK, "MASTER_ADDR": "no-such-node.invalid"})["MASTER_ADDR"]
    assert found.state == "error"
    assert found.what.startswith("no-such-node.invalid cannot be resolved")


IN_NAMESPACE = """
import json, sys
from lightning_dist.cli.doctor import network
for one in json.loads(sys.argv[1]):
    print(json.dumps({name: vars(each) for name, each in network(one).items()}))
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
    unset, chosen, lost = (
        {name: Finding(**each) for name, each in json.loads(line).items()}
        for line in done.require_success().output.splitlines()
    )
    assert unset["interfaces"].what.startswith("eth0 up, 10.77.0.1, MTU 1500, ")
    assert unset["MASTER_ADDR"].what == "10.77.0.2 (10.77.0.2) through eth0"
    assert unset["gloo address"].state == "error"  # this machine's name is no address of the node
    assert unset["gloo address"].fix == "export GLOO_SOCKET_IFNAME=eth0"
    assert chosen["gloo address"].what == "10.77.0.1 (GLOO_SOCKET_IFNAME=eth0)"
    assert lost["MASTER_ADDR"].state == "error"
    assert lost["MASTER_ADDR"].what == "no route to 10.99.0.1 (10.99.0.1)"
