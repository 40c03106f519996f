"""How far the predictions of `lightning-dist profile whatif` are from what is then measured.

    python -m benchmarks.profiler.whatif [--layout 2x1] [--link 200] [--setting int8] [--base 500]
                                [--steps 12] [--json PATH]

Needs root. Hosts on one machine (`harness/testbed.py`) train the model of
`step_time/`, 42 MB of fp32 gradients, with each setting at each rate under the
profiler, settings in turn. A setting is `ddp`, a codec, or FORM/CODEC as in
`step_time/`. Then every pair of setting and rate is predicted from ONE profile,
that of ddp at the rate `--base`, with the costs of codecs that `calibrate()` finds before the first
step, compiled as in the run and on all ranks at once. What was lost of the rate at `--base` is
taken to be lost of the others too. Hierarchical settings need the rate inside a host, which ddp
does not show: `--inside-gbit`. Nor does it show the latency of a round, which counts nothing unless
`--latency-us` gives it; many hosts multiply it.

JSON: in meta `base`, `errors`, the median and the largest of them without the pair that was the
profile, and `errors_from_any` of all profiles together; rows with `kind` "pair" (setting,
link_mbit, measured_ms, predicted_ms, relative_error, is_base) and "scaling": what the same profile
says of 2 to 1,024 hosts, predicted and not measured (hosts, codec, form, step_ms). Of a
step's time the median over steps counts, of the mean over ranks, as in the profile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.launch import Layout
from benchmarks.harness.results import error_sizes, parser_of, positive, recording, say
from benchmarks.harness.testbed import Testbed
from benchmarks.profiler.tables import WHATIF_ERRORS, WHATIF_SCALING
from benchmarks.step_time.models import WIDTH
from benchmarks.step_time.rank import Row, split_row
from lightning_dist.integrations.profiler.run import ProfileRun
from lightning_dist.measurement.calibration import calibrate
from lightning_dist.measurement.costs import CodecCost
from lightning_dist.profiling.capture.session import SessionSettings
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import predict
from lightning_dist.profiling.whatif.predictions import LABEL, Prediction
from lightning_dist.profiling.whatif.scenarios import DDP, FLAT, elsewhere

SETTINGS = (DDP, "none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
LINKS = (200.0, 500.0, 1000.0)
SCALE = tuple(2**power for power in range(1, 11))
_UNITS = 24  # of a megabyte: about what the gradients of the model take

JsonRow = dict[str, Any]
Place = tuple[str, float]  # setting, link


def train(
    *, profiles: Mapping[str, str], codecs: Sequence[str], steps: int, batch: int, seed: int
) -> Iterator[dict[str, Any]]:
    """One rank: costs of codecs, where all ranks use them at once, and every setting in turn.

    Settings take turns step by step, so that what else the machine does is the same for all.

    Args:
        profiles: the folder of the profile of every setting.
    """
    torch.set_num_threads(1)
    dist.barrier()
    costs = calibrate(codecs, fused=True, units=_UNITS)
    yield {name: asdict(cost) for name, cost in costs.items()}
    turns = []
    for name, folder in profiles.items():
        row = Row(name, seed=seed)
        settings = SessionSettings(max_overhead=1.0)
        turns.append((row, ProfileRun(row.ddp, parent=Path(folder), settings=settings)))
        dist.barrier()
    torch.manual_seed(seed + 1 + dist.get_rank())
    inputs, targets = (torch.randn(batch, WIDTH) for _ in range(2))
    for number in range(steps):
        first = number % len(turns)
        for row, profile in turns[first:] + turns[:first]:
            dist.barrier()
            profile.exclude_interval()  # the turns of others are no part of it
            row.step(inputs, targets)
            profile.exclude_interval()
            row.forget()
        if dist.get_rank() == 0:
            print(f"  step {number + 1} of {steps}", flush=True)
    for row, profile in turns:
        profile.close("finished", together=True)
        row.close()


def measure(given: argparse.Namespace) -> tuple[dict[Place, Observed], dict[str, CodecCost]]:
    """Train everywhere, and read the profiles; and the costs, as measured at the base rate."""
    layout = Layout.parse(given.layout)
    # Hosts on one machine share its cores, which they do not know.
    one_core = len(os.sched_getaffinity(0)) < 2 * layout.world_size
    found: dict[Place, Observed] = {}
    costs: dict[str, CodecCost] = {}
    codecs = {split_row(setting)[1] for setting in given.setting} - {DDP} | {"none"}
    with (
        tempfile.TemporaryDirectory() as directory,
        Testbed(layout.hosts, link_mbit=given.link[0]) as testbed,
    ):
        for link in given.link:
            say(f"link: {link:g} Mbit/s")
            testbed.set_link(link)
            profiles = {
                name: f"{directory}/{link:g}/setting{number}"
                for number, name in enumerate(given.setting)
            }
            ((listed,), *_) = testbed.run(
                train,
                ranks_per_host=layout.counts,
                timeout_s=given.timeout,
                profiles=profiles,
                codecs=sorted(codecs),
                steps=given.steps,
                batch=given.batch,
                seed=given.seed,
            )
            for name, folder in profiles.items():
                observed = observe(read_run(Path(folder) / "run-0"))
                found[name, link] = replace(observed, one_core=one_core)
            if link == given.base:
                costs = {name: CodecCost(**cost) for name, cost in listed.items()}
    return found, costs


def predicted(
    profile: Observed,
    profile_mbit: float,
    setting: str,
    link_mbit: float,
    *,
    costs: Mapping[str, CodecCost],
    given: argparse.Namespace,
    hosts: int | None = None,
) -> Prediction:
    """A setting at a rate, from a profile. At the profile's own rate the measured one counts.

    At another, what was lost of the profile's is lost too.
    """
    form, codec = split_row(setting)
    there = elsewhere(
        profile.scenario,
        hosts=hosts,
        link_gbps=None
        if link_mbit == profile_mbit
        else profile.scenario.link.gbps * link_mbit / profile_mbit,
        inside_gbps=given.inside_gbit,
        latency_us=given.latency_us,
    )
    scenario = replace(there, codec=codec, form=form or FLAT)
    (prediction,) = predict(profile, [scenario], costs=costs).scenarios
    return prediction


def compare(
    found: Mapping[Place, Observed], base: Place, **known: Any
) -> tuple[list[JsonRow], list[float]]:
    """Predictions from one profile beside what was measured, and the errors of those elsewhere."""
    rows = []
    for (setting, link), observed in found.items():
        prediction = predicted(found[base], base[1], setting, link, **known)
        measured, step_ms = observed.step * 1e3, prediction.step_ms
        rows.append(
            {
                "kind": "pair",
                "setting": setting,
                "link_mbit": link,
                "measured_ms": measured,
                "predicted_ms": step_ms,
                "relative_error": None if step_ms is None else step_ms / measured - 1,
                "is_base": (setting, link) == base,
                "reason": prediction.reason,
            }
        )
    errors = [row["relative_error"] for row in rows if not row["is_base"]]
    return rows, [error for error in errors if error is not None]


def main(argv: list[str] | None = None) -> None:
    """Measure, predict, show, and write."""
    given = parse_arguments(argv)
    with recording(given, seed=given.seed) as record:
        found, costs = measure(given)
        known: dict[str, Any] = {"costs": costs, "given": given}
        base = (DDP, given.base)
        record.rows, errors = compare(found, base, **known)
        together = [error for place in found for error in compare(found, place, **known)[1]]
        for hosts, setting in itertools.product(SCALE, given.setting):
            each = predicted(found[base], given.base, setting, given.base, hosts=hosts, **known)
            scaled = {name: getattr(each, name) for name in ("codec", "form", "hosts", "step_ms")}
            record.rows.append({"kind": "scaling", **scaled})
        record.meta |= {
            "errors": error_sizes(errors or [0.0]),
            "errors_from_any": error_sizes(together) if together else None,
            "base": {"setting": DDP, "link_mbit": given.base},
            "costs": {name: asdict(cost) for name, cost in costs.items()},
            "label": LABEL,
        }
        if together:
            record.show(WHATIF_ERRORS, WHATIF_SCALING)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--layout", default="2x1", help="hosts x ranks of each (2x1)")
    add("--link", type=float, action="append", metavar="MBIT", help="repeatable (200, 500, 1000)")
    settings = ", ".join(SETTINGS)
    add("--setting", action="append", help=f"repeatable, ddp is always there ({settings})")
    add("--base", type=float, metavar="MBIT", help="rate of the profile (the second of --link)")
    add("--steps", type=positive, default=12, help="of each, two of which are left out (12)")
    add("--batch", type=positive, default=64, help="of each rank (64)")
    add("--inside-gbit", type=float, metavar="RATE", help="of a rank inside its host")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one rate (900)")
    add("--latency-us", type=float, metavar="US", help="of a round between hosts")
    add("--seed", type=int, default=0)
    given = parser.parse_args(argv)
    given.link = given.link or list(LINKS)
    if given.base is None:
        given.base = given.link[min(1, len(given.link) - 1)]
    if given.base not in given.link:
        parser.error(f"--base must be one of --link, got {given.base:g}")
    given.setting = list(dict.fromkeys([DDP, *(given.setting or SETTINGS)]))
    return given


if __name__ == "__main__":
    main()
