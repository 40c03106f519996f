"""What works with each version of torch, Lightning and Accelerate that the package admits.

Each version gets an environment, one at a time, which finds all other packages in that of
``make install``. There the names of every feature are looked up, the tests of its rooms run, and
short trainings are compared with those of the version that all tests run with. torch for CUDA is
imported without a GPU and without NVIDIA's libraries (`stand_ins`).

    python -m tests.campaigns.versions --json FILE [--only torch==2.9.1 --renew]

A torch is up to 0.9 GB to fetch.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.harness.results import of_tests, parser_of, recording, say
from benchmarks.versions import FEATURES, IMPORT, LOSSES
from lightning_dist.base.versions import installed_version
from tests.campaigns.versions.environments import LIMIT, ROOT, environment, told
from tests.runner.processes import environment_of

VERSIONS = (
    *(f"torch=={each}" for each in ("2.7.1", "2.9.1", "2.11.0", "2.14.1", "2.15.0")),
    *(f"lightning=={each}" for each in ("2.5.6", "2.6.0")),
    "accelerate==1.10.1",
)
"""Beside those that all tests run with."""
_ACCELERATE, _LIGHTNING = "frameworks/accelerate", "frameworks/lightning"
ROOMS = {
    "Gradient compression and local steps": (
        *("codecs", "exchange", "ranks", "kernels", "reducer", "sync/test_onebit_adam.py"),
        *("sync/test_plain_ddp.py", "sync/test_delayed_gradients.py", "sync/test_pipelines.py"),
        *("sync/test_refusals_of_groups.py", "sync/local/test_local_updates.py"),
        *("sync/local/test_local_trained.py", "sync/local/test_local_state.py"),
    ),
    "FSDP2": ("sync/fsdp",),
    "Asynchronous checkpoints": ("checkpoint",),
    "Checkpoints of sharded models": ("frameworks/test_model_parallel_checkpoints.py",),
    "lightning-dist launch": (f"{_LIGHTNING}/test_launchers.py",),
    "Elastic restart": (
        *("elastic/data", "elastic/process", "elastic/loop/test_loop.py"),
        *("elastic/test_journal.py", "elastic/test_progress.py", "elastic/test_rendezvous.py"),
        "elastic/test_store_queue.py",
        *("elastic/launcher", "elastic/recovery/test_generations.py"),
        *(
            f"elastic/recovery/test_recovery_{e}.py"
            for e in ("coordinator", "launcher", "protocol")
        ),
    ),
    "recovery='in_process'": ("elastic/recovery/test_recovery.py",),
    "CommProfiler": ("profiling",),
    "Strategies for Lightning": (
        *(f"{_LIGHTNING}/test_lightning_training.py", f"{_LIGHTNING}/test_command_line.py"),
        f"{_LIGHTNING}/test_local_steps_lightning.py",
    ),
    "Strategies for Fabric": ("frameworks/fabric",),
    "AsyncCheckpoint": (
        *(
            f"{_LIGHTNING}/checkpoint/test_async_checkpoint_{each}.py"
            for each in ("files", "errors")
        ),
        f"{_LIGHTNING}/checkpoint/test_lightning_checkpoints.py",
    ),
    "ElasticRestart": (f"{_LIGHTNING}/elastic/test_elastic_resume.py",),
    "recovery='in_process' of a Trainer": (f"{_LIGHTNING}/test_trainer_recovery.py",),
    "CompressedDDPPlugin": (
        *(f"{_ACCELERATE}/test_accelerate_{each}.py" for each in ("plugin", "state")),
    ),
    "lightning-dist config and launch for Accelerate": (
        *(f"{_ACCELERATE}/test_{each}.py" for each in ("run_module", "accelerate_programs")),
    ),
    "CompressedDDPMixin": (f"{_ACCELERATE}/test_trainer_mixin.py",),
}
"""Tests by feature, or by a part that every version has. With a version of Lightning or Accelerate
those of its features run."""
_LOSSES = ("tests.campaigns.versions.losses",)
WHOLE_JOBS = (
    *("FSDP2", "Checkpoints of sharded models", "lightning-dist launch", "ElasticRestart"),
    *("recovery='in_process'", "recovery='in_process' of a Trainer"),
)
"""Features whose slow tests run too: they have few others."""
_NAMES = """
import json
from lightning_dist.base.features import FEATURES
print("FOUND" + json.dumps([(each.title, each.package, each.missing) for each in FEATURES]))
"""


def tested(python: str, variables: Mapping[str, str], feature: str) -> dict[str, Any]:
    """Counts of the feature's tests, and the first lines of those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [python, "-m", "pytest", "-n", "3", "--dist", "loadfile", f"--junitxml={report}"]
        if feature in WHOLE_JOBS:
            command += ["-m", "not exhaustive"]
        try:
            subprocess.run(
                [*command, *(f"tests/{each}" for each in ROOMS[feature])],
                cwd=ROOT,
                env=dict(variables),
                capture_output=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not over within {LIMIT:.0f} s"}
        if not report.exists():
            return {"error": "pytest has not run"}
        return of_tests(report)


def look_at(requirement: str, reference: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Rows of one version: one for each feature, and one for the losses."""
    with environment(requirement) as (python, variables):
        losses = told(python, variables, "LOSSES", "-m", *_LOSSES)
        names = told(python, variables, "FOUND", "-c", _NAMES)
        if not isinstance(names, list):
            yield {"kind": requirement, "feature": IMPORT, "error": names}
            return
        others = [each for each in ROOMS if all(each != title for title, *_ in names)]
        for feature, package, missing in [*names, *((each, "torch", None) for each in others)]:
            if not installed_version(package):
                continue
            row = {"kind": requirement, "feature": feature, "missing": missing}
            is_its_own = requirement.startswith((package, "torch"))
            if missing is None and feature in ROOMS and is_its_own:
                row |= tested(python, variables, feature)
            yield row
        row = {"kind": requirement, "feature": LOSSES}
        if isinstance(losses, dict):
            row["differing"] = [name for name, found in losses.items() if found != reference[name]]
            pairs = (
                (a, b)
                for name in losses
                for a, b in zip(losses[name], reference[name], strict=True)
            )
            row["difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
        else:
            row["error"] = losses
        yield row


def main() -> None:
    """Look at all versions, or at some."""
    parser = parser_of(__doc__, renews=True)
    parser.add_argument("--only", choices=VERSIONS, action="append", help="repeatable")
    given = parser.parse_args()
    with recording(given) as record:
        reference = told(sys.executable, environment_of({}), "LOSSES", "-m", *_LOSSES)
        if not isinstance(reference, dict):
            sys.exit(f"The short trainings fail in this environment: {reference}")
        for version in given.only or VERSIONS:
            for row in look_at(version, reference):
                say(json.dumps(row)[:300])
                record.add([row])
        record.show(FEATURES)
        failures = [row for row in record.rows if row.get("failed") or row.get("error")]
    if failures:
        sys.exit(f"{len(failures)} of {len(record.rows)} rows have failures")


if __name__ == "__main__":
    os.environ.pop("PYTHONPATH", None)
    main()
