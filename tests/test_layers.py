"""The layer rule of ARCHITECTURE.md: nothing points up. Read from the sources, not by importing."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

import lightning_dist

PACKAGE = Path(lightning_dist.__file__).parent
FRAMEWORKS = ("lightning", "pytorch_lightning", "accelerate", "transformers", "wandb")

ROOMS = tuple(
    f"lightning_dist.{each.stem}" for each in PACKAGE.iterdir() if (each / "__init__.py").exists()
)
FORBIDDEN = {
    "after_import.py": ("torch", "lightning_dist"),
    "codecs": ("torch.distributed", *(f"lightning_dist.{x}" for x in ("exchange", "topology"))),
    "topology": tuple(f"lightning_dist.{x}" for x in ("codecs", "exchange", "settings")),
    "exchange": ("lightning_dist.settings",),
    "kernels": ("torch.distributed", *(f"lightning_dist.{x}" for x in ("settings", "topology"))),
    "reducer": ("lightning_dist.measurement", "lightning_dist.onebit_adam"),
    "measurement": ("lightning_dist.onebit_adam", "lightning_dist.profiling"),
    "settings.py": ("lightning_dist.exchange",),
    "onebit_adam.py": (),
    "checkpoint": tuple(f"lightning_dist.{x}" for x in ("codecs", "settings", "topology")),
    "profiling": tuple(
        f"lightning_dist.{x}" for x in ("checkpoint", "codecs", "elastic", "settings", "topology")
    ),
    "elastic": tuple(f"lightning_dist.{x}" for x in ("codecs", "exchange", "settings", "topology")),
    "accelerator.py": ("torch.distributed", "lightning_dist"),
    "configuration": (
        "torch",
        *(f"lightning_dist.{x}" for x in ("checkpoint", "cli", "codecs", "console", "elastic")),
        *(f"lightning_dist.{x}" for x in ("exchange", "profiling", "settings", "topology")),
    ),
    "console.py": ("torch", "lightning_dist"),
    "exchanges.py": ("torch", "lightning_dist"),
    "log.py": ("torch", "lightning_dist"),
    "metrics.py": (),
    "features.py": ("torch", *ROOMS, "lightning_dist.private"),
    "optional.py": ("torch", "lightning_dist"),
    "private.py": ROOMS,
    "shared_folder.py": ("torch", "lightning_dist"),
    "versions.py": ("torch.distributed",),
}
"""What a layer must not import, beside the frameworks and the layers above it."""

UPPER = ("lightning_dist.reducer", "lightning_dist.integrations")


def forbidden(layer: str) -> tuple[str, ...]:
    above = (
        UPPER[1:] if layer in ("profiling", "measurement", "reducer", "onebit_adam.py") else UPPER
    )
    return (*FRAMEWORKS, *above, *FORBIDDEN[layer])


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


def violations(source: str, layer: str, *, package: str = "lightning_dist.x") -> list[str]:
    names = sorted(set(imported(source, package=package)))
    return [
        name
        for name in names
        if any(name == rule or name.startswith(f"{rule}.") for rule in forbidden(layer))
    ]


def files(layer: str) -> list[Path]:
    path = PACKAGE / layer
    return [path] if path.suffix else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("layer", FORBIDDEN)
def test_a_layer_imports_nothing_above_it(layer: str) -> None:
    assert files(layer), "the layer has moved: move the rule too"
    found = {
        str(file.relative_to(PACKAGE)): bad
        for file in files(layer)
        if (bad := violations(file.read_text(), layer, package=f"lightning_dist.{layer}"))
    }
    assert found == {}


def test_every_module_has_a_rule_or_is_on_top() -> None:
    on_top = {
        "__init__.py",
        "_version.py",
        "accelerate.py",
        "cli",
        "fabric.py",
        "integrations",
        "__main__.py",
        "run.py",
        "transformers.py",
    }
    modules = {
        p.name for p in PACKAGE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert modules - on_top == set(FORBIDDEN)


CIRCLES = ("reducer",)
"""Rooms with modules that know of each other, under TYPE_CHECKING or within a function."""


def import_graph() -> dict[str, set[str]]:
    """What every module of the package imports of it, wherever in the file."""
    names = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
        for file in PACKAGE.rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for name in names:
        path = PACKAGE.parent.joinpath(*name.split("."))
        folder = path.is_dir()
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
    within = tuple(f"lightning_dist.{room}." for room in CIRCLES)
    found = circles(import_graph())
    assert [each for each in found if not all(name.startswith(within) for name in each)] == []


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
    names.remove("lightning_dist.log.get_logger")  # it imports nothing else, as its layer demands
    assert {name.split(".")[0] for name in names} - sys.stdlib_module_names == {"fsspec"}


@pytest.mark.parametrize(
    ("source", "layer", "bad"),
    [
        ("import torch.distributed as dist", "codecs", "torch.distributed"),
        ("from torch import distributed", "codecs", "torch.distributed"),
        ("from torch.distributed import all_reduce", "codecs", "torch.distributed.all_reduce"),
        ("def f():\n    import wandb", "reducer", "wandb"),
        ("from lightning.pytorch import Trainer", "reducer", "lightning.pytorch.Trainer"),
        ("import accelerate.utils", "exchange", "accelerate.utils"),
        ("from ..reducer import plan", "exchange", "lightning_dist.reducer.plan"),
        ("from lightning_dist import integrations", "reducer", "lightning_dist.integrations"),
        (
            "import_module('lightning_dist.reducer.plan')",
            "exchange",
            "lightning_dist.reducer.plan",
        ),
        ("if True:\n from lightning_dist.exchange.wire import views", "codecs", "lightning_dist."),
    ],
)
def test_the_checker_can_fail(source: str, layer: str, bad: str) -> None:
    (found,) = violations(source, layer, package=f"lightning_dist.{layer}")
    assert found.startswith(bad)


def test_the_checker_lets_the_rest_pass() -> None:
    source = (
        "import torch\nimport lightning_dist.codecs\nimport wandb_like\nfrom torch import Tensor"
    )
    assert violations(source, "reducer") == []


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
    assert "lightning_dist.integrations.strategies.registration" in loaded
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


PREFIXED = {"log.py", "integrations/rank_zero.py"}
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
