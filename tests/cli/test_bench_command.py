"""``lightning-dist bench``: sizes, groups, tables, and real ranks; also on links of known rate."""

import json

import pytest
from calls import refusal
from processes import Finished, port, run_together

from benchmarks.harness.testbed import Testbed, TestbedUnavailable
from lightning_dist.cli.bench import nbytes_of, print_report, sizes_of
from lightning_dist.cli.bench_run import BenchReport, members_of
from lightning_dist.profiling.links import Measurement

LINK_MBIT = 200.0
PAYLOAD = 1448 / 1514
"""Of a full frame, which is what the shaper counts: the rest is headers."""


@pytest.fixture(scope="module")
def quick_bench(quick_python: list[str]) -> list[str]:
    """The program in a fork that has torch."""
    return [*quick_python, "-c", "from lightning_dist.cli import main; main()", "bench"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_sizes_are_those_of_nccl_tests() -> None:
    texts = {"100": 100, "64K": 65536, "1m": 1 << 20, "0.5G": 1 << 29, " 8M ": 8 << 20}
    assert {text: nbytes_of(text, option="") for text in texts} == texts
    for text in ("", "1T", "M", "-1K", "1M,", "0", "0.5", "1MB", "1:2"):
        with pytest.raises(ValueError, match=f"--x must be bytes, or like 64K, .* got '{text}'"):
            nbytes_of(text, option="--x")
    assert sizes_of(1024, 20_000, factor=4) == (1024, 4096, 16384)
    assert sizes_of(1024, 2048, factor=2) == (1024, 2048)
    assert sizes_of(1024, 1023, factor=2) == ()


def test_groups() -> None:
    nodes = ["a", "b", "a", "b", "c"]
    assert members_of("flat", nodes) == [(0, 1, 2, 3, 4)]
    assert members_of("intra", nodes) == [(0, 2), (1, 3)]
    assert members_of("inter", nodes) == [(0, 1, 4)]
    for scope, few, rule in [
        ("flat", ["a"], "2 ranks or more"),
        ("intra", ["a", "b"], "every node has one"),
        ("inter", ["a", "a"], "all 2 ranks are on a"),
    ]:
        with pytest.raises(ValueError, match=rule):
            members_of(scope, few)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--ops gather", "--ops must be from all_reduce, all_gather, all_to_all, broadcast"),
        ("--max-bytes 1XB", "--max-bytes must be bytes, or like 64K, 1M, 2G"),
        ("-b 2M -e 1M", "--min-bytes 2M must not be above --max-bytes 1M"),
        ("--device cuda", "--device cuda needs a GPU for each of 999 ranks here"),
    ],
)
def test_bad_input(monkeypatch: pytest.MonkeyPatch, words: str, problem: str) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "999", "LOCAL_WORLD_SIZE": "999"}.items():
        monkeypatch.setenv(name, value)
    assert problem in refusal("bench", *words.split())


def test_without_a_launcher() -> None:
    said = refusal("bench")
    assert "torchrun --nproc-per-node N --no-python lightning-dist bench" in said
    assert "--min-bytes must be bytes" in refusal("bench", "-b", "1X")  # what is wrong comes first
    assert "--ops must be from" in refusal("bench", "--ops", "all")


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (
        Measurement("all_reduce", 1_000_000, 4, (0.002, 0.001, 0.003)),
        Measurement("all_gather", 4_000_000, 4, (0.001,)),
    )
    print_report(BenchReport(("a", "a", "b", "b"), (0, 1, 2, 3), "flat", "gloo", "cpu", rows))
    heading, columns, first, second, _ = capsys.readouterr().out.splitlines()
    assert heading == "4 ranks (flat) on a, b; gloo, cpu"
    assert columns.split()[:6] == ["op", "size", "(B)", "count", "dtype", "median"]
    numbers = ["2.00", "ms", "1.00", "ms", "3.00", "ms", "4.00", "Gbit/s", "6.00", "Gbit/s"]
    assert first.split() == ["all_reduce", "1000000", "250000", "float32", *numbers, "25", "%"]
    assert second.split()[-6:] == ["32.0", "Gbit/s", "24.0", "Gbit/s", "100", "%"]


def test_a_matrix_names_the_slowest_pair(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ((None, 1.0, 0.9), (0.8, None, 0.25), (1.0, 1.0, None))
    nodes = ("a", "a", "b", "c")
    report = BenchReport(nodes, (0, 2, 3), "inter", "gloo", "cpu", (), 8_000_000, rates)
    print_report(report)
    _, columns, *rows, last = capsys.readouterr().out.splitlines()
    assert columns.split()[-6:] == ["0", "a", "2", "b", "3", "c"]
    assert rows[1].split() == ["2", "b", "0.800", "-", "0.250"]
    assert last.startswith("slowest: rank 2 on b to rank 3 on c, 250 Mbit/s, 25 % of the fastest")


def on_ranks(
    command: list[str], words: str, nodes: list[str], *, limit: float = 100
) -> list[Finished]:
    """The program on a rank for each of ``nodes``, as a launcher starts it; on CPUs."""
    common = {"WORLD_SIZE": str(len(nodes)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port())}
    of_ranks = [
        {**common, "RANK": str(rank), "LIGHTNING_DIST_HOSTNAME": node}
        for rank, node in enumerate(nodes)
    ]
    commands = [[*command, "--device", "cpu", *words.split()]] * len(nodes)
    return run_together(commands, of_ranks, limit=limit)


def test_all_collectives(quick_bench: list[str]) -> None:
    words = "--min-bytes 64K --max-bytes 1M --step-factor 16 --iters 3 --json"
    done = on_ranks(quick_bench, words, ["a", "a"])
    first, other = (each.require_success().output for each in done)
    assert "groups" not in other
    (group,) = json.loads(first[first.index("{") :])["groups"]
    assert (group["ranks"], group["backend"], group["device"]) == ([0, 1], "gloo", "cpu")
    ops = ["all_reduce", "all_reduce", "all_gather", "all_gather", "all_to_all", "all_to_all"]
    assert [row["op"] for row in group["rows"]] == ops
    assert [row["nbytes"] for row in group["rows"]] == [1 << 16, 1 << 20] * 3
    for row in group["rows"]:
        assert len(row["seconds"]) == 3
        assert 0 < row["busbw_gbps"] <= row["algbw_gbps"]


def test_pairs(quick_bench: list[str]) -> None:
    nodes = ["a", "b", "a"]
    done = on_ranks(quick_bench, "--pairs --group intra -e 64K --json", nodes)
    first, *others = [each.require_success().output for each in done]
    assert not any("groups" in each for each in others)
    (group,) = json.loads(first[first.index("{") :])["groups"]
    assert (group["nodes"], group["ranks"], group["pair_nbytes"]) == (nodes, [0, 2], 1 << 16)
    (none, there), (back, also_none) = group["pair_gbps"]
    assert (none, also_none) == (None, None)
    assert min(there, back) > 0


LEFT_WAITING = """
import os, torch.distributed as dist
from datetime import timedelta
from lightning_dist.cli import bench_run, main
def wait(*arguments):  # until rank 0, which has the store, is gone
    dist.distributed_c10d._get_default_store().wait(["never"], timedelta(seconds=90))
if os.environ["RANK"] == "1":
    bench_run.measure = wait
main()
"""


def test_timeout_bounds_what_is_measured(quick_python: list[str]) -> None:
    command = [*quick_python, "-c", LEFT_WAITING, "bench"]
    done = on_ranks(command, "--timeout 2", ["a", "a"], limit=60)
    assert done[0].returncode == 2
    assert "Timed out waiting 2000ms" in done[0].output


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("--group inter", "--group inter needs 2 nodes or more"),
        ("-b 4 -e 4 --ops all_reduce", "nbytes must be 8 or more"),
    ],
)
def test_what_is_wrong_with_all_ranks_is_said_once(
    quick_bench: list[str], words: str, problem: str
) -> None:
    done = on_ranks(quick_bench, words, ["a", "a"])
    assert [each.returncode for each in done] == [2, 2]
    said = [f"lightning-dist: {problem}" in each.output for each in done]
    assert said == [True, False]


@pytest.mark.root
def test_the_rate_of_a_link_is_found(quick_bench: list[str]) -> None:
    words = ["--group", "inter", "--ops", "all_reduce", "--device", "cpu", "--json"]
    try:
        with Testbed(hosts=2, link_mbit=LINK_MBIT) as testbed:
            command = [*quick_bench, *words, "-b", "4M", "-e", "4M", "-n", "5"]
            shown, *others = testbed.launch(command, ranks_per_host=[2, 1], timeout_s=90)
    except TestbedUnavailable as reason:
        pytest.skip(str(reason))
    assert not any("all_reduce" in each for each in others)
    (group,) = json.loads(shown[shown.index("{") :])["groups"]
    assert (group["ranks"], group["nodes"]) == ([0, 2], ["host0", "host0", "host1"])
    (row,) = group["rows"]
    # What is shown is of the median, to which a busy machine adds; the link is in the fastest use.
    best = row["busbw_gbps"] * row["median_seconds"] / min(row["seconds"])
    assert best * 1000 == pytest.approx(LINK_MBIT * PAYLOAD, rel=0.2)
