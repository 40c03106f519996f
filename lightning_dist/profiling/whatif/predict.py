"""Step times of settings that were not run, beside one that was, with the error of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from lightning_dist.profiling.whatif.answer import (
    NO_DIFFERENCE,
    NO_ERROR,
    THIS_RUN,
    Prediction,
    WhatIf,
    is_faster,
)
from lightning_dist.profiling.whatif.buckets import recut
from lightning_dist.profiling.whatif.observe import Observed
from lightning_dist.profiling.whatif.setting import DDP, FLAT, FORMS, Link, Setting, impossible
from lightning_dist.profiling.whatif.simulate import play
from lightning_dist.reducer.costs import CodecCost

LEAST_MARGIN = 0.02
"""Two runs of the same differ by as much, whatever the model says of one of them."""

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
        one_core: a rank has one core for the backward pass and the codec. None: if the run had less
            than two for each; what its own codec took has that in it already.
        bucket_mb: of gradients in a bucket, ``bucket_cap_mb`` of DDP.
    """

    codec: str | None = None
    form: str | None = None
    hosts: int | None = None
    gbps: float | None = None
    was_gbps: float | None = None
    inside_gbps: float | None = None
    latency: float | None = None
    one_core: bool | None = None
    bucket_mb: float | None = None

    @property
    def question(self) -> Wish:
        """What is asked about the run's own setting: other links, latency and hosts."""
        return replace(self, codec=None, form=None, bucket_mb=None)

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
        if self.bucket_mb is not None and not 0 < self.bucket_mb < inf:
            raise ValueError(f"bucket_mb must be above 0 MB, got {self.bucket_mb}")
        if self.was_gbps is not None and self.gbps is None:
            raise ValueError(
                f"was_gbps={self.was_gbps} says of the run's link what another one is compared "
                "with; give gbps too, or leave it out"
            )
        if self.latency is not None and self.latency < 0:
            raise ValueError(f"latency must not be negative, got {self.latency} s")


def predict(
    observed: Observed, wishes: Sequence[Wish], *, costs: Mapping[str, CodecCost]
) -> WhatIf:
    """Play the run itself, and then what is wished."""
    known = {**costs, **_of_this_run(observed, costs)}
    current, error = _play(observed, observed.setting, known), None
    if current.step_ms is not None:
        error = current.step_ms / (observed.step * MS) - 1
    margin = None if error is None else max(abs(error), LEAST_MARGIN)
    of_question: dict[Wish, list[Wish]] = {}
    for wish in wishes:  # whether a codec has a core is no other question
        of_question.setdefault(replace(wish.question, one_core=None), []).append(wish)
    others: list[Prediction] = []
    for alike in of_question.values():
        own, *played = (
            _play(observed, _wished(observed, wish), known, wish)
            for wish in (alike[0].question, *alike)
        )
        others += _placed(played, own, margin)
    return WhatIf(
        measured_ms=observed.step * MS,
        current=current,
        error=error,
        margin=margin,
        others=[each for each in others if each.step_ms is not None]
        + [each for each in others if each.step_ms is None],
        link={
            "gbps": observed.setting.link.gbps,
            "inside_gbps": None
            if observed.setting.inside is None
            else observed.setting.inside.gbps,
            "latency_us": _us(observed.setting.link.latency),
        },
        reasons=_reasons(observed, wishes),
        against=_against(current, wishes),
    )


def why_not(observed: Observed, wish: Wish) -> str:
    """Why nothing can be told of it, whatever codecs cost; empty if something can."""
    return _untellable(observed, _wished(observed, wish))


def _against(current: Prediction, wishes: Sequence[Wish]) -> str:
    if all(wish.question == Wish() for wish in wishes):
        return THIS_RUN
    return f"{current.codec} {current.form}, as in this run, with the same link and hosts"


def _reasons(observed: Observed, wishes: Sequence[Wish]) -> Mapping[str, str]:
    asks = any(wish.hosts is not None and wish.latency is None for wish in wishes)
    if observed.setting.hosts > 1 or not asks:
        return observed.reasons
    reason = "the run was on one host; rounds between hosts count nothing without --latency-us"
    return {**observed.reasons, "latency": reason}


def _of_this_run(observed: Observed, costs: Mapping[str, CodecCost]) -> dict[str, CodecCost]:
    """The cost of the run's own codec, as the run has it."""
    setting = observed.setting
    cost = costs.get(setting.codec)
    if cost is None or impossible(setting):
        return {}
    calibrated = play(observed.buckets, setting, cost=cost, plain=costs.get("none"))
    cost = replace(cost, wire=cost.wire * observed.sent / calibrated.sent, assumes="")
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
        share = 1.0 if wish.was_gbps is None else link.gbps / wish.was_gbps
        link = replace(link, rate=Link.of_gbps(wish.gbps).rate * share)
    if wish.latency is not None:
        link = replace(link, latency=wish.latency)
    elif setting.hosts == 1 and wish.hosts is not None:
        link = replace(link, latency=None)  # that of one host says nothing of what is between them
    inside = setting.inside
    if wish.inside_gbps is not None:
        inside = Link.of_gbps(wish.inside_gbps)
    return replace(
        setting,
        codec=setting.codec if wish.codec is None else wish.codec,
        form=setting.form if wish.form is None else wish.form,
        counts=counts,
        link=link,
        inside=inside,
    )


def _play(
    observed: Observed,
    setting: Setting,
    costs: Mapping[str, CodecCost],
    wish: Wish | None = None,
) -> Prediction:
    bucket_mb = None if wish is None else wish.bucket_mb
    about = Prediction(
        setting.codec,
        setting.form,
        setting.hosts,
        setting.world_size,
        setting.link.gbps,
        bucket_mb=bucket_mb,
    )
    cost = costs.get(setting.codec)
    if reason := _unknown(observed, setting, costs):
        return replace(about, reason=reason)
    buckets = observed.buckets
    if bucket_mb is not None:
        buckets = recut(buckets, bucket_mb, begin=observed.begin)
    one_core = _shares_core(observed, setting, wish)
    played = play(buckets, setting, cost=cost, plain=costs.get("none"), one_core=one_core)
    last = max(bucket.ready for bucket in buckets)
    done = max(played.done, last)
    return replace(
        about,
        step_ms=(done + observed.tail) * MS,
        exposed_ms=(done - last) * MS,
        sent_mb=played.sent / 1e6,
        source="" if cost is None else cost.source,
        assumes="" if cost is None else cost.assumes,
    )


def _shares_core(observed: Observed, setting: Setting, wish: Wish | None) -> bool:
    """Whether the codec of ``setting`` has to be played on the core of the backward pass."""
    if wish is not None and wish.one_core is not None:
        return wish.one_core
    return observed.one_core and setting.codec != observed.setting.codec


def _unknown(observed: Observed, setting: Setting, costs: Mapping[str, CodecCost]) -> str:
    """Why nothing can be told of a setting; empty if something can."""
    if setting.codec != DDP and setting.codec not in costs:
        return f"what {setting.codec} costs was not measured"
    if setting.form != FLAT and "none" not in costs:
        return "what a copy costs was not measured"
    return _untellable(observed, setting)


def _untellable(observed: Observed, setting: Setting) -> str:
    """The same, whatever codecs cost."""
    is_of_run = setting.link.rate == observed.setting.link.rate
    if observed.setting.hosts == 1 and setting.hosts > 1 and is_of_run:
        return "the run was on one host; give the rate of a link between hosts with --bandwidth"
    return impossible(setting)


def _placed(
    played: Sequence[Prediction], own: Prediction, margin: float | None
) -> list[Prediction]:
    """The best first. One that is within the margin of the one before it shares its place.

    Of those that share one, :func:`_least_lost` is first. What is only true of some models has no
    place, and comes after all that have.

    Args:
        own: the setting of the run, with the same link and hosts.
    """
    told = sorted(
        (each for each in played if each.step_ms is not None), key=lambda each: each.step_ms or 0.0
    )
    untold = [each for each in played if each.step_ms is None]
    if margin is None or own.step_ms is None:
        return [*(replace(each, verdict=NO_ERROR) for each in told), *untold]
    found: list[Prediction] = []
    for each in told:
        change = (each.step_ms or 0.0) / own.step_ms - 1
        verdict = NO_DIFFERENCE if abs(change) <= margin else ""
        found.append(replace(each, change=change, verdict=verdict))
    groups: list[list[Prediction]] = []
    for each in found:
        if each.assumes:
            continue
        if groups and (each.step_ms or 0.0) <= (groups[-1][-1].step_ms or 0.0) * (1 + margin):
            groups[-1].append(each)
        else:
            groups.append([each])
    place, placed = 1, list[Prediction]()
    for group in groups:
        placed += [replace(each, place=place) for each in _least_lost(group, margin)]
        place += len(group)
    return [*placed, *(each for each in found if each.assumes), *untold]


def _least_lost(alike: Sequence[Prediction], margin: float) -> list[Prediction]:
    """Those that cannot be told from the fastest, by what they send: more bytes lose less.

    First come those that are faster than the run's own setting by more than that, if there are
    any; what is further from the fastest follows in the order of time.
    """
    most = (alike[0].step_ms or 0.0) * (1 + margin)
    near = [each for each in alike if (each.step_ms or 0.0) <= most]
    near.sort(key=lambda each: (not is_faster(each), -(each.sent_mb or 0.0)))
    return [*near, *alike[len(near) :]]


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1e6
