"""Settings of sharded models (FSDP2): between replicas, or of the collectives of one replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from lightning_dist.settings.declared import Rule, check_values, is_whole, optional, setting
from lightning_dist.settings.exchange import FSDP2, LOCAL, ExchangeSettings, is_text

if TYPE_CHECKING:
    from lightning_dist.codecs import Codec


@dataclass(frozen=True)
class ShardedSettings(ExchangeSettings):
    """Everything that decides what travels under FSDP2. Equal on all ranks, or the start fails.

    Raises:
        ValueError: a setting is out of range, or cannot take effect for shards.
    """

    kind: ClassVar[str] = FSDP2
    instead: ClassVar[Mapping[str, str]] = {
        LOCAL: "use a LocalUpdateModelParallelStrategy or local_updates",
        "exchange_timeout": "give timeout= to the strategy or the process group",
        "hierarchical": "each rank exchanges its shard; leave it out",
        **dict.fromkeys(("ranks_per_node", "rank_groups"), "give the number of replicas"),
    }

    parameters: str | Codec | None = setting(
        None,
        optional(Rule("a codec such as int8", is_text), "FSDP gathers parameters as they are"),
        "codec of the parameters in FSDP's all-gather, for one replica that is sharded over all "
        "ranks. Gradients are then reduce-scattered in ``codec``, which has to be unbiased "
        '(``"qsgd:bits=8"``) or to keep its error in 8 bits (``error_feedback=True``: 1 byte and '
        "2/block for every element of the *unsharded* model on every rank), and kernels are "
        "compiled on a CPU only.",
        objects=True,
        ask="Codec of the parameters of a model without replicas; null: it has replicas",
    )

    def _resolve_codec(self) -> None:
        super()._resolve_codec()
        if self.parameters is not None:
            self._check_parameters(self.parameters)

    def _check_parameters(self, parameters: str | Codec) -> None:
        from lightning_dist.codecs import resolve_codec

        if self.start_step or self.commit != "auto":
            raise ValueError(
                "With parameters= every step is compressed, and nothing is committed later: leave "
                "start_step and commit out"
            )
        gradients, of_parameters = self.inter, resolve_codec(parameters)
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
            if self.error_feedback == "auto" and leaf.keeps_residual and not leaf.lossless:
                raise ValueError(
                    f"codec {leaf} is biased, and where gradients are sharded over all ranks each "
                    "would keep an error of the whole model: give error_feedback=True, which keeps "
                    "it in 8 bits (1 byte and 2/block for every element of the unsharded model), "
                    "error_feedback=False to lose it, or an unbiased codec such as 'qsgd:bits=8'"
                )

    @property
    def keeps_rounded_errors(self) -> bool:
        """Whether what the codec of the gradients loses is kept in 8 bits, with ``parameters``."""
        return self.error_feedback is True

    @property
    def policy_of_gradients(self) -> Codec:
        """The block codec of each gradient in a reduce-scatter, with the size limit."""
        from lightning_dist.codecs.policies import sized

        return sized(self.inter, self.min_compress_numel)

    @property
    def policy_of_parameters(self) -> Codec:
        """The block codec of each parameter in an all-gather, with the size limit."""
        from lightning_dist.codecs import resolve_codec
        from lightning_dist.codecs.policies import sized

        assert self.parameters is not None
        return sized(resolve_codec(self.parameters), self.min_compress_numel)


def _is_count(value: object) -> bool:
    return is_whole(value) and value > 0  # type: ignore[operator]


@dataclass(frozen=True)
class MeshSettings:
    """Sizes of the device mesh of a sharded model.

    Raises:
        ValueError: a size is out of range.
    """

    kind: ClassVar[str] = "a device mesh"

    replicate_size: int | Literal["auto"] = setting(
        "auto",
        Rule("a number of ranks above 0", lambda value: value == "auto" or _is_count(value)),
        'replicas of the model. ``"auto"``: as many as nodes; with ``parameters`` one.',
    )
    data_parallel_size: int | Literal["auto"] = setting(
        "auto",
        Rule("a number of ranks above 0", lambda value: value == "auto" or _is_count(value)),
        'ranks that shard a replica. ``"auto"``: all that are left.',
    )
    tensor_parallel_size: int = setting(
        1,
        Rule("a number of ranks above 0", _is_count),
        "ranks that have a part of each layer, within a shard.",
    )

    def __post_init__(self) -> None:
        check_values(self)
