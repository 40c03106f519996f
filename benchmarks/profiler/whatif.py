"""How far the predictions of `lightning-dist profile whatif` are from what is then measured.

    python -m benchmarks.profiler.whatif codecs [--layout 2x1] [--link 200] [--row int8] ...
    python -m benchmarks.profiler.whatif local [--link 50] [--row diloco@16/int8] ...
    python -m benchmarks.profiler.whatif fsdp [--link 50] [--row fsdp/int8] ...

Hosts on one machine (`harness/testbed.py`; needs root) train rows as in `harness/rows.py`, at one
rate of the links after the other. Every row is predicted from ONE profile at the rate `--base`,
that of ddp or, of sharded models, that of the codec `none` in the same sharding, with the costs of
codecs that `calibrate()` finds there on all ranks at once. What was lost of the rate at `--base` is
taken to be lost of the others too. Hosts share the machine's cores.

`codecs`: the model of `step_time/`, 42 MB of fp32 gradients, ddp and codecs or FORM/CODEC, all of
them under the profiler, rows in turn. Hierarchical rows need the rate inside a host, which ddp does
not show: `--inside-gbit`. Nor does it show the latency of a round, which counts nothing unless
`--latency-us` gives it; many hosts multiply it. JSON: in meta `base`, `errors`, the median and the
largest of them without the pair that was the profile, and `errors_from_any` of all profiles
together; rows with `kind` "pair" (setting, link_mbit, measured_ms, predicted_ms, relative_error,
is_base) and "scaling": what the same profile says of 2 to 1,024 hosts, predicted and not measured
(hosts, codec, form, step_ms). Of a step's time the median over steps counts, of the mean over
ranks, as in the profile.

`local`: the GPT of `convergence.time_to_accuracy`, 5.6 MB of gradients; local steps, beside the
same steps without communication and those of torch. Rows take turns of whole windows. A turn begins
where nothing is under way, which with `overlap_steps` is that many steps after an exchange began,
and ends at the same place of a window. So it has whole windows as they follow each other in a long
training, and waits for no exchange but where the method does. In a row of the JSON:

    step_ms          median over turns of the time of a step, of the slowest rank
    turns, steps     that were timed
    share            median no-comm step / median step: the throughput, 1 without communication
    wire_bytes       bytes that host 0 sent in a step, from its interface's own counter
    predicted_ms     null for rows without local steps
    ratio            measured / predicted step
    replicas_identical
                     whether in the end all ranks held the same parameters (or anchor), bit by bit

`fsdp`: the model of `codecs`, or with --model gpt that of `local`, sharded within hosts or over all
ranks, in turns as of `local` without the profiler. Rows of kind "pair" as of `codecs`, with `turns`
and `steps` of the measured step, and with `wire_mb` and `predicted_mb` that host 0 sent in it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.convergence.rank import TIMEOUT, Settings, Training
from benchmarks.convergence.tasks import DEMO_GPT, make_task
from benchmarks.harness.launch import Layout
from benchmarks.harness.results import Record, parser_of, positive, recording, require_testbeds, say
from benchmarks.harness.rows import (
    ALL,
    ALL_INT8,
    BASELINES,
    COMPUTE_ROW,
    DDP_ROW,
    FSDP,
    RowName,
    rotated,
    timed,
)
from benchmarks.harness.tables import of_link
from benchmarks.harness.testbed import Testbed
from benchmarks.profiler.tables import WHATIF_ERRORS, WHATIF_FSDP, WHATIF_SCALING
from benchmarks.step_time.tables import LOCAL_STEPS
from lightning_dist.measurement import CodecCost
from lightning_dist.measurement.calibration import calibrate
from lightning_dist.profiling.capture.profile_session import ProfileSessionSettings
from lightning_dist.profiling.run import read_run
from lightning_dist.profiling.session.models import as_ddp
from lightning_dist.profiling.session.profile_run import ProfileRun
from lightning_dist.profiling.whatif.observe import Observed, observe
from lightning_dist.profiling.whatif.predict import local_scenarios, predict
from lightning_dist.profiling.whatif.scenarios import (
    ALL_RANKS,
    DDP,
    FLAT,
    LABEL,
    Prediction,
    elsewhere,
)
from lightning_dist.sync.networks import new_groups

CODEC_ROWS = ("none", "fp16", "int8", "int4", "sign", "topk", "powersgd")
LOCAL_ROWS = (
    "int4",
    "terngrad",
    *(f"diloco@{every}/int8" for every in (4, 16, 64)),
    "diloco@16:overlap_steps=6/int8",
    "streaming@16:fragments=4,overlap_steps=3/int8",
    *(f"sparseloco@{every}" for every in (4, 16, 64)),
    "sparseloco@16:overlap_steps=4",
)
FSDP_BASES = (f"{FSDP}/none", f"{FSDP}/all-ranks-none")
"""Whose profiles predict the other rows of their sharding."""
FSDP_ROWS = tuple(f"{FSDP}/{name}" for name in ("bf16", "int8", "int4", ALL, ALL_INT8))
JsonRow = dict[str, Any]
Place = tuple[str, float]  # row, link

LOCAL = "local"
SUBJECTS: dict[str, tuple[Any, ...]] = {
    "codecs": ((DDP_ROW,), CODEC_ROWS, (200.0, 500.0, 1000.0), 64),
    LOCAL: (BASELINES, LOCAL_ROWS, (1000.0, 200.0, 50.0, 10.0), 8),
    FSDP: (FSDP_BASES, FSDP_ROWS, (1000.0, 200.0, 50.0), 16),
}
"""Rows that are always there; and by default: other rows, links, samples of a rank and step."""
_CALIBRATION = {
    "codecs": {"units": 24, "fused": True},
    LOCAL: {"units": 6, "fused": False},
    FSDP: {"units": 6, "fused": True},
}
"""Units of a megabyte: about what the gradients take; compiled as in the rows."""
SCALE = tuple(2**power for power in range(1, 11))
_TURN_STEPS = 16
"""Of a turn, or a window if that is longer; fewer where they take too long."""
_TURN_S = 2.0
_LEAST_TURNS, _MOST_TURNS = 2, 4


def run(
    *,
    subject: str,
    model: str,
    rows: Sequence[str],
    profiles: Mapping[str, str],
    codecs: Sequence[str],
    seconds: float,
    steps: int,
    batch: int,
    seed: int,
) -> Iterator[dict[str, Any]]:
    """One rank: costs of codecs, where all ranks use them at once, profiles, and timed turns.

    Args:
        model: name of a task.
        rows: that are timed in turn.
        profiles: the folder of the profile of every other row.
        codecs: whose costs are found.
        seconds: of a row, after which it takes no further turn.
        steps: of a profile.
    """
    torch.set_num_threads(1)
    place = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    settings = DEMO_GPT if model == "gpt" else {}
    task = make_task(model, {**settings, "batch": batch * place["world_size"]}, **place)
    common = Settings(jobs=(), seeds=(seed,), tasks={}, compile_kernels=True)

    def make(name: str) -> Training:
        if place["rank"] == 0:
            print(f"  {name}", flush=True)  # where a set-up fails, this is the row
        # Groups of a form in levels are its own.
        groups = new_groups(dist.group.WORLD, timeout=TIMEOUT) if subject == LOCAL else None
        training = Training(task, name, seed=seed, settings=common, groups=groups)
        # A first exchange, in which buffers are made, up to where nothing is under way; DDP puts
        # its buckets in another order after the first.
        updates = training.row.updates
        local = updates and updates.settings
        first = 1 if subject == FSDP else 3
        training.steps(local.sync_every + local.overlap_steps if local else first)
        return training

    dist.barrier()
    if codecs:
        costs = calibrate(codecs, **_CALIBRATION[subject])
        yield {"costs": {name: asdict(cost) for name, cost in costs.items()}}
    _profile({name: make(name) for name in profiles}, profiles, steps)
    made = {name: make(name) for name in rows}
    yield from _turns(made, seconds=seconds)
    for name, training in made.items():
        settings = training.row.updates and training.row.updates.settings
        names = ("sync_every", "fragments", "overlap_steps") if settings else ()
        local = {each: getattr(settings, each) for each in names}
        yield {"row": name, "identical": training.end()["identical"], "local": local}


def _profile(made: Mapping[str, Training], folders: Mapping[str, str], steps: int) -> None:
    """Rows in turn step by step, so that what else the machine does is the same for all."""
    settings = ProfileSessionSettings(max_overhead=1.0)
    profiles = {
        name: ProfileRun(model, parent=folders[name], settings=settings, predict=False)
        for name, each in made.items()
        if (model := as_ddp(each.row.model)) is not None
    }
    for number in range(steps if made else 0):
        for name in rotated(made, number):
            dist.barrier()
            profiles[name].exclude_interval()  # the turns of others are no part of it
            made[name].step()
            profiles[name].exclude_interval()
    for name, profile in profiles.items():
        profile.close("finished", together=True)
        made[name].row.close()


def _turns(made: Mapping[str, Training], *, seconds: float) -> Iterator[dict[str, Any]]:
    """Rows in turn, another one first in every round, until each has had its time."""
    used = dict.fromkeys(made, 0.0)
    step_s: dict[str, float] = {}
    for number in range(_MOST_TURNS if made else 0):
        for name in rotated(made, number):
            window, windows = made[name].row.name.local.get("sync_every", 1), 1
            if name in step_s:
                affordable = int(_TURN_S / (window * step_s[name]))
                windows = max(1, min(affordable, _TURN_STEPS // window))
            steps = window * windows
            if number >= _LEAST_TURNS and used[name] + steps * step_s[name] > seconds:
                continue
            elapsed, tx_bytes = timed(partial(made[name].steps, steps))
            used[name] += elapsed
            step_s[name] = elapsed / steps
            found = {"step_s": step_s[name], "wire_bytes": tx_bytes / steps}
            yield {"row": name, "steps": steps, **found}


@dataclass(frozen=True)
class Measured:
    """Profiles by row and link, costs of codecs, results of rank 0 by link."""

    profiles: dict[Place, Observed] = field(default_factory=dict)
    costs: dict[str, CodecCost] = field(default_factory=dict)
    results: dict[float, list[dict[str, Any]]] = field(default_factory=dict)


def measure(given: argparse.Namespace, record: Record) -> Measured:
    """Measure one link after the other; of local steps keep the rows of the JSON after each."""
    found, layout, is_local = Measured(), Layout.parse(given.layout), given.subject == LOCAL
    # Hosts on one machine share its cores, which they do not know.
    cores = len(os.sched_getaffinity(0))
    shared = {
        "one_core": cores < 2 * layout.world_size,
        "crowded": max(1.0, layout.world_size / cores),
    }
    names = [RowName.parse(row) for row in given.row]
    codecs = {"none"}
    for each in names:
        if each.local or not (is_local or each.is_torch):
            codecs |= {each.codec, each.parameters or "none"}
    bases = {LOCAL: (DDP_ROW,), FSDP: FSDP_BASES}
    # FSDP pauses between collectives: links would pass a part of each at once.
    burst = {"burst_s": 0.001} if given.subject == FSDP else {}
    with (
        tempfile.TemporaryDirectory() as directory,
        Testbed(layout.hosts, link_mbit=given.link[0], **burst) as testbed,
    ):
        for link in given.link:
            say(f"link: {of_link(link)}")
            testbed.set_link(link)
            profiled = bases.get(given.subject, given.row)
            if link != given.base and given.subject in bases:
                profiled = ()
            profiles = {row: f"{directory}/{link:g}/row{n}" for n, row in enumerate(profiled)}
            (results, *_) = testbed.run(
                run,
                ranks_per_host=layout.counts,
                timeout_s=given.timeout,
                subject=given.subject,
                model=given.model,
                rows=given.row if given.subject in bases else [],
                profiles=profiles,
                codecs=sorted(codecs) if link == given.base else [],
                seconds=given.seconds,
                steps=given.steps,
                batch=given.batch,
                seed=given.seed,
            )
            if link == given.base:
                costs = results.pop(0)["costs"]
                found.costs.update({name: CodecCost(**cost) for name, cost in costs.items()})
            found.results[link] = results
            for row, folder in profiles.items():
                observed = observe(read_run(Path(folder) / "run-0"))
                found.profiles[row, link] = replace(observed, **shared)
            if is_local:
                record.rows = local_rows(found, base=given.base)
                record.write()
    return found


def predicted(
    profile: Observed,
    row: str,
    *,
    at: float,
    costs: Mapping[str, CodecCost],
    local: Mapping[str, int] | None = None,
    **there: Any,
) -> Prediction:
    """A row elsewhere, from a profile.

    Args:
        at: rate of the link, as a multiple of the profile's. At the profile's own the measured one
            counts; at another, what was lost of the profile's is lost too.
        local: schedule of local steps, if any.
        there: other arguments of ``elsewhere``.
    """
    run, name = profile.scenario, RowName.parse(row)
    scenario = elsewhere(run, link_gbps=None if at == 1 else run.link.gbps * at, **there)
    scenarios = [replace(scenario, codec=name.codec, form=name.form or FLAT)]
    if run.form == ALL_RANKS:
        pair = {"codec": name.codec, "parameters": name.parameters}
        if name.is_torch:
            pair = {"codec": DDP, "parameters": ""}
        scenarios = [replace(scenario, **pair)]
    if local:
        every, more = [local["sync_every"]], {k: local[k] for k in ("fragments", "overlap_steps")}
        scenarios = local_scenarios(
            profile, scenario, costs=costs, codecs=[name.codec], sync_every=every, **more
        )
    (found,) = predict(profile, scenarios, costs=costs).scenarios
    return found


def local_rows(found: Measured, *, base: float) -> list[JsonRow]:
    """A row of the JSON for each row on each link."""
    profile, rows = found.profiles.get((DDP_ROW, base)), []
    for link, results in found.results.items():
        ends = {each["row"]: each for each in results if "identical" in each}
        turns = {row: [e for e in results if e["row"] == row and "step_s" in e] for row in ends}
        steps_ms = {row: 1e3 * median(e["step_s"] for e in own) for row, own in turns.items()}
        for row, own in turns.items():
            predicted_ms, local = None, ends[row]["local"]
            if local and profile is not None:
                at, costs = link / base, found.costs
                predicted_ms = predicted(profile, row, local=local, at=at, costs=costs).step_ms
            rows.append(
                {
                    "row": row,
                    "link_mbit": link,
                    "step_ms": steps_ms[row],
                    "turns": len(own),
                    "steps": sum(each["steps"] for each in own),
                    "share": steps_ms[COMPUTE_ROW] / steps_ms[row],
                    "wire_bytes": median(each["wire_bytes"] for each in own),
                    "predicted_ms": predicted_ms,
                    "ratio": predicted_ms and steps_ms[row] / predicted_ms,
                    # Without communication replicas do not learn together.
                    "replicas_identical": None if row == COMPUTE_ROW else ends[row]["identical"],
                }
            )
    return rows


def fsdp_rows(found: Measured, *, base: float) -> tuple[list[JsonRow], dict[str, Any]]:
    """A row for each row on each link, and what the meta data say of them."""
    rows = []
    for link, results in found.results.items():
        for row in dict.fromkeys(each["row"] for each in results):
            own = [each for each in results if each["row"] == row and "step_s" in each]
            family = FSDP_BASES[RowName.parse(row).all_ranks]
            profile = found.profiles[family, base]
            prediction = predicted(profile, row, at=link / base, costs=found.costs)
            step_s = median(each["step_s"] for each in own)
            rows.append(
                {
                    **_pair((row, link), step_s, prediction, base=(family, base)),
                    "setting": row.removeprefix(f"{FSDP}/"),
                    "turns": len(own),
                    "steps": sum(each["steps"] for each in own),
                    "wire_mb": median(each["wire_bytes"] for each in own) / 1e6,
                    "predicted_mb": prediction.sent_mb,
                }
            )
    return rows, {"errors": _error_sizes(rows)}


def _pair(at: Place, step_s: float, prediction: Prediction, *, base: Place) -> JsonRow:
    """What was measured, beside the prediction from the profile of ``base``."""
    (row, link), measured, step_ms = at, 1e3 * step_s, prediction.step_ms
    return {
        "kind": "pair",
        "setting": row,
        "link_mbit": link,
        "measured_ms": measured,
        "predicted_ms": step_ms,
        "relative_error": None if step_ms is None else step_ms / measured - 1,
        "is_base": at == base,
        "reason": prediction.reason,
    }


def _error_sizes(pairs: Sequence[JsonRow]) -> dict[str, float]:
    """Median and largest of the errors elsewhere, without signs, and how many there are."""
    errors = [pair["relative_error"] for pair in pairs if not pair["is_base"]]
    sizes = [abs(error) for error in errors if error is not None] or [0.0]
    return {"rows": len(sizes), "median": median(sizes), "largest": max(sizes)}


def compare(profiles: Mapping[Place, Observed], base: Place, **known: Any) -> list[JsonRow]:
    """Predictions from one profile beside what was measured."""
    rows = []
    for at, observed in profiles.items():
        prediction = predicted(profiles[base], at[0], at=at[1] / base[1], **known)
        rows.append(_pair(at, observed.step, prediction, base=base))
    return rows


def codec_rows(found: Measured, given: argparse.Namespace) -> tuple[list[JsonRow], dict[str, Any]]:
    """Rows of all pairs of a row and a link, and of more hosts; what the meta data say of them."""
    base = (DDP_ROW, given.base)
    known: dict[str, Any] = {"inside_gbps": given.inside_gbit, "latency_us": given.latency_us}
    known["costs"] = found.costs
    rows = compare(found.profiles, base, **known)
    together = [pair for at in found.profiles for pair in compare(found.profiles, at, **known)]
    meta = {
        "errors": _error_sizes(rows),
        "errors_from_any": _error_sizes(together),
        "base": {"setting": DDP_ROW, "link_mbit": given.base},
    }
    for hosts, row in itertools.product(SCALE, given.row):
        each = predicted(found.profiles[base], row, at=1, nodes=hosts, **known)
        scaled = {name: getattr(each, name) for name in ("codec", "form", "step_ms")}
        rows.append({"kind": "scaling", "hosts": hosts, **scaled})
    return rows, meta


def parse_arguments() -> argparse.Namespace:
    """The command line, with what depends on the subject filled in."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("subject", choices=SUBJECTS)
    add("--layout", help="hosts x ranks of each (2x1; of fsdp 2x2)")
    add("--model", choices=("linear", "gpt"), help="linear; of local gpt")
    add("--link", type=float, action="append", metavar="MBIT", help="Mbit/s; repeatable")
    add("--row", action="append", help="beside those that are always there; repeatable")
    add("--base", type=float, metavar="MBIT", help="rate of the profile (the second of --link)")
    add("--steps", type=positive, default=12, metavar="N", help="of a profile (%(default)s)")
    add("--seconds", type=float, default=6.0, metavar="S", help="of a timed row (%(default)s)")
    add("--batch", type=positive, metavar="N", help="of each rank (64; of local 8, of fsdp 16)")
    add("--inside-gbit", type=float, metavar="RATE", help="of a rank inside its host")
    add("--latency-us", type=float, metavar="US", help="of a round between hosts")
    add("--timeout", type=float, default=900.0, metavar="S", help="for one rate (%(default)s)")
    add("--seed", type=int, default=0, metavar="N")
    add("--quick", action="store_true", help="two links, few and short steps: does it work?")
    given = parser.parse_args()
    always, rows, links, batch = SUBJECTS[given.subject]
    if given.quick:
        given.link, given.steps, given.seconds = given.link or list(links[:2]), 5, 0.0
        given.model, given.batch = given.model or "gpt", given.batch or 1
    given.link, given.batch = given.link or list(links), given.batch or batch
    given.layout = given.layout or ("2x2" if given.subject == FSDP else "2x1")
    given.model = given.model or ("gpt" if given.subject == LOCAL else "linear")
    given.base = given.base or given.link[min(1, len(given.link) - 1)]
    given.row = list(dict.fromkeys([*always, *(given.row or rows)]))
    if given.base not in given.link:
        parser.error(f"--base must be one of --link, got {given.base:g}")
    require_testbeds(parser, given.link, [given.layout])
    return given


def main() -> None:
    """Measure, predict, show, and write."""
    given = parse_arguments()
    with recording(given, seed=given.seed) as record:
        found = measure(given, record)
        if given.subject == LOCAL:
            record.show(LOCAL_STEPS)
            return
        is_fsdp = given.subject == FSDP
        record.rows, meta = (
            fsdp_rows(found, base=given.base) if is_fsdp else codec_rows(found, given)
        )
        costs = {name: asdict(cost) for name, cost in found.costs.items()}
        record.meta |= {**meta, "costs": costs, "label": LABEL}
        record.show(*((WHATIF_FSDP,) if is_fsdp else (WHATIF_ERRORS, WHATIF_SCALING)))


if __name__ == "__main__":
    main()
