"""Texts for one reader, in a real store."""

import pytest
import torch.distributed as dist

from lightning_dist.elastic.launcher.mail import Mail

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
    writers = [Mail(store, numbered=numbered) for _ in range(2)]
    reader = Mail(store, numbered=numbered)
    assert reader.read() is None
    for number in range(3):
        for at, writer in enumerate(writers):
            writer.write(f"{number} of {at}")
    first = [reader.read() for _ in range(4)]
    next_one = Mail(store, numbered=numbered)  # of a start that follows
    rest = [next_one.read() for _ in range(3)]
    assert [*first, *rest] == [*(f"{n} of {at}" for n in range(3) for at in range(2)), None]


def test_a_writer_that_died_before_it_wrote() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    writer, reader = (Mail(store, numbered=True) for _ in range(2))
    store.add("letters", 1)
    writer.write("after it")
    assert [reader.read(), reader.read()] == ["after it", None]
