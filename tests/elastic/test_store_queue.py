"""Texts for one reader, in a real store."""

import pytest
import torch.distributed as dist

from lightning_dist.elastic.rendezvous import StoreQueue

QUEUES = [
    pytest.param(
        False,
        marks=pytest.mark.skipif(
            not hasattr(dist.Store, "queue_push"), reason="torch has no queues"
        ),
    ),
    True,
]


@pytest.mark.parametrize("numbered", QUEUES)
def test_each_text_is_read_once(numbered: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    writers = [StoreQueue(store, numbered=numbered) for _ in range(2)]
    reader = StoreQueue(store, numbered=numbered)
    assert reader.pop() is None
    for number in range(3):
        for at, writer in enumerate(writers):
            writer.push(f"{number} of {at}")
    first = [reader.pop() for _ in range(4)]
    next_one = StoreQueue(store, numbered=numbered)  # of a start that follows
    rest = [next_one.pop() for _ in range(3)]
    assert [*first, *rest] == [*(f"{n} of {at}" for n in range(3) for at in range(2)), None]


def test_a_writer_that_died_before_it_wrote() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    writer, reader = (StoreQueue(store, numbered=True) for _ in range(2))
    store.add("pushed", 1)
    writer.push("after it")
    assert [reader.pop(), reader.pop()] == ["after it", None]
