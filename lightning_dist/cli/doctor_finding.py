"""What one check of ``lightning-dist doctor`` has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error", "n/a"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Args:
        state: ``"error"``: training will fail or hang. ``"warning"``: it may, or is slow.
            ``"n/a"``: it could not be checked, or there is nothing to check; ``what`` says why.
        what: was found.
        fix: a command or a line to paste, or a sentence where there is none; empty if all is well.
    """

    name: str
    state: State
    what: str
    fix: str = ""
