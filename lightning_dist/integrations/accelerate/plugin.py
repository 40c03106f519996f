"""``CompressedDDPPlugin(codec="int8").attach(accelerator)``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from typing import Any, Literal

from accelerate import Accelerator

from lightning_dist.codecs import Codec
from lightning_dist.configuration import resolve
from lightning_dist.integrations.accelerate.compression import Compression
from lightning_dist.settings import Settings


@dataclass(frozen=True)
class CompressedDDPPlugin:
    """What :func:`lightning_dist.compress_ddp` takes, for every model that Accelerate prepares.

    Attach it to an ``accelerate.Accelerator``, or give it to
    :class:`lightning_dist.accelerate.Accelerator` in ``kwargs_handlers=[...]``.

    Args:
        codec: a name of ``lightning_dist.CODECS``, with options as in ``"topk:ratio=0.01"``, a
            codec object, a policy, or ``{"intra": "bf16", "inter": "int4"}``.
        error_feedback: keep what the codec loses and send it with the next gradient; 4 bytes per
            compressed element. ``"auto"``: where the codec needs it.
        hierarchical: reduce inside every host first. ``"auto"``: where there are several hosts, one
            of them with several ranks. True: and fail where there are not. ``"leader"``: one rank
            of a host crosses for all. False: flat.
        ranks_per_host: hosts of so many ranks that follow each other, instead of the hosts' names.
        rank_groups: any groups instead of hosts, such as ``[[0, 1, 2], [3]]``.
        min_compress_numel: smaller tensors, and 1-D ones, travel uncompressed; 0 compresses all.
            None: the codec's own choice.
        start_step: synchronised steps before compression starts.
        compile_kernels: fuse the codec's kernels at set-up. ``"auto"``: for models of 4 Mi elements
            or more where a compiler is there.

    Raises:
        ValueError: a setting that is out of range or cannot take effect.
    """

    codec: str | Codec | Mapping[str, str | Codec] = "int8"
    _: KW_ONLY
    error_feedback: bool | Literal["auto"] = "auto"
    hierarchical: bool | Literal["auto", "leader"] = "auto"
    ranks_per_host: int | None = None
    rank_groups: Sequence[Any] | None = None
    min_compress_numel: int | None = None
    start_step: int = 0
    compile_kernels: bool | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        self._settings()

    @classmethod
    def from_settings(cls, options: Mapping[str, Any]) -> CompressedDDPPlugin:
        """From options by name, as a file or the environment gives them; the rest are defaults.

        Raises:
            ValueError: an option that does not exist, or a value that cannot take effect.
        """
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, n=1)
                meant = f"did you mean {near[0]!r}?" if near else "leave it out"
                raise ValueError(
                    f"the options of compression are {', '.join(known)}, got {name!r}; {meant}"
                )
        return cls(**options)

    @classmethod
    def configured(cls, **given: Any) -> CompressedDDPPlugin:
        """What is given; the rest from variables ``LIGHTNING_DIST_*`` and files, or else defaults.

        The files: that which ``LIGHTNING_DIST_CONFIG`` names, and ``lightning_dist.yaml`` beside
        Accelerate's configuration (``lightning-dist config --show`` says what is in force).

        Raises:
            ValueError: an option that does not exist, a value that cannot take effect, or two
                sources that contradict each other; with where it is from.
        """
        resolved = resolve(given)
        with resolved.named_in_errors():
            return cls.from_settings(resolved.options)

    def attach(self, accelerator: Accelerator) -> Compression:
        """Compress the gradients of every model that ``accelerator`` prepares from now on.

        Their residuals, of every rank, go with ``accelerator.save_state`` and ``load_state``. With
        one process nothing is exchanged, which is warned of.

        Raises:
            ValueError: a model is prepared already, another plugin is attached, the Accelerator
                does not use DDP or was given a communication hook, or a launcher has started
                several processes and this Accelerator knows of one.
        """
        return Compression(accelerator, self._settings())

    def _settings(self) -> Settings:
        return Settings.check(**{field.name: getattr(self, field.name) for field in fields(self)})
