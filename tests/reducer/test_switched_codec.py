"""State that the codec of the next phase does not keep is freed, and the training goes on."""

from __future__ import annotations

import pytest
from feeding import Fed, backward, compressed, digest, feed
from layouts import PAIRS, Layout, flat
from worlds import Rank, run_threads

from lightning_dist.codecs import Codec, by_name, by_size, warmup

DGC = "dgc:ratio=0.1,block_size=128"
SWITCH, STEPS = 2, 4

SCHEDULES: dict[str, tuple[Codec, set[str]]] = {  # and what still has a residual at the end
    "int8, none": (warmup({0: "int8", SWITCH: "none"}), set()),
    "powersgd, bf16": (warmup({0: "powersgd:rank=2", SWITCH: "bf16"}), set()),
    "threshold, qsgd": (warmup({0: "threshold:tau=1.5", SWITCH: "qsgd:block_size=64"}), set()),
    "dgc, none": (warmup({0: DGC, SWITCH: "none"}), set()),
    "dgc, int8": (warmup({0: DGC, SWITCH: "int8"}), {"first", "second"}),
    "by_name": (warmup({0: "int8", SWITCH: by_name("int8", {"second": "none"})}), {"first"}),
    "by_size": (
        warmup({0: by_size("int8", min_numel=1), SWITCH: by_size("int8", min_numel=1800)}),
        {"first"},
    ),
}


@pytest.mark.parametrize("commit", ["immediate", "deferred"])
@pytest.mark.parametrize("layout", [flat(2), flat(3), Layout(PAIRS)], ids=str)
def test_what_is_not_kept_any_more_is_freed(layout: Layout, commit: str) -> None:
    form = {"min_compress_numel": 256, "commit": commit, **layout.form}

    def body(rank: Rank) -> list[str]:
        found = []
        for name, (codec, left) in SCHEDULES.items():
            with compressed(rank, Fed(), codec, **form) as (model, reducer):
                got = [backward(model, feed(rank.rank, step)) for step in range(STEPS)]
                assert set(reducer.residuals) == left, name
                assert (reducer.memory()["residual_bytes"] > 0) == bool(left), name
                state = reducer.state_dict()
                if state is not None:
                    assert set(state["residuals"]) == left, name
                    assert not {"momenta", "factors"} & set(state), name
                found.append(digest([each for of in got for each in of.values()]))
        return found

    assert len({str(digests) for digests in run_threads(body, layout.size)}) == 1, "replicas"
