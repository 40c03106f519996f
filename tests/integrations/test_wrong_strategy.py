"""A strategy that a Trainer or Fabric does not take: the error names the one that it takes."""

from __future__ import annotations

import json
import re
from typing import Any

import lightning as L
import pytest
from lightning.fabric import Fabric
from processes import run

from lightning_dist import CompressedDDPStrategy, CompressedModelParallelStrategy
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
from lightning_dist.fabric import CompressedModelParallelStrategy as FabricSharded

FOR_TRAINER = "lightning_dist.CompressedDDPStrategy"
FOR_FABRIC = "lightning_dist.fabric.CompressedDDPStrategy"
OPTIONS = "codec options go into the class: strategy=CompressedDDPStrategy('topk:ratio=0.01')"


def refused(make: Any, strategy: object) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011  (the callers compare the whole text)
        make(strategy=strategy, accelerator="cpu", devices=1)
    return str(error.value)


def test_fabric_given_the_strategy_of_a_trainer() -> None:
    assert refused(Fabric, CompressedDDPStrategy()) == (
        f"Fabric takes {FOR_FABRIC}, got {FOR_TRAINER}, which is for Trainer; import the former"
    )


def test_a_trainer_given_the_strategy_of_fabric() -> None:
    assert refused(L.Trainer, FabricStrategy("int4")) == (
        f"Trainer takes {FOR_TRAINER}, got {FOR_FABRIC}, which is for Fabric; import the former"
    )


@pytest.mark.parametrize("make", [L.Trainer, Fabric])
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("compresed_ddp", "compressed_ddp"),
        ("compressed-ddp", "compressed_ddp"),
        ("CompressedDDP", "compressed_ddp"),
        ("compressed_ddp_int-8", "compressed_ddp_int8"),
        ("compressed_int4", "compressed_ddp_int4"),
        ("compressed_ddp_powersdg", "compressed_ddp_powersgd"),
    ],
)
def test_a_misspelt_name(make: Any, name: str, meant: str) -> None:
    assert refused(make, name) == f"Unknown strategy {name!r}: did you mean {meant!r}?"


@pytest.mark.parametrize("make", [L.Trainer, Fabric])
def test_a_name_with_options(make: Any) -> None:
    name = "compressed_ddp_topk:ratio=0.01"
    assert refused(make, name) == f"Unknown strategy {name!r}: {OPTIONS}"


@pytest.mark.parametrize("make", [L.Trainer, Fabric])
@pytest.mark.parametrize("name", ["dpp", "horovod"])
def test_names_of_others_keep_lightnings_message(make: Any, name: str) -> None:
    assert refused(make, name).startswith("You selected an invalid strategy name")


@pytest.mark.parametrize(
    ("make", "strategy", "says"),
    [
        (L.Trainer, lambda: FabricSharded(lambda model, mesh: model), "which is for Fabric"),
        (Fabric, CompressedModelParallelStrategy, "which is for Trainer"),
        (Fabric, lambda: "compressed_model_parallel", "needs the function that calls fully_shard"),
        (L.Trainer, lambda: "compressed_model_paralel", "did you mean 'compressed_model_parallel'"),
    ],
)
def test_strategies_of_sharded_models(make: Any, strategy: Any, says: str) -> None:
    assert says in refused(make, strategy())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block_size": 64}, "write codec='int8:block_size=64'"),
        ({"replicate": 2}, "did you mean 'replicate_size'"),
        ({"replicate_size": 0}, "above 0, got 0"),
        ({"tensor_parallel_size": "auto"}, "got 'auto'"),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "the codec between replicas alone"),
    ],
)
def test_arguments_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        CompressedModelParallelStrategy(**{"codec": "int8", **arguments})


OTHER_PACKAGE = """
import json, sys
import lightning_dist, pytorch_lightning, lightning_fabric
from lightning_dist import CompressedDDPStrategy
from lightning_dist.fabric import CompressedDDPStrategy as FabricStrategy
said = []
objects = CompressedDDPStrategy(), FabricStrategy()
for strategy in ("compressed_ddp", "compressed_ddp_int4", *objects):
    for make in (pytorch_lightning.Trainer, lightning_fabric.Fabric):
        try:
            make(strategy=strategy, accelerator="cpu", devices=1)
        except ValueError as error:
            said.append(str(error))
print("SAID" + json.dumps(said))
"""


def test_a_trainer_or_fabric_of_the_other_package(quick_python: list[str]) -> None:
    """The names and both classes, under pytorch_lightning and lightning_fabric."""
    pytest.importorskip("pytorch_lightning")
    done = run([*quick_python, "-c", OTHER_PACKAGE], limit=90).require_success()
    said = json.loads(done.output.split("SAID")[1].splitlines()[0])
    expected = [
        f"lightning_dist works with the package 'lightning', and this {kind} comes from "
        f"{package!r}, whose classes are different ones; write 'import lightning as L', not "
        "'import pytorch_lightning'"
        for kind, package in (("Trainer", "pytorch_lightning"), ("Fabric", "lightning_fabric"))
    ]
    assert said == expected * 4
