"""The arguments that both strategies take, Lightning's and Fabric's."""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from lightning_dist.elastic.recovery.mirror import require_flat
from lightning_dist.frameworks.strategies.other_package import OfOneFramework
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.run import RecoverySettings
from lightning_dist.settings.signatures import refuse_codec_options, refuse_unknown, takes
from lightning_dist.sync.arguments import refuse_ddp_arguments, refuse_pytorch_lightning

CHECKPOINT_KEY = "lightning_dist"
CONFIG_KEY = "lightning_dist"
"""Key of `comm_config` in the configuration of a tracked run."""


class CompressionArguments(OfOneFramework):
    """Mixin before a ``DDPStrategy`` that takes settings of an exchange and of recovery."""

    _can_recover = False

    @takes(ExchangeSettings)
    @takes(RecoverySettings, "recovering")
    def __init__(
        self, settings: ExchangeSettings, recovering: RecoverySettings, **kwargs: Any
    ) -> None:
        """Check the arguments; nothing here may depend on rank or device.

        Args:
            settings: each an argument of the strategy.
            recovering: each an argument of the strategy.
            **kwargs: everything ``DDPStrategy`` takes, and so ``DistributedDataParallel``'s
                arguments.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect.
        """
        refuse_ddp_arguments(kwargs)
        refuse_codec_options(kwargs, settings.codec, of=type(self))
        refuse_unknown(kwargs, of=type(self), handed_to=DistributedDataParallel.__init__)
        refuse_pytorch_lightning(**kwargs)
        self.recovery = recovering.recovery
        self.mirror_every = recovering.mirror_every
        if recovering.recovery == "in_process":
            if not self._can_recover:
                raise ValueError(
                    f"{type(self).__name__} cannot continue in the same process after a rank is "
                    "lost; use the Trainer's CompressedDDPStrategy, "
                    "ElasticLoop(recovery='in_process'), or recovery='restart'"
                )
            if settings.delay:
                raise ValueError(
                    "recovery='in_process' repeats a failed step, which is not possible with "
                    f"delay={settings.delay}; leave it out, or use recovery='restart'"
                )
        self._settings = settings
        if self.mirror_every is not None:
            require_flat(settings)
            self._settings = settings.flat()
        super().__init__(**kwargs)
