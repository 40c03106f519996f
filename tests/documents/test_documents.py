"""The documents: tables are those of the kept results, blocks run, commands have their options."""

import ast
import inspect
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer
from needs import needs
from processes import ROOT, Finished, run, torchrun
from torch.distributed.run import get_args_parser
from typer.main import get_command

import lightning_dist
from benchmarks import docs_tables
from benchmarks.figures import FIGURES
from lightning_dist import CODECS
from lightning_dist.base.features import RECOVERY
from lightning_dist.cli import app
from lightning_dist.cli.launch_plan import FLAGS
from lightning_dist.codecs.options import parse_codec

RESULTS = docs_tables.load_results(ROOT / "benchmarks/results")


def test_the_measured_tables_are_made_from_the_kept_results() -> None:
    for document in docs_tables.DOCUMENTS:
        text = (ROOT / document).read_text()
        fresh = docs_tables.render(text, RESULTS)
        assert fresh == text, f"{document} is not up to date: make tables"


@pytest.mark.parametrize("name", FIGURES)
def test_the_figures_are_drawn_from_the_kept_results(name: str) -> None:
    is_fresh = FIGURES[name](RESULTS) == (ROOT / name).read_text()
    assert is_fresh, f"{name} is not up to date: make tables"


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    tables = re.findall(r"(?m)^\|[ :|-]+\|\n((?:\|.*\n)+)", text)
    assert len(tables) >= 4
    assert [table for table in tables if table.count("\n") > 6] == []


SUMS = {"allreduce": "by the network", "two_shot": "decoded", "gather": "all payloads gathered"}


def test_the_table_of_the_guide_is_that_of_the_codecs() -> None:
    """Options with their defaults, what is kept, and who adds."""
    rows = [line for line in (ROOT / "docs/guide.md").read_text().splitlines() if "| " in line]
    for name, make in CODECS.items():
        if not make.__module__.startswith("lightning_dist."):
            continue
        (row,) = [r for r in rows if re.search(rf"^\|[^|]*`{name}`", r)]
        _, options, _, keeps, sums = (cell.strip() for cell in row.strip("|").split("|"))
        codec = make()
        said = dict(re.findall(r"`(\w+)=([^`]*)`", options))
        inherited = vars(CODECS["topk"]()) if "`topk`'s" in options else {}
        for option in vars(codec):
            if option in said or option not in inherited:
                assert parse_codec(f"{name}:{option}={said[option]}", CODECS) == codec, name
        kept = " and ".join(codec.memory().kinds) or "nothing"
        assert keeps.startswith(kept), name
        assert sums.startswith(SUMS[codec.exchange]), name


def test_every_codec_is_on_the_page_of_the_api() -> None:
    page = (ROOT / "docs/api/codecs.md").read_text()
    own = [make for make in CODECS.values() if make.__module__.startswith("lightning_dist.")]
    assert [m.__name__ for m in own if f"::: lightning_dist.{m.__name__}\n" not in page] == []


def test_public_names_are_documented() -> None:
    pages = ("guide", "fsdp2", "local-steps", "checkpoints", "profiling", "write-your-own-codec")
    files = ("README.md", *(f"docs/{name}.md" for name in pages))
    text = "".join((ROOT / file).read_text() for file in files)
    own = {"CODECS", "Codec", "__version__", *(make.__name__ for make in CODECS.values())}
    assert [n for n in lightning_dist.__all__ if n not in own and n not in text] == []


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
RUN_PAGE = ROOT / "tests/documents/run_page.py"
JOINED = {"fsdp2": ["4+5"], "write-your-own-codec": ["0+1+2"]}
"""Blocks that go on where the one before ends."""
OPTIONAL = {"accelerate 1": "transformers", "write-your-own-codec 3": "triton"}
"""Blocks that are run where a package is installed."""
MISSING = {block: package for block, package in OPTIONAL.items() if find_spec(package) is None}
NOT_RUN = {"elastic-ray 0": "Ray's controller starts the workers", **MISSING}
"""Blocks that cannot run here. CUDA is replaced by the CPU. Job files of SLURM and Kubernetes run
with stand-ins in tests/examples. Commands are not run; the options of ours and of torchrun are
checked, those of other programs (accelerate, make, pip, ufw) are not."""
RANKS = {"fsdp2 3": 4}
"""Of blocks that two are too few for."""


def launch(
    script: Path, *arguments: str | Path, ranks: int, limit: float, python: list[str]
) -> Finished:
    """As `torchrun`, with our agent, as ``lightning-dist launch``."""
    options = ["--standalone", f"--nproc-per-node={ranks}", "--no-python"]
    agent = [*python, "-m", "lightning_dist.elastic.launcher", *options]
    return run([*agent, *python, script, *arguments], limit=limit)


def recovers(page: Path, run: str) -> bool:
    """Whether blocks are to be started by our launcher, and need a torch that not all have."""
    return "in_process" in python_blocks(page)[int(run.partition("+")[0])]


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```(?:python|diff)\n(.*?)```", page.read_text(), re.DOTALL)


def runs_of(page: Path) -> list[str]:
    """Numbers of the blocks, as run_page.py takes them."""
    joined = JOINED.get(page.stem, [])
    taken = {part for each in joined for part in each.split("+")}
    numbers = [str(n) for n in range(len(python_blocks(page)))]
    runs = [n for n in numbers if n not in taken and f"{page.stem} {n}" not in NOT_RUN]
    return [*runs, *joined]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", [p for p in PAGES if runs_of(p)], ids=lambda p: p.stem)
def test_blocks_run_on_two_ranks(page: Path, tmp_path: Path, quick_python: list[str]) -> None:
    """As they stand there, with stand-ins for the user's model and data, and a CPU for CUDA."""
    runs = [run for run in runs_of(page) if not recovers(page, run)]
    run_on_two_ranks(page, runs, torchrun, tmp_path, quick_python)


@needs(RECOVERY)
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(recovers(p, run) for run in runs_of(p))], ids=lambda p: p.stem
)
def test_blocks_recover_on_two_ranks(page: Path, tmp_path: Path, quick_python: list[str]) -> None:
    runs = [run for run in runs_of(page) if recovers(page, run)]
    run_on_two_ranks(page, runs, launch, tmp_path, quick_python)


def run_on_two_ranks(
    page: Path, runs: list[str], start: Callable[..., Finished], folder: Path, python: list[str]
) -> None:
    for number in runs:  # a process has one world: a second one may wait for ever
        ranks = RANKS.get(f"{page.stem} {number}", 2)
        done = start(RUN_PAGE, page, folder, number, ranks=ranks, limit=150, python=python)
        ended = done.output.count(f"block {number} has run")
        assert ended == ranks, f"{page.name}, block {number}:\n{done.output[-12000:]}"


def test_all_that_is_not_run_exists() -> None:
    known = {f"{page.stem} {n}" for page in PAGES for n in range(len(python_blocks(page)))}
    assert {*OPTIONAL, *NOT_RUN} <= known


def shell_lines(page: Path) -> list[list[str]]:
    """Words of our commands and torchrun's, in blocks and indented."""
    text = page.read_text()
    blocks = re.findall(r"```(?:bash)?\n(.*?)```", text, re.DOTALL)
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    blocks += re.findall(r"(?m)^(?: {4}|\t)+(\S(?:.*\\\n)*.*)", plain)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    ours = [line for line in lines if re.match(r"(lightning-dist|torchrun) ", line)]
    return [[word.strip("[]") for word in shlex.split(line, comments=True)] for line in ours]


def check_command(words: list[str]) -> None:
    """Raise for an option that a command does not have."""
    if words[0] == "torchrun":
        parsed = get_args_parser().parse_args(words[1:])
        check_command([parsed.training_script, *parsed.training_script_args])
    elif words[:2] == ["lightning-dist", "launch"]:
        options = [word for word in words[2:] if word not in FLAGS]
        if "--config_file" not in " ".join(options):
            get_args_parser().parse_args(options)
    elif words[0] == "lightning-dist":
        command, rest = get_command(app), words[1:]
        while isinstance(command, typer.core.TyperGroup) and rest and rest[0] in command.commands:
            command, rest = command.commands[rest[0]], rest[1:]
        known = {option for each in command.params for option in each.opts}
        given = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert given <= known | {"--help", "--install-completion"}, (words, given - known)


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "examples/README.md"], ids=lambda p: p.stem
)
def test_commands_have_the_options(page: Path) -> None:
    for words in shell_lines(page):
        check_command(words)


def test_that_a_wrong_option_is_found() -> None:
    with pytest.raises(AssertionError, match="--keeep"):
        check_command(["lightning-dist", "ckpt", "prune", "DIR", "--keeep", "3"])
    with pytest.raises(SystemExit):
        check_command(["torchrun", "--nnodez", "2", "train.py"])


BLOCKS = [
    pytest.param(code, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


def own_names(tree: ast.Module) -> dict[str, Any]:
    """What a block imports from this package, by the name that it has in the block."""
    return {
        alias.asname or alias.name: getattr(import_module(node.module), alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.partition(".")[0] == "lightning_dist"
        for alias in node.names
    }


def wrong_arguments(tree: ast.Module, names: dict[str, Any]) -> list[str]:
    """Calls with an argument that the function or class does not have."""
    wrong = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        words = ast.unparse(node.func).removeprefix("lightning_dist.").split(".")
        called = names.get(words[0], getattr(lightning_dist, words[0], None))
        if len(words) > 1 or called is None:
            continue
        parameters = inspect.signature(called).parameters.values()
        if any(each.kind is each.VAR_KEYWORD for each in parameters):
            continue
        known = {each.name for each in parameters}
        wrong += [f"{words[0]}({k.arg}=)" for k in node.keywords if k.arg not in {*known, None}]
    return wrong


@pytest.mark.parametrize("code", BLOCKS)
def test_code_uses_names_and_arguments_that_exist(code: str) -> None:
    tree = ast.parse(code)
    assert wrong_arguments(tree, own_names(tree)) == []


def test_that_test_can_fail() -> None:
    with pytest.raises(AttributeError):
        own_names(ast.parse("from lightning_dist import compress_dpp"))
    assert wrong_arguments(ast.parse("compress_ddp(model, codek='int8')"), {}) == [
        "compress_ddp(codek=)"
    ]
