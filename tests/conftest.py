"""What every test needs: one thread, and nothing left behind."""

from __future__ import annotations

import gc
import os
import re
import shlex
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tiers
from forks import EVERYTHING, TORCH, fork_server
from left_behind import LeftBehind, own_temporary_folder
from on_ranks import Worlds
from processes import interpret_triton
from scheduling import pytest_xdist_make_scheduler  # noqa: F401  (a hook)
from slots import slots, taking

if TYPE_CHECKING:
    import torch

# A gloo group that other tests have left in a circle of references waits in its destructor for
# threads: one that a fork collects, such as the worker of a DataLoader, crashes or hangs it.
os.register_at_fork(after_in_child=gc.freeze)

_FORK_SERVERS = pytest.StashKey[dict[str, list[str]]]()
_SLOTS = pytest.StashKey[str]()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: to go through it takes the garbage collector a third of a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files that take minutes come first: as the last one, one worker would run it alone."""
    if {Path(each).resolve() for each in config.args} == {Path(__file__).parent}:
        config.stash[tiers.COLLECTED] = [item.nodeid for item in items]
    for item in items:
        function = item.nodeid.partition("[")[0]
        if tier := tiers.listed().get(item.nodeid) or tiers.listed().get(function):
            item.add_marker(tier)
    items.sort(
        key=lambda item: (
            not re.search("simulated_device|test_documents", item.nodeid),
            item.get_closest_marker("slow") is None,
        )
    )


@pytest.fixture(scope="session", autouse=True)
def _environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No variables of ours, and no `lightning_dist.yaml` beside Accelerate's configuration."""
    for name in [name for name in os.environ if name.startswith("LIGHTNING_DIST_")]:
        del os.environ[name]
    os.environ["HF_HOME"] = str(tmp_path_factory.mktemp("hf"))
    # A store of torch asks DNS for the name of ::ffff:127.0.0.1, and when many ask at once an
    # answer may be lost: asked for again after a second, not after five.
    os.environ["RES_OPTIONS"] = "timeout:1"
    yield
    if wandb := sys.modules.get("wandb"):
        wandb.teardown()  # the process that serves its runs


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    import torch

    torch.set_num_threads(1)
    dtype = torch.get_default_dtype()
    yield
    assert torch.get_default_dtype() == dtype, "a test changed the default dtype"


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    environment, threads = dict(os.environ), set(threading.enumerate())
    had_a_group = _has_a_group()
    yield
    if _has_a_group() and not had_a_group:  # as Lightning's own strategies leave it
        sys.modules["torch.distributed"].destroy_process_group()
    left = {
        t.name for t in set(threading.enumerate()) - threads if t.name.startswith("lightning_d")
    }
    assert not left, f"reducers not closed: {left}"
    if dict(os.environ) != environment:
        os.environ.clear()
        os.environ.update(environment)
    # A Trainer in the environment of rank 1 makes Lightning's loggers silent in this process.
    if lightning := sys.modules.get("lightning_utilities.core.rank_zero"):
        lightning.rank_zero_only.rank = 0


def _has_a_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


@pytest.fixture
def generator() -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(7)


def pytest_configure(config: pytest.Config) -> None:
    """Start the fork servers of all workers in the process that runs them, or those of this one.

    Workers are forks too. The process that runs them imports neither torch nor this package.
    """
    own_temporary_folder(config)
    config.pluginmanager.register(LeftBehind())
    given: dict[str, Any] = getattr(config, "workerinput", {})
    words: dict[str, list[str]] | None = given.get("fork_servers")
    workers: list[str] = [] if words is not None else config.getoption("tx", None) or []
    if words is None:
        if config.option.markexpr == "gpu":
            os.environ["TRITON_INTERPRET"] = "0"
        stack = ExitStack()
        config.add_cleanup(stack.close)
        config.stash[_SLOTS] = stack.enter_context(slots())
        words = {
            name: stack.enter_context(fork_server(*modules, at_once=bool(workers)))
            for name, modules in (("quick", EVERYTHING), ("torch", TORCH))
        }
    else:
        config.stash[_SLOTS] = given["slots"]
    config.stash[_FORK_SERVERS] = words
    if workers:
        fork = f"popen//python={shlex.join(words['quick'])}"
        config.option.tx = [fork if each == "popen" else each for each in workers]
        return
    from hypothesis import settings

    config.pluginmanager.register(Worlds(words["quick"], words["torch"]))
    interpret_triton()
    settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40)
    settings.load_profile("ci")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["fork_servers"] = node.config.stash[_FORK_SERVERS]
    node.workerinput["slots"] = node.config.stash[_SLOTS]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A test waits for as many slots as it has ranks before the clock of its limit starts."""
    with taking(item.config.stash[_SLOTS], ranks_of(item)):
        return (yield)


def ranks_of(item: pytest.Item) -> int:
    """As it is marked; else those of most whole jobs, or this process alone."""
    mark = item.get_closest_marker("on_ranks") or item.get_closest_marker("ranks")
    if mark is not None:
        return int(mark.args[0])
    return 2 if item.get_closest_marker("slow") or item.get_closest_marker("exhaustive") else 1


@pytest.fixture(scope="session")
def quick_python(pytestconfig: pytest.Config) -> list[str]:
    """Words to start a script with in the place of ``sys.executable``: it is a fork then."""
    return pytestconfig.stash[_FORK_SERVERS]["quick"]


@pytest.fixture
def quick_executable(
    quick_python: list[str], tmp_path_factory: pytest.TempPathFactory, monkeypatch: Any
) -> str:
    """Stands for ``sys.executable``: a script that does what it is told in a fork.

    While a test has it, forks start Python with it too. Where Python's own options are given, as
    for the writer of checkpoints, it is Python.
    """
    script = tmp_path_factory.mktemp("executable") / "python"
    script.write_text(
        f'#!/bin/sh\ncase "$1" in -[!ucm]*) exec {sys.executable} "$@";; esac\n'
        f'exec {shlex.join(quick_python)} "$@"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PYTHON_EXEC", str(script))  # torchrun's variable
    return str(script)


@pytest.fixture(scope="session")
def torch_python(pytestconfig: pytest.Config) -> list[str]:
    """The same of a process that has not imported this package, Lightning or Accelerate."""
    return pytestconfig.stash[_FORK_SERVERS]["torch"]
