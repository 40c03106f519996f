"""``lightning-dist profile whatif``: what a run would take with other settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import typer

from lightning_dist.cli.errors import reported
from lightning_dist.profiling.folder import read_run
from lightning_dist.profiling.report.summary_file import to_json
from lightning_dist.profiling.whatif.setting import DDP

_UNITS = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]bit)(?:/s|ps)?", re.IGNORECASE)


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
        list[int] | None,
        typer.Option(metavar="N", help="So many, each as large as the largest; repeatable."),
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
    one_core: Annotated[
        bool, typer.Option("--one-core", help="A rank has no core for the codec alone.")
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option(
            "--compiled", help="Codecs as large models run them; takes half a minute to measure."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Predict the step time with other codecs, links and numbers of hosts.

    Plays the buckets of the profile anew, with the rates that the run itself had and with what
    codecs cost on this machine, which is measured now. The same is said of the run as it was:
    settings that are closer than the error of that are not told apart.
    """
    # Codecs are measured, for which torch is loaded: not before it is needed.
    from lightning_dist.cli.profile_whatif_table import print_whatif
    from lightning_dist.profiling.whatif.candidates import candidates, scaled
    from lightning_dist.profiling.whatif.observe import observe
    from lightning_dist.profiling.whatif.predict import Wish, predict
    from lightning_dist.reducer.calibration import CANDIDATES, calibrate

    observed = observe(read_run(folder))
    like = Wish(
        gbps=None if bandwidth is None else gbps_of(bandwidth, option="--bandwidth"),
        was_gbps=None if was is None else gbps_of(was, option="--was"),
        inside_gbps=None if inside is None else gbps_of(inside, option="--inside"),
        latency=None if latency_us is None else latency_us / 1e6,
        one_core=one_core,
    )
    names = tuple(codec or (DDP, *CANDIDATES))
    costs = calibrate(_to_measure(names, observed.setting.codec), fused=compiled)
    only = [name for name in names if name != DDP]
    wishes = candidates(observed, only, like=like, forms=form, ddp=DDP in names)
    if hosts:
        wishes = scaled(wishes, hosts)
    found = predict(observed, wishes, costs=costs)
    if as_json:
        typer.echo(to_json(found.as_dict()))
    else:
        print_whatif(found)


def gbps_of(text: str, *, option: str) -> float:
    """``"100mbit"`` in Gbit/s.

    Raises:
        ValueError: it is no rate.
    """
    if (match := _RATE.fullmatch(text.strip())) is None or not float(match[1]):
        raise ValueError(
            f"{option} must be a rate above 0 with kbit, mbit or gbit, like 100mbit; got {text!r}"
        )
    return float(match[1]) * _UNITS[match[2].lower()]


def _to_measure(names: Sequence[str], current: str) -> list[str]:
    """Of the run's own codec too, and of a copy, where this version knows them."""
    from lightning_dist.codecs import CODECS

    own = [current] if current in CODECS else []
    return [name for name in dict.fromkeys(["none", *own, *names]) if name != DDP]
