"""Codec costs of a run: measured when its training is over, and kept in ``costs.json``."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from lightning_dist.profiling.run import Run, replace_file
from lightning_dist.reducer.costs import CANDIDATES, CodecCost

if TYPE_CHECKING:  # torch takes seconds, and reading needs none of it
    import torch

    from lightning_dist.profiling.whatif.observe import Observed

NAME = "costs.json"
SCHEMA = 1
MEASURES = "`lightning-dist profile whatif DIR` measures"
"""Remedy where costs are missing."""

LEAST_TRAINING = 30.0
"""Seconds: a shorter one is a trial, and nobody wants to wait at its end."""

LARGEST_SHARE, LONGEST = 0.1, 30.0
"""Share of the training, and seconds, after which measuring begins with no further codec. One that
is compiled takes up to 20 seconds the first time."""


@dataclass(frozen=True)
class Costs:
    """Codec costs by name, and the reason why some or all are missing."""

    by_name: Mapping[str, CodecCost] = field(default_factory=dict)
    reason: str = ""


class _File(msgspec.Struct):
    schema: int
    costs: msgspec.Raw
    reason: str = ""


def write_costs(folder: str | Path, costs: Costs) -> None:
    """Write ``costs.json``.

    Raises:
        OSError: the file cannot be written.
    """
    content = {"schema": SCHEMA, "reason": costs.reason, "costs": list(costs.by_name.values())}
    text = msgspec.json.format(msgspec.json.encode(content), indent=2)
    replace_file(Path(folder) / NAME, text + b"\n")


def read_costs(folder: str | Path) -> Costs:
    """Costs from ``costs.json``; none, and the reason, where it cannot be used."""
    try:
        file = msgspec.json.decode((Path(folder) / NAME).read_bytes(), type=_File)
        if file.schema > SCHEMA:
            return Costs(
                reason=f"{NAME} is of schema {file.schema}, and this version knows {SCHEMA}; "
                "install a newer lightning_dist"
            )
        costs = msgspec.json.decode(file.costs, type=list[CodecCost])
        if not all(map(_is_possible, costs)):
            raise ValueError("a cost of no codec")
    except FileNotFoundError:
        return Costs(reason=f"what codecs cost was not measured; {MEASURES}")
    except OSError as error:
        return Costs(reason=f"{NAME} cannot be read: {error.strerror}; {MEASURES}")
    except (msgspec.MsgspecError, ValueError):
        return Costs(reason=f"{NAME} is damaged; {MEASURES}")
    return Costs({cost.name: cost for cost in costs}, file.reason)


def _is_possible(cost: CodecCost) -> bool:
    is_known = cost.exchange in ("allreduce", "gather", "two_shot")
    return is_known and cost.wire > 0 and min(cost.encode, cost.decode, cost.settle) >= 0


def runs_compiled(observed: Observed, wish: bool | Literal["auto"] = "auto") -> bool:
    """Whether gradients as large as those of a run get compiled kernels on a device like its own.

    Also those that nobody has compressed yet: a codec may be several times faster with them.

    Args:
        wish: ``compile_kernels`` of the run.
    """
    import torch

    from lightning_dist.reducer.fusing import should_fuse

    return should_fuse(wish, numel=round(observed.elements), device=torch.device(observed.device))


def measure_costs(
    run: Run,
    observed: Observed,
    *,
    fused: bool,
    device: torch.device,
    clock: Callable[[], float] = time.monotonic,
) -> Costs:
    """Costs of all candidates, the run's own codec first, or why there are none. Never raises.

    Args:
        fused: compile the kernels first, as :func:`runs_compiled` says.
        device: that has trained.
        clock: seconds.
    """
    from lightning_dist.reducer.calibration import calibrate, to_measure

    trained = seconds_of(run)
    if trained < LEAST_TRAINING:
        return Costs(reason=f"the training was shorter than {LEAST_TRAINING:g} s; {MEASURES}")
    where = f"on {run.ranks[min(run.ranks)].metadata.host} after this run"
    until = clock() + min(LONGEST, LARGEST_SHARE * trained)
    found: dict[str, CodecCost] = {}
    problems = []
    names = to_measure(CANDIDATES, observed.scenario.codec)
    for number, name in enumerate(names):
        if number and clock() > until:
            problems.append(f"no time was left to measure {', '.join(names[number:])}; {MEASURES}")
            break
        try:
            found |= calibrate([name], fused=fused, where=where, device=device)
        except Exception as error:  # a training must not fail by what comes after it
            problems.append(f"measuring {name} failed: {type(error).__name__}: {error}")
    return Costs(found, "; ".join(problems))


def seconds_of(run: Run) -> float:
    """Duration from the first recorded step to the end of the last, on the longest rank."""
    spans = []
    for each in run.ranks.values():
        if each.steps:  # of their heads: no line is read again for it
            first, last = each.head(min(each.steps)), each.head(max(each.steps))
            spans.append(last.begin + last.duration - first.begin)
    return max(spans, default=0) / 1e9
