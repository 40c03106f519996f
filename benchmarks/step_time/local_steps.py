"""How long a local step takes on a slow link, and how much of the time without communication it is.

    python -m benchmarks.step_time.local_steps [--link 50] [--row diloco@16/int8] ... [--json PATH]

Two hosts on one machine (`harness/testbed.py`; needs root) train the demo's byte-level GPT with
1.4 M parameters (5.6 MB of fp32 gradients) and AdamW. One set of processes holds all rows, each
with a model of its own, which take turns of whole windows. Between links only the limit changes.
Rows:

    no-comm          the same steps under `no_sync`: compute only
    ddp              DistributedDataParallel as it is, fp32
    torch-fp16-hook  with torch's own `fp16_compress_hook`; these three are always measured
    CODEC            `lightning_dist.compress_ddp(ddp, CODEC)`
    METHOD@H/CODEC, METHOD@H:fragments=4,overlap_steps=3/CODEC
                     `lightning_dist.local_updates` with that method, H local steps and the codec;
                     without /CODEC the method's own

A turn begins where nothing is under way, which with `overlap_steps` is that many steps after an
exchange began, and ends at the same place of a window. So it has whole windows as they follow each
other in a long training, and waits for no exchange but where the method does.

Every row is also predicted as by `lightning-dist profile whatif --local-steps`: from one profile of
the row ddp at the rate --base, with codec costs that `calibrate()` finds on all ranks at once. What
was lost of the rate at --base is taken to be lost of the others too. In a row of the JSON:

    step_ms          median over turns of the time of a step, of the slowest rank
    turns, steps     that were timed
    share            median no-comm step / median step: the throughput, 1 without communication
    wire_bytes       bytes that host 0 sent in a step, from its interface's own counter
    predicted_ms     null for rows without local steps
    ratio            measured / predicted step
    replicas_identical
                     whether in the end all ranks held the same parameters (or anchor), bit by bit

The JSON is written after every turn. Hosts share the machine's cores.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.rank import TIMEOUT, Job, Settings, Training
from benchmarks.convergence.tasks import make_task
from benchmarks.convergence.time_to_accuracy import HOSTS, TASK
from benchmarks.harness.results import Record, parser_of, positive, recording
from benchmarks.harness.tables import of_link
from benchmarks.harness.testbed import Testbed, shape
from benchmarks.step_time.rank import BASELINES, COMPUTE_ROW, DDP_ROW, tx_bytes_of
from benchmarks.step_time.tables import local_steps
from lightning_dist.integrations.profiler.run import ProfileRun
from lightning_dist.integrations.torch.networks import new_groups
from lightning_dist.measurement.calibration import calibrate
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import local_scenarios, predict
from lightning_dist.profiling.whatif.scenarios import elsewhere

ROWS = (
    "int4",
    "terngrad",
    *(f"diloco@{every}/int8" for every in (4, 16, 64)),
    "diloco@16:overlap_steps=6/int8",
    "streaming@16:fragments=4,overlap_steps=3/int8",
    *(f"sparseloco@{every}" for every in (4, 16, 64)),
    "sparseloco@16:overlap_steps=4",
)
LINKS = (1000.0, 200.0, 50.0, 10.0)  # fast first: the warm-up is cheap there
_TURN_STEPS = 16
"""Of a turn, or a window if that is longer; fewer where they take too long."""
_TURN_S = 2.0
_LEAST_TURNS, _MOST_TURNS = 2, 4
_PROFILED_STEPS = 10
_UNITS = 6  # of a megabyte: about what the gradients take

JsonRow = dict[str, Any]


def run(
    *,
    rows: Sequence[str],
    links: Sequence[float],
    base: float,
    folder: str,
    shaped: Sequence[tuple[str, str]],
    seconds: float,
    batch: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """One rank: every row on one link after the other; a result of every turn, and of the profile.

    Args:
        folder: of the profile of ddp at the rate ``base``.
        shaped: namespaces and devices whose rate the links are; rank 0 changes it.
        seconds: of a row on a link, after which it takes no further turn.
    """
    world_size, rank0 = dist.get_world_size(), dist.get_rank() == 0
    settings = {**TASK, "batch": batch * world_size, "steps": 1}
    task = make_task("gpt", settings, rank=dist.get_rank(), world_size=world_size)
    common = Settings(jobs=(), seeds=(seed,), tasks={}, compile_kernels=True)
    made = {}
    for name in rows:
        if rank0:
            print(f"  {name}", flush=True)  # where a set-up fails, this is the row before
        groups = new_groups(dist.group.WORLD, timeout=TIMEOUT)
        job = Job("gpt", name)
        made[name] = training = Training(task, job, seed=seed, settings=common, groups=groups)
        yield {"kind": "row", "row": name, "codec": job.codec, "schedule": _schedule(training)}
    for index, link in enumerate(links):
        dist.barrier()
        if rank0:
            print(f"link: {of_link(link)}", flush=True)
            for namespace, device in shaped:
                shape(namespace, device, rate_mbit=link)
        dist.barrier()
        if index == 0:
            for training in made.values():
                _warm_up(training)
        if link == base:
            groups = new_groups(dist.group.WORLD, timeout=TIMEOUT)
            ddp = Training(task, Job("gpt", DDP_ROW), seed=seed, settings=common, groups=groups)
            _warm_up(ddp)
            codecs = [each.job.codec for each in made.values() if each.updates]
            yield {"kind": "costs", "costs": _profile(ddp, folder, codecs)}
        yield from _turns(made, link, seconds=seconds)
    for name, training in made.items():
        yield {"kind": "end", "row": name, "identical": training.end()["identical"]}


def _schedule(training: Training) -> dict[str, int] | None:
    if training.updates is None:
        return None
    schedule = training.updates.schedule
    return {name: getattr(schedule, name) for name in ("sync_every", "fragments", "overlap_steps")}


def _warm_up(training: Training) -> None:
    """A first exchange, in which buffers are made, up to where nothing is under way."""
    steps = 3  # DDP puts its buckets in another order after the first
    if training.updates is not None:
        schedule = training.updates.schedule
        steps = schedule.sync_every + schedule.overlap_steps
    for _ in range(steps):
        training.step()


def _profile(training: Training, folder: str, codecs: Sequence[str]) -> dict[str, Any]:
    """Costs of codecs; in ``folder`` a profile of the training."""
    assert isinstance(training.ddp, DistributedDataParallel)
    settings = SessionSettings(max_overhead=1.0)
    profile = ProfileRun(training.ddp, parent=Path(folder), settings=settings, predict=False)
    for _ in range(_PROFILED_STEPS):
        training.step()
    profile.close("finished", together=True)
    dist.barrier()
    costs = calibrate(list(dict.fromkeys(codecs)), units=_UNITS)
    return {name: asdict(cost) for name, cost in costs.items()}


def _turns(
    made: Mapping[str, Training], link: float, *, seconds: float
) -> Iterator[dict[str, Any]]:
    """Rows in turn, another one first in every round, until each has had its time."""
    used = dict.fromkeys(made, 0.0)
    step_s: dict[str, float] = {}
    interface = os.environ["GLOO_SOCKET_IFNAME"]
    names = list(made)
    for number in range(_MOST_TURNS):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            training = made[name]
            window = training.updates.schedule.sync_every if training.updates else 1
            windows = 1
            if name in step_s:
                affordable = int(_TURN_S / (window * step_s[name]))
                windows = max(1, min(affordable, _TURN_STEPS // window))
            steps = window * windows
            if number >= _LEAST_TURNS and used[name] + steps * step_s[name] > seconds:
                continue
            dist.barrier()
            tx_bytes, began = tx_bytes_of(interface), time.perf_counter()
            for _ in range(steps):
                training.step()
            elapsed = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
            dist.barrier()  # now every rank has received what this one sent
            tx_bytes = tx_bytes_of(interface) - tx_bytes
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
            used[name] += elapsed.item()
            step_s[name] = elapsed.item() / steps
            found = {"link_mbit": link, "step_s": step_s[name], "wire_bytes": tx_bytes / steps}
            yield {"kind": "turn", "row": name, "steps": steps, **found}


def measure(given: argparse.Namespace, record: Record) -> None:
    """Keep all results as they come, as rows of the JSON."""
    results: list[dict[str, Any]] = []
    profiled: tuple[Observed, dict[str, CodecCost]] | None = None
    with tempfile.TemporaryDirectory() as folder, Testbed(HOSTS, link_mbit=None) as testbed:

        def add(result: dict[str, Any]) -> None:
            nonlocal profiled
            results.append(result)
            if result["kind"] == "costs":
                costs = {name: CodecCost(**cost) for name, cost in result["costs"].items()}
                profile = observe(read_run(Path(folder) / "run-0"))
                # Hosts on one machine share its cores, which they do not know.
                one_core = len(os.sched_getaffinity(0)) < 2 * HOSTS
                profiled = replace(profile, one_core=one_core), costs
            elif result["kind"] != "row":
                record.rows = summarize(results, profiled, base=given.base)
                record.write()

        testbed.run(
            run,
            timeout_s=given.timeout,
            on_result=add,
            rows=given.row,
            links=given.link,
            base=given.base,
            folder=folder,
            shaped=testbed.shaped,
            seconds=given.seconds,
            batch=given.batch,
            seed=given.seed,
        )


def summarize(
    results: Sequence[Mapping[str, Any]],
    profiled: tuple[Observed, Mapping[str, CodecCost]] | None,
    *,
    base: float,
) -> list[JsonRow]:
    """A row of the JSON for each row on each link.

    Args:
        profiled: what ddp's profile at the rate ``base`` says, and costs of codecs; if it is there.
    """
    every = [each for each in results if each["kind"] == "turn"]
    identical = {each["row"]: each["identical"] for each in results if each["kind"] == "end"}
    identical[COMPUTE_ROW] = None  # its replicas do not learn together
    found = []
    for link in dict.fromkeys(each["link_mbit"] for each in every):
        turns = [each for each in every if each["link_mbit"] == link]
        compute = [each["step_s"] for each in turns if each["row"] == COMPUTE_ROW]
        for about in (each for each in results if each["kind"] == "row"):
            own = [each for each in turns if each["row"] == about["row"]]
            if not own:
                continue
            step_s, predicted_s = median(each["step_s"] for each in own), None
            if about["schedule"] and profiled is not None:
                at = link / base
                predicted_s = predicted(*profiled, about["codec"], about["schedule"], at=at)
            found.append(
                {
                    "row": about["row"],
                    "link_mbit": link,
                    "step_ms": 1e3 * step_s,
                    "turns": len(own),
                    "steps": sum(each["steps"] for each in own),
                    "share": median(compute) / step_s if compute else None,
                    "wire_bytes": median(each["wire_bytes"] for each in own),
                    "predicted_ms": predicted_s and 1e3 * predicted_s,
                    "ratio": predicted_s and step_s / predicted_s,
                    "replicas_identical": identical.get(about["row"]),
                }
            )
    return found


def predicted(
    profile: Observed,
    costs: Mapping[str, CodecCost],
    codec: str,
    schedule: Mapping[str, int],
    *,
    at: float,
) -> float:
    """Seconds of a local step.

    Args:
        at: rate of the link, as a multiple of the profile's.
    """
    own = profile.scenario
    there = own if at == 1 else elsewhere(own, link_gbps=own.link.gbps * at)
    scenarios = local_scenarios(
        profile,
        there,
        costs=costs,
        codecs=[codec],
        sync_every=[schedule["sync_every"]],
        fragments=schedule["fragments"],
        overlap_steps=schedule["overlap_steps"],
    )
    (found,) = predict(profile, scenarios, costs=costs).scenarios
    assert found.step_ms is not None
    return found.step_ms / 1e3


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--link", type=float, action="append", metavar="MBIT", help="Mbit/s; repeatable")
    add("--row", action="append", help="beside no-comm, ddp and torch-fp16-hook; repeatable")
    add("--base", type=float, metavar="MBIT", help="rate of the profile (the second of --link)")
    add("--seconds", type=float, default=6.0, metavar="S", help="of a row on a link (%(default)s)")
    add("--batch", type=positive, default=8, metavar="N", help="windows of text per rank and step")
    add("--timeout", type=float, default=1800.0, metavar="S", help="for all (%(default)s)")
    add("--seed", type=int, default=0, metavar="N")
    given = parser.parse_args(argv)
    given.link = given.link or list(LINKS)
    given.base = given.base or given.link[min(1, len(given.link) - 1)]
    given.row = list(dict.fromkeys([*BASELINES, *(given.row or ROWS)]))
    if given.base not in given.link:
        parser.error(f"--base must be one of --link, got {given.base:g}")
    try:
        for link in given.link:
            Testbed(HOSTS, link_mbit=link)
    except ValueError as error:
        parser.error(str(error))
    return given


def main(argv: list[str] | None = None) -> None:
    """Measure, show, and write."""
    given = parse_arguments(argv)
    with recording(given, seed=given.seed) as record:
        measure(given, record)
        record.show(local_steps)


if __name__ == "__main__":
    main()
