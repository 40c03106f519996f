"""Step times of settings that were not run, beside one that was, with the error of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.profiling.whatif.setting import DDP, FLAT, FORMS, Link, Setting, impossible
from lightning_dist.profiling.whatif.simulate import play
from lightning_dist.reducer.costs import CodecCost

SCHEMA = 1

LABEL = "PREDICTION, not measured"

LEAST_MARGIN = 0.02
"""Two runs of the same differ by as much, whatever the model says of one of them."""

NO_DIFFERENCE = "no difference that the model could tell"

NO_ERROR = "the model has no error to be judged by"

MS = 1e3


@dataclass(frozen=True)
class Wish:
    """What is asked of a run. None: as it was.

    Args:
        gbps: of a host's link, headers included.
        was_gbps: what the link of the run was called: what was lost of it there is lost of ``gbps``
            too. None: only headers are.
        hosts: as many, each with the ranks of one of the run.
        inside_gbps: of a rank inside its host.
        latency: seconds of a round between hosts.
        one_core: a rank has one core for the backward pass and the codec.
    """

    codec: str | None = None
    form: str | None = None
    hosts: int | None = None
    gbps: float | None = None
    was_gbps: float | None = None
    inside_gbps: float | None = None
    latency: float | None = None
    one_core: bool = False

    def __post_init__(self) -> None:
        if self.form is not None and self.form not in FORMS:
            raise ValueError(f"form must be one of {', '.join(FORMS)}, got {self.form!r}")
        if self.hosts is not None and self.hosts < 2:
            raise ValueError(
                f"hosts must be 2 or more, got {self.hosts}; on one host nothing is between hosts"
            )
        for name in ("gbps", "was_gbps", "inside_gbps"):
            rate = getattr(self, name)
            if rate is not None and rate <= 0:
                raise ValueError(f"{name} must be above 0 Gbit/s, got {rate}")
        if self.was_gbps is not None and self.gbps is None:
            raise ValueError(
                f"was_gbps={self.was_gbps} says of the run's link what another one is compared "
                "with; give gbps too, or leave it out"
            )
        if self.latency is not None and self.latency < 0:
            raise ValueError(f"latency must not be negative, got {self.latency} s")


@dataclass(frozen=True)
class Prediction:
    """One setting. Milliseconds of a step; a figure that cannot be told is None, see ``reason``.

    Args:
        gbps: of the link between hosts, headers included.
        exposed_ms: from the last gradient to the mean of all.
        sent_mb: over the link of a host.
        change: of the step against the prediction for the run itself, -0.5: half as long.
        place: 1 for the best; those that the model cannot tell apart share one.
        verdict: in words; empty where ``change`` says it.
        source: where the cost of the codec is from.
        assumes: what has to be so.
    """

    codec: str
    form: str
    hosts: int
    world_size: int
    gbps: float
    step_ms: float | None = None
    exposed_ms: float | None = None
    sent_mb: float | None = None
    change: float | None = None
    place: int | None = None
    verdict: str = ""
    source: str = ""
    assumes: str = ""
    reason: str = ""


@dataclass(frozen=True)
class WhatIf:
    """What can be said of a run and of others like it.

    Args:
        measured_ms: median step of the run.
        current: the model's word on that very run.
        error: of it against ``measured_ms``, -0.1: a tenth too short; None: no prediction.
        margin: share of a step within which nothing is ranked.
        others: the best first, then those of which nothing can be told.
        link: what was measured of the links.
        reasons: by name, what is not known, and why.
    """

    measured_ms: float
    current: Prediction
    error: float | None
    margin: float | None
    others: Sequence[Prediction]
    link: Mapping[str, float | None]
    reasons: Mapping[str, str] = field(default_factory=dict)
    label: str = LABEL

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"schema": SCHEMA, **asdict(self)}


def predict(
    observed: Observed, wishes: Sequence[Wish], *, costs: Mapping[str, CodecCost]
) -> WhatIf:
    """Play the run itself, and then what is wished."""
    known = {**costs, **_of_this_run(observed, costs)}
    current, error = _play(observed, observed.setting, known), None
    if current.step_ms is not None:
        error = current.step_ms / (observed.step * MS) - 1
    margin = None if error is None else max(abs(error), LEAST_MARGIN)
    played = [
        _play(observed, _wished(observed, wish), known, one_core=wish.one_core) for wish in wishes
    ]
    return WhatIf(
        measured_ms=observed.step * MS,
        current=current,
        error=error,
        margin=margin,
        others=_placed(played, current, margin),
        link={
            "gbps": observed.setting.link.gbps,
            "inside_gbps": None
            if observed.setting.inside is None
            else observed.setting.inside.gbps,
            "latency_us": _us(observed.setting.link.latency),
        },
        reasons=observed.reasons,
    )


def _of_this_run(observed: Observed, costs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """The cost of the run's own codec, as the run has it."""
    setting = observed.setting
    cost = costs.get(setting.codec)
    if cost is None or impossible(setting):
        return {}
    calibrated = play(observed.buckets, setting, cost=cost, plain=costs.get("none"))
    cost = replace(cost, wire=cost.wire * observed.sent / calibrated.sent)
    if setting.form != FLAT or observed.encode is None or observed.decode is None:
        return {cost.name: cost}  # what it does inside a host is in its times
    encode = observed.encode / observed.elements
    payloads, reduced = 1, 0.0
    if cost.exchange == "two_shot" and setting.world_size > 2:
        reduced = cost.decode + cost.encode / setting.world_size
    elif cost.exchange != "allreduce":
        payloads = setting.world_size
    expected = cost.decoding(payloads) + reduced
    slower = observed.decode / observed.elements / expected if expected else 1.0
    return {
        cost.name: replace(
            cost,
            encode=encode,
            decode=cost.decode * slower,
            settle=cost.settle * slower,
            source="this run",
        )
    }


def _wished(observed: Observed, wish: Wish) -> Setting:
    setting, link = observed.setting, observed.setting.link
    counts = setting.counts
    if wish.hosts is not None:
        counts = [max(counts)] * wish.hosts
    if wish.gbps is not None:
        whole = Link.of_gbps(wish.gbps, link.latency)
        share = 1.0 if wish.was_gbps is None else link.gbps / wish.was_gbps
        link = replace(whole, rate=whole.rate * share)
    if wish.latency is not None:
        link = replace(link, latency=wish.latency)
    inside = setting.inside
    if wish.inside_gbps is not None:
        inside = Link.of_gbps(wish.inside_gbps)
    return Setting(
        setting.codec if wish.codec is None else wish.codec,
        setting.form if wish.form is None else wish.form,
        counts,
        link,
        inside,
    )


def _play(
    observed: Observed,
    setting: Setting,
    costs: Mapping[str, CodecCost],
    *,
    one_core: bool = False,
) -> Prediction:
    about = Prediction(
        setting.codec, setting.form, setting.hosts, setting.world_size, setting.link.gbps
    )
    cost = costs.get(setting.codec)
    if reason := _unknown(observed, setting, costs):
        return replace(about, reason=reason)
    plain = costs.get("none")
    played = play(observed.buckets, setting, cost=cost, plain=plain, one_core=one_core)
    last = max(bucket.ready for bucket in observed.buckets)
    done = max(played.done, last)
    return replace(
        about,
        step_ms=(done + observed.tail) * MS,
        exposed_ms=(done - last) * MS,
        sent_mb=played.sent / 1e6,
        source="" if cost is None else cost.source,
        assumes="" if cost is None else cost.assumes,
    )


def _unknown(observed: Observed, setting: Setting, costs: Mapping[str, CodecCost]) -> str:
    """Why nothing can be told of a setting; empty if something can."""
    if setting.codec != DDP and setting.codec not in costs:
        return f"what {setting.codec} costs was not measured"
    if setting.form != FLAT and "none" not in costs:
        return "what a copy costs was not measured"
    if observed.setting.hosts == 1 and setting.hosts > 1:
        same = setting.link.rate == observed.setting.link.rate
        if same:
            return "the run was on one host; give the rate of a link between hosts"
    return impossible(setting)


def _placed(
    played: Sequence[Prediction], current: Prediction, margin: float | None
) -> list[Prediction]:
    """The best first. One that is within the margin of the one before it shares its place."""
    told = [(each.step_ms, each) for each in played if each.step_ms is not None]
    found: list[Prediction] = []
    before, place = None, 1
    for number, (step_ms, each) in enumerate(sorted(told, key=lambda of: of[0]), start=1):
        if margin is None or current.step_ms is None:
            found.append(replace(each, verdict=NO_ERROR))
            continue
        if before is not None and step_ms > before * (1 + margin):
            place = number
        before, change = step_ms, step_ms / current.step_ms - 1
        verdict = NO_DIFFERENCE if abs(change) <= margin else ""
        found.append(replace(each, change=change, place=place, verdict=verdict))
    return [*found, *(each for each in played if each.step_ms is None)]


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
