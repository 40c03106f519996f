"""What users read: messages, tested whole, and documents, whose names are those in the code."""

import ast
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from messages import message, refused
from processes import ROOT
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from worlds import Rank, run_threads

import lightning_dist
from lightning_dist.base.console import print_table, stdout_console
from lightning_dist.checkpoint.checkpointer import Metrics
from lightning_dist.codecs import Int8, resolve_codec
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.sync.ddp import compress_ddp


@pytest.mark.parametrize("codec", ["int7", "", 8, None])
def test_unknown_codec(codec: Any) -> None:
    other = ", or an object such as lightning_dist.Int8(block_size=128)"
    assert message(resolve_codec, codec) == (
        "codec must be one of 'none', 'fp16', 'bf16', 'int8', 'int4', 'fp8', 'sign', 'qsgd', "
        "'terngrad', 'topk', 'dgc', 'randomk', 'threshold', 'powersgd', with options as in "
        "'int8:block_size=128'"
        + other * (not isinstance(codec, str))
        + f", got {codec!r}"
        + ("; did you mean 'int8' or 'int4'?" if codec == "int7" else "")
    )


@pytest.mark.parametrize("block_size", [3, 0, -16, 17, 65552])
def test_block_size(block_size: int) -> None:
    assert message(Int8, block_size=block_size) == (
        f"int8: block_size must be a multiple of 16 from 16 to 65536, got {block_size}; 256 is the "
        "default"
    )


def test_settings_at_their_edges_are_taken() -> None:
    settings = ExchangeSettings(min_compress_numel=0, start_step=0, hierarchical=False)
    assert (settings.min_compress_numel, settings.start_step) == (0, 0)
    assert (Int8(16).block, Int8(65536).block) == (16, 65536)


PRIVATE = re.compile(r"\b(told|said|is there|let them meet)\b", re.IGNORECASE)


def test_strings_that_users_read_have_no_private_words() -> None:
    """Of the package all but docstrings; of the command line these too, which are its help."""
    for path in Path(lightning_dist.__file__).parent.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        documents = [node.value for node in nodes if isinstance(node, ast.Expr)]
        for node in nodes:
            if isinstance(node, ast.Constant) and ("cli" in path.parts or node not in documents):
                assert not PRIVATE.search(str(node.value)), f"{path}: {node.value}"


def test_every_placeholder_of_an_error_is_filled_in() -> None:
    """A string that is split over lines needs its ``f`` on each of them."""
    left = re.compile(r"\{(f'|[a-z_][\w.()\[\]]*(![rs])?\})")
    for path in Path(lightning_dist.__file__).parent.rglob("*.py"):
        raises = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Raise))
        for node in (each for one in raises for each in ast.walk(one)):
            text = node.value if isinstance(node, ast.Constant) else ""
            assert not left.search(str(text)), f"{path}: {text}"


def test_a_module_that_is_not_ddp() -> None:
    assert message(compress_ddp, nn.Linear(2, 2)) == (
        "compress_ddp needs a DistributedDataParallel, got Linear; wrap the model first: "
        "DistributedDataParallel(model); compress_fsdp is for those of fully_shard"
    )


def test_a_grad_scaler_that_is_none() -> None:
    assert refused(lambda rank: rank.ddp(nn.Linear(2, 2)), grad_scaler=True) == (
        "grad_scaler must be a torch.amp.GradScaler, got True; create one"
    )


def test_a_second_hook() -> None:
    """Another's hook, and ours a second time."""

    def another(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        model.register_comm_hook(None, fp16_compress_hook)
        return model

    assert refused(another) == (
        "A model takes one communication hook, and fp16_compress_hook is registered already; "
        "remove that registration, or wrap the model in a new DistributedDataParallel"
    )

    def ours(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        groups = [rank.group("first payload"), rank.group("first flags")]
        compress_ddp(model, groups=groups).close()
        return model

    assert "and that of compress_ddp is registered already; call compress_ddp once" in refused(ours)


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(9999, 4, sparse=True), nn.Linear(4, 1))
    assert refused(lambda rank: rank.ddp(model)) == (
        "The gradient of '0.weight' is sparse (sparse=True), so it is averaged at once and "
        "uncompressed, got codec int8; set codec=by_name(..., {'0.weight': 'none'}) without "
        "delay, make it with sparse=False, or freeze it"
    )


def test_no_trainable_parameters() -> None:
    """DDP itself refuses such a module, so it is frozen after it was wrapped."""

    def frozen(rank: Rank) -> DistributedDataParallel:
        model = rank.ddp(nn.Linear(2, 2))
        model.module.requires_grad_(False)
        return model

    assert refused(frozen) == (
        "The model must have a parameter with requires_grad=True, and has none; unfreeze one, or "
        "run without a distributed strategy"
    )


def test_skipped_buckets() -> None:
    ddp = {"find_unused_parameters": True, "skip_all_reduce_unused_params": True}
    assert refused(lambda rank: rank.ddp(nn.Linear(2, 2), **ddp)) == (
        "DistributedDataParallel(skip_all_reduce_unused_params=True) skips buckets, and the "
        "compressed step ends with the last one; leave it out"
    )


def test_ranks_with_different_settings() -> None:
    """Found before training, on all ranks, and each difference is named once."""

    def body(rank: Rank) -> str:
        codec = Int8(256 if rank.rank < 2 else 128)
        model, start = rank.ddp(nn.Linear(2, 2)), 10 if rank.rank == 1 else 0
        return message(compress_ddp, model, codec, groups=rank.groups(), start_step=start)

    assert set(run_threads(body, 3)) == {
        "All ranks must compress in the same way, but they differ in\n"
        "  codec: 'int8' on ranks 0, 1; 'int8:block_size=128' on rank 2\n"
        "  start_step: 0 on ranks 0, 2; 10 on rank 1\n"
        "Give every rank the same settings and the same version of the package."
    }


class Namesake(Int8):
    """Another codec under the same name."""


def test_ranks_with_different_codecs_of_one_name() -> None:
    def body(rank: Rank) -> str:
        codec = Namesake() if rank.rank else Int8()
        return message(compress_ddp, rank.ddp(nn.Linear(2, 2)), codec, groups=rank.groups())

    for said in run_threads(body, 2):
        assert "  codec: 'int8' on rank 0; 'int8 (Namesake)' on rank 1\n" in said


def test_ranks_with_different_models() -> None:
    """DDP compares shapes; frozen parameters it does not compare."""

    def body(rank: Rank) -> str:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = rank.ddp(module)
        module[rank.rank].requires_grad_(False)
        return message(compress_ddp, model, groups=rank.groups())

    first, second = run_threads(body, 2)
    assert first == second
    assert "parameters: '2 tensors, 20 elements, digest" in first
    assert first.count("on rank 0; ") == first.count(" on rank 1") == 1


def test_without_a_terminal_a_line_stays_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    line = "12 words " * 200
    stdout_console().print(line)
    assert capsys.readouterr().out == f"{line}\n", "neither folded nor coloured"


def test_a_table_has_no_frame_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a", "MB"), [("[red]x", "1"), ("y", "10 words " * 50)], right=("MB",))
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["a", "MB"]
    assert rows[0].split() == ["[red]x", "1"]
    assert rows[0].endswith("1")  # aligned to the right
    assert len(rows) == 2


def test_a_column_that_is_not_optional_is_folded_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    for name, value in (("COLUMNS", "30"), ("NO_COLOR", "1")):
        monkeypatch.setenv(name, value)
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        print_table(("a", "b", "c"), [("1" * 12, "2" * 25, "3" * 9)], optional=("c",))
        print("end", flush=True)
        text = b""
        while b"end" not in text:
            text += terminal.read(4096)
    header, *rows, end = text.decode().splitlines()
    assert (header.split(), end) == (["a", "b"], "end")
    assert "Columns left out for 30 columns: c (use" in " ".join(map(str.strip, rows))
    assert max(map(len, rows)) <= 30
    assert ("".join(rows).count("1"), "".join(rows).count("2")) == (12, 25)


def test_nobody_makes_another_one() -> None:
    package = Path(lightning_dist.__file__).parent
    found = subprocess.run(
        ["grep", "-rlE", "--include=*.py", r"stdout\.isatty|Console\(width", package],
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [Path(each).name for each in found] == ["console.py"]


DOCS = ROOT / "docs"
PACKAGE = ROOT / "lightning_dist"
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    *(ROOT / each / "README.md" for each in ("examples", "benchmarks/results")),
]
METRIC = re.compile(r"\b(?:comm|checkpoint|elastic)/[a-z]\w*\b")
OF_LOGGERS = [
    PACKAGE / "sync" / "arguments.py",
    PACKAGE / "checkpoint" / "checkpointer.py",
    PACKAGE / "elastic" / "history.py",
    PACKAGE / "profiling" / "session" / "live.py",
]
CALLBACK = PACKAGE / "frameworks" / "comm_profiler.py"


def strings(path: Path) -> Iterator[str]:
    """Every string of a module; what an f-string fills in is ``...``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            yield "".join(_text(part) for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"%(\.\d)?[sdf]", "...", node.value)


def _text(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "..."


@cache
def metrics_of_the_code() -> frozenset[str]:
    """Full names, and what follows ``comm/`` where that is put before it."""
    of_checkpoints = {f"checkpoint/{field.name}" for field in fields(Metrics)}
    of_profiles = {text for text in strings(CALLBACK) if text.startswith("comm/")}
    of_others = {text for file in OF_LOGGERS for text in strings(file)}
    return frozenset(of_checkpoints | of_profiles | of_others)


def is_logged(metric: str) -> bool:
    short = metric.removeprefix("comm/")
    return bool({metric, short, short.removeprefix("total_")} & metrics_of_the_code())


@pytest.mark.parametrize("module", ["lightning_dist", "lightning_dist.fabric"])
def test_every_public_name_is_on_a_page_of_the_api(module: str) -> None:
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    names = set(import_module(module).__all__) - {"CODECS", "__version__"}
    missing = [n for n in sorted(names) if not re.search(rf"^::: {module}\.{n}$", pages, re.M)]
    assert not missing, "add `::: NAME` to a page in docs/api/"


def test_accelerates_side_is_on_a_page_too() -> None:
    pytest.importorskip("accelerate")
    test_every_public_name_is_on_a_page_of_the_api("lightning_dist.accelerate")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)\s#]+)", page.read_text())
    assert [t for t in targets if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_metrics_in_the_documents_are_logged(page: Path) -> None:
    spans = re.findall(r"`([^`\n]+)`", page.read_text())
    named = {metric for span in spans for metric in METRIC.findall(span) if span == metric}
    assert [metric for metric in sorted(named) if not is_logged(metric)] == []


def test_that_test_can_fail() -> None:
    assert is_logged("comm/exposed_fraction")
    assert is_logged("comm/total_wire_bytes")
    assert is_logged("elastic/restarts")
    assert not is_logged("comm/exposed")
    assert not is_logged("elastic/restart")


def test_messages_under_troubleshooting_are_ours() -> None:
    """The first span of a row is what is said, unless it is said by torch or the system."""
    said = [" ".join(text.split()) for file in PACKAGE.rglob("*.py") for text in strings(file)]
    said = [re.sub(r"(\.\.\.)+", "...", text) for text in said]
    rows = (DOCS / "troubleshooting.md").read_text().splitlines()
    messages = [found[1] for row in rows if (found := re.match(r"\| `([^`]*[a-z] [^`]*)` ", row))]
    ours = [message for message in messages if message != "Too many open files"]
    assert len(ours) > 6
    assert [
        m for m in ours if not any(m.removesuffix("...").strip() in text for text in said)
    ] == []


def panels_of_the_document() -> dict[str, tuple[str, ...]]:
    rows = (DOCS / "wandb.md").read_text().split("| panel |")[1].split("\n\n")[0].splitlines()[2:]
    cells = [row.strip("| ").split(" | ") for row in rows]
    return {title: tuple(METRIC.findall(metrics)) for title, metrics, _ in cells}


def test_the_dashboard_has_the_panels_of_the_document() -> None:
    """Read from the source: wandb-workspaces takes seconds to import."""
    source = ast.parse((ROOT / "examples" / "wandb_dashboard.py").read_text())
    (sections,) = (
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "SECTIONS"
    )
    made = {title: of for panels in sections.values() for title, of in panels.items()}
    assert made == panels_of_the_document()


@pytest.mark.slow
def test_the_dashboard_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb_workspaces", reason="the example needs wandb-workspaces")
    monkeypatch.syspath_prepend(ROOT / "examples")
    workspace = import_module("wandb_dashboard").workspace("me", "tests")
    titles = [panel.title for section in workspace.sections for panel in section.panels]
    assert titles == list(panels_of_the_document())
