"""Messages of errors, whole."""

from collections.abc import Callable
from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

from lightning_dist import compress_ddp


def message(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The message of the ValueError of a call."""
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the callers compare the whole text)
        call(*args, **kwargs)
    return str(error.value)


def refused(wrap: Callable[[Rank], DistributedDataParallel], **settings: Any) -> str:
    """The message of compress_ddp in a world of two, the same on both ranks."""

    def body(rank: Rank) -> str:
        return message(compress_ddp, wrap(rank), groups=rank.groups(), **settings)

    first, second = run_threads(body, 2)
    assert first == second
    return first
