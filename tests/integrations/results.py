"""What the ranks of a launch left behind, and the claims that hold for every run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import Finished
from torch import Tensor

Facts = dict[str, Any]


class Results:
    """Facts of every scenario by name, one entry per rank."""

    def __init__(self, folder: Path, finished: Finished, *, ranks: int) -> None:
        self.folder, self.finished, self.ranks = folder, finished, ranks

    def __call__(self, name: str, *, ranks: int | None = None) -> list[Facts]:
        return [self._of(name, rank) for rank in range(ranks or self.ranks)]

    def _of(self, name: str, rank: int) -> Facts:
        path = self.folder / f"{name}.{rank}.pt"
        if not path.exists():
            output = self.finished.output[-8000:]
            pytest.fail(f"rank {rank} left no {path.name}; output:\n{output}", pytrace=False)
        result = torch.load(path, weights_only=True)
        if "error" in result:
            pytest.fail(f"{name} on rank {rank}:\n{result['error']}", pytrace=False)
        return result["facts"]


def pick(ranks: list[Facts], name: str) -> list[Facts]:
    """One run of a scenario that made several."""
    return [facts[name] for facts in ranks]


def require_replicas(ranks: list[Facts]) -> None:
    """Parameters were bit-identical on all ranks after every batch, and they moved."""
    digests = ranks[0]["digests"]
    assert all(facts["digests"] == digests for facts in ranks)
    assert len(set(digests)) > 1
    for facts in ranks[1:]:
        require_equal(facts["parameters"], ranks[0]["parameters"])
    finite = [value.isfinite().all() for value in ranks[0]["parameters"].values()]
    assert all(finite)


def require_compressed(ranks: list[Facts], *, steps: int) -> None:
    """The hook ran ``steps`` times on every rank and saved bytes each time."""
    for facts in ranks:
        stats = facts["stats"]
        assert stats["steps"] == steps
        assert 0 < stats["wire_bytes"] < stats["raw_bytes"]
        assert 0 < stats["last_step"]["wire_bytes"] < stats["last_step"]["raw_bytes"]


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert found.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not different, f"differ: {different}"
