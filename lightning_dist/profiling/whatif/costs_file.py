"""``costs.json``: what codecs cost on the machine that has trained, beside the lines of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import isfinite
from pathlib import Path
from typing import Any

from lightning_dist.profiling.report.files import replace_file
from lightning_dist.reducer.costs import CodecCost

NAME = "costs.json"

SCHEMA = 1

MEASURES = "`lightning-dist profile whatif DIR` measures"
"""How to come by what is missing."""

_EXCHANGES = ("allreduce", "gather", "two_shot")
_AMOUNTS = ("wire", "encode", "decode", "settle")
_TEXTS = ("name", "exchange", "source", "assumes")


@dataclass(frozen=True)
class Costs:
    """Of codecs, by name.

    Args:
        reason: why some are missing, or all of them.
    """

    by_name: Mapping[str, CodecCost] = field(default_factory=dict)
    reason: str = ""


def write_costs(folder: str | Path, costs: Costs) -> None:
    """Keep them.

    Raises:
        OSError: the file cannot be written.
    """
    listed = [asdict(cost) for cost in costs.by_name.values()]
    content = {"schema": SCHEMA, "reason": costs.reason, "costs": listed}
    replace_file(Path(folder) / NAME, json.dumps(content, indent=2).encode() + b"\n")


def read_costs(folder: str | Path) -> Costs:
    """What is kept in a folder; nothing, and the reason, where that cannot be used."""
    path = Path(folder) / NAME
    try:
        content = json.loads(path.read_bytes())
        if content["schema"] > SCHEMA:
            return Costs(
                reason=f"{NAME} is of schema {content['schema']}, and this version knows {SCHEMA}; "
                "install a newer lightning_dist"
            )
        costs = [_cost(each) for each in content["costs"]]
        return Costs({cost.name: cost for cost in costs}, str(content.get("reason", "")))
    except FileNotFoundError:
        return Costs(reason=f"what codecs cost was not measured; {MEASURES}")
    except OSError as error:
        return Costs(reason=f"{NAME} cannot be read: {error.strerror}; {MEASURES}")
    except (ValueError, TypeError, KeyError):
        return Costs(reason=f"{NAME} is damaged; {MEASURES}")


def _cost(content: Mapping[str, Any]) -> CodecCost:
    """Fields of a later version are skipped.

    Raises:
        ValueError: it is no cost; KeyError, TypeError too.
    """
    cost = CodecCost(**{each.name: content[each.name] for each in fields(CodecCost)})
    amounts = [getattr(cost, name) for name in _AMOUNTS]
    texts = [getattr(cost, name) for name in _TEXTS]
    if cost.exchange not in _EXCHANGES or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"not the cost of a codec: {content!r:.80}")
    if not all(isfinite(amount) and amount >= 0 for amount in amounts) or not cost.wire:
        raise ValueError(f"not the cost of a codec: {content!r:.80}")
    return cost
