"""The layer rule of ARCHITECTURE.md: nothing points up. Read from the sources, not by importing."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import lightning_dist

PACKAGE = Path(lightning_dist.__file__).parent
FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "wandb")

ROOMS = {
    "base": "",
    "ranks": "base",
    "codecs": "base",
    "exchange": "codecs ranks",
    "settings": "base codecs ranks",
    "kernels": "base codecs exchange",
    "reducer": "base codecs exchange kernels ranks settings",
    "measurement": "base codecs ranks reducer settings",
    "sync": "base codecs exchange kernels measurement ranks reducer settings",
    "checkpoint": "base ranks settings",
    "elastic": "base checkpoint ranks reducer settings sync",
    "profiling": "base codecs elastic kernels measurement ranks reducer sync",
    "frameworks": "base checkpoint codecs elastic profiling ranks reducer settings sync",
    "cli": "base checkpoint codecs elastic frameworks measurement profiling ranks settings sync",
}
"""What each room may import of the others: those before it."""
ADAPTERS = ("frameworks", "cli")
"""Rooms that import Lightning, Accelerate, transformers or wandb."""
WITH_A_FRAMEWORK = {
    "elastic/loop/loop.py": "lightning",
    "elastic/recovery/frameworks.py": "accelerate",
}
"""Files of other rooms that do."""
NO_TORCH = (
    *(f"base/{each}.py" for each in ("console", "features", "log", "optional")),
    "base/shared_folder.py",
    "base/exchanges.py",
    *(f"settings/{each}.py" for each in ("options", "resolve")),
)
NO_COLLECTIVES = ("base/accelerator.py", "base/versions.py", "codecs/", "kernels/")


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def imported(source: str, *, package: str) -> Iterator[str]:
    """Full names of everything that ``source`` imports, wherever in the file."""
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1]
            module = ".".join([*(parts if node.level else []), *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def forbidden(file: str) -> list[str]:
    """Names that a file of the package must not import, or with which such names begin."""
    room = file.partition("/")[0]
    rooms = ROOMS.keys() - {room, *ROOMS[room].split()}
    names = [f"lightning_dist.{each}" for each in rooms]
    if room not in ADAPTERS and file not in WITH_A_FRAMEWORK:
        names += FRAMEWORKS
    names += ["torch"] * (file in NO_TORCH)
    names += ["torch.distributed"] * file.startswith(NO_COLLECTIVES)
    return names


def violations(source: str, file: str) -> list[str]:
    package = f"lightning_dist.{file.rpartition('/')[0].replace('/', '.')}"
    names = sorted(set(imported(source, package=package)))
    rules = forbidden(file)
    return [
        name for name in names if any(name == rule or name.startswith(f"{rule}.") for rule in rules)
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_nothing_above_it(room: str) -> None:
    found = {
        file: bad
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if (bad := violations(path.read_text(), file := str(path.relative_to(PACKAGE))))
    }
    assert found == {}


def test_rooms_are_in_the_order_of_their_imports() -> None:
    order = list(ROOMS)
    for room, others in ROOMS.items():
        assert all(order.index(each) < order.index(room) for each in others.split()), room


def test_the_table_of_rooms_in_the_architecture() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| .+ \| ([\w ]*)\|$", text, re.MULTILINE)
    assert [room for room, _ in rows] == [*reversed(ROOMS)], "from the top down"
    assert {room: set(others.split()) for room, others in rows} == {
        room: set(others.split()) for room, others in ROOMS.items()
    }


def test_paths_in_the_architecture_exist() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    found = set(re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|cpp))?)`", text))
    missing = [
        each for each in found if not any((at / each).exists() for at in (PACKAGE, PACKAGE.parent))
    ]
    assert missing == []


def test_every_module_is_in_a_room_or_is_a_door() -> None:
    doors = ("__init__", "__main__", "_version", "accelerate", "fabric", "run", "transformers")
    modules = {
        p.stem for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert modules == {*ROOMS, *doors}


def test_exceptions_are_still_needed() -> None:
    assert all((PACKAGE / file).exists() for file in NO_TORCH)
    for file, name in WITH_A_FRAMEWORK.items():
        names = imported((PACKAGE / file).read_text(), package="lightning_dist")
        assert any(each.startswith(f"{name}.") for each in names), file


def import_graph() -> dict[str, set[str]]:
    """What every module of the package imports of it, wherever in the file."""
    names = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name in names:
        path = PACKAGE.parent.joinpath(*name.split("."))
        folder = (path / "__init__.py").exists()
        source = (path / "__init__.py" if folder else path.with_suffix(".py")).read_text()
        found = imported(source, package=name if folder else name.rpartition(".")[0])
        graph[name] = {_module_of(each, names) for each in found} - {name, "", "lightning_dist"}
    return graph


def _module_of(name: str, modules: set[str]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of modules from each of which imports lead to all others of the set."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, todo = set[str](), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        reached[start] = seen
    found = [{m for m in reached[n] if n in reached[m]} for n in graph if n in reached[n]]
    return [each for number, each in enumerate(found) if each not in found[:number]]


def test_no_imports_lead_in_a_circle() -> None:
    """Under TYPE_CHECKING or within a function neither."""
    assert circles(import_graph()) == []


def test_a_circle_is_found() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "e"}, "e": set[str]()}
    assert circles(graph) == [{"b", "c"}]


def test_what_the_writer_process_imports_is_the_standard_library() -> None:
    disk = PACKAGE / "checkpoint" / "disk"
    own = "lightning_dist.checkpoint.disk"
    names = {
        name
        for file in disk.rglob("*.py")
        for name in imported(file.read_text(), package=own)
        if not name.startswith(own)
    }
    assert names
    names.remove("lightning_dist.base.log.get_logger")  # which needs nothing else either
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"fsspec"}


@pytest.mark.parametrize(
    ("source", "file", "bad"),
    [
        ("import torch.distributed as dist", "codecs/x.py", "torch.distributed"),
        ("from torch import distributed", "codecs/x.py", "torch.distributed"),
        ("from torch.distributed import all_reduce", "codecs/x.py", "torch.distributed.all_reduce"),
        ("def f():\n    import wandb", "reducer/x.py", "wandb"),
        ("from lightning.pytorch import Trainer", "reducer/x.py", "lightning.pytorch.Trainer"),
        ("import accelerate.utils", "exchange/x.py", "accelerate.utils"),
        ("from ..reducer import plan", "exchange/x.py", "lightning_dist.reducer.plan"),
        ("from lightning_dist import frameworks", "reducer/x.py", "lightning_dist.frameworks"),
        ("import torch", "base/log.py", "torch"),
        (
            "import_module('lightning_dist.reducer.plan')",
            "exchange/x.py",
            "lightning_dist.reducer.plan",
        ),
        (
            "if True:\n from lightning_dist.exchange.rounds import views",
            "codecs/x.py",
            "lightning_dist.",
        ),
    ],
)
def test_the_checker_can_fail(source: str, file: str, bad: str) -> None:
    (found,) = violations(source, file)
    assert found.startswith(bad)


def test_the_checker_lets_the_rest_pass() -> None:
    source = (
        "import torch\nimport lightning_dist.codecs\nimport wandb_like\nfrom torch import Tensor"
    )
    assert violations(source, "reducer/x.py") == []


@cache
def codec_classes() -> set[str]:
    modules = [parsed(file.read_text()) for file in (PACKAGE / "codecs").glob("*.py")]
    classes = {n.name for m in modules for n in m.body if isinstance(n, ast.ClassDef)}
    return classes - {"MomentumCorrection"}  # a memory, of which C++ is told the momentum


def asked_for_codecs(source: str) -> Iterator[str]:
    """Calls of isinstance and issubclass with a class of `codecs/`."""
    names = codec_classes()
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "isinstance",
            "issubclass",
        ):
            asked = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)}
            if asked & names:
                yield ast.unparse(node)


def test_nobody_asks_which_codec_it_has() -> None:
    """A codec says in methods what others must know of it, so that one of a user's own can."""
    found = {
        str(file.relative_to(PACKAGE)): asked
        for file in PACKAGE.rglob("*.py")
        if file.parent.name != "codecs" and (asked := [*asked_for_codecs(file.read_text())])
    }
    assert found == {}
    assert [*asked_for_codecs("isinstance(codec, BlockCodec | PowerSGD)")]


def loaded_after(statement: str, python: Sequence[str] = (sys.executable,)) -> set[str]:
    """Modules that an interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_that_takes_long() -> None:
    loaded = loaded_after("import lightning_dist")
    assert not loaded & {"torch", "lightning", "numpy", "accelerate", "wandb"}


def test_triton_is_imported_where_a_kernel_is_asked_for(torch_python: list[str]) -> None:
    loaded = loaded_after(
        "import lightning_dist.reducer.reducer, lightning_dist.kernels.triton", torch_python
    )
    own = "lightning_dist.kernels.triton"
    assert {name for name in loaded if name.startswith(own)} == {own, f"{own}.table"}
    assert not {"triton"} & set(
        imported((PACKAGE / "kernels/triton/table.py").read_text(), package=own)
    )


def test_nobody_else_is_loaded_for_lightning(torch_python: list[str]) -> None:
    loaded = loaded_after("import lightning, lightning_dist", torch_python)
    assert "lightning_dist.frameworks.registration" in loaded
    assert not loaded & {"accelerate", "wandb", "lightning_dist.checkpoint"}


def test_lightning_is_loaded_for_lightning_only(torch_python: list[str]) -> None:
    loaded = loaded_after(
        "from lightning_dist import ElasticLoop, compress_ddp, accelerate", torch_python
    )
    assert {"accelerate", "lightning_dist.reducer.reducer"} <= loaded
    assert "lightning" not in loaded


def test_that_test_can_fail() -> None:
    assert "wave" in loaded_after("import wave")
    assert "wave" not in loaded_after("import json")


PREFIXED = {"base/log.py", "frameworks/lightning/rank_zero.py"}
"""Files that issue warnings and Lightning's log messages, with the prefix."""


def unprefixed(source: str) -> list[str]:
    """Functions that ``source`` calls or passes on, and whose messages have no prefix."""
    return [
        name
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.Name | ast.Attribute)
        and (name := ast.unparse(node)) in ("rank_zero_warn", "rank_zero_info", "warnings.warn")
    ]


def test_every_warning_has_the_prefix() -> None:
    found = {
        str(path.relative_to(PACKAGE)): unprefixed(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if str(path.relative_to(PACKAGE)) not in PREFIXED
    }
    assert {path: names for path, names in found.items() if names} == {}
    assert unprefixed("warnings.warn(text)") == ["warnings.warn"]
    assert unprefixed("Saves(warn=rank_zero_warn)") == ["rank_zero_warn"]


BESIDE_ROOMS = {"benchmarks", "campaigns", "documents", "examples"} | {
    *("runner", "simulated_device", "support"),
}
"""Folders of tests that are of no room of the package, or that many tests use."""


def misplaced(folders: Sequence[Path], tests: Path) -> list[str]:
    """Folders of tests that are not where the package has a folder, or have over 25 files."""
    return [
        str(folder)
        for folder in folders
        if (
            folder.parts[:1] not in [(each,) for each in BESIDE_ROOMS]
            and not (PACKAGE / folder).is_dir()
        )
        or len([*(tests / folder).glob("*.*")]) > 25
    ]


def test_tests_are_where_their_room_is() -> None:
    tests = Path(__file__).parent
    folders = sorted({path.parent.relative_to(tests) for path in tests.rglob("*.py")})
    assert Path("elastic/recovery") in folders
    assert misplaced(folders, tests) == []
    assert misplaced([Path("integrations"), Path("runner")], tests) == ["integrations"]
