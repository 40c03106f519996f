"""Records of ranks whose folder is not rank 0's, gathered into rank 0's after the training."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from lightning_dist.exchange.handshake import all_facts
from lightning_dist.profiling.links import first_sentence
from lightning_dist.shared_folder import has_token, leave_token, remove_token

_CHUNK = 8 * 2**20
"""Bytes that are read at once; on the wire they are about a tenth."""


def ranks_apart(folder: str | Path, group: dist.ProcessGroup) -> list[int]:
    """Ranks whose ``folder`` is not that of rank 0. Collective, the same on all ranks.

    All others are, where rank 0 cannot write to its own.

    Raises:
        RuntimeError: of gloo: a rank is gone, or did not come within the timeout of the group.
    """
    if group.size() == 1:
        return []
    folder, is_first, cpu = Path(folder), group.rank() == 0, torch.device("cpu")
    own = {"token": leave_token(folder) if is_first else ""}
    token = str(all_facts(own, group=group, device=cpu)[0]["token"])
    sees = {"sees": is_first or (bool(token) and has_token(folder, token))}
    of_all = all_facts(sees, group=group, device=cpu)
    if is_first and token:
        remove_token(folder, token)
    return [rank for rank, each in enumerate(of_all) if not each["sees"]]


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
