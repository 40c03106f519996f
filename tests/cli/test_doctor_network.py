"""``lightning-dist doctor``: planted mistakes of launchers and networks, and their fixes."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import pytest
from doctor_findings import ELASTIC, RANK, by_name
from processes import run

from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_interfaces import Interface
from lightning_dist.cli.doctor_launcher import launcher
from lightning_dist.cli.doctor_network import network

LOOPBACK = Interface("lo", True, ("127.0.0.1", "::1"), 65536, None)
FAST = Interface("eth0", True, ("10.0.0.5",), 1500, 10_000)
SLOW = Interface("eth1", True, ("10.1.0.5",), 1500, 100)
DOWN = Interface("ib0", False, ("10.2.0.5",), 2044, None)
NO_ADDRESS = Interface("docker0", True, (), 1500, None)
HERE = [LOOPBACK, FAST, DOWN, NO_ADDRESS]


def in_network(environ: Mapping[str, str], hostname: str = "localhost") -> dict[str, Finding]:
    return by_name(network(environ, found=HERE, hostname=hostname))


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


IN_NAMESPACE = """
import json, sys
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
