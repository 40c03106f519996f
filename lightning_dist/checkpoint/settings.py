"""Settings of asynchronous checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args, get_type_hints


@dataclass(frozen=True)
class CheckpointSettings:
    """Settings for taking and writing checkpoints; see :class:`~lightning_dist.AsyncCheckpoint`.

    Without known optimizers ``snapshot="auto"`` is ``"blocking"``.
    """

    snapshot: Literal["auto", "overlap", "blocking", "sync"] = "auto"
    max_in_flight: int = 1
    on_busy: Literal["wait", "skip"] = "wait"
    writer: Literal["auto", "process", "thread"] = "auto"
    verify: Literal["resume", "always", "never"] = "resume"
    on_error: Literal["raise", "warn"] = "raise"
    host_memory_limit: int | None = None
    lock: bool = True

    def __post_init__(self) -> None:
        require_choices(self)
        if not _is_count(self.max_in_flight):
            raise ValueError(f"max_in_flight must be an integer >= 1; got {self.max_in_flight!r}")
        if self.host_memory_limit is not None and not _is_count(self.host_memory_limit):
            raise ValueError(
                "host_memory_limit must be a number of bytes >= 1, or None; got "
                f"{self.host_memory_limit!r}"
            )
        if not isinstance(self.lock, bool):
            raise ValueError(f"lock must be True or False; got {self.lock!r}")
        if self.snapshot == "sync" and self.on_busy == "skip":
            raise ValueError(
                "snapshot='sync' waits for every save, so on_busy='skip' cannot take effect; leave "
                "one of them out"
            )


def require_choices(settings: Any) -> None:
    """Raise a ValueError where a field of a dataclass has none of the strings that it may have."""
    hints: dict[str, Any] = get_type_hints(type(settings))
    for field in fields(settings):
        choices, value = get_args(hints[field.name]), getattr(settings, field.name)
        is_choice = bool(choices) and all(isinstance(choice, str) for choice in choices)
        if is_choice and value not in choices:
            names = ", ".join(map(repr, choices))
            raise ValueError(f"{field.name} must be one of {names}; got {value!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
