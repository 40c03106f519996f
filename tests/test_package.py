"""The package as it is installed: sdist, wheel, and the example of the README."""

import re
import shutil
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from processes import ROOT, run

import lightning_dist
from tests.campaigns.versions.__main__ import VERSIONS

MODULE = """
import torch
import lightning as L

class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(128, 64)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(torch.randn(64, 128)), batch_size=4
        )

module = Module()
"""
AFTER = """
if trainer.is_global_zero:
    import sys
    found = trainer.strategy.comm_stats()
    print("from", lightning_dist.__file__)
    print(trainer.world_size, "ranks,", f"{found['ratio']:.1f} times fewer bytes")
"""
BUILD = """
import os, sys
from setuptools import build_meta
os.chdir(sys.argv[1])
getattr(build_meta, f"build_{sys.argv[2]}")("dist")
"""


def test_the_lowest_admitted_versions_are_tested() -> None:
    """By `make test-lowest`, with its constraints beside the versions of all other tests; torch by
    `make test-versions`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (
        project["optional-dependencies"][name] for name in ("accelerate", "transformers", "wandb")
    )
    texts = ((ROOT / name).read_text() for name in ("constraints.txt", "constraints-lowest.txt"))
    tested = dict(re.findall(r"(?m)^([\w-]+)==(\S+)", "\n".join(texts)))
    tested |= {"torch": "2.7.0a0"}
    assert VERSIONS[0].startswith("torch==2.7.")
    for each in map(Requirement, [*project["dependencies"], *chain(*extras)]):
        least = [bound.version for bound in each.specifier if bound.operator == ">="]
        is_own = each.name == "lightning-dist"
        assert is_own or [Version(tested[each.name])] == list(map(Version, least)), each


@pytest.mark.parametrize("name", ["mutants", "versions", "versions.registers"])
def test_a_campaign_starts(name: str) -> None:
    """As its document says, without the paths that pytest adds."""
    command = [sys.executable, "-m", f"tests.campaigns.{name}", "--help"]
    assert "usage" in run(command, limit=100, PYTHONPATH=str(ROOT)).require_success().output


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made from the unpacked sdist, as package indexes do."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE", "lightning_dist"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tree / name)
    run([sys.executable, "-c", BUILD, tree, "sdist"], limit=100).require_success()
    (sdist,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tree / "unpacked", filter="data")
    (unpacked,) = (tree / "unpacked").iterdir()
    run([sys.executable, "-c", BUILD, unpacked, "wheel"], limit=100).require_success()
    (made,) = (unpacked / "dist").glob("*.whl")
    return made


@pytest.mark.slow
def test_the_wheel_has_all_files_of_the_package(wheel: Path) -> None:
    suffixes = {".py", ".cpp", ".css", ".html", ".js", ".typed"}
    package = ROOT / "lightning_dist"
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in package.rglob("*")
        if path.suffix in suffixes or path.name == "py.typed"
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    assert expected - names == set()
    assert "lightning_dist/py.typed" in names
    assert [name for name in names if not name.startswith("lightning_dist")] == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_example_of_the_readme_with_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", environment], limit=60).require_success()
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    install = [*pip, "install", "--quiet", "--ignore-installed", "--no-deps", "--no-index", wheel]
    run(install, limit=120).require_success()
    # Its dependencies are those that run this test, behind the packages of the environment.
    site = Path(
        sysconfig.get_path("purelib", vars={"base": str(environment), "platbase": str(environment)})
    )
    (site / "tested.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    )
    (diff,) = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = [line[1:] for line in diff.splitlines() if not line.startswith("-")]
    code = "\n".join(lines)
    assert code.count("devices=8, num_nodes=4") == 1
    code = code.replace(
        "devices=8, num_nodes=4",
        'devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False',
    )
    script = tmp_path / "train.py"
    script.write_text(MODULE + code + AFTER)
    done = run([python, script], limit=200, PYTHONPATH="").require_success()
    assert f"from {site / 'lightning_dist'}" in done.output
    assert re.search(r"2 ranks, 3\.\d times fewer bytes", done.output)
    shown = run([environment / "bin" / "lightning-dist", "--version"], limit=100, PYTHONPATH="")
    assert f"lightning-dist {lightning_dist.__version__}" in shown.require_success().output
