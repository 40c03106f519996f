"""Codec costs of a run: measured when its training is over, and kept in ``costs.json``."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from lightning_dist.base.shared_folder import replace_file
from lightning_dist.measurement.calibration import CANDIDATES, CodecCost
from lightning_dist.profiling.run import Run

if TYPE_CHECKING:  # torch takes seconds, and reading needs none of it
    import torch

    from lightning_dist.profiling.whatif.observe import Observed

NAME = "costs.json"
LEAST_TRAINING = 30.0
"""Seconds: a shorter one is a trial, and nobody wants to wait at its end."""

LARGEST_SHARE, LONGEST = 0.1, 30.0
"""Share of the training, and seconds, after which measuring begins with no further codec. One that
is compiled takes up to 20 seconds the first time."""


class Status(Enum):
    """Origin of codec costs: the run, whose reason says which are missing; or there are none."""

    MEASURED = "measured"
    NOT_MEASURED = "not measured"
    UNREADABLE = "unreadable"


class Costs(msgspec.Struct, frozen=True):
    """Codec costs by name, and the reason why some or all are missing: ``costs.json``."""

    by_name: dict[str, CodecCost] = msgspec.field(default_factory=dict, name="costs")
    reason: str = ""
    status: Status = Status.MEASURED
    schema: Literal[2] = 2


def write_costs(folder: str | Path, costs: Costs) -> None:
    """Write ``costs.json``."""
    text = msgspec.json.format(msgspec.json.encode(costs), indent=2)
    replace_file(Path(folder) / NAME, text + b"\n")


def read_costs(folder: str | Path) -> Costs:
    """Costs from ``costs.json``; none, and the reason, where it cannot be used."""
    try:
        return msgspec.json.decode((Path(folder) / NAME).read_bytes(), type=Costs)
    except FileNotFoundError:
        return Costs(reason="codec costs were not measured", status=Status.NOT_MEASURED)
    except OSError as error:
        reason = f"{NAME} cannot be read: {error.strerror}"
    except msgspec.MsgspecError:
        reason = f"{NAME} is damaged or of another version"
    return Costs(reason=reason, status=Status.UNREADABLE)


def runs_compiled(observed: Observed, wish: bool | Literal["auto"] = "auto") -> bool:
    """True if gradients as large as those of a run get compiled kernels on a device like its own.

    Args:
        wish: ``compile_kernels`` of the run.
    """
    import torch

    from lightning_dist.kernels.inductor import should_fuse

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
    from lightning_dist.measurement.calibration import calibrate, to_measure

    trained = seconds_of(run)
    if trained < LEAST_TRAINING:
        reason = f"the training was shorter than {LEAST_TRAINING:g} s"
        return Costs(reason=reason, status=Status.NOT_MEASURED)
    where = f"on {run.ranks[min(run.ranks)].metadata.node} after this run"
    until = clock() + min(LONGEST, LARGEST_SHARE * trained)
    found: dict[str, CodecCost] = {}
    problems = []
    of_parameters = filter(None, [observed.scenario.parameters])
    names = to_measure([*CANDIDATES, *of_parameters], observed.scenario.codec)
    for number, name in enumerate(names):
        if number and clock() > until:
            problems.append(f"no time was left to measure {', '.join(names[number:])}")
            break
        try:
            found |= calibrate([name], fused=fused, where=where, device=device)
        except Exception as error:  # a training must not fail by what comes after it
            problems.append(f"measuring {name} failed: {type(error).__name__}: {error}")
    return Costs(found, "; ".join(problems))


def seconds_of(run: Run) -> float:
    """Duration from the first recorded step to the end of the last, on the longest rank."""
    longest = 0
    for each in (each for each in run.ranks.values() if each.steps):
        last = each.head(max(each.steps))
        longest = max(longest, last.begin + last.duration - each.head(min(each.steps)).begin)
    return longest / 1e9
