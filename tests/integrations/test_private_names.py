"""Private names of frameworks: each is in a table, is there, and is reached through private.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module, reload
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import lightning_dist
from lightning_dist import private as of_torch
from lightning_dist.integrations.lightning import private as of_lightning
from lightning_dist.private import Table, is_there, require_names

PACKAGE = Path(lightning_dist.__file__).parent
COMPILERS = PACKAGE / "kernels"
"""Uses those of torch's compiler, which is not there on every platform."""
DOCUMENTED = {("os", "_exit")}
DOCUMENTED_FIELDS = {"_fields"}  # of named tuples
BY_NAME = ("getattr", "hasattr", "setattr")


def tables() -> Iterator[tuple[str, Table]]:
    yield "torch", of_torch.NAMES
    yield "torch", of_torch.AGENT
    yield "torch", of_torch.REGROUPED
    yield "torch", of_torch.COMPILED
    yield "torch", of_torch.FSDP
    yield "torch", of_torch.DTENSOR
    yield "lightning", of_lightning.NAMES
    of_accelerate = import_module("lightning_dist.integrations.accelerate.private")
    yield "accelerate", of_accelerate.NAMES
    yield "accelerate", of_accelerate.COMMANDS
    yield "transformers", of_accelerate.TRAINER


def entries() -> list[tuple[str, str]]:
    return [
        (owner, name) for _, table in tables() for owner, of in table.items() for name in of.split()
    ]


def test_every_name_is_there() -> None:
    for package, table in tables():
        try:
            import_module(package)
        except ImportError:
            continue
        for owner, names in table.items():
            assert [name for name in names.split() if not is_there(owner, name)] == [], owner


def test_a_name_that_is_gone_is_said_with_the_versions_that_have_it() -> None:
    for package, table in tables():
        for owner in table:
            where = owner.replace(":", ".")
            with pytest.raises(ImportError, match=rf"{package} .*has no {where}\._gone") as error:
                require_names(package, {owner: "_gone"})
            assert re.search(rf"install {package}(\[.*\])?[<>=]", str(error.value))


def test_names_that_are_removed_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelCheckpoint, "_save_topk_checkpoint")
    monkeypatch.setattr(torch.amp.grad_scaler.GradScaler, "__init__", lambda self: None)
    monkeypatch.setattr(torch.amp.grad_scaler.GradScaler, "_lazy_init_scale_growth_tracker", None)
    with pytest.raises(ImportError, match=r"ModelCheckpoint\._save_topk_checkpoint"):
        require_names("lightning", dict(of_lightning.NAMES))
    with pytest.raises(ImportError, match=r"GradScaler\._scale"):
        require_names("torch", dict(of_torch.NAMES))


def test_names_of_modules_are_there_when_torch_compile_has_replaced_their_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constructor = torch.nn.Module.__init__

    def replacement(self: torch.nn.Module) -> None:
        constructor(self)

    monkeypatch.setattr(torch.nn.Module, "__init__", replacement)
    require_names("torch", dict(of_torch.NAMES))


def test_an_adapter_is_not_imported_without_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(ModelCheckpoint, "_save_topk_checkpoint")
    with pytest.raises(ImportError, match=r"lightning .* has no .*\._save_topk_checkpoint, which"):
        reload(of_lightning)


def own_names() -> set[str]:
    """Names with an underscore that some class or module of ours defines."""
    found: set[str] = set()
    for file in PACKAGE.rglob("*.py"):
        if file.name == "private.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def violations(source: str, *, own: set[str]) -> list[str]:
    """Private names of others that ``source`` uses, and names of the tables that it imports."""
    known = {name for _, name in entries()}
    undocumented = {(owner, name) for owner, name in entries() if ":" not in owner}
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            base = ast.unparse(node.value)
            allowed = known | own if base in ("self", "cls", "super()") else own - known
            if node.attr not in allowed and (base, node.attr) not in DOCUMENTED:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            names = [alias.name for alias in node.names]
            of_others = not module.startswith(("lightning_dist", "__future__"))
            if of_others and any(map(is_private, [*module.split("."), *names])):
                found.append(ast.unparse(node))
            found += [name for name in names if (module, name) in undocumented]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            name = node.args[1]
            known_name = isinstance(name, ast.Constant) and name.value in DOCUMENTED_FIELDS
            if isinstance(name, ast.Constant) and is_private(str(name.value)) and not known_name:
                found.append(ast.unparse(node))
        elif isinstance(node, ast.FunctionDef) and re.match(r"_[A-Z]\w*__", node.name):
            found += [node.name] if node.name not in known else []
    return found


def test_private_names_are_used_nowhere_else() -> None:
    own = own_names()
    files = [each for each in PACKAGE.rglob("*.py") if COMPILERS not in each.parents]
    found = {
        str(file.relative_to(PACKAGE)): bad
        for file in files
        if file.name != "private.py" and (bad := violations(file.read_text(), own=own))
    }
    assert len(files) > 250
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "trainer._checkpoint_connector.restore()",
        "self._scaler._scale",
        "self._unheard_of",
        "super()._unheard_of()",
        "from torch._C import x",
        "from torch.utils import _pytree",
        "from torch.distributed.run import get_args_parser",
        "getattr(model, '_orig_mod')",
        "hasattr(parameter, '_in_backward_optimizers')",
        "def _ModelCheckpoint__unheard_of(self): ...",
    ],
)
def test_the_search_can_find(source: str) -> None:
    assert violations(source, own={"_scaler", "_fs"})


def test_the_list_in_the_architecture_is_that_of_the_tables() -> None:
    text = (PACKAGE.parent / "ARCHITECTURE.md").read_text()
    section = text.partition("## What may break with a new torch or Lightning")[2]
    listed = re.findall(r"^- `([\w.]+)`:((?:.|\n {2})*)", section, flags=re.MULTILINE)
    found = [(owner, name) for owner, of in listed for name in re.findall(r"`(\w+)`", of)]
    wanted = [(owner.replace(":", "."), name) for owner, name in entries()]
    assert found == wanted, "\n" + architecture()


def architecture() -> str:
    """The list as it should be."""
    import textwrap

    lines = []
    for _, table in tables():
        for owner, of in table.items():
            names = ", ".join(f"`{name}`" for name in of.split())
            line = f"- `{owner.replace(':', '.')}`: {names}"
            lines += textwrap.wrap(line, 100, subsequent_indent="  ", break_long_words=False)
    return "\n".join(lines)
