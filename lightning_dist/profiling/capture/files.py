"""Files of a profile: its folder, the lines of a rank, and how they come into one folder.

Records of ranks whose folder is not rank 0's are gathered into rank 0's after the training.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import BufferedWriter
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.base.shared_folder import has_token, leave_token, remove_token
from lightning_dist.profiling.capture.events import EndRecord, Record, from_line, to_line
from lightning_dist.profiling.links import first_sentence
from lightning_dist.ranks.facts import all_facts

_TAIL = 4096
"""Bytes; the last line is a short one."""
_CHUNK = 8 * 2**20
"""Bytes that are read at once; on the wire they are about a tenth."""


def new_run_folder(parent: Path, *, on_problem: Callable[[str], None]) -> Path:
    """The first ``run-<n>`` that is not there yet, or a temporary one."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for number in count():
            folder = parent / f"run-{number}"
            with suppress(FileExistsError):
                folder.mkdir()
                return folder
    except OSError as error:
        folder = Path(tempfile.mkdtemp(prefix="comm_profile-"))
        on_problem(f"{error.filename}: {error.strerror}; the profile is in {folder}")
        return folder
    raise AssertionError("there are numbers enough")


class RankFile:
    """Lines of one rank, in the order of its records.

    A disk that fails does not stop the training: nothing more is written then, because the last
    line may be incomplete.

    Args:
        folder: of the run; None: nothing is kept.
        appends: go on with the file that is there; False: replace it.
        on_problem: called with what went wrong, and what that costs.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        rank: int,
        appends: bool = False,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._path = Path(folder or "") / f"rank{rank}.jsonl"
        self._on_problem = on_problem
        self._lines: list[bytes] = []
        self._file: BufferedWriter | None = None
        if folder is not None:
            with self._recording_loss("steps of this rank are not saved"):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                if appends and _is_torn(self._path):
                    self._lines.append(b"")
                self._file = self._path.open("ab" if appends else "wb")

    def write(self, records: Iterable[Record]) -> None:
        """Append them, with the next flush."""
        if self._file is not None:
            self._lines += map(to_line, records)

    def flush(self) -> None:
        """Have all of them in the file."""
        lines, self._lines = self._lines, []
        if self._file is not None:
            with self._recording_loss("further steps of this rank are not saved"):
                self._file.write(b"".join(line + b"\n" for line in lines))
                self._file.flush()

    def close(self) -> None:
        """Make what was written durable."""
        self.flush()
        file, self._file = self._file, None
        if file is not None:
            with self._recording_loss("it may be incomplete"), file:
                os.fsync(file.fileno())

    @contextmanager
    def _recording_loss(self, loss: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            file, self._file = self._file, None
            if file is not None:
                with suppress(OSError):
                    file.close()
            self._on_problem(f"{error.filename or self._path}: {error.strerror}; {loss}")


def _is_torn(path: Path) -> bool:
    """Whether who has written a file has died within a line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - 1, 0))
            return file.read() not in (b"\n", b"")
    except FileNotFoundError:
        return False


def await_ends(folder: Path, ranks: Iterable[int], *, timeout: float) -> bool:
    """Wait until all of ``ranks`` have written how they ended, for ``timeout`` seconds at most.

    Ranks that fail together end within a moment of each other.
    """
    missing, until = set(ranks), time.monotonic() + timeout
    while missing := {rank for rank in missing if not _has_ended(folder / f"rank{rank}.jsonl")}:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def _has_ended(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(file.tell() - _TAIL, 0))
            *_, last = file.read().splitlines()
            return isinstance(from_line(last), EndRecord)
    except (OSError, ValueError):  # not there yet, empty, or half a line
        return False


def ranks_apart(folder: str | Path, group: dist.ProcessGroup) -> list[int]:
    """Ranks whose ``folder`` is not that of rank 0. Collective, the same on all ranks.

    All others are, where rank 0 cannot write to its own.

    Raises:
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """
    if group.size() == 1:
        return []
    folder, is_first, cpu = Path(folder), group.rank() == 0, torch.device("cpu")
    facts = {"token": leave_token(folder) if is_first else ""}
    token = str(all_facts(facts, group=group, device=cpu)[0]["token"])
    sees = {"sees": is_first or (bool(token) and has_token(folder, token))}
    of_all = all_facts(sees, group=group, device=cpu)
    if is_first and token:
        remove_token(folder, token)
    return [rank for rank, facts in enumerate(of_all) if not facts["sees"]]


def gather_records(path: Path, *, ranks: Sequence[int], group: dist.ProcessGroup) -> list[str]:
    """Copy ``rank<r>.jsonl`` of each of ``ranks`` into the folder of rank 0; raises nothing.

    Args:
        path: file of this rank, complete.
        ranks: as from :func:`ranks_apart`; others but rank 0 return at once.
        group: of all ranks, on gloo, used for nothing else meanwhile.

    Returns:
        What did not arrive, and why; for the user to see.
    """
    if group.rank() in ranks:
        return _send_file(path, group)
    problems: dict[int, str] = {}
    sending = [*ranks] if group.rank() == 0 else []
    # A chunk of each in turn: while a long file travels, no rank waits for longer than its timeout.
    while sending:
        for rank in [*sending]:
            chunk = b""
            try:
                chunk = _receive(rank, group)
                if rank not in problems and chunk:
                    with (path.parent / f"rank{rank}.jsonl").open("ab") as file:
                        file.write(chunk)
            except RuntimeError as error:  # of gloo; it concerns this one only
                problems[rank] = f"records of rank {rank} are incomplete: {first_sentence(error)}"
            except OSError as error:
                problems[rank] = f"records of rank {rank} were not written: {error.strerror}"
            if not chunk:
                sending.remove(rank)
    return [*problems.values()]


def _send_file(path: Path, group: dist.ProcessGroup) -> list[str]:
    problems = []
    try:
        try:
            with path.open("rb") as file:
                while chunk := file.read(_CHUNK):
                    _send(zlib.compress(chunk, 1), group)
        except OSError as error:
            problems.append(f"{path} cannot be read: {error.strerror}")
        _send(b"", group)
    except RuntimeError as error:  # of gloo
        problems.append(f"records do not reach rank 0: {first_sentence(error)}")
    return problems


def _send(content: bytes, group: dist.ProcessGroup) -> None:
    group.send([torch.tensor([len(content)], device="cpu")], 0, 0).wait()
    if content:
        group.send([torch.frombuffer(bytearray(content), dtype=torch.uint8)], 0, 0).wait()


def _receive(rank: int, group: dist.ProcessGroup) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    group.recv([length], rank, 0).wait()
    content = bytearray(int(length))
    if content:
        group.recv([torch.frombuffer(content, dtype=torch.uint8)], rank, 0).wait()
    return zlib.decompress(content) if content else b""
