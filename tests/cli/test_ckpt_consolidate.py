"""``lightning-dist ckpt consolidate``."""

from __future__ import annotations

from pathlib import Path

import torch
from ckpt_calls import ckpt, refusal
from cli_saves import damage, records_of, save_sharded


def test_consolidate_makes_a_file_for_torch(tmp_path: Path) -> None:
    state = {"w": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.int8), "step": 7}
    save_sharded(tmp_path / "s.ckpt", ranks=3, records=records_of(state))
    target = tmp_path / "full.pt"
    result = ckpt("consolidate", tmp_path / "s.ckpt", target)
    assert result.exit_code == 0
    assert f"torch.load({str(target)!r}, map_location='cpu')" in result.stdout
    assert result.stdout.startswith(f"{target}: {target.stat().st_size / 1000:.1f} kB\n")
    loaded = torch.load(target, map_location="cpu")
    assert loaded.keys() == state.keys()
    assert loaded["w"].equal(state["w"])
    assert loaded["b"].equal(state["b"])
    assert ckpt("verify", target).exit_code == 0


def test_consolidate_refuses(mixed: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.pt"

    def said(source: Path, target: Path = target, code: int = 2) -> str:
        return refusal("consolidate", source, target, code=code)

    assert said(mixed / "no") == (
        f"There is no checkpoint at {mixed}/no; lightning-dist ckpt ls DIR lists those of a folder"
    )
    assert "Only a folder of shards" in said(mixed / "a.ckpt")
    assert "Only a folder of shards" in said(mixed / "c")
    assert said(mixed / "b.ckpt", tmp_path / "x" / "y.pt") == (
        f"There is no folder {tmp_path}/x; create it first"
    )
    assert not target.exists()
    target.write_bytes(b"precious")
    assert "exists; remove it first" in said(mixed / "b.ckpt")
    assert target.read_bytes() == b"precious"
    target.unlink()
    damage(next((mixed / "b.ckpt").glob("shard-*")))
    assert "has changed since it was written" in said(mixed / "b.ckpt", code=1)
    assert not target.exists()
