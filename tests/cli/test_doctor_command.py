"""``lightning-dist doctor``: what it prints, and whether two ranks meet."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from doctor_findings import ELASTIC, by_name
from typer.testing import CliRunner, Result

import lightning_dist
from lightning_dist.cli import app
from lightning_dist.cli.doctor import show
from lightning_dist.cli.doctor_finding import Finding
from lightning_dist.cli.doctor_run import two_ranks


def doctor(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, words)])


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
