"""Private names of frameworks, and what differs between the versions that the package admits."""

import ast
import importlib
import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from importlib import reload
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import lightning as L
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from checkpoint_runs import fit
from lightning.fabric import Fabric
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from packaging.requirements import Requirement
from packaging.version import Version
from processes import ROOT, run

import lightning_dist
from lightning_dist import CODECS, AsyncCheckpoint, CompressedDDPStrategy
from lightning_dist.base import features
from lightning_dist.base.features import (
    ASYNC_CHECKPOINT,
    CHECKPOINTS,
    DDP,
    FEATURES,
    TESTED,
    Feature,
    is_there,
)
from lightning_dist.base.private import new_group
from lightning_dist.base.versions import installed_version, release
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.frameworks.lightning.checkpoint import private as of_checkpoints
from lightning_dist.frameworks.registration import (
    ELASTIC_NAMES,
    LOCAL_NAMES,
    LOCAL_SHARDED_NAMES,
    SHARDED_NAMES,
    lightning_strategy,
    register,
    register_all,
)

PACKAGE = Path(lightning_dist.__file__).parent
COMPILERS = PACKAGE / "kernels"
"""Uses those of torch's compiler, which is not there on every platform."""
DOCUMENTED = {("os", "_exit")}
# Of named tuples; and of specifications of modules, in a file that is run by its path.
DOCUMENTED_FIELDS = {"_fields", "_initializing"}
BY_NAME = ("getattr", "hasattr", "setattr")


def entries() -> list[tuple[str, str]]:
    tables = (table for each in FEATURES for table in each.names.items())
    return [(owner, name) for owner, of in tables for name in of.split()]


def test_every_feature_has_its_names() -> None:
    """Where the package is as new as it says."""
    there = [each for each in FEATURES if is_new_enough(each)]
    assert len(there) > 15
    assert {each.title: each.missing for each in there if each.missing} == {}


def is_new_enough(feature: Feature) -> bool:
    installed = installed_version(feature.package)
    return bool(installed) and release(installed) >= release(feature.since)


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.title)
def test_a_feature_without_a_name_says_which_version_has_it(feature: Feature) -> None:
    package, since = feature.package, feature.since
    for owner in feature.names:
        without = replace(feature, names={owner: "_gone"})
        assert without.missing == f"{owner.replace(':', '.')}._gone"
        with pytest.raises(ImportError) as error:
            without.require()
        assert str(error.value) == (
            f"{feature.title} needs {package} {since} or newer: {package} "
            f"{installed_version(package)} has no {without.missing}; install "
            f"'{package}>={since}', or leave it out"
        )


def test_a_version_that_is_newer_than_the_tests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is warned of, once, and refused only for a name that is gone."""
    monkeypatch.setitem(TESTED, "torch", "2.9")
    feature = Feature("Part", "2.7", {"torch": "_foreach_copy_"})
    newer = replace(feature, title="Other")
    features._warn_untested.cache_clear()
    for each in (feature, newer):
        each.require()
    assert [each.getMessage() for each in caplog.records] == [
        f"[lightning_dist] lightning_dist was not tested with torch {torch.__version__} (newest: "
        "2.9); all names that it uses are there, so training goes on"
    ]
    with pytest.raises(ImportError) as error:
        replace(feature, names={"torch": "_gone"}).require()
    assert str(error.value) == (
        f"Part was last tested with torch 2.9, and torch {torch.__version__} has no torch._gone; "
        "install 'torch==2.9.*'"
    )
    features._warn_untested.cache_clear()


@pytest.mark.parametrize(
    ("version", "numbers"),
    [
        ("2.13.0a0+5228986.nv26.07", (2, 13, 0)),
        ("2.7.1+cu126", (2, 7, 1)),
        ("5.24", (5, 24)),
        ("", ()),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


def test_names_that_are_removed_are_missed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(lambda: vars(ASYNC_CHECKPOINT).pop("missing", None))
    monkeypatch.delattr(ModelCheckpoint, "_save_topk_checkpoint")
    monkeypatch.setattr(torch.amp.grad_scaler.GradScaler, "__init__", lambda self: None)
    monkeypatch.setattr(torch.amp.grad_scaler.GradScaler, "_lazy_init_scale_growth_tracker", None)
    vars(ASYNC_CHECKPOINT).pop("missing", None)
    with pytest.raises(ImportError, match=r"lightning .* has no .*\._save_topk_checkpoint; "):
        reload(of_checkpoints)  # an adapter is not imported without its names
    assert "GradScaler._scale" in str(replace(DDP).missing)


def test_names_of_modules_are_there_when_torch_compile_has_replaced_their_constructor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    constructor = torch.nn.Module.__init__

    def replacement(self: torch.nn.Module) -> None:
        constructor(self)

    monkeypatch.setattr(torch.nn.Module, "__init__", replacement)
    assert replace(DDP).missing is None
    assert replace(CHECKPOINTS).missing is None


def test_arguments_of_functions_are_names_too() -> None:
    assert is_there("torch.distributed:new_group", "backend")
    assert not is_there("torch.distributed:new_group", "color")


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
    assert len(files) > 200
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


@pytest.mark.parametrize(
    "link",
    [
        lambda callback, *given: callback._link_checkpoint(*given),
        lambda callback, *given: type(callback)._link_checkpoint(*given),
        lambda callback, trainer, file, link: type(callback)._link_checkpoint(
            trainer=trainer, filepath=file, linkpath=link
        ),
    ],
    ids=["of_the_object", "of_the_class", "with_keywords"],
)
def test_the_last_checkpoint_is_linked_by_either_form_of_the_call(
    tmp_path: Path, link: Callable[..., None], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("name", TESTED)
def test_versions_that_are_admitted(name: str) -> None:
    """Newer ones than the tests have met too, and builds before a release."""
    admitted = requirements()[name].specifier
    first = min(release(each.since) for each in FEATURES if each.package == name)
    assert not any(each.operator.startswith("<") for each in admitted)
    (lowest,) = (Version(each.version) for each in admitted if each.operator == ">=")
    assert lowest.release[:2] == first[:2]
    assert admitted.contains(f"{TESTED[name]}.0")
    assert admitted.contains("99.0")
    if name == "torch":
        assert admitted.contains("2.13.0a0+5228986.nv26.07", prereleases=True)  # of a container
    else:
        assert lowest == pinned(name, "constraints-lowest.txt")


def test_versions_of_lightning_that_held_an_attack() -> None:
    admitted = requirements()["lightning"].specifier  # GHSA-w37p-236h-pfx3
    assert [admitted.contains(each) for each in ("2.6.1", "2.6.2", "2.6.3", "2.6.4")] == [
        *(True, False, False, True)
    ]


NAMES = {
    "compressed_ddp": {"start_method": "popen"},
    "compressed_ddp_spawn": {"start_method": "spawn"},
    "compressed_ddp_fork": {"start_method": "fork"},
    "compressed_ddp_notebook": {"start_method": "fork"},
    "compressed_ddp_find_unused_parameters_true": {"find_unused_parameters": True},
    **{f"compressed_ddp_{codec}": {"codec": codec} for codec in CODECS},
}


@pytest.mark.parametrize(
    ("registry", "strategy"),
    [(StrategyRegistry, CompressedDDPStrategy), (STRATEGY_REGISTRY, FabricStrategy)],
    ids=["Lightning", "Fabric"],
)
def test_a_registry_has_the_names_and_no_others(registry: Any, strategy: type) -> None:
    """Lower-case, because Lightning lower-cases what the user writes."""
    ours = {name: registry[name]["init_params"] for name in registry if "compressed" in name}
    of_trainer = {**SHARDED_NAMES, **LOCAL_SHARDED_NAMES, **ELASTIC_NAMES}
    assert ours == {**NAMES, **LOCAL_NAMES, **(of_trainer if registry is StrategyRegistry else {})}
    for name in NAMES:
        assert name == name.lower()
        assert type(registry.get(name)) is strategy, name


# What an interpreter without Lightning imports first, and that Lightning then takes the names.
ORDERS = (
    "import lightning_dist, lightning",
    "from lightning_dist import CompressedDDPStrategy",
    "from lightning_dist.fabric import CompressedDDPStrategy",
)
IN_FORKS = """
import os, sys
assert not [name for name in sys.modules if name.startswith("lightning_dist")]
assert "lightning" not in sys.modules
for order in sys.argv[1:]:
    if os.fork() == 0:
        exec(order)
        from lightning.pytorch.strategies import StrategyRegistry
        print(*StrategyRegistry, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, order
"""


def test_the_order_of_imports_does_not_matter(torch_python: list[str]) -> None:
    done = run([*torch_python, "-c", IN_FORKS, *ORDERS], limit=100).require_success()
    known = [set(line.split()) for line in done.output.splitlines()]
    assert [set(NAMES) <= names for names in known] == [True] * len(ORDERS)


def test_importing_again_changes_nothing() -> None:
    before = {name: dict(entry) for name, entry in StrategyRegistry.items()}
    importlib.reload(lightning_dist)
    register_all()
    assert {name: dict(entry) for name, entry in StrategyRegistry.items()} == before


def test_a_name_that_the_user_took_stays_theirs() -> None:
    registry = _StrategyRegistry()
    registry.register("compressed_ddp", DDPStrategy, description="mine")
    register(registry, lightning_strategy)
    assert registry["compressed_ddp"]["strategy"] is DDPStrategy
    assert registry["compressed_ddp"]["description"] == "mine"
    assert set(registry) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "codec"), [("compressed_ddp", "int8"), ("Compressed_DDP_BF16", "bf16")]
)
@pytest.mark.parametrize("is_variable", [False, True])
def test_trainers_and_fabric_take_the_name_or_find_it_in_a_variable(
    name: str, codec: str, is_variable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"accelerator": "cpu", "devices": 2}
    if is_variable:
        monkeypatch.setenv("PL_TRAINER_STRATEGY", name)
    else:
        arguments["strategy"] = name
        fabric = Fabric(**{**arguments, "strategy": name.lower()}).strategy
        assert isinstance(fabric, FabricStrategy)
        assert fabric._settings.inter.name == codec
    trainer = L.Trainer(**arguments, logger=False)
    assert type(trainer.strategy) is CompressedDDPStrategy
    assert trainer.world_size == 2
    assert trainer.strategy.comm_stats() == {}
    assert trainer.strategy._settings.inter.name == codec


@pytest.mark.skipif(not dist.is_nccl_available(), reason="torch for CUDA only")
def test_streams_of_nccl_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """And torch is not asked for another timeout than it is told, of which it warns."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda *_, **arguments: made.append(arguments))
    new_group([0, 1], backend="nccl", timeout=timedelta(seconds=41))
    options = made[0]["pg_options"]
    assert options.is_high_priority_stream
    assert options._timeout == timedelta(seconds=41)
