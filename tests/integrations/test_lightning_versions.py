"""What differs between the versions of Lightning, torch and Accelerate that the package admits."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning.pytorch as pl
import pytest
from checkpoint_runs import fit
from lightning.pytorch.callbacks import ModelCheckpoint
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_dist import AsyncCheckpoint

ROOT = Path(__file__).parents[2]
Link = Callable[[ModelCheckpoint, pl.Trainer, str, str], None]


def of_the_object(callback: ModelCheckpoint, trainer: pl.Trainer, file: str, link: str) -> None:
    callback._link_checkpoint(trainer, file, link)


def of_the_class(callback: ModelCheckpoint, trainer: pl.Trainer, file: str, link: str) -> None:
    type(callback)._link_checkpoint(trainer, file, link)


def with_keywords(callback: ModelCheckpoint, trainer: pl.Trainer, file: str, link: str) -> None:
    type(callback)._link_checkpoint(trainer=trainer, filepath=file, linkpath=link)


@pytest.mark.parametrize("link", [of_the_object, of_the_class, with_keywords])
def test_the_last_checkpoint_is_linked_by_either_form_of_the_call(
    tmp_path: Path, link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_last(self: Any, trainer: pl.Trainer, candidates: Any) -> None:
        if not self.save_last:
            return
        path = self.format_checkpoint_name(candidates, self.CHECKPOINT_NAME_LAST)
        self.last_model_path = path
        link(self, trainer, self._last_checkpoint_saved, path)

    monkeypatch.setattr(ModelCheckpoint, "_save_last_checkpoint", save_last)
    others = AsyncCheckpoint(tmp_path / "other", "{step}", every_n_train_steps=3)
    callback = AsyncCheckpoint(
        tmp_path / "here", "{step}", every_n_train_steps=3, save_last="link", monitor="step"
    )
    fit(others, callback, max_epochs=1)
    assert (tmp_path / "here" / "last.ckpt").readlink() == Path("step=3.ckpt")
    assert not (tmp_path / "other" / "last.ckpt").exists()


def test_a_link_outside_of_a_training_is_that_of_lightning(tmp_path: Path) -> None:
    (tmp_path / "step=3.ckpt").touch()
    AsyncCheckpoint._link_checkpoint(
        trainer=Mock(), filepath=f"{tmp_path}/step=3.ckpt", linkpath=f"{tmp_path}/last.ckpt"
    )
    assert (tmp_path / "last.ckpt").readlink() == Path("step=3.ckpt")


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for extra in project["optional-dependencies"].values() for each in extra)
    found = map(Requirement, [*project["dependencies"], *extras])
    return {each.name: each for each in found}


def pinned(name: str, file: str = "constraints.txt") -> Version:
    (version,) = re.findall(rf"^{name}==(.+)$", (ROOT / file).read_text(), flags=re.MULTILINE)
    return Version(version)


@pytest.mark.parametrize("name", ["torch", "lightning", "accelerate"])
def test_no_version_beyond_the_tested_ones_is_admitted(name: str) -> None:
    """Their private parts are used: a minor version later they may be others."""
    admitted, version = requirements()[name].specifier, pinned(name)
    assert admitted.contains(version)
    assert not admitted.contains(f"{version.major}.{version.minor + 1}.0")
    assert not admitted.contains(f"{version.major}.{version.minor - 1}.99")


@pytest.mark.parametrize("name", ["lightning", "accelerate"])
def test_the_lowest_versions_that_are_tested_are_the_lowest_admitted(name: str) -> None:
    lowest = [each.version for each in requirements()[name].specifier if each.operator == ">="]
    assert [Version(version) for version in lowest] == [pinned(name, "constraints-lowest.txt")]
