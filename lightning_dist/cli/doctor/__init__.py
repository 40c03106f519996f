"""``lightning-dist doctor``: checks of a node for distributed training.

A check is a function that returns a :class:`Finding`. Those of this node are in ``node.py``, those
of its way to other ones in ``network.py``; ``command.py`` prints them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        state: ``"error"``: training will fail or hang. ``"warning"``: it may, or is slow.
            ``"n/a"``: it could not be checked, or there is nothing to check.
        fix: a command or a line to paste, or a sentence where there is none; empty if all is well.
    """

    state: Literal["ok", "warning", "error", "n/a"]
    what: str
    fix: str = ""
