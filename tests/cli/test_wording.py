"""Words that users see, as snapshots: help of the command line, and ten common errors.

``python tests/cli/test_wording.py`` writes the snapshots anew; read the difference.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from calls import commands, program

import lightning_dist
from lightning_dist import AsyncCheckpoint, CompressedDDPStrategy, LocalUpdateStrategy

SNAPSHOTS = Path(__file__).with_name("snapshots")


def help_texts() -> str:
    texts = [program(*path, "--help", terminal_width=80).stdout for path in commands()]
    return "\n\n".join(texts)


ERRORS: dict[str, Callable[[], object]] = {
    "a codec that does not exist": lambda: CompressedDDPStrategy("int9"),
    "an option that the codec does not have": lambda: CompressedDDPStrategy("topk:ration=0.1"),
    "a value out of range": lambda: CompressedDDPStrategy("topk:ratio=2"),
    "a setting of another kind": lambda: CompressedDDPStrategy("int8", hierarchical="yes"),
    "a delay of several steps": lambda: CompressedDDPStrategy("int8", delay=2),
    "a model that is not in DDP": lambda: lightning_dist.compress_ddp(torch.nn.Linear(2, 2)),
    "a method of local updates": lambda: LocalUpdateStrategy("dilocco"),
    "checkpoints every so often": lambda: AsyncCheckpoint("ckpts", every_n_train_steps=-1),
}
COMMANDS = (
    "launch no.py",
    "launch --nnodes 2 train.py",
    "ckpt verify no.ckpt",
    "ckpt ls no",
    "profile report no",
    "config --set codec=int9",
    "config --set codek=int8",
    "bench --ops all_reduce",
)


def error_texts() -> str:
    texts = []
    for what, call in ERRORS.items():
        with pytest.raises(Exception) as caught:  # noqa: PT011  # the snapshot has class and words
            call()
        texts.append(f"# {what}\n{caught.type.__name__}: {caught.value}\n")
    for words in COMMANDS:
        result = program(*words.split())
        said = result.stderr.strip()
        texts.append(f"$ lightning-dist {words}\n{said}\nexit {result.exit_code}\n")
    return "\n".join(texts)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, with one script."""
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "cache")
    Path("train.py").touch()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize(("name", "texts"), [("help", help_texts), ("errors", error_texts)])
def test_words_are_those_of_the_snapshot(name: str, texts: Callable[[], str]) -> None:
    assert texts() == (SNAPSHOTS / f"{name}.txt").read_text()


def test_help_fits_a_terminal_of_80_columns() -> None:
    assert [line for line in help_texts().splitlines() if len(line) > 80] == []


if __name__ == "__main__":
    SNAPSHOTS.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ.update(HF_HOME="cache", XDG_CACHE_HOME="cache")
        Path("train.py").touch()
        (SNAPSHOTS / "help.txt").write_text(help_texts())
        (SNAPSHOTS / "errors.txt").write_text(error_texts())
