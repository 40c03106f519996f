"""Settings of sharded models, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lightning_dist.codecs import Codec, resolve_codec
from lightning_dist.codecs.policies import sized
from lightning_dist.settings.exchange import Settings


def sharded_settings(codec: str | Codec | Mapping[str, Any], **settings: Any) -> Settings:
    """The checked settings of :func:`compress_fsdp`.

    Raises:
        ValueError: a setting is out of range, or cannot take effect for shards.
    """
    checked = Settings.check(codec, **settings)
    if not checked.intra.lossless:
        raise ValueError(
            f"Inside a replica FSDP reduces gradients itself, got the codec {checked.intra.name!r} "
            "for it; give the codec between replicas alone"
        )
    return checked


@dataclass(frozen=True)
class ShardSettings:
    """Checked settings of a model that is sharded over all ranks.

    Args:
        given: all that the user has set, but the codec of the parameters.
        gradients, parameters: policies that answer with block codecs.
    """

    given: Settings
    gradients: Codec
    parameters: Codec

    @classmethod
    def check(cls, given: Settings, parameters: str | Codec) -> ShardSettings:
        """Resolve names and refuse what cannot work."""
        if given.start_step or given.commit != "auto":
            raise ValueError(
                "With parameters= every step is compressed, and nothing is committed later: leave "
                "start_step and commit out"
            )
        gradients, of_parameters = given.codec, resolve_codec(parameters)
        for policy, what in ((gradients, "gradients"), (of_parameters, "parameters")):
            if policy.boundaries() != (0,):
                raise ValueError(
                    f"A sharded model cannot change codecs while it trains, got {policy} for its "
                    f"{what}; give one codec, or by_name or by_size of several"
                )
        for leaf in of_parameters.leaves():
            if leaf.of_parameters() is None:
                raise ValueError(
                    "Parameters are gathered whole, and nothing of them is kept: their codec must "
                    f"be one such as 'int8', 'fp8', 'bf16' or 'none', got {leaf}"
                )
        for leaf in gradients.leaves():
            if leaf.of_shards() is None:
                raise ValueError(
                    "In a reduce-scatter every rank decodes its own shard: the codec of gradients "
                    f"must be of blocks and not sparse, got {leaf}; use 'qsgd:bits=8', or 'int8' "
                    "with error_feedback=True"
                )
            if given.error_feedback == "auto" and leaf.keeps_residual and not leaf.lossless:
                raise ValueError(
                    f"codec {leaf} is biased, and where gradients are sharded over all ranks each "
                    "would keep an error of the whole model: give error_feedback=True, which keeps "
                    "it in 8 bits (1 byte and 2/block for every element of the unsharded model), "
                    "error_feedback=False to lose it, or an unbiased codec such as 'qsgd:bits=8'"
                )
        least = given.min_compress_numel
        return cls(given, sized(gradients, least), sized(of_parameters, least))

    @property
    def memory(self) -> bool:
        """Whether what the codec of the gradients loses is kept, in 8 bits."""
        return self.given.error_feedback is True


def checked_settings(
    codec: str | Codec | Mapping[str, Any],
    *,
    parameters: str | Codec | None,
    **settings: Any,
) -> Settings | ShardSettings:
    """The checked settings of :func:`compress_fsdp`, of either kind."""
    given = sharded_settings(codec, **settings)
    return given if parameters is None else ShardSettings.check(given, parameters)
