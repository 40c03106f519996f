"""Every codec, its options and 1-bit Adam as users write them: Lightning, Fabric, YAML."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric import Fabric
from processes import torchrun
from results import Facts, Results, pick, require_compressed, require_equal, require_replicas

from lightning_dist import CODECS, CompressedDDPStrategy, by_name, by_size, warmup
from lightning_dist.codecs import DGC, POLICIES, QSGD, Codec, Int4, PowerSGD, TopK
from lightning_dist.configuration import resolve
from lightning_dist.configuration.options import POLICIES as POLICIES_OF_FILES
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.settings import Settings

RUNNER = Path(__file__).with_name("run_scenarios.py")
GUIDE = Path(__file__).resolve().parents[2] / "docs/guide.md"
WEIGHTS, BIAS = 2 * 16 * 256, 256  # elements; the bias stays uncompressed
STEPS, FREEZE = 8, 5

STRINGS: list[tuple[str, Codec]] = [
    ("topk:ratio=0.01", TopK(ratio=0.01)),
    ("topk:ratio=0.05,values=int8,block_size=1024", TopK(0.05, 1024, "int8")),
    ("int4:block_size=64,hadamard=true", Int4(block_size=64, hadamard=True)),
    ("dgc:ratio=0.05,warmup_steps=4,clip=1.0", DGC(ratio=0.05, warmup_steps=4, clip=1.0)),
    ("powersgd:rank=2,two_phase=true", PowerSGD(rank=2, two_phase=True)),
    ("qsgd:bits=2,block_size=64,norm=l2", QSGD(bits=2, block_size=64, norm="l2")),
]
strings = pytest.mark.parametrize(("text", "codec"), STRINGS)
both = pytest.mark.parametrize("strategy", [CompressedDDPStrategy, FabricStrategy])
OPTIONS = [*(text for text, _ in STRINGS), "threshold:tau=2.0"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, quick_python: list[str]) -> Results:
    """One pair of processes for all scenarios of this file."""
    folder = tmp_path_factory.mktemp("codec_options")
    finished = torchrun(RUNNER, folder, "codec_options", ranks=2, limit=110, python=quick_python)
    return Results(folder, finished, ranks=2)


@strings
def test_a_trainer_takes_options_in_the_string(text: str, codec: Codec) -> None:
    strategy = CompressedDDPStrategy(codec=text)
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    assert trainer.strategy._settings.codec == codec


@strings
def test_fabric_takes_them_too(text: str, codec: Codec) -> None:
    fabric = Fabric(strategy=FabricStrategy(codec=text), accelerator="cpu", devices=2)
    assert fabric.strategy._settings.codec == codec


def codec_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str) -> Codec:
    """The codec of the trainer that LightningCLI builds."""
    cli = pytest.importorskip("lightning.pytorch.cli", reason="LightningCLI needs jsonargparse")
    config = tmp_path / "config.yaml"
    config.write_text(
        f"""
trainer:
  accelerator: cpu
  devices: 2
  logger: false
  strategy:
    class_path: lightning_dist.CompressedDDPStrategy
    init_args:
      codec: {codec}
"""
    )
    monkeypatch.setattr(sys, "argv", ["train.py"])
    arguments = {"run": False, "save_config_callback": None, "args": ["--config", str(config)]}
    trainer = cli.LightningCLI(L.LightningModule, **arguments).trainer
    assert type(trainer.strategy) is CompressedDDPStrategy
    return trainer.strategy._settings.codec


@strings
def test_yaml_takes_them_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, codec: Codec
) -> None:
    assert codec_of_yaml(tmp_path, monkeypatch, text) == codec


def test_yaml_takes_an_object_with_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = """
        class_path: lightning_dist.codecs.PowerSGD
        init_args:
          rank: 3
          two_phase: true
"""
    assert codec_of_yaml(tmp_path, monkeypatch, written) == PowerSGD(rank=3, two_phase=True)


def test_yaml_takes_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI and the settings file take the example of the guide."""
    (written,) = re.findall(r"```yaml\n(codec:.*?)```", GUIDE.read_text(), re.DOTALL)
    large = by_size("int8", min_numel=65536)
    named = by_name("int4", {r"head\.weight": "int8", "embed": "none"})
    expected = warmup({0: "none", 200: large, 1000: named})
    inside = textwrap.indent(written.removeprefix("codec:"), " " * 6)
    assert codec_of_yaml(tmp_path, monkeypatch, inside) == expected
    (tmp_path / "ours.yaml").write_text(written)
    found = resolve(environ={"LIGHTNING_DIST_CONFIG": str(tmp_path / "ours.yaml"), "HF_HOME": "/"})
    assert Settings.check(**found.options).codec == expected
    assert set(POLICIES) == set(POLICIES_OF_FILES)


def test_yaml_refuses_a_bad_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"codec 'topk' takes ratio=0.01, .* got 'size=3'"):
        codec_of_yaml(tmp_path, monkeypatch, "topk:size=3")


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"codec": "topk:size=3"},
        r"codec 'topk' takes ratio=0.01, block_size=4096, values=bf16, decay=1.0; got 'size=3' in "
        r"'topk:size=3'; remove it",
    ),
    ({"codec": "none:ratio=1"}, "takes no options; got 'ratio=1' in 'none:ratio=1'; remove it"),
    ({"codec": {"by_size": "int8"}}, "A policy is a mapping from one of by_size, by_name, .* got"),
    (
        {"codec": {"by_size": {"codec": "int8", "numel": 9}}},
        "by_size takes codec, min_numel, got {'codec': 'int8', 'numel': 9}: .* 'numel'",
    ),
    ({"codec": {"warmup": {"1": "int8"}}}, "warmup: steps must be whole numbers that start at 0"),
    ({"codec": {"by_sizes": {}}}, r"got the keys \['by_sizes'\]; policies are by_size, by_name"),
    ({"codec": "powersgd:rank"}, "codec 'powersgd' takes rank=4, two_phase=False, seed=0; got"),
    (
        {"codec": "powersgd:rank=x"},
        "Option rank of codec 'powersgd' must be a whole number, got 'x'",
    ),
    ({"codec": "powersgd:two_phase=1"}, "Option two_phase .* must be true or false, got '1'"),
    ({"codec": "topk:ratio=2"}, "topk: ratio must be a number above 0 and up to 1, got 2.0"),
    (
        {"codec": "topk:values=fp64"},
        "topk: values must be 'bf16', 'fp32', 'int8' or 'int2', got 'fp64'",
    ),
    ({"codec": "threshold:tau=0"}, r"threshold: tau must be a positive number, got 0\.0; 3"),
    ({"codec": "powersgd:rank=0"}, "powersgd: rank must be a whole number from 1 to 1024, got 0"),
    ({"codec": "dgc:momentum=1"}, "dgc: momentum must be a number from 0 to below 1, got 1.0"),
    ({"codec": "top_k:ratio=0.1"}, "codec must be one of 'none', .*'topk', .* got 'top_k:ratio"),
    (
        {"codec": "terngrad", "error_feedback": True},
        "Error feedback diverges with codec TernGrad.* leave error_feedback at 'auto'",
    ),
    (
        {"codec": "randomk:unbiased=true", "error_feedback": True},
        "Error feedback diverges with codec RandomK.* leave error_feedback at 'auto'",
    ),
    (
        {"codec": "dgc", "error_feedback": False},
        "codec 'dgc' accumulates its momentum in error feedback .* or use 'topk'",
    ),
]


@both
@pytest.mark.parametrize(("arguments", "message"), BAD, ids=[str(bad) for bad, _ in BAD])
def test_what_cannot_be_is_refused(
    strategy: Callable[..., object], arguments: dict[str, Any], message: str
) -> None:
    """Before any process group exists."""
    with pytest.raises(ValueError, match=message):
        strategy(**arguments)
    assert not torch.distributed.is_initialized()


def require_trained(ranks: list[Facts], codec: str) -> None:
    require_replicas(ranks)
    if codec != "threshold":  # with a small tau it sends more than uncompressed, as it says
        require_compressed(ranks, steps=STEPS)
    for facts in ranks:
        assert facts["finite"], facts["losses"]
        parts = facts["stats"]["per_codec"]
        assert parts[codec]["raw_bytes"] == STEPS * 4 * WEIGHTS
        assert parts["none"]["raw_bytes"] == STEPS * 4 * BIAS


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_trains_under_its_registered_name(launched: Results, codec: str) -> None:
    ranks = pick(launched("every_codec"), codec)
    if codec in ("none", "fp16", "bf16"):  # these take the bias too
        require_replicas(ranks)
        assert all(facts["finite"] for facts in ranks)
        assert set(ranks[0]["stats"]["per_codec"]) == {codec}
        return
    require_trained(ranks, codec)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_in_lightning(launched: Results, option: str) -> None:
    require_trained(pick(launched("options_in_lightning"), option), option.split(":")[0])


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_in_fabric(launched: Results, option: str) -> None:
    ranks = pick(launched("options_in_fabric"), option)
    require_compressed(ranks, steps=6)
    require_replicas(ranks)
    for facts in ranks:
        assert facts["stats"]["per_codec"][option.split(":")[0]]["raw_bytes"] == 6 * 4 * WEIGHTS


def test_options_change_what_is_sent(launched: Results) -> None:
    """By hand: 41 of 4096, rounded up to even, in 3.5 bytes; 52 of 1024 in 2.5 and a scale."""
    wire = {
        option: pick(launched("options_in_lightning"), option)[0]["stats"]["per_codec"]
        for option in OPTIONS[:2]
    }
    first, second = (parts["topk"]["wire_bytes"] / STEPS for parts in wire.values())
    assert first == pytest.approx(WEIGHTS / 4096 * 42 * 3.5, abs=2 * 16)  # planes are padded to 8
    assert second == pytest.approx(WEIGHTS / 1024 * (52 * 2.5 + 2), abs=2 * 16)


def test_onebit_adam_has_two_phases(launched: Results) -> None:
    """Gradients uncompressed for 5 steps, then momenta of the matrices through ``sign``."""
    ranks = pick(launched("onebit"), "whole")
    everything = WEIGHTS + BIAS
    for facts in ranks:
        warm = [{"none": everything * step} for step in range(1, FREEZE + 1)]
        frozen = [
            {"none": FREEZE * everything + step * BIAS, "sign": step * WEIGHTS}
            for step in range(1, 12 - FREEZE + 1)
        ]
        assert facts["raw"] == [*warm, *frozen]
        assert set(facts["residuals"]) == {"net.0.weight", "net.2.weight"}
        assert all(residual.any() for residual in facts["residuals"].values())
    require_replicas(ranks)
    assert len(set(ranks[0]["digests"])) == 12
    assert sum(ranks[0]["losses"][-4:]) < 0.7 * sum(ranks[0]["losses"][:4])


def test_onebit_adam_resumes_in_the_compressed_phase_bit_for_bit(launched: Results) -> None:
    for facts in launched("onebit"):
        whole, resumed = facts["whole"], facts["resumed"]
        assert len(facts["half"]["digests"]) == 8 > FREEZE
        assert facts["half"]["digests"] == whole["digests"][:8]
        assert resumed["digests"] == whole["digests"][8:]
        require_equal(resumed["residuals"], whole["residuals"])
        for index, state in whole["optimizer"].items():
            require_equal(resumed["optimizer"][index], state)
        assert resumed["raw"] == [{"none": n * BIAS, "sign": n * WEIGHTS} for n in range(1, 5)]


def test_onebit_adam_in_fabric(launched: Results) -> None:
    """Connected by ``setup``; with ``none`` the momenta are exchanged exactly."""
    first, second = launched("onebit_in_fabric")
    for name in ("sign", "none"):
        assert torch.equal(first[name]["weight"], second[name]["weight"])
    numel, bias = 64 * 64, 64
    assert first["sign"]["raw"] == {"none": 5 * numel + 10 * bias, "sign": 5 * numel}
    assert first["none"]["raw"] == {"none": 10 * (numel + bias)}
    assert not torch.equal(first["sign"]["weight"], first["none"]["weight"])


REFUSED = {
    "1-D under powersgd": r"PowerSGD\(.* none of the model's 2 parameters is one: lower the rank",
    "1-D under powersgd in fabric": "none of the model's 2 parameters is one: lower the rank",
    "rank as large as the matrix": r"rank \* \(n \+ m\) < n \* m, and none of the model's 3 param",
    "onebit clipped": "gradient_clip_val would clip OneBitAdam's momenta .* leave it out",
    "onebit under ddp": "OneBitAdam needs compressed DDP .* found none: use strategy='compressed",
    "1-D under int8": "^$",  # a warning
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_a_fit_is_refused_on_both_ranks(launched: Results, attempt: str) -> None:
    for facts in launched("refused"):
        assert re.search(REFUSED[attempt], facts[attempt]), facts[attempt]


def test_the_ranks_train_on_after_a_refusal(launched: Results) -> None:
    ranks = launched("after_refusals")
    require_replicas(ranks)
    require_compressed(ranks, steps=STEPS)
