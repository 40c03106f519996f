"""How the samples of a train dataloader are dealt to the ranks of a start."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lightning_dist.elastic.layout import BatchPolicy, Layout, layout_for
from lightning_dist.elastic.loading import LoaderFacts, facts_of, shard
from lightning_dist.elastic.plan import EpochPlan, full_size
from lightning_dist.elastic.sampling import Cursor
from lightning_dist.elastic.state import ElasticState, require_same_data


class Deal:
    """This rank's share of every epoch.

    Args:
        policy: see :func:`~lightning_dist.elastic.layout.layout_for`.
        accumulate: passes per optimizer step, as the script says.
        rank: this one.
        world_size: ranks.
        resumed: what a checkpoint said; None for a fresh start.
        path: of that checkpoint.
        begun: the layout of a start that left no checkpoint; its global batch is kept too, if the
            script still asks for the same batches.
        seed: of the order.
    """

    def __init__(
        self,
        *,
        policy: BatchPolicy,
        accumulate: int,
        rank: int,
        world_size: int,
        resumed: ElasticState | None,
        path: str,
        begun: Layout | None,
        seed: int,
    ) -> None:
        self.policy, self._accumulate, self._seed = policy, accumulate, seed
        self.rank, self.world_size = rank, world_size
        self.resumed, self._path, self._begun = resumed, path, begun
        self.cursor = Cursor()
        if resumed is not None:
            self.cursor.begin = resumed.position
        self.facts: LoaderFacts | None = None
        self.first: Layout | None = None
        self.layout: Layout | None = None
        """The layout of now; None where samples are not counted."""
        self._epoch_size = 0

    @property
    def is_dealt(self) -> bool:
        """Whether the position in the data is known by samples."""
        return self.facts is not None

    @property
    def size(self) -> int | None:
        """Samples of an epoch, as the dataset has them."""
        return None if self.facts is None else self.facts.size

    def deal(
        self,
        loader: Any,
        *,
        limit: Callable[[Layout, LoaderFacts], int | None] = lambda first, facts: None,
        accept: Callable[[Layout, Layout], None] = lambda first, now: None,
        on_first: Callable[[], None] = lambda: None,
    ) -> DataLoader[Any]:
        """This rank's share of the user's ``loader``.

        Args:
            limit: passes of an epoch that are wanted, in the layout of the first start.
            accept: told the layout of the first start and that of now; may refuse.
            on_first: called before the first batch of an epoch is drawn in this process.

        Raises:
            NotExactError: its samples cannot be dealt.
            ValueError: they are not those of the checkpoint.
        """
        facts = facts_of(loader, seed=self._seed)
        if self.resumed is not None:
            require_same_data(self.resumed, size=facts.size, path=self._path)
        self.facts = facts
        script = self._script_layout()
        self.first = self._first_layout(script)
        self.layout = layout_for(self.policy, self.first, script=script)
        passes = limit(self.first, facts)
        self._epoch_size = full_size(facts.size, limit_passes=passes, layout=self.first)
        accept(self.first, self.layout)
        return shard(loader, self.plan, cursor=self.cursor, seed=self._seed, on_first=on_first)

    def _first_layout(self, script: Layout) -> Layout:
        if self.resumed is not None:
            return self.resumed.first
        begun = self._begun
        if begun is None:
            return script
        same = replace(begun, world_size=0, global_batch=0) == replace(
            script, world_size=0, global_batch=0
        )
        return begun if same else script

    def _script_layout(self) -> Layout:
        return Layout.of_script(
            world_size=self.world_size,
            micro_batch=1 if self.facts is None else self.facts.batch_size,
            accumulate=self._accumulate,
        )

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """Of the run's first start, and now. Samples are counted as batches where nobody knows."""
        if self.first is not None and self.layout is not None:
            return self.first, self.layout
        now = self._script_layout()
        return (now if self.resumed is None else self.resumed.first), now

    def plan(self) -> EpochPlan:
        """The passes of the present epoch on this rank."""
        assert self.facts is not None
        assert self.layout is not None
        return EpochPlan(
            self.layout,
            self.rank,
            self.cursor.begin,
            self._epoch_size,
            drop_last=self.facts.drop_last,
        )
