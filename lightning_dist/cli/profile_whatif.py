"""``lightning-dist profile whatif``: what a run would take with other settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_dist.cli.errors import reported
from lightning_dist.profiling.report.summary_file import to_json
from lightning_dist.profiling.run import read_run, run_folder
from lightning_dist.profiling.whatif.setting import DDP

if TYPE_CHECKING:
    from lightning_dist.profiling.whatif.costs_file import Costs
    from lightning_dist.reducer.costs import CodecCost

_PREFIXES = {"k": 1e-6, "m": 1e-3, "g": 1.0}
_MOST_OF_A_LINK = 1.25
"""Bursts are let through faster than a link is called."""
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg])(bits?|bytes?|b)(/s|/sec|ps)?", re.IGNORECASE)


@reported
def whatif_command(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="What CommProfiler has written.")],
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of a host's link, like 100mbit or 10gbit.")
    ] = None,
    was: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of that link in the run: as much is lost of the other."),
    ] = None,
    hosts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N", help="So many, each as large as the largest; 2,8,64 or repeated."
        ),
    ] = None,
    codec: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Only this one, or ddp; with options; repeatable."),
    ] = None,
    form: Annotated[
        list[str] | None, typer.Option(metavar="FORM", help="flat, sharded, leader; repeatable.")
    ] = None,
    inside: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of a rank inside its host.")
    ] = None,
    latency_us: Annotated[
        float | None, typer.Option(metavar="US", help="Of a round between hosts.")
    ] = None,
    bucket_mb: Annotated[
        list[float] | None,
        typer.Option(metavar="MB", help="Of gradients in a bucket, bucket_cap_mb; repeatable."),
    ] = None,
    one_core: Annotated[
        bool | None,
        typer.Option(
            "--one-core/--own-core",
            help="A rank has no core for the codec alone, or has. Otherwise as in the run.",
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="What codecs cost here, even if the run has measured it."),
    ] = False,
    compiled: Annotated[
        bool | None,
        typer.Option(
            help="Measure codecs with compiled kernels, which takes half a minute, or without. "
            "Otherwise as gradients of this size have them."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Predict the step time with other codecs, buckets, links and numbers of hosts.

    Plays the buckets of the profile anew, with the rates that the run itself had and with what
    codecs cost: as measured at the end of the run where that was done (costs.json), otherwise on
    this machine now. The same is said of the run as it was: settings that are closer than the
    error of that are not told apart. `change` is against the run's own setting, with the same
    link and hosts where you ask about others.

    \b
      lightning-dist profile whatif comm_profile/run-0
      lightning-dist profile whatif comm_profile/run-0 --codec int4 --codec powersgd:rank=8
      lightning-dist profile whatif comm_profile/run-0 --bandwidth 10gbit --hosts 8
      lightning-dist profile whatif comm_profile/run-0 --codec ddp --codec int4 \\
        --bandwidth 10gbit --hosts 2,16,128,1024
    """
    # Codecs are measured, for which torch is loaded: not before it is needed.
    from lightning_dist.cli.profile_whatif_table import print_whatif
    from lightning_dist.profiling.whatif.candidates import (
        candidates,
        in_buckets,
        other_buckets,
        scaled,
        with_own,
    )
    from lightning_dist.profiling.whatif.measure import runs_compiled
    from lightning_dist.profiling.whatif.observe import observe
    from lightning_dist.profiling.whatif.predict import Wish, predict, why_not
    from lightning_dist.reducer.costs import CANDIDATES

    if was is not None and bandwidth is None:
        raise ValueError(
            f"--was {was} is the rate of the run's own link, beside which --bandwidth is another; "
            "give --bandwidth too, or leave --was out"
        )
    if latency_us is not None and not 0 <= latency_us < inf:
        raise ValueError(f"--latency-us must be 0 µs or more, got {latency_us:g}")
    folder = str(run_folder(folder))
    observed = observe(read_run(folder))
    like = Wish(
        gbps=None if bandwidth is None else gbps_of(bandwidth, option="--bandwidth"),
        was_gbps=None if was is None else gbps_of(was, option="--was"),
        inside_gbps=None if inside is None else gbps_of(inside, option="--inside"),
        latency=None if latency_us is None else latency_us / 1e6,
        one_core=one_core,
    )
    moved = observed.setting.link.gbps
    if like.was_gbps is not None and moved > _MOST_OF_A_LINK * like.was_gbps:
        raise ValueError(
            f"--was {was} is less than the {moved:.3g} Gbit/s that the run had of that link; give "
            "the rate that its link is called, or leave --was out"
        )
    names = tuple(codec or (DDP, *CANDIDATES))
    only = [name for name in names if name != DDP]
    own = observed.setting.codec
    with _named_as_options():
        wishes = candidates(observed, only, like=like, forms=form, ddp=DDP in names)
        if bucket_mb:
            wishes = in_buckets(wishes, bucket_mb)
        elif not (codec or form or hosts):
            wishes += other_buckets(observed, like=like)
        if hosts:
            wishes = scaled(wishes, hosts_of(hosts))
        reasons = [why_not(observed, wish) for wish in wishes]
        if all(reasons):  # none, too: ddp in another form
            because = "; ".join(dict.fromkeys(reasons)) or "DDP itself knows no hosts"
            raise ValueError(f"nothing of this can be predicted: {because}")
        costs = _costs(
            folder,
            names,
            own,
            anew=measure or compiled is not None,
            fused=runs_compiled(observed) if compiled is None else compiled,
            device=observed.device,
        )
    found = predict(observed, with_own(observed, wishes), costs=costs)
    if as_json:
        typer.echo(to_json(found.as_dict()))
    else:
        print_whatif(found)


def gbps_of(text: str, *, option: str) -> float:
    """``"100mbit"`` in Gbit/s.

    As networks spell it: ``b`` is a bit, ``B`` a byte; nothing else depends on the case.

    Raises:
        ValueError: it is no rate, or one that is read both ways.
    """
    if (match := _RATE.fullmatch(text.strip())) is None or not float(match[1]):
        raise ValueError(
            f"{option} must be a rate above 0 in bits, like 100mbit or 10gbit, or in bytes, like "
            f"1.25GB/s; got {text!r}"
        )
    number, prefix, unit, per = match.groups()
    if unit == "B" and per == "PS":
        raise ValueError(
            f"{option}={text!r} may be of bits or of bytes; write {number}{prefix.lower()}bit or "
            f"{number}{prefix.upper()}B/s"
        )
    bits = 8 if unit == "B" or unit.lower().startswith("byte") else 1
    return float(number) * _PREFIXES[prefix.lower()] * bits


def hosts_of(texts: Sequence[str]) -> list[int]:
    """``["2,8", "64"]`` as numbers, the smallest first, each once.

    Raises:
        ValueError: one is no number.
    """
    found = set()
    for each in ",".join(texts).split(","):
        if not each.strip().isdecimal():
            raise ValueError(
                f"--hosts must be numbers of hosts, like 8 or 2,8,64; got {each!r}. Each has as "
                "many ranks as the largest host of the run"
            )
        found.add(int(each))
    return sorted(found)


@contextmanager
def _named_as_options() -> Iterator[None]:
    """Mistakes in what options said bear the names of these."""
    names = ("codec", "form", "hosts", "bucket_mb")
    options = {name: f"--{name.replace('_', '-')}" for name in names}
    try:
        yield
    except ValueError as error:
        name, _, rule = str(error).partition(" ")
        raise ValueError(f"{options.get(name, name)} {rule}") from None


def _costs(
    folder: str, names: Sequence[str], own: str, *, anew: bool, fused: bool, device: str
) -> Mapping[str, CodecCost]:
    """As the run has kept them; what it has not is measured here, on a device of the same kind.

    Raises:
        ValueError: there is none here, and it was asked for.
    """
    import torch

    from lightning_dist.profiling.whatif.costs_file import NAME, Costs, read_costs
    from lightning_dist.reducer.calibration import NOT_COMPILED, calibrate, to_measure

    is_here = device == "cpu" or torch.cuda.is_available()
    if anew and not is_here:
        raise ValueError(
            f"--measure and --compiled need a device like that of the run, {device}, and there is "
            "none here; leave them out, or call this where it is"
        )
    read = Costs() if anew else read_costs(folder)
    if not is_here:
        typer.echo(f"no {device} here to measure codecs on: {_kept_only(read)}", err=True)
        return read.by_name
    if read.reason.startswith(NAME):
        typer.echo(f"{read.reason.partition(';')[0]}; measured here instead", err=True)
    # Of kernels that are not compiled only what no compiler makes faster would fit to the others.
    kept = {
        name: cost
        for name, cost in read.by_name.items()
        if not (fused and cost.source.startswith(NOT_COMPILED))
    }
    wanted = to_measure([name for name in names if name != DDP], own)
    missing = [name for name in wanted if name not in kept]
    return {**kept, **calibrate(missing, fused=fused, device=device)}


def _kept_only(read: Costs) -> str:
    if read.by_name:
        return "codecs that the run has not measured are n/a"
    return f"{read.reason.partition(';')[0]}, so all but ddp is n/a"
