"""The table of codecs: what may be added, and what installed packages bring."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from test_own_codec import install

from lightning_dist.codecs import (
    CODECS,
    BlockCodec,
    ErrorFeedback,
    Int8,
    Memory,
    Sign,
    register_codec,
    resolve_codec,
)
from lightning_dist.codecs.table import CodecTable
from lightning_dist.settings import Settings


@dataclass(frozen=True)
class Mine(Int8):
    """One that is in order."""

    name: ClassVar[str] = "mine"


def another(**attributes: Any) -> type[Int8]:
    """A codec class, with other attributes."""
    return dataclass(frozen=True)(type("Another", (Int8,), {"name": "mine", **attributes}))


class NotDecorated(Int8):
    name: ClassVar[str] = "not_decorated"


@dataclass(frozen=True)
class NoDefault(BlockCodec):
    size: int
    name: ClassVar[str] = "no_default"
    exchange: ClassVar[str] = "two_shot"


@pytest.fixture
def table() -> CodecTable:
    return CodecTable([Int8, Sign])


def test_what_is_added_is_there(table: CodecTable) -> None:
    told: list[str] = []
    table.on_add(told.append)
    table.add(Mine)
    assert (list(table), len(table), table["mine"]) == (["int8", "sign", "mine"], 3, Mine)
    assert "mine" in table
    assert told == ["mine"]
    table.add(Mine)  # a module that is imported again, or a cell that is run again
    assert len(table) == 3


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Mine(), "must be a class derived from lightning_dist.Codec, got Mine"),
        (dict, "must be a class derived from lightning_dist.Codec"),
        (NotDecorated, "must be a frozen dataclass, got .*NotDecorated; write @register_codec"),
        (another(name="Mine"), "must be lower-case .* got 'Mine'"),
        (another(name="int8"), "must not be taken, got 'int8' .* is the name of .*Int8"),
        (another(exchange="ring"), "must be one of .* got 'ring'"),
        (NoDefault, "a default for every option, got .*NoDefault"),
    ],
)
def test_what_is_no_codec_is_refused(table: CodecTable, codec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.add(codec)
    assert list(table) == ["int8", "sign"]


def test_two_classes_do_not_share_a_name(table: CodecTable) -> None:
    table.add(Mine)
    with pytest.raises(ValueError, match=r"got 'mine' for .*Another, which is the name of .*Mine"):
        table.add(another())


def test_our_names_are_taken() -> None:
    with pytest.raises(ValueError, match="must not be taken, got 'int8'"):
        register_codec(another(name="int8"))
    assert CODECS["int8"] is Int8


def test_packages_are_imported_when_they_are_asked_for(
    table: CodecTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    entries = {
        "mine": f"{__name__}:Mine",
        "int8": f"{__name__}:Mine",
        "gone": "no_such_package:Codec",
        "other": f"{__name__}:Mine",
        "wrong": f"{__name__}:install",
    }
    install(tmp_path, "\n".join(f"{name} = {place}" for name, place in entries.items()))
    monkeypatch.syspath_prepend(tmp_path)
    assert list(table) == ["int8", "sign", "mine", "gone", "other", "wrong"]
    assert len(table) == 6
    assert "'int8'" in caplog.text
    assert (table["mine"], table["int8"]) == (Mine, Int8)
    with pytest.raises(ValueError, match=r"'own_package', got ModuleNotFoundError: .*no_such_pack"):
        table["gone"]
    with pytest.raises(ValueError, match="the name of its codec, got 'other' for 'mine'"):
        table["other"]
    with pytest.raises(ValueError, match="must be a class"):
        table["wrong"]
    with pytest.raises(KeyError):
        table["unknown"]


def test_a_name_that_nobody_has_lists_the_others() -> None:
    with pytest.raises(ValueError, match=r"'int8', .*got 'in8'; did you mean 'int8'"):
        resolve_codec("in8")


@dataclass(frozen=True)
class Velocity(ErrorFeedback):
    kinds: ClassVar[tuple[str, ...]] = ("residual", "velocity")


@dataclass(frozen=True)
class WithVelocity(Int8):
    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        return Velocity()


def test_a_memory_keeps_what_a_reducer_has_room_for() -> None:
    with pytest.raises(ValueError, match=r"kinds residual, momentum, got .*'velocity'"):
        Settings.check(WithVelocity())
