"""``CompressedDDPPlugin(codec="int8").attach(accelerator)``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, Self

from accelerate import Accelerator

from lightning_dist.codecs import Codec
from lightning_dist.frameworks.accelerate.attach import print_outside, require_attachable
from lightning_dist.frameworks.accelerate.compression import Compression
from lightning_dist.settings import LEFT_OUT, Resolved, resolve
from lightning_dist.settings.exchange import Settings
from lightning_dist.settings.options import OF_DDP, require_known, require_only
from lightning_dist.sync.arguments import refuse_codec_options


@dataclass(frozen=True)
class CompressedDDPPlugin:
    """Arguments of :func:`lightning_dist.compress_ddp`, for every model that Accelerate prepares.

    Attach it to an ``accelerate.Accelerator``, or give it to
    :class:`lightning_dist.accelerate.Accelerator` in ``kwargs_handlers=[...]``.

    What is left out, ``LEFT_OUT`` in the signature, comes from variables ``LIGHTNING_DIST_*``, the
    file that ``LIGHTNING_DIST_CONFIG`` names, or ``lightning_dist.yaml`` beside Accelerate's
    configuration, in this order; otherwise it is the default of ``compress_ddp``. The fields are
    what is in force, ``lightning-dist config --show`` says why.

    Raises:
        ValueError: a setting that does not exist, is out of range or cannot take effect, a variable
            or a key of a file that does not exist, or two sources that contradict each other; with
            where it is from.
    """

    codec: str | Codec | Mapping[str, Any] = LEFT_OUT
    _: KW_ONLY
    error_feedback: bool | Literal["auto"] = LEFT_OUT
    hierarchical: bool | Literal["auto", "leader"] = LEFT_OUT
    ranks_per_node: int | None = LEFT_OUT
    rank_groups: Sequence[Any] | None = LEFT_OUT
    min_compress_numel: int | None = LEFT_OUT
    start_step: int = LEFT_OUT
    compile_kernels: bool | Literal["auto"] = LEFT_OUT
    commit: Literal["auto", "immediate", "deferred"] = LEFT_OUT
    delay: int = LEFT_OUT
    exchange_timeout: float | None = LEFT_OUT
    _resolved: Resolved = field(init=False, repr=False, compare=False)

    def __new__(cls, *codec: Any, **settings: Any) -> Self:
        given = codec[0] if codec else settings.get("codec")
        refuse_codec_options(settings, given, of=cls)
        for name in settings:
            require_known(name, where=cls.__name__)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        resolved = resolve({name: getattr(self, name) for name in OF_DDP})
        object.__setattr__(self, "_resolved", resolved)
        for name in OF_DDP:
            object.__setattr__(self, name, resolved.value(name))
        with resolved.named_in_errors():
            require_only(
                resolved.options, OF_DDP, under="in a CompressedDDPPlugin (use LocalUpdatesPlugin)"
            )
            self._settings()

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
        compression = Compression(accelerator, self._settings())
        print_outside(accelerator, self._resolved)
        return compression

    def _settings(self) -> Settings:
        return Settings.check(**{name: getattr(self, name) for name in OF_DDP})
