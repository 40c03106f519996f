"""The table of codecs: what users may write in ``codec=``, and codecs that they register."""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from processes import HELPERS, ROOT, run

from lightning_dist.codecs import (
    CODECS,
    DGC,
    FP8,
    POLICIES,
    QSGD,
    BlockCodec,
    Codec,
    ErrorFeedback,
    Int4,
    Int8,
    Memory,
    NoCompression,
    RandomK,
    Sign,
    TernGrad,
    TopK,
    Uncompressed,
    after_steps,
    by_name,
    by_size,
    register_codec,
    resolve_codec,
    warmup,
)
from lightning_dist.codecs.options import CodecTable
from lightning_dist.settings.exchange import ExchangeSettings


@dataclass(frozen=True)
class Mine(Int8):
    """One that is in order."""

    name: ClassVar[str] = "mine"


def another(**attributes: Any) -> type[Int8]:
    """A codec class, with other attributes."""
    return dataclass(frozen=True)(type("Another", (Int8,), {"name": "mine", **attributes}))


class NotDecorated(Int8):
    name: ClassVar[str] = "not_decorated"


@dataclass(frozen=True)
class NoDefault(BlockCodec):
    size: int
    name: ClassVar[str] = "no_default"
    exchange: ClassVar[str] = "two_shot"


@pytest.fixture
def table() -> CodecTable:
    return CodecTable([Int8, Sign])


def test_what_is_added_is_there(table: CodecTable) -> None:
    told: list[str] = []
    table.on_add(told.append)
    table.add(Mine)
    assert (list(table), len(table), table["mine"]) == (["int8", "sign", "mine"], 3, Mine)
    assert "mine" in table
    assert told == ["mine"]
    table.add(Mine)  # a module that is imported again, or a cell that is run again
    assert len(table) == 3


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        (Mine(), "must be a class derived from lightning_dist.Codec, got Mine"),
        (dict, "must be a class derived from lightning_dist.Codec"),
        (NotDecorated, "must be a frozen dataclass, got .*NotDecorated; write @register_codec"),
        (another(name="Mine"), "must be lower-case .* got 'Mine'"),
        (another(name="int8"), "must not be taken, got 'int8' .* is the name of .*Int8"),
        (another(exchange="ring"), "must be one of .* got 'ring'"),
        (NoDefault, "a default for every option, got .*NoDefault"),
    ],
)
def test_what_is_no_codec_is_refused(table: CodecTable, codec: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        table.add(codec)
    assert list(table) == ["int8", "sign"]


def test_two_classes_do_not_share_a_name(table: CodecTable) -> None:
    table.add(Mine)
    with pytest.raises(ValueError, match=r"got 'mine' for .*Another, which is the name of .*Mine"):
        table.add(another())


def test_our_names_are_taken() -> None:
    with pytest.raises(ValueError, match="must not be taken, got 'int8'"):
        register_codec(another(name="int8"))
    assert CODECS["int8"] is Int8


def test_packages_are_imported_when_they_are_asked_for(
    table: CodecTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    entries = {
        "mine": f"{__name__}:Mine",
        "int8": f"{__name__}:Mine",
        "gone": "no_such_package:Codec",
        "other": f"{__name__}:Mine",
        "wrong": f"{__name__}:install",
    }
    install(tmp_path, "\n".join(f"{name} = {place}" for name, place in entries.items()))
    monkeypatch.syspath_prepend(tmp_path)
    assert list(table) == ["int8", "sign", "mine", "gone", "other", "wrong"]
    assert len(table) == 6
    assert "'int8'" in caplog.text
    assert (table["mine"], table["int8"]) == (Mine, Int8)
    with pytest.raises(ValueError, match=r"'own_package', got ModuleNotFoundError: .*no_such_pack"):
        table["gone"]
    with pytest.raises(ValueError, match="the name of its codec, got 'other' for 'mine'"):
        table["other"]
    with pytest.raises(ValueError, match="must be a class"):
        table["wrong"]
    with pytest.raises(KeyError):
        table["unknown"]


def test_a_name_that_nobody_has_lists_the_others() -> None:
    with pytest.raises(ValueError, match=r"'int8', .*got 'in8'; did you mean 'int8'"):
        resolve_codec("in8")


@dataclass(frozen=True)
class Velocity(ErrorFeedback):
    kinds: ClassVar[tuple[str, ...]] = ("residual", "velocity")


@dataclass(frozen=True)
class WithVelocity(Int8):
    def memory(self, error_feedback: bool | Literal["auto"] = "auto") -> Memory:
        return Velocity()


def test_a_memory_keeps_what_a_reducer_has_room_for() -> None:
    with pytest.raises(ValueError, match=r"kinds residual, momentum, got .*'velocity'"):
        ExchangeSettings(WithVelocity())


nan, inf = math.nan, math.inf
BAD: list[tuple[type[Codec], str, list[Any]]] = [
    (Int8, "block_size", [0, 8, 24, 65552]),
    (Int4, "block_size", [0, 8, 24, 65552]),
    (FP8, "block_size", [0, 8, 24, 65552, "a", nan]),
    (Sign, "block_size", [0, 8, 24, 65552, "a", nan]),
    (QSGD, "bits", [0, 1, 3, 16, "a", nan, 4.0]),
    (QSGD, "block_size", [0, 8, 24, 65552, "a", nan]),
    (QSGD, "norm", ["l1", "", 2]),
    (TernGrad, "block_size", [0, 8, 24, 65552, "a", nan]),
    (TernGrad, "clip_sigma", [-1, 0.5, nan, inf, "a"]),
    (TopK, "ratio", [0, -0.1, 1.01, nan, inf, "a", None]),
    (TopK, "block_size", [0, 32, 100, 8192, "a", nan, 64.0]),
    (TopK, "values", ["fp16", "", 8]),
    (DGC, "ratio", [0, 1.01, nan, "a"]),
    (DGC, "momentum", [-0.1, 1, 1.5, nan, "a"]),
    (DGC, "clip", [-1, nan, inf, "a"]),
    (DGC, "warmup_steps", [-1, 0.5, nan, "a"]),
    (RandomK, "ratio", [0, -0.1, 1.01, nan, inf, "a", True]),
    (RandomK, "block_size", [0, 32, 100, 2**17, "a", nan]),
    (RandomK, "unbiased", [1, "yes", None]),
]


@pytest.mark.parametrize(("kind", "field", "values"), BAD)
def test_bad_hyperparameters_name_codec_field_and_value(
    kind: type[Codec], field: str, values: list[Any]
) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field) as caught:
            kind(**{field: value})
        assert str(caught.value).startswith(f"{kind.name}: {field} must be")
        assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "codec"),
    [
        ("sign", Sign()),
        ("topk:ratio=0.05", TopK(ratio=0.05)),
        ("topk: ratio = 5e-2 , values = int8", TopK(ratio=0.05, values="int8")),
        ("qsgd:bits=8,norm=l2", QSGD(bits=8, norm="l2")),
        ("randomk:unbiased=True", RandomK(unbiased=True)),
        ("int4:hadamard=true", Int4(hadamard=True)),
        ("dgc:warmup_steps=100", DGC(warmup_steps=100)),
    ],
)
def test_options_in_text(text: str, codec: Codec) -> None:
    assert resolve_codec(text) == codec
    assert resolve_codec(codec) is codec


@pytest.mark.parametrize(
    "text",
    [
        "topk:ratio=0.05,values=int8",
        "int4:hadamard=true",
        "by_size('int8')",
        "by_size('int8:block_size=64', min_numel=0)",
        "by_name('int8')",
        "by_name('int8', {'head': 'none', 'mlp': by_size('int4')})",
        "warmup({0: 'none', 200: by_name('fp8', {'a\\\\.b': 'fp16'})})",
    ],
)
def test_codecs_are_printed_as_they_are_written(text: str) -> None:
    is_policy = "(" in text
    codec = eval(text, {**POLICIES}) if is_policy else resolve_codec(text)
    assert str(codec) == text
    for kind in CODECS.values():
        assert (str(kind()), resolve_codec(str(kind()))) == (kind.name, kind())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topq", ["'topq'", "'topk'", "'none'", "int8:block_size=128"]),
        ("", ["''", "'topk'"]),
        ("topk:rato=1", ["ratio=0.01", "block_size=4096", "rato=1", "did you mean 'ratio'"]),
        ("topk:0.5", ["ratio=0.01", "0.5", "option=value"]),
        ("topk:ratio=a", ["ratio", "a number", "'a'"]),
        ("topk:block_size=1e3", ["block_size", "a whole number", "'1e3'"]),
        ("int4:hadamard=1", ["hadamard", "true or false", "'1'"]),
        ("none:x=1", ["no options", "x=1"]),
        ("topk:ratio=2", ["topk: ratio must be", "2.0"]),
    ],
)
def test_errors_of_options_list_what_there_is(text: str, says: list[str]) -> None:
    with pytest.raises(ValueError, match=r"must be|takes") as caught:
        resolve_codec(text)
    assert [word for word in says if word not in str(caught.value)] == []


def chosen(codec: Codec, name: str = "layer.weight", shape: tuple[int, ...] = (64, 64)) -> Codec:
    return codec.for_tensor(name, shape, step=0)


def test_by_size_leaves_small_and_flat_tensors_uncompressed() -> None:
    for shape, small in [
        ((64, 64), False),
        ((63, 65), True),
        ((8192,), True),
        ((4, 32, 32), False),
    ]:
        assert chosen(by_size("int8"), shape=shape) == (Uncompressed() if small else Int8())
    assert chosen(by_size("int8", min_numel=0), shape=(1,)) == Int8()
    assert chosen(by_size("int8", min_numel=100), shape=(10, 10)) == Int8()
    assert chosen(by_size("int8", min_numel=101), shape=(10, 10)) == Uncompressed()
    assert chosen(by_size("none", min_numel=10**9)) == NoCompression()
    assert chosen(by_size("randomk"), shape=(8,)) == NoCompression()
    with pytest.raises(ValueError, match="min_numel must be 0"):
        by_size("int8", min_numel=-1)


def test_norms_biases_and_embeddings_are_left_alone() -> None:
    for name in (
        *("fc.bias", "bias", "layer.0.norm1.weight", "encoder.layer_norm.weight", "pos_emb"),
        *("transformer.h.0.ln_1.weight", "ln_f.weight", "bn2.weight", "model.rmsnorm.weight"),
        *("layers.3.input_layernorm.weight", "transformer.wte.weight", "wpe.weight"),
        *("embed_tokens.weight", "embeddings.word_embeddings.weight"),
    ):
        assert chosen(by_name("int8"), name) == Uncompressed(), name
    weights = "fc", "layers.0.self_attn.q_proj", "h.0.mlp.c_fc", "conv1"
    assert all(chosen(by_name("int8"), f"{name}.weight") == Int8() for name in weights)


def test_the_first_rule_that_matches_wins() -> None:
    codec = by_name("int8", {r"head": "int4", r"head\.bias": "none", r"stem": "sign"})
    assert chosen(codec, "head.bias") == Int4()
    assert chosen(codec, "stem.weight") == Sign()
    assert chosen(codec, "body.weight") == Int8()
    assert {Int8(), Int4(), Sign()} <= set(codec.leaves())
    with pytest.raises(ValueError, match=r"by_name: patterns must be regular.*'\('.*; write "):
        by_name("int8", {"(": "none"})


def test_warmup_and_after_steps() -> None:
    codec = warmup({0: "none", 3: "int8", 7: "int4"})
    at = [codec.for_tensor("w", (64, 64), step=step).name for step in range(9)]
    assert at == ["none"] * 3 + ["int8"] * 4 + ["int4"] * 2
    assert after_steps(3, "int8") == warmup({0: "none", 3: "int8"})
    assert after_steps(0, "int8") == Int8()
    with pytest.raises(ValueError, match="steps must be 0 or more"):
        after_steps(-1, "int8")
    with pytest.raises(ValueError, match="got 'int8'; write after_steps"):
        after_steps("int8", 500)  # type: ignore[arg-type]
    for phases in ({}, {1: "int8"}, {5: "int8", 0: "none"}):
        with pytest.raises(ValueError, match="start at 0 and ascend"):
            warmup(phases)


def test_the_ramp_of_dgc_is_that_of_the_paper() -> None:
    codec = DGC(warmup_steps=40)
    sent = [codec.for_tensor("w", (64, 64), step=step) for step in range(60)]
    sparsity = [round(100 * (1 - leaf.ratio), 2) for leaf in sent if isinstance(leaf, DGC)]
    assert sparsity == [75.0] * 10 + [93.75] * 10 + [98.44] * 10 + [99.61] * 10 + [99.9] * 20
    assert {leaf.momentum_correction for leaf in sent} == {0.9}
    assert DGC().leaves() == (DGC(),)
    assert chosen(DGC()) == DGC()
    assert DGC(ratio=0.5, warmup_steps=9).leaves() == (DGC(ratio=0.5),)


@pytest.mark.parametrize(
    "codec",
    [
        *(make() for make in CODECS.values()),
        DGC(warmup_steps=3),
        DGC(warmup_steps=21),
        by_size(DGC(warmup_steps=10)),
        warmup({0: "none", 5: by_name(DGC(warmup_steps=12)), 20: "int8"}),
        by_name("int8", {"weight": after_steps(4, "int4")}),
    ],
    ids=lambda codec: codec.name,
)
def test_stage_changes_exactly_when_the_answer_does(codec: Codec) -> None:
    """And every answer is among the leaves."""
    answers = [codec.for_tensor("a.weight", (128, 128), step=step) for step in range(30)]
    phases = [codec.phase(step) for step in range(30)]
    for step in range(1, 30):
        assert (phases[step] != phases[step - 1]) == (answers[step] != answers[step - 1])
    assert set(answers) <= set(codec.leaves())


def test_a_class_is_no_codec() -> None:
    with pytest.raises(ValueError, match=r"got the class: write Int8\(\.\.\.\)"):
        resolve_codec(Int8)  # type: ignore[arg-type]


SCRIPT = Path(__file__).with_name("own_codec.py")
PAGE = ROOT / "docs/write-your-own-codec.md"


def code_of(mark: str) -> str:
    found = re.search(rf"<!-- {mark} -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found, mark
    return found[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with ``own_package``, as it is before it is installed."""
    home = tmp_path / "own_package"
    home.mkdir()
    (home / "__init__.py").touch()
    (home / "codecs.py").write_text("".join(map(code_of, ("example", "memory", "exchange"))))
    return tmp_path


def install(folder: Path, entry_points: str, *, package: str = "own_package") -> None:
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[lightning_dist.codecs]\n{entry_points}\n")


LISTED = """
import sys
from lightning_dist.codecs import CODECS
from lightning_dist.frameworks.registration import NAMES
assert {"compressed_ddp_rowint8", "compressed_ddp_int8_decay"} <= set(NAMES)
assert {"rowint8", "int8_decay"} <= set(CODECS)
assert "own_package" not in sys.modules
CODECS["rowint8"]
assert "own_package" in sys.modules
print("all is well")
"""


def run_script(python: list[str], folder: Path, *words: str | Path) -> None:
    paths = [str(path) for path in (folder, *HELPERS)]
    done = run([*python, *words], limit=110, PYTHONPATH=os.pathsep.join(paths))
    assert "all is well" in done.require_success().output


def test_a_codec_that_is_registered(package: Path, quick_python: list[str]) -> None:
    run_script(quick_python, package, SCRIPT, "registered")


@pytest.mark.slow
def test_a_codec_that_a_package_brings(package: Path, torch_python: list[str]) -> None:
    names = {"rowint8": "RowInt8", "int8_decay": "DecayInt8", "int8_broadcast": "BroadcastInt8"}
    install(package, "\n".join(f"{k} = own_package.codecs:{v}" for k, v in names.items()))
    run_script(torch_python, package, "-c", LISTED)
    run_script(torch_python, package, SCRIPT, "installed")


def test_the_example_is_short() -> None:
    lines = [line for line in code_of("example").splitlines() if line.strip()]
    assert len(lines) <= 27
