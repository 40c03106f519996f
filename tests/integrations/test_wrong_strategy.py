"""Strategies with wrong arguments, or given to a Trainer or Fabric of another package."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from processes import run

from lightning_dist import CompressedModelParallelStrategy, LocalUpdateModelParallelStrategy
from lightning_dist.fabric import LocalUpdateModelParallelStrategy as FabricStrategy


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"block_size": 64}, "write codec='int8:block_size=64'"),
        ({"replicate": 2}, "did you mean 'replicate_size'"),
        ({"replicate_size": 0}, "above 0, got 0"),
        ({"tensor_parallel_size": "auto"}, "got 'auto'"),
        ({"tensor_parallel_size": 2, "recovery": "in_process"}, "each keeps a part of it"),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "the codec between replicas alone"),
    ],
)
def test_arguments_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        CompressedModelParallelStrategy(**{"codec": "int8", **arguments})


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"replicas": "host"}, "all ranks of a host are one worker; leave it out"),
        ({"method": "post_local_sgd", "ddp_steps": 9}, "got ddp_steps=9; leave it out"),
        ({"tensor_parallel_size": 2}, "got tensor_parallel_size=2; leave it out"),
        ({"parameters": "int8"}, "parameters='int8' has no effect on local updates of a sharded"),
        ({"hierarchical": True}, "each rank exchanges its shard; leave it out"),
        ({"rank_groups": [[0, 1], [2]]}, "replicate_size is the number of workers"),
        ({"ranks_per_host": 2}, "replicate_size is the number of workers"),
        ({"commit": "deferred"}, "commit='deferred' has no effect"),
        ({"compile_kernels": True}, "compile nothing, so leave it out"),
        ({"recovery": "in_process"}, "each keeps a part of it"),
        ({"data_parallel_size": 0}, "above 0, got 0"),
        ({"method": "dilocco"}, "did you mean 'diloco'"),
        ({"block_size": 64}, "write codec='int8:block_size=64'"),
        ({"sync_evry": 4}, "did you mean 'sync_every'"),
        ({"codec": {"intra": "bf16", "inter": "int8"}}, "give the codec between replicas alone"),
    ],
)
def test_arguments_of_local_steps_of_sharded_models(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        LocalUpdateModelParallelStrategy(**arguments)
    with pytest.raises(ValueError, match=re.escape(says)):
        FabricStrategy(lambda model, _: model, **arguments)


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
