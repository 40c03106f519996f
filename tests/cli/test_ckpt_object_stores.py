"""``lightning-dist ckpt`` on object stores."""

from __future__ import annotations

import os

import fsspec
import pytest
import torch
from ckpt_calls import ckpt, listed
from cli_saves import records_of, save_file, save_sharded


def test_every_command_on_an_object_store(memory: str) -> None:
    records = records_of({"w": torch.arange(10)})
    for step in (1, 2):
        save_file(f"{memory}/{step}.ckpt", step=step)
    save_sharded(f"{memory}/3.ckpt", step=3, records=records)
    assert [(n, f["kind"]) for n, f in listed(memory).items()] == [
        ("3.ckpt", "sharded"), ("2.ckpt", "single"), ("1.ckpt", "single")
    ]  # fmt: skip
    assert ckpt("verify", memory).exit_code == 0
    result = ckpt("prune", memory, "--keep", "2", stdin="y\n")
    assert "no locks here" in result.stdout
    assert set(listed(memory)) == {"2.ckpt", "3.ckpt"}
    result = ckpt("consolidate", f"{memory}/3.ckpt", f"{memory}/full.pt")
    assert result.exit_code == 0
    assert "fsspec.open(" in result.stdout
    with fsspec.open(f"{memory}/full.pt") as file:
        assert torch.load(file)["w"].equal(torch.arange(10))


@pytest.mark.parametrize("root", ["memory://", "memory:///"])
def test_the_root_of_a_store(root: str) -> None:
    path = save_file(f"memory://{os.urandom(4).hex()}.ckpt")
    assert listed(root)[path.removeprefix("memory://")]["problem"] is None
    fsspec.filesystem("memory").rm(path)


def test_on_an_object_store_what_may_be_under_way_stays(memory: str) -> None:
    save_file(f"{memory}/1.ckpt", step=1)
    save_file(f"{memory}/2.ckpt", step=2)
    save_sharded(f"{memory}/3.ckpt", step=3)
    fsspec.filesystem("memory").rm_file(f"{memory}/3.ckpt/manifest.json")
    assert ckpt("prune", memory, "--keep", "1", "--yes").exit_code == 0
    assert set(listed(memory)) == {"2.ckpt", "3.ckpt"}
    assert ckpt("verify", memory).exit_code == 1
