"""Mutants of the package, and the tests that notice them.

Each of ``--count`` mutants is met by the tests that run its block, the quick files first, until one
fails: those of the tier that CI runs, and, if none of them fails, those of the exhaustive tier; of
each tier the quickest, which take ``--budget`` seconds together. A mutant that ends no test in time
is noticed too. The tests of a block are those that `hits` has found; a result that is in the file
already is kept, so that a campaign goes on where it was ended.

    python -m tests.campaigns.mutants --hits FOLDER --count 200 --seed 1 --json FILE
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue

from tests.campaigns.mutants.drawing import Mutant, draw
from tests.campaigns.mutants.hits import Place, seconds_of_tests, tests_of_blocks
from tests.runner.processes import environment_of, kill_tree

ROOT = Path(__file__).resolve().parents[3]
TIERS = {"ci": "not exhaustive", "exhaustive": "exhaustive"}
NOT_NOTED = {f"kernels/triton/{name}.py" for name in ("device", "codecs")}
"""Files whose functions Triton reads as text: whoever runs a pass runs them."""


def tests_of(mutant: Mutant, places: list[Place], tests: list[set[str]]) -> set[str]:
    """Tests that run the block of a mutant; of what an import runs, all tests of the file."""
    file = "kernels/triton/passes.py" if mutant.file in NOT_NOTED else mutant.file
    of_file = [(i, last - first) for i, (name, first, last) in enumerate(places) if name == file]
    around = [
        (size, i)
        for i, size in of_file
        if mutant.file == file and places[i][1] <= mutant.line <= places[i][2]
    ]
    blocks = [min(around)[1]] if around else [i for i, _ in of_file]
    return set().union(*(tests[i] for i in blocks))


def collected(tier: str) -> set[str]:
    """Tests of a tier."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", TIERS[tier]]
    done = subprocess.run([*command, "-o", "addopts="], cwd=ROOT, capture_output=True, text=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


@contextmanager
def copies(count: int) -> Iterator[SimpleQueue[Path]]:
    """Copies of what is committed, to be changed."""
    free: SimpleQueue[Path] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for number in range(count):
            copy = Path(folder, str(number))
            copy.mkdir()
            archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE)
            subprocess.run(["tar", "x"], cwd=copy, input=archive.stdout, check=True)
            (copy / ".venv").symlink_to(ROOT / ".venv")
            free.put(copy)
        yield free


def within(budget: float, tests: Iterable[str], seconds: dict[str, float]) -> dict[str, float]:
    """Tests that take so long together, the quickest first, and what each takes."""
    found = {test: seconds.get(test, 1.0) for test in tests}
    order = sorted(found, key=lambda test: found[test])
    total = accumulate(found[test] for test in order)
    return {test: found[test] for test, until in zip(order, total, strict=True) if until <= budget}


def noticed_by(copy: Path, tests: dict[str, float]) -> str | None:
    """The first test that fails in a copy; None if all pass. Quick files come first."""
    cost: dict[str, float] = {}
    for test, seconds in tests.items():
        file = test.partition("::")[0]
        cost[file] = cost.get(file, 0.0) + seconds
    if not cost:
        return None
    files = sorted(cost, key=lambda file: cost[file])
    chosen = copy / "chosen-tests.txt"
    chosen.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-x", "-m", "", "-n", "0", "--no-header"]
    command += ["-p", "tests.campaigns.mutants.chosen", "-p", "no:cacheprovider", "-rfE", *files]
    temporary = copy.with_name(f"{copy.name}-tmp")
    temporary.mkdir(exist_ok=True)
    variables = {"PYTHONPATH": str(copy), "CHOSEN_TESTS": str(chosen), "TMPDIR": str(temporary)}
    with open(copy / "chosen-output.txt", "w+") as output:
        process = subprocess.Popen(
            command,
            cwd=copy,
            env={**environment_of({}), **variables},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(90 + 4 * sum(cost.values()))
        except subprocess.TimeoutExpired:
            code = None
        finally:
            kill_tree(process.pid)
            process.wait()
        output.seek(0)
        lines = output.read().splitlines()
    if code in (0, 5):
        return None
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return failed[-1].partition(" - ")[0] if failed else f"exit code {code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hits", type=Path, required=True, help="folder that `hits` has written")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds of tests of a tier")
    parser.add_argument("--json", type=Path, required=True, help="lines of results")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--tier", choices=TIERS, help="only this one")
    given = parser.parse_args()
    places, tests = tests_of_blocks(given.hits)
    seconds = seconds_of_tests(given.hits)
    tiers = {tier: collected(tier) for tier in TIERS if given.tier in (None, tier)}
    rows = given.json.read_text().splitlines() if given.json.exists() else []
    done = {(row["mutant"], row["tier"]): row["noticed_by"] for row in map(json.loads, rows)}

    def meet(mutant: Mutant) -> None:
        relevant = tests_of(mutant, places, tests)
        for tier, of_tier in tiers.items():
            found = done.get((str(mutant), tier))
            if (str(mutant), tier) not in done:
                began = time.monotonic()
                chosen = within(given.budget, relevant & of_tier, seconds)
                copy = free.get()
                source = copy / "lightning_dist" / mutant.file
                text = source.read_text()
                try:
                    source.write_text(mutant.applied(text))
                    found = noticed_by(copy, chosen)
                finally:
                    source.write_text(text)
                    free.put(copy)
                row = {"mutant": str(mutant), "tier": tier, "noticed_by": found}
                row |= {"tests": len(chosen), "seconds": round(time.monotonic() - began, 1)}
                with given.json.open("a") as file:
                    print(json.dumps(row), file=file, flush=True)
            if found:
                return

    with copies(given.workers) as free, ThreadPoolExecutor(given.workers) as pool:
        list(pool.map(meet, draw(ROOT / "lightning_dist", given.count, given.seed)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
