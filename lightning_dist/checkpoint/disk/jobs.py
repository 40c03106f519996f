"""Jobs that a trainer sends to its writer, and the answers."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_dist.checkpoint.disk.manifest import Origin


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of bytes of a record, from ``start``, and where it lies in the snapshot."""

    record: str
    nbytes: int
    offset: int
    start: int = 0


@dataclass(frozen=True)
class Save:
    """Write a snapshot and publish it."""

    origin: Origin
    target: str
    pieces: tuple[Piece, ...]
    """Records that this rank writes, in the order of the archive."""
    dropped: str = field(default="", kw_only=True)
    """Reason why nothing is written; later jobs must know that this one failed."""


@dataclass(frozen=True)
class SaveFile(Save):
    """One file for ``torch.load``: whole records, of one rank."""


@dataclass(frozen=True)
class SaveFolder(Save):
    """A folder that all ranks write to: this rank's shard, and files as they are."""

    rank: int
    records: tuple[str, ...] = ()
    """Names of all records, in the order of the archive."""
    spread: tuple[tuple[str, int], ...] = ()
    """``(record, bytes)`` of those that may have gaps, which are zeros."""
    complete: tuple[tuple[str, int], ...] = ()
    """The same of those of which ranks write parts that leave no gaps."""
    files: tuple[tuple[str, str], ...] = ()
    """``(name in the folder, path of the content)``; names may have folders in them."""
    scratch: str = ""
    """A local folder that is removed afterwards, also where the trainer is dead by then."""
    peer_timeout: float = 120.0
    """Seconds in which some rank must have written something."""


@dataclass(frozen=True)
class Link:
    """Show a checkpoint under a second name, once it is there."""

    source: str
    target: str
    symbolic: bool


@dataclass(frozen=True)
class Remove:
    """Remove a checkpoint, but not before a save that came before this has been committed."""

    target: str


@dataclass(frozen=True)
class Keep:
    """Do not remove a checkpoint after all, if its removal still waits."""

    target: str


Job = Save | Link | Remove | Keep


@dataclass(frozen=True)
class Committed:
    """A checkpoint is durable under its name."""

    target: str
    origin: Origin
    nbytes: int
    """written by this rank."""
    seconds: float
    """from the start of writing."""
    total: int
    """Bytes of the checkpoint, written by all ranks."""


@dataclass(frozen=True)
class Failed:
    """A job could not be done; under its name is what was there, or all of the new one."""

    target: str
    origin: Origin | None
    """None for a link or a removal."""
    reason: str
    dropped: bool = False
    """The snapshot was given up before anything was written; the next one will be whole."""


@dataclass(frozen=True)
class Done:
    """A link is there, a checkpoint removed or kept."""

    target: str
    waits: bool = False
    """It is done after the next success."""


@dataclass(frozen=True)
class Owned:
    """The writer keeps other trainers from a folder."""

    folder: str


Event = Committed | Failed | Done
