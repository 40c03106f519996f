"""What a file in Chrome's trace event format has to keep so that viewers draw all of it."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def events_of(path: Path) -> list[Event]:
    """The events of a trace; raises where JSON is not as strict as viewers are."""
    content = json.loads(gzip.decompress(path.read_bytes()), parse_constant=_refuse)
    return list(content["traceEvents"])


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def problems(events: list[Event]) -> list[str]:
    """What is wrong, in words."""
    found = [f"unknown phase: {e}" for e in events if e["ph"] not in ("M", "X", "i", "s", "f")]
    times = [event["ts"] for event in events if event["ph"] != "M"]
    if times != sorted(times):
        found.append("not in the order of time")
    found += [
        f"not whole microseconds from 0 on: {event}"
        for event in events
        for name in ("ts", "dur")
        if not isinstance(event.get(name, 0), int) or event.get(name, 0) < 0
    ]
    found += [
        f"a flow without a number: {e}" for e in events if not isinstance(e.get("id", 0), int)
    ]
    named = {(e["pid"], e.get("tid")) for e in events if e["name"].endswith("_name")}
    used = {(e["pid"], e.get("tid")) for e in events if e["ph"] in ("X", "i", "s", "f")}
    used |= {(event["pid"], None) for event in events}
    found += [f"no name for {each}" for each in sorted(used - named, key=str)]
    found += [f"a main thread of its own: {each}" for each in used if each[0] == each[1]]
    for thread in sorted(used, key=str):
        if thread[1] is not None:
            of_thread = [e for e in events if (e["pid"], e.get("tid")) == thread]
            found += _misplaced(of_thread)
    return found + _loose_flows(events)


def _misplaced(events: list[Event]) -> list[str]:
    """Slices that neither nest nor are apart, and flows where no slice is open."""
    found = []
    open_until: list[int] = []
    for event in events:
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        if event["ph"] == "X":
            end = event["ts"] + event["dur"]
            if open_until and end > open_until[-1]:
                found.append(f"ends after the slice that it is in: {event}")
            open_until.append(end)
        if event["ph"] in ("s", "f") and not open_until:
            found.append(f"no slice is open: {event}")
    return found


def _loose_flows(events: list[Event]) -> list[str]:
    ends = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            ends[event["cat"], event["name"], event["id"]].append(event)
    return [
        f"not from one slice to another: {flow}"
        for flow in ends.values()
        if [each["ph"] for each in flow] != ["s", "f"] or flow[0]["pid"] == flow[1]["pid"]
    ]
