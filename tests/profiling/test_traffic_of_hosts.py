"""Rates of hosts whose ranks share a link."""

from __future__ import annotations

import pytest
from planted import MS, Planted, replace, replaced

from lightning_dist.profiling.analysis.summarize import summarize
from lightning_dist.profiling.capture.events import LinkRecord
from lightning_dist.profiling.run import Run
from lightning_dist.profiling.whatif.observe import observe

SENT = 1_000_000
TOOK = 15  # milliseconds
RATE = SENT * 8 / (TOOK * MS)  # Gbit/s


def taking_turns(*, apart: int = TOOK) -> Run:
    """Two hosts of two ranks: on each the second begins to send ``apart`` ms after the first."""
    hosts, shift = ["a", "a", "b", "b"], {2: 700.0, 3: 700.0}
    run = Planted(world_size=4, hosts=hosts, shift=shift, buckets=1, sent=SENT).run()
    for rank, each in run.ranks.items():
        turn = rank % 2
        groups = {"intra": [rank - turn, rank - turn + 1], "inter": [turn, turn + 2]}
        steps = {}
        for number, step in each.steps.items():
            spans = []
            for span in step.spans:
                if span.phase == "exchange":
                    begin = span.begin + turn * apart * MS
                    spans.append(replace(span, group="inter", begin=begin, end=begin + TOOK * MS))
                else:
                    spans.append(span)
            steps[number] = replace(step, spans=spans)
        link = LinkRecord("inter", sent=SENT, seconds=TOOK / 1e3)
        about = replace(each.metadata, groups=groups)
        run = replaced(run, rank, metadata=about, steps=steps, links=[link])
    return run


@pytest.mark.parametrize(("apart", "rate"), [(TOOK, RATE), (0, 2 * RATE), (5, 1.5 * RATE)])
def test_ranks_of_a_host_that_send_one_after_the_other_share_its_link(
    apart: int, rate: float
) -> None:
    run = taking_turns(apart=apart)
    traffic = summarize(run).traffic
    assert traffic is not None
    assert traffic.link_gbps == pytest.approx(RATE)
    assert traffic.wire_gbps == pytest.approx(rate)
    assert observe(run).scenario.link.rate == pytest.approx(rate * 1e9 / 8)
