"""Script of one rank: the Python blocks of a page, run with stand-ins for the user's own objects.

Arguments: the page, a folder, and the numbers of the blocks; ``3+4`` are run as one.
"""

import contextlib
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

GROUP = "torch.distributed.init_process_group('gloo')\n"
DDP = GROUP + "model = DistributedDataParallel(model)\n"
ACCELERATE = """
from accelerate import Accelerator
from lightning_dist.accelerate import CompressedDDPPlugin, local_updates
accelerator = Accelerator()
compression = CompressedDDPPlugin("int8").attach(accelerator)
model, optimizer = accelerator.prepare(model, optimizer)
"""
BATCHES = """
loader = micro_batches = [torch.randn(2, WIDTH) for _ in range(2)]
"""
SHARDED = """
class Sharded(Regression):
    def configure_model(self):
        for block in self.net.blocks:
            fully_shard(block, mesh=self.device_mesh["data_parallel"])
        fully_shard(self.net, mesh=self.device_mesh["data_parallel"])
module = Sharded()
"""
LOCAL = """
def loss(model, batch):
    return criterion(model(batch[0]), batch[1])
data = batches = loader
"""
WANDB = """
from lightning.fabric.loggers import Logger
class Kept(Logger):
    name = version = "kept"
    def log_metrics(self, metrics, step=None): ...
    def log_hyperparams(self, params): self.params = params
fabric = Fabric(strategy="compressed_ddp", loggers=[Kept()])
fabric.launch()
fabric.setup(model, optimizer)
"""
LOOP = """
state = {"model": model, "optimizer": optimizer}
def train_step(x, y):
    accelerator.backward(loop.scale_loss(criterion(model(x), y)))
    if loop.sync_gradients:
        optimizer.step()
        optimizer.zero_grad()
        loop.step_done()
"""
TRANSFORMERS = """
from transformers import TrainingArguments
class Model(Net):
    def forward(self, x, labels):
        return {"loss": criterion(super().forward(x), labels)}
model, data = Model(), [{"x": x, "labels": y} for x, y in data]
args = TrainingArguments("out", use_cpu=True, report_to=[], max_steps=3)
"""
HSDP = """
from accelerate import PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True)
# Accelerate shards on no CPU, so it is told that this is none.
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
"""
RECOVERING = """
from lightning_dist import init_process_group
from lightning_dist.accelerate import Accelerator, CompressedDDPPlugin
from lightning_dist.fabric import CompressedDDPStrategy
"""
RECOVERED = """
state = {"model": model, "optimizer": optimizer}
with ElasticLoop("ckpts/", loader=loader, state=state, recovery="in_process") as loop:
    for epoch in loop.epochs(1):
        for x, y in loop.batches():
            loop.scale_loss(criterion(model(x), y)).backward()
            if loop.sync_gradients:
                optimizer.step()
                optimizer.zero_grad()
                loop.step_done()
    assert (loop.steps, torch.distributed.get_world_size()) == (3, 2)
"""
TRITON = """
from lightning_dist.codecs import Int8
from lightning_dist.kernels.triton.passes import int8_encode as my_encode, int8_level as my_level
from lightning_dist.kernels.triton.registry import device_codec
class MyCodec(Int8): ...
"""
PIPELINE = """
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replica", "stage"))
module, index, stages, device = nn.Linear(8, 8), 0, 1, torch.device("cpu")
inputs, outputs = torch.empty(2, 8), torch.empty(2, 8, requires_grad=True)
"""
BEFORE = {
    "accelerate 1": TRANSFORMERS,
    "command-line 0": DDP + "from lightning_dist.settings import resolve\n",
    "elastic 2": "lightning_dist.init_process_group()\n" + ACCELERATE + LOOP,
    "elastic 5": RECOVERING,
    "elastic 6": RECOVERING,
    "fsdp2 1": SHARDED,
    "fsdp2 3": HSDP,
    "fsdp2 4+5": BATCHES,
    "fsdp2 6": GROUP,
    "guide 2": GROUP + PIPELINE,
    "local-steps 0": ACCELERATE[: ACCELERATE.index("compression")] + LOCAL,
    "local-steps 1": ACCELERATE[: ACCELERATE.index("compression")] + LOCAL,
    "local-steps 2": GROUP + LOCAL,
    "local-steps 3": GROUP + LOCAL + "import lightning_dist\n",
    "local-steps 4": GROUP,
    "profiling 1": DDP + "def train():\n    loss_of(model(data[:2][0])).backward()\n",
    "quick-start 3": GROUP,
    "two-machines 0": "os.environ['LOCAL_RANK'] = '0'  # the first of its machine\n",
    "wandb 0": WANDB,
    "wandb 1": ACCELERATE + "step = 1\n",
    "write-your-own-codec 0+1+2": GROUP + "from lightning import Trainer\n",
    "write-your-own-codec 3": TRITON,
    "write-your-own-codec 6": "class MyCodec(Codec): ...\n",
}
"""What a block uses that the page does not show, by the page and the number."""
AFTER = {
    "accelerate 1": """
assert trainer.state.global_step == 3
assert trainer.compression.comm_stats()[0]["ratio"] > 3
del trainer  # it is not Lightning's
""",
    "fsdp2 3": """
accelerator.backward(loss_of(model(data[:2][0])))
optimizer.step()
assert compression.comm_stats()[0]["wire_bytes"] > 0
""",
    "guide 1": "configure_optimizers(module)\n",
    "guide 2": """
x = torch.randn(4, 8)
ScheduleGPipe(stage, 2, loss_fn=nn.functional.mse_loss).step(x, target=x)
assert module.weight.grad is not None
""",
    "guide 3": """
profiler = CommProfiler()
module = type("Own", (Module, Regression), {})(profiler)
trainer = L.Trainer(strategy="compressed_ddp", callbacks=[profiler], max_steps=3)
trainer.fit(module)
""",
    "elastic 5": RECOVERED,
    "elastic 6": RECOVERED,
    "local-steps 4": """
loss_of(model(data[:2][0])).backward()
optimizer.step()
updates.step()
updates.finish()
""",
    "write-your-own-codec 3": "assert device_codec(MyCodec(), {}).encode is my_encode\n",
    "write-your-own-codec 0+1+2": "del trainer  # as above, and the group is the model's\n",
}

FEWER = {
    '"cuda"': '"cpu"',
    "dp_replicate_size=4, dp_shard_size=8": "dp_replicate_size=2, dp_shard_size=2",
}
"""What the machine of the tests has less of."""
STAND_INS = Path(__file__).with_name("stand_ins.py")


def blocks_of(page: Path) -> list[str]:
    """The Python blocks of a page; of a difference its new side."""
    found = re.findall(r"```(python|diff)\n(.*?)```", page.read_text(), re.DOTALL)
    return [code if kind == "python" else new_side(code) for kind, code in found]


def new_side(difference: str) -> str:
    return "".join(line[1:] for line in difference.splitlines(True) if not line.startswith("-"))


def run(code: str, folder: Path, place: str) -> None:
    """Run a block in a folder of its own. A Trainer that it has only made is fitted."""
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(STAND_INS.read_text(), str(STAND_INS), "exec"), names)
    for more, fewer in FEWER.items():
        code = code.replace(more, fewer)
    for part in (BEFORE.get(place, ""), code, AFTER.get(place, "")):
        exec(compile(part, f"<{place}>", "exec"), names)
    trainer = names.get("trainer")
    if trainer is not None and trainer.global_step == 0:
        module = names["module"]
        if "Module" in names:
            module = type("Own", (names["Module"], type(module)), {})()
        trainer.fit(module)
    if trainer is not None:
        assert trainer.global_step == 3, trainer.global_step


def clean() -> None:
    if dist.is_initialized():  # a block may only make the group, which others still connect
        dist.barrier()
    with contextlib.suppress(AssertionError, ValueError, RuntimeError):
        dist.destroy_process_group()
    AcceleratorState._reset_state(True)
    PartialState._reset_state()


def main() -> None:
    page, folder, *wanted = sys.argv[1:]
    os.environ["ACCELERATE_USE_CPU"] = "true"
    blocks = blocks_of(Path(page))
    for number in wanted:
        torch.manual_seed(0)
        code = "\n".join(blocks[int(part)] for part in number.split("+"))
        run(code, Path(folder, number), f"{Path(page).stem} {number}")
        clean()
        print(f"block {number} has run", flush=True)


if __name__ == "__main__":
    main()
