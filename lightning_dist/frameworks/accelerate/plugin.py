"""``CompressedDDPPlugin(codec="int8").attach(accelerator)``."""

from __future__ import annotations

from accelerate import Accelerator

from lightning_dist.frameworks.accelerate.attach import (
    print_outside,
    require_attachable,
)
from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.settings import FromOutside, Resolved, from_outside
from lightning_dist.settings.exchange import ExchangeSettings
from lightning_dist.settings.signatures import takes


class CompressedDDPPlugin(FromOutside, ExchangeSettings):
    """Arguments of :func:`lightning_dist.compress_ddp`, for every model that Accelerate prepares.

    Attach it to an ``accelerate.Accelerator``, or give it to
    :class:`lightning_dist.accelerate.Accelerator` in ``kwargs_handlers=[...]``.

    What is left out comes from variables ``LIGHTNING_DIST_*``, the file that
    ``LIGHTNING_DIST_CONFIG`` names, or ``lightning_dist.yaml`` beside Accelerate's configuration,
    in this order; otherwise it is the default of ``compress_ddp``. The fields are what is in force;
    ``lightning-dist config --show`` says why.
    """

    @takes(ExchangeSettings, make=from_outside)
    def __init__(self, settings: Resolved) -> None:
        """Check the settings.

        Args:
            settings: each an argument of the plugin.

        Raises:
            ValueError: a setting that does not exist, is out of range or cannot take effect, a
                variable or a key of a file that does not exist, or two sources that contradict each
                other; with where it is from.
        """
        super().__init__(settings)

    def attach(self, accelerator: Accelerator) -> Compression:
        """Compress the gradients of every model that ``accelerator`` prepares from now on.

        Their residuals, of every rank, go with ``accelerator.save_state`` and ``load_state``. With
        one process nothing is exchanged, which is warned of. Rank 0 says which settings are from
        outside of the code, and from where.

        Raises:
            ValueError: a model is prepared already, another plugin is attached, the Accelerator
                does not use DDP or was given a communication hook, or a launcher has started
                several processes and this Accelerator knows of one.
        """
        require_attachable(accelerator)
        compression = Compression(accelerator, self)
        print_outside(accelerator, self.resolved)
        return compression
