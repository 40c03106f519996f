"""The arguments that both strategies take, Lightning's and Fabric's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from torch.nn.parallel import DistributedDataParallel

from lightning_dist.codecs import Codec
from lightning_dist.elastic.recovery.mirror import require_flat
from lightning_dist.elastic.settings import RecoveryMode, require_mirror, require_recovery
from lightning_dist.frameworks.strategies.other_package import OfOneFramework
from lightning_dist.settings.exchange import Settings
from lightning_dist.sync.arguments import (
    refuse_codec_options,
    refuse_ddp_arguments,
    refuse_pytorch_lightning,
    refuse_unknown,
)

CHECKPOINT_KEY = "lightning_dist"
CONFIG_KEY = "lightning_dist"
"""Of `comm_config` in the configuration of a tracked run."""


class CompressionArguments(OfOneFramework):
    """Mixin before a ``DDPStrategy``; typed, so that LightningCLI reads the arguments from YAML."""

    _can_recover = False

    def __init__(
        self,
        codec: str | Codec | dict[str, Any] = "int8",
        error_feedback: bool | Literal["auto"] = "auto",
        hierarchical: bool | Literal["auto", "leader"] = "auto",
        min_compress_numel: int | None = None,
        start_step: int = 0,
        compile_kernels: bool | Literal["auto"] = "auto",
        ranks_per_node: int | None = None,
        rank_groups: list[Any] | None = None,
        commit: Literal["auto", "immediate", "deferred"] = "auto",
        delay: int = 0,
        exchange_timeout: float | None = None,
        recovery: RecoveryMode = "restart",
        mirror_residuals: bool | int = False,
        **kwargs: Any,
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            codec: a name of ``lightning_dist.CODECS``, with options as in ``"topk:ratio=0.01"``, a
                codec object, or a policy (``by_name``, ``by_size``, ``warmup``, ``after_steps``),
                also as a mapping, ``{"by_size": {"codec": "int4"}}``. In a hierarchical exchange it
                is the codec between nodes; ``{"intra": "bf16", "inter": "int4"}`` names that inside
                nodes too: none (the default), fp16 or bf16.
            error_feedback: keep the compression error and add it to the next gradient; 4 bytes per
                compressed element. ``"auto"``: where the codec needs it.
            hierarchical: reduce inside every node first, so that each rank sends only a share of
                the gradient to other nodes. ``"auto"``: if there are several nodes, one of them
                with several ranks. True: the same, or raise. ``"leader"``: one rank of each node
                communicates with other nodes; for nodes with one network card and slow CPUs, or
                with different numbers of ranks. False: flat.
            min_compress_numel: smaller tensors, and 1-D ones, are uncompressed; 0 compresses all.
                None: the codec's own choice (0 for casts, 4096 for most others).
            start_step: synchronised steps before compression starts.
            compile_kernels: fuse the codec's kernels at set-up (about 20 s the first time).
                ``"auto"``: for models of 4 Mi elements or more if a compiler is found.
            ranks_per_node: number of consecutive ranks on each node, whatever its name. None: by
                host name.
            rank_groups: groups of ranks instead of nodes, such as ``[[0, 1, 2], [3]]``.
            commit: when residuals are written. ``"immediate"``: in the pass that encodes, and each
                bucket is decoded on arrival; a step that is not applied loses the residuals it has
                sent. ``"deferred"``: once every bucket of a step has arrived and all ranks know
                that it is finite; a skipped step does not change residuals. ``"auto"``: deferred
                with a GradScaler or ``find_unused_parameters``, else immediate.
            delay: 1 applies the mean of a step in the next one, so that its exchange overlaps with
                a whole step; the first step gets zeros. For slow links, at some cost in loss. Not
                with a GradScaler, ``find_unused_parameters``, several optimizers or OneBitAdam.
            exchange_timeout: seconds that one wait for other ranks may take before the step fails
                on a CPU, and that a strategy waits for an accelerator at the end. None: the timeout
                of the process group.
            recovery: ``"in_process"``, for a Trainer with ``ElasticRestart`` under ``lightning-dist
                launch``: if a rank is lost, the others repeat the interrupted step without it, in
                the same processes, and its replacement joins between two steps. On CPUs.
                ``"restart"``: all ranks are restarted.
            mirror_residuals: with ``recovery="in_process"``, keep a copy of the residuals of each
                rank on the next one; as of :class:`~lightning_dist.ElasticLoop`. The exchange is
                then flat.
            **kwargs: everything ``DDPStrategy`` takes, and so ``DistributedDataParallel``'s
                arguments.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        refuse_ddp_arguments(kwargs)
        refuse_codec_options(kwargs, codec, of=type(self))
        refuse_unknown(kwargs, of=type(self), handed_to=DistributedDataParallel.__init__)
        refuse_pytorch_lightning(**kwargs)
        require_recovery(recovery)
        self.recovery: RecoveryMode = recovery
        self.mirror_every = require_mirror(mirror_residuals, recovery=recovery)
        if recovery == "in_process":
            if not self._can_recover:
                raise ValueError(
                    f"{type(self).__name__} cannot continue in the same process after a rank is "
                    "lost; use the Trainer's CompressedDDPStrategy, "
                    "ElasticLoop(recovery='in_process'), or recovery='restart'"
                )
            if delay:
                raise ValueError(
                    "recovery='in_process' repeats a failed step, which is not possible with "
                    f"delay={delay}; leave it out, or use recovery='restart'"
                )
        self._settings = Settings.check(
            codec,
            error_feedback=error_feedback,
            hierarchical=hierarchical,
            ranks_per_node=ranks_per_node,
            rank_groups=rank_groups,
            min_compress_numel=min_compress_numel,
            start_step=start_step,
            compile_kernels=compile_kernels,
            commit=commit,
            delay=delay,
            exchange_timeout=exchange_timeout,
        )
        if self.mirror_every is not None:
            require_flat(self._settings)
            self._settings = replace(self._settings, hierarchical=False)
        super().__init__(**kwargs)
