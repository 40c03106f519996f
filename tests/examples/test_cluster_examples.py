"""Job files of clusters: their commands run here, with stand-ins for what a cluster brings."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml
from processes import ROOT, port, run, run_together

CLUSTER = ROOT / "examples" / "cluster"
LIMIT = 110.0
SHORT = ["--steps", "12"]
DONE = "*step=12.ckpt"


@pytest.fixture
def programs(tmp_path: Path, quick_executable: str) -> Path:
    """A folder for ``PATH`` with ``lightning-dist`` and ``torchrun`` of this Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    python = shlex.quote(quick_executable)
    ours = "from lightning_dist.cli import main; main()"
    program(folder / "lightning-dist", f"exec {python} -c '{ours}' \"$@\"")
    program(folder / "torchrun", f'exec {python} -m torch.distributed.run "$@"')
    return folder


@pytest.fixture
def slurm(programs: Path, tmp_path: Path) -> Path:
    """With SLURM's programs too: ``srun`` starts two tasks, the others note what they were told."""
    program(programs / "scontrol", _SCONTROL.format(log=tmp_path / "scontrol"))
    program(programs / "scancel", _SCANCEL.format(tasks=tmp_path / "tasks"))
    program(programs / "srun", _SRUN.format(tasks=tmp_path / "tasks"))
    return programs


_SCONTROL = """
echo "$@" >> {log}
[ "$1 $2" != "show hostnames" ] || {{ echo 127.0.0.1 && seq -f node%g 20000; }}
"""  # more than a pipe holds: whoever reads the first line only ends it by SIGPIPE
_SCANCEL = """
[ "$1 $2" = "--signal=TERM 4711.0" ] && xargs kill -TERM < {tasks}
"""
_SRUN = """
while [ "${{1#-}}" != "$1" ]; do shift; done
export BATCH=$PPID
"$@" & first=$!
"$@" & second=$!
echo $first $second > {tasks}
wait $first; code=$?
wait $second || code=$?
exit $code
"""


def program(path: Path, text: str) -> None:
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


def on_path(programs: Path, **variables: str) -> dict[str, str]:
    return {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", **variables}


def job(programs: Path, **variables: str) -> dict[str, str]:
    """Variables of a job of SLURM on two nodes of one rank each."""
    told = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_NUM_NODES": "2"}
    return on_path(programs, **told, RANKS="1", PORT=str(port()), **variables)


def in_root(*words: str | Path) -> list[str]:
    command = shlex.join(map(str, words))
    return ["bash", "-c", f"cd {shlex.quote(str(ROOT))} && exec {command}"]


@pytest.mark.parametrize("name", ["slurm.sbatch", "torchrun.sh"])
def test_bash_reads_it(name: str) -> None:
    subprocess.run(["bash", "-n", CLUSTER / name], check=True, timeout=20)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT + 20)
def test_slurm_starts_both_nodes(slurm: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    command = in_root("bash", CLUSTER / "slurm.sbatch", "--folder", folder, *SHORT)
    done = run(command, limit=LIMIT, **job(slurm)).require_success()
    assert "elastic: world 2, fresh start" in done.output
    assert list(folder.glob(DONE))
    assert "requeue" not in (tmp_path / "scontrol").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT + 20)
def test_the_time_of_a_slurm_job_is_over(slurm: Path, tmp_path: Path) -> None:
    """The script gets SIGUSR1: a checkpoint, back into the queue, and it goes on from there."""
    folder, script = tmp_path / "out", tmp_path / "train.py"
    script.write_text(_TOLD_AT_STEP_5)
    command = in_root("bash", CLUSTER / "slurm.sbatch", "--folder", folder, *SHORT)
    variables = job(slurm, SCRIPT=str(script), PYTHONPATH=str(ROOT / "examples"))
    ended = run(command, limit=LIMIT, **variables).require_success()
    assert "requeue 4711" in (tmp_path / "scontrol").read_text(), ended.output[-3000:]
    (saved,) = folder.glob("*.ckpt")
    step = int(saved.stem.rpartition("=")[2])
    assert 5 <= step <= 8, "within two steps, not at the end nor at the tenth"
    again = run(command, limit=LIMIT, **job(slurm)).require_success()
    assert f"step {step})" in again.output
    assert list(folder.glob(DONE))


_TOLD_AT_STEP_5 = """
import os, signal
import elastic_train
import lightning as L

class TimeIsOver(L.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 5 and trainer.is_global_zero:
            os.kill(int(os.environ["BATCH"]), signal.SIGUSR1)

Usual = L.Trainer
L.Trainer = lambda callbacks, **rest: Usual(callbacks=[*callbacks, TimeIsOver()], **rest)
elastic_train.main()
"""


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT + 20)
def test_torchrun_on_two_nodes(programs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    example = "examples/elastic_train.py"
    command = in_root(CLUSTER / "torchrun.sh", example, "--folder", folder, *SHORT)
    variables = on_path(programs, HEAD="127.0.0.1", NODES="2", PORT=str(port()))
    nodes = run_together([command] * 2, [variables] * 2, limit=LIMIT)
    assert all(node.require_success() for node in nodes)
    assert any("elastic: world 2, fresh start" in node.output for node in nodes)
    assert list(folder.glob(DONE))


def test_torchrun_needs_a_host_and_a_script(programs: Path) -> None:
    done = run([CLUSTER / "torchrun.sh"], limit=20, **on_path(programs))
    assert done.returncode == 1
    assert "HEAD: the node at which the nodes meet" in done.output


@pytest.mark.exhaustive
@pytest.mark.timeout(LIMIT + 20)
def test_the_containers_of_the_pytorchjob_train(programs: Path, tmp_path: Path) -> None:
    spec = yaml.safe_load((CLUSTER / "kubeflow-pytorchjob.yaml").read_text())["spec"]
    policy, pod = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert policy["minReplicas"] <= spec["pytorchReplicaSpecs"]["Worker"]["replicas"]
    assert pod["terminationGracePeriodSeconds"] > 25
    operator = {  # what the operator sets, for two pods of one rank
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port()}",
        "PET_NNODES": "2:2",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
    }
    own = {each["name"]: each["value"] for each in container["env"]}
    arguments = [word.replace("/checkpoints", str(tmp_path)) for word in container["args"]]
    command = in_root(*container["command"], *arguments, *SHORT)
    pods = run_together([command] * 2, [on_path(programs, **operator, **own)] * 2, limit=LIMIT)
    assert all(each.require_success() for each in pods)
    assert any("elastic: world 2, fresh start" in each.output for each in pods)
    assert list((tmp_path / "elastic").glob(DONE))
