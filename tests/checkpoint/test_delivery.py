"""File operations are counted by the writer that has them."""

from __future__ import annotations

from lightning_dist.checkpoint.delivery import Delivery
from lightning_dist.checkpoint.disk.jobs import Done, Job
from lightning_dist.checkpoint.disk.jobs import Remove as Removal
from lightning_dist.checkpoint.settings import CheckpointSettings
from lightning_dist.checkpoint.snapshot.memory import SnapshotMemory


class Silent:
    """A writer that takes jobs and says nothing by itself."""

    def own(self, folder: str) -> None:
        pass

    def send(self, job: Job, memory: SnapshotMemory | None) -> None:
        pass

    def close(self, timeout: float | None = None) -> None:
        pass


def test_an_answer_ends_no_operation_of_a_writer_that_is_dying() -> None:
    """Whose end is seen after the next writer has been asked for the same, and has answered."""
    delivery = Delivery(CheckpointSettings(), failed=print, committed=print)
    dying, following = Silent(), Silent()
    for writer in (dying, following):
        delivery.writer = writer
        delivery.run(Removal("folder/1.ckpt"))
    delivery._report(following, Done("folder/1.ckpt"))
    delivery._lost(dying, "killed")
    delivery.wait(5)
    delivery.close(5)
