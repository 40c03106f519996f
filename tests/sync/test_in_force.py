"""What is said at the start: what is in force, and what is waited for."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from processes import torchrun
from threads import on_threads
from torch import nn
from worlds import Rank, run_threads

from lightning_dist import after_steps, by_name, by_size, compress_ddp, warmup
from lightning_dist.profiling.session.profile_run import log_if_slow
from lightning_dist.sync.effect import show

SCRIPT = Path(__file__).with_name("in_force_runs.py")
LINE = (
    r"compressed DDP: codec int8, flat exchange, 1 node x 2 ranks, world size 2; "
    r"rank 0 sends about \d\d\.\d kB per step, \d\d\.\d kB without compression"
)


def lines(*frameworks: str, python: list[str]) -> list[str]:
    done = torchrun(SCRIPT, *frameworks, ranks=2, limit=120, python=python).require_success()
    return [line for line in done.output.splitlines() if re.search(f"{LINE}|by_name: ", line)]


def test_one_line_on_rank_0_without_lightning(torch_python: list[str]) -> None:
    """In processes that have not imported it: who prints is another then."""
    assert len(lines("plain", "accelerate", python=torch_python)) == 2


def test_one_line_on_rank_0_and_a_pattern_for_one_of_two_models(quick_python: list[str]) -> None:
    """Of Fabric and of Accelerate: the other model is warned of, and trains."""
    found = lines("fabric", "lightning", "two_models", python=quick_python)
    warned = [line for line in found if "by_name: " in line]
    assert (len(found), len(warned)) == (4, 2)
    for line in warned:
        assert "got 'critic', which is found in none of 2" in line
        assert line.endswith("; ignore this if it is for another model")


def model_of(rank: Rank) -> Any:
    torch.manual_seed(0)
    blocks = {"attn": nn.Linear(64, 64), "mlp": nn.Linear(64, 64)}
    return rank.ddp(nn.ModuleDict({"embed": nn.Embedding(10, 64), **blocks}))


def said(codec: Any, caplog: Any, *, size: int = 2, **settings: Any) -> list[str]:
    """What the ranks say, or raise, when this codec is attached."""

    def body(rank: Rank) -> str:
        groups = rank.groups(settings.get("rank_groups"))
        try:
            compress_ddp(model_of(rank), codec, groups=groups, **settings).close()
        except ValueError as error:
            return str(error)
        return ""

    caplog.clear()
    with caplog.at_level("INFO"):
        raised = run_threads(body, size)
    return [*filter(None, raised), *caplog.messages]


def test_a_line_that_is_not_shown_is_not_composed(caplog: Any) -> None:
    composed = []
    for level in ("WARNING", "INFO"):
        for name in ("lightning_dist", rank_zero.log.name):
            caplog.set_level(level, logger=name)
        show(lambda level=level: composed.append(level) or level)  # type: ignore[misc]
    assert composed == ["INFO"]


@pytest.mark.parametrize(
    ("codec", "pattern", "nearest"),
    [
        (by_name("int8", {"emb_table": "none"}), "emb_table", "'embed.weight'"),
        (by_name("int8", {r"atn\.weight": "int4"}), r"atn\\.weight", "'attn.weight'"),
        (warmup({0: "none", 9: by_name("int8", {"mpl": "none"})}), "mpl", "'mlp.weight'"),
        (by_size(by_name("int8", {"attn": "none", "$nothing": "int4"})), "$nothing", "'"),
    ],
    ids=["alone", "escaped", "in a warm-up", "one of two"],
)
def test_a_pattern_that_no_parameter_has(
    codec: Any, pattern: str, nearest: str, caplog: Any
) -> None:
    for message in said(codec, caplog):
        assert message.startswith(
            f"by_name: a pattern must be found in the name of a parameter, got '{pattern}', which "
            f"is found in none of 5; the nearest are {nearest}"
        )


@pytest.mark.parametrize(
    "codec", [by_name("int8"), by_name("int8", {"embed": "none", r"attn|mlp": "int4"})]
)
def test_patterns_that_are_found_and_the_default_ones(codec: Any, caplog: Any) -> None:
    (line,) = said(codec, caplog, min_compress_numel=0)
    assert line.startswith("[lightning_dist] compressed DDP: codec by_name(")


def test_one_process_exchanges_nothing(caplog: Any) -> None:
    messages = said("int8", caplog, size=1, min_compress_numel=0)
    assert messages == [
        "[lightning_dist] One process: nothing is exchanged or compressed; int8 takes "
        "effect with two ranks or more. If you started several processes, they are not "
        "connected: check WORLD_SIZE"
    ]


@on_threads(2)
def test_parameters_that_are_too_small_are_reported_once(rank: Rank, caplog: Any) -> None:
    """And not at the end, with the advice to begin earlier."""
    model = rank.ddp(nn.Linear(1, 3))
    reducer = compress_ddp(model, "int8", min_compress_numel=0, groups=rank.groups())
    reducer.close()
    assert reducer.never_compressed is None
    rank.barrier.wait()
    assert "are so small that it would send more bytes" in caplog.messages[0]


def test_bytes_of_a_warm_up_are_those_of_its_end(caplog: Any) -> None:
    (line,) = said(after_steps(50, "int8"), caplog, min_compress_numel=0)
    assert " per step from step 50 on, " in line


def test_levels_are_reported_separately(caplog: Any) -> None:
    (line,) = said("int8", caplog, size=4, rank_groups=[[0, 1], [2, 3]])
    places = "2 nodes x 2 ranks, between nodes: int8 on 1/2 of the gradient per rank"
    assert f"hierarchical exchange, {places}, world size 4; rank 0 sends about " in line
    assert "kB to other nodes and " in line


def test_a_training_that_ends_before_compression_begins_says_so_at_its_end(caplog: Any) -> None:
    def body(rank: Rank) -> None:
        model = rank.ddp(nn.Linear(256, 64))
        handle = compress_ddp(model, after_steps(100, "int8"), groups=rank.groups())
        model(torch.ones(2, 256)).sum().backward()
        rank.barrier.wait()
        handle.close()
        assert (handle.never_compressed is None) == (rank.rank > 0)
        if handle.never_compressed is not None:
            assert handle.never_compressed.atexit
            handle.never_compressed()  # as the interpreter does where torch keeps the model alive

    run_threads(body, 2)
    said = [message for message in caplog.messages if "Nothing was compressed" in message]
    assert said == [
        "[lightning_dist] Nothing was compressed in 1 synchronised steps: compression starts at "
        "step 100 (start_step, warmup, after_steps), with OneBitAdam after its freeze_step; lower "
        "it"
    ]


def timers() -> set[threading.Timer]:
    """Those that run in this process."""
    return {each for each in threading.enumerate() if isinstance(each, threading.Timer)}


def test_it_is_said_while_it_is_waited_for() -> None:
    said = threading.Event()
    with log_if_slow(0.01, lambda text: said.set() if text == "for rank 1" else None, "for rank 1"):
        assert said.wait(20)


def test_what_is_over_soon_is_not_spoken_of() -> None:
    told: list[str] = []
    before = timers()
    with log_if_slow(3600, told.append, "for rank 1"):
        (timer,) = timers() - before
    timer.join(20)
    assert not timer.is_alive()
    assert told == []
