"""``lightning-dist ckpt prune`` of whatever a folder holds."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from ckpt_calls import ckpt, listed, names
from cli_saves import damage, save_file, save_sharded
from hypothesis import given
from hypothesis import strategies as st

from lightning_dist.checkpoint.disk.storage import storage_of

STATES = st.lists(
    st.tuples(
        st.sampled_from(["whole", "flipped", "cut", "sharded", "shard flipped", "no manifest"]),
        st.sampled_from(["{}.ckpt", "last-{}.ckpt", "best-{}.ckpt"]),
        st.sampled_from([None, "hard", "symbolic"]),
    ),
    max_size=5,
)


def make(folder: Path, step: int, state: str, name: str, link: str | None) -> None:
    path = folder / name.format(step)
    if state in ("whole", "flipped", "cut"):
        save_file(path, step=step)
        if state == "flipped":
            damage(path)
        elif state == "cut":
            os.truncate(path, path.stat().st_size - 30)
    else:
        save_sharded(path, step=step, ranks=1)
        if state == "shard flipped":
            damage(next(path.glob("shard-*")))
        elif state == "no manifest":
            (path / "manifest.json").unlink()
    if link is not None:
        storage, inside = storage_of(str(folder))
        source, target = f"{inside}/{path.name}", f"{inside}/link-{step}.ckpt"
        storage.link(source, target, symbolic=link == "symbolic")


def whole(folder: Path) -> set[str]:
    if not any(path.name.endswith(".ckpt") for path in folder.iterdir()):
        return set()
    verdicts = json.loads(ckpt("verify", folder, "--json").stdout)["checkpoints"]
    return {each["name"] for each in verdicts if each["problem"] is None}


@given(states=STATES, keep=st.integers(1, 3))
def test_prune_keeps_as_many_whole_ones_as_asked(
    tmp_path_factory: pytest.TempPathFactory,
    states: list[tuple[str, str, str | None]],
    keep: int,
) -> None:
    folder = tmp_path_factory.mktemp("prune")
    for step, (state, name, link) in enumerate(states, 1):
        make(folder, step, state, name, link)
    before, all_names = whole(folder), names(folder)
    steps_of = {name: each["step"] for name, each in listed(folder).items()}
    result = ckpt("prune", folder, "--keep", str(keep), "--yes")
    assert result.exit_code == 0
    after, left = whole(folder), names(folder)

    assert after == before & left, "nothing that stays is harmed"
    assert {n for n in all_names if n.startswith(("last", "best"))} <= left
    plain = sorted({steps_of[n] for n in before if not n.startswith(("last", "best"))})
    assert set(plain[-keep:]) <= {steps_of[n] for n in after}, "the newest whole ones stay"
    assert bool(after) == bool(before), "never the last whole one"
    if not before:
        assert left == all_names
    shutil.rmtree(folder)
