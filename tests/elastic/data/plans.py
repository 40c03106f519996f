"""Layouts, plans and epochs to draw, and what a step means computed the slow way."""

from dataclasses import dataclass

from hypothesis import strategies as st

from lightning_dist.elastic.data.plan import EpochPlan, Layout, MicroBatch, Position, layout_for


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """What a script says, or what ``fixed_global_batch`` makes of it on other ranks."""
    sizes = {
        "world_size": st.integers(1, 5),
        "micro_batch": st.integers(1, 4),
        "accumulate": st.integers(1, 3),
    }
    first = Layout.of_script(**{name: draw(each) for name, each in sizes.items()})
    if draw(st.booleans()):
        return first
    return relaid(draw, first)


def relaid(draw: st.DrawFn, first: Layout) -> Layout:
    """The same global batch, on other ranks with another micro batch."""
    ranks = draw(st.integers(1, min(7, first.global_batch)))
    return constant(first, world_size=ranks, micro_batch=draw(st.integers(1, 5)))


def constant(first: Layout, *, world_size: int, micro_batch: int) -> Layout:
    """What ``fixed_global_batch`` makes of ``first`` where the script asks for this."""
    script = Layout.of_script(
        world_size=world_size, micro_batch=micro_batch, accumulate=first.accumulate
    )
    return layout_for("fixed_global_batch", first, script=script)


@dataclass(frozen=True)
class Epoch:
    """An epoch as all of its ranks see it."""

    layout: Layout
    begin: Position
    size: int
    drop_last: bool

    def plan(self, rank: int) -> EpochPlan:
        return EpochPlan(self.layout, rank, self.begin, self.size, self.drop_last)

    @property
    def plans(self) -> list[EpochPlan]:
        return [self.plan(rank) for rank in range(self.layout.world_size)]

    def steps_of_samples(self) -> list[list[int]]:
        """The twin: a list of the samples that are left, cut by hand."""
        left = list(range(self.begin.samples, self.size))
        steps = []
        while left:
            steps.append(left[: self.layout.global_batch])
            left = left[self.layout.global_batch :]
        if self.drop_last and steps and len(steps[-1]) < self.layout.global_batch:
            steps.pop()
        return steps


def steps_of(plan: EpochPlan) -> list[list[MicroBatch]]:
    """The passes of a rank that are left, step by step."""
    steps: list[list[MicroBatch]] = [[]]
    for index in range(plan.first_micro_batch, len(plan)):
        steps[-1].append(plan.micro_batch_at(index))
        if steps[-1][-1].ends_step:
            steps.append([])
    assert not steps[-1], "an epoch ends with the end of a step"
    return steps[:-1]


@st.composite
def epochs(draw: st.DrawFn) -> Epoch:
    layout = draw(layouts())
    steps = draw(st.integers(0, 3))
    return Epoch(
        layout,
        Position(draw(st.integers(0, 3)), steps * layout.global_batch, steps),
        draw(st.integers(1, 5 * layout.global_batch + 3)),
        draw(st.booleans()),
    )
