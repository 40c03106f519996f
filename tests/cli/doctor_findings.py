"""What the tests of ``lightning-dist doctor`` share."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_dist.cli.doctor_finding import Finding

RANK = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
ELASTIC = {**RANK, "TORCHELASTIC_RUN_ID": "job", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}


def by_name(findings: Iterable[Finding]) -> dict[str, Finding]:
    found = {}
    for each in findings:
        assert each.name not in found
        assert bool(each.fix) == (each.state in ("warning", "error")), each
        found[each.name] = each
    return found
