"""Settings of an exchange of gradients, of a model in DDP or sharded by FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lightning_dist._version import __version__
from lightning_dist.ranks.levels import Nodes, is_nodes, nodes_of
from lightning_dist.settings.declared import (
    AllowedValues,
    check_values,
    choice,
    count,
    is_whole,
    number,
    optional,
    setting,
    settings_of,
)

if TYPE_CHECKING:
    from lightning_dist.codecs import BlockCodec, Codec
    from lightning_dist.codecs.memory import Memory


# Whatever needs torch is imported where settings are checked: the command line, which completes
# and shows them, would take two seconds longer.


DDP, FSDP2, LOCAL, LOCAL_SHARDS = (
    "DDP",
    "FSDP2",
    "local updates",
    "local updates of a sharded model",
)
"""Kinds of training, each with its settings."""
POLICIES = ("by_size", "by_name", "warmup", "after_steps")
"""Codecs that choose codecs; here without torch."""
_OF_LEVELS = (DDP, LOCAL)
_OF_STEPS = (DDP, FSDP2)


def is_by_level(codec: object) -> bool:
    """Whether ``codec`` has one codec inside a node and one between nodes."""
    return isinstance(codec, Mapping) and set(codec) == {"intra", "inter"}


def is_text(value: object) -> bool:
    """Whether ``value`` may be the name of a codec, with its options."""
    return isinstance(value, str) and bool(value.strip())


def _is_codec(value: object) -> bool:
    if not isinstance(value, Mapping):
        return is_text(value)
    if is_by_level(value):
        return all(map(_is_codec, value.values()))
    return len(value) == 1 and set(value) <= set(POLICIES)


def _is_zero_or_one(value: object) -> bool:
    return type(value) is int and value in (0, 1)


@dataclass(frozen=True)
class ExchangeSettings:
    """Everything that decides what travels under DDP. Equal on all ranks, or the start fails.

    Raises:
        ValueError: a setting is out of range or cannot take effect, with the rule, the value
            received and what to do.
    """

    kind: ClassVar[str] = DDP
    """Training in which these settings take effect."""
    instead: ClassVar[Mapping[str, str]] = {
        LOCAL: "give method= to a LocalUpdateStrategy, a LocalUpdatesPlugin or local_updates",
        FSDP2: "use a CompressedModelParallelStrategy, a CompressedFSDPPlugin or compress_fsdp",
    }
    """What to do in the place of a setting that does not, by its name or its training."""

    codec: str | Codec | Mapping[str, Any] = setting(
        "int8",
        AllowedValues(
            "a codec such as int8 or topk:ratio=0.01, a policy such as {by_size: {codec: int4}}, "
            "or {intra: CODEC, inter: CODEC}",
            _is_codec,
        ),
        'a name of ``lightning_dist.CODECS``, with options as in ``"topk:ratio=0.01"``, a codec '
        "object, or a policy (``by_name``, ``by_size``, ``warmup``, ``after_steps``), also as a "
        'mapping, ``{"by_size": {"codec": "int4"}}``. In a hierarchical exchange it is the codec '
        'between nodes; ``{"intra": "bf16", "inter": "int4"}`` names that inside nodes too: none '
        "(the default), fp16 or bf16.",
        objects=True,
        positional=True,
        ask="The codec of what is sent, with options; `lightning-dist codecs` lists them",
    )
    error_feedback: bool | Literal["auto"] = setting(
        "auto",
        choice(True, False, "auto"),
        "keep the compression error and add it to the next gradient; 4 bytes per compressed "
        'element. ``"auto"``: where the codec needs it.',
        ask="Error feedback: send later what the codec loses? true, false or auto",
    )
    hierarchical: bool | Literal["auto", "leader"] = setting(
        "auto",
        choice("auto", True, False, "leader"),
        "reduce inside every node first, so that each rank sends only a share of the gradient to "
        'other nodes. ``"auto"``: if there are several nodes, one of them with several ranks. '
        'True: the same, or raise. ``"leader"``: one rank of each node communicates with other '
        "nodes; for nodes with one network card and slow CPUs, or with different numbers of "
        "ranks. False: flat.",
        under=_OF_LEVELS,
        ask="Reduce inside every node first? true, false, auto or leader",
    )
    ranks_per_node: int | None = setting(
        None,
        optional(count("ranks", least=1), "by host name"),
        "number of consecutive ranks on each node, whatever its name. None: by host name.",
        under=_OF_LEVELS,
        ask="Consecutive ranks of a node; null: by host name",
    )
    rank_groups: Sequence[Any] | None = setting(
        None,
        optional(
            AllowedValues("groups of ranks, none of them empty, like [[0, 1], [2, 3]]", is_nodes),
            "by host name",
        ),
        "groups of ranks instead of nodes, such as ``[[0, 1, 2], [3]]``.",
        under=_OF_LEVELS,
    )
    min_compress_numel: int | None = setting(
        None,
        optional(count("elements (0 compresses all tensors)"), "the codec's default"),
        "smaller tensors, and 1-D ones, are uncompressed; 0 compresses all. None: the codec's own "
        "choice (0 for casts, 4096 for most others).",
        ask="Elements below which a tensor is not compressed; null: by codec",
    )
    start_step: int = setting(
        0,
        count("synchronised steps"),
        "synchronised steps before compression starts.",
        under=_OF_STEPS,
        ask="Steps before compression starts",
    )
    compile_kernels: bool | Literal["auto"] = setting(
        "auto",
        choice(True, False, "auto"),
        'fuse the codec\'s kernels at set-up (about 20 s the first time). ``"auto"``: for models '
        "or shards of 4 Mi elements or more if a compiler is found, and for all on a GPU with "
        "Triton, whose kernels exchange whole buckets. Equal on all ranks.",
        under=_OF_STEPS,
        ask="Compile the codec's kernels at the start? true, false or auto",
    )
    state_update: Literal["auto", "immediate", "deferred"] = setting(
        "auto",
        choice("auto", "immediate", "deferred"),
        'when residuals are written. ``"immediate"``: in the pass that encodes, and each bucket '
        "is decoded on arrival; a step that is not applied loses the residuals it has sent. "
        '``"deferred"``: once every bucket of a step has arrived and all ranks know that it is '
        'finite; a skipped step does not change residuals. ``"auto"``: deferred with a '
        "GradScaler or ``find_unused_parameters``, else immediate.",
        under=_OF_STEPS,
        ask="When are residuals written? auto, immediate or deferred",
    )
    delay: int = setting(
        0,
        AllowedValues("0, or 1: the mean of a step is applied in the next one", _is_zero_or_one),
        "1 applies the mean of a step in the next one, so that its exchange overlaps with a whole "
        "step; the first step gets zeros. For slow links, at some cost in loss. Not with a "
        "GradScaler, ``find_unused_parameters``, several optimizers or OneBitAdam.",
        under=(DDP,),
        ask="Apply each mean one step late, so that its exchange has a whole step? 0 or 1",
    )
    exchange_timeout: float | None = setting(
        None,
        optional(
            number("a number of seconds above 0", lambda value: 0 < value < float("inf")),
            "the process group's own timeout",
        ),
        "seconds that one wait for other ranks may take before the step fails on a CPU, and that "
        "an accelerator is waited for at the end. None: the timeout of the process group.",
        under=(DDP, LOCAL, LOCAL_SHARDS),
    )
    inter: Codec = field(init=False, repr=False, compare=False)
    """The codec between nodes, or the only one."""
    intra: BlockCodec = field(init=False, repr=False, compare=False)
    """The codec inside a node, of a hierarchical exchange."""

    def __post_init__(self) -> None:
        check_values(self)
        self._check_together()
        self._resolve_codec()

    def _check_together(self) -> None:
        if self.ranks_per_node is not None and self.rank_groups is not None:
            raise ValueError(
                "ranks_per_node and rank_groups both define the ranks of a node, got "
                f"ranks_per_node={self.ranks_per_node} and rank_groups={self.rank_groups!r}; give "
                "one"
            )
        if is_by_level(self.codec) and self.hierarchical is False:
            raise ValueError(
                f"A codec for each level needs a hierarchical exchange, got codec={self.codec!r} "
                "with hierarchical=False; give one codec, or leave hierarchical at 'auto'"
            )
        if self.delay and self.state_update == "deferred":
            raise ValueError(
                "state_update='deferred' depends on whether a step is applied, which is not known "
                "yet with delay=1; leave state_update at 'auto'"
            )

    def _resolve_codec(self) -> None:
        from lightning_dist.settings.codecs import by_level, check_feedback

        inter, intra = by_level(self.codec)
        if not intra.lossless and "hierarchical" not in settings_of(type(self)):
            raise ValueError(
                f"Inside a replica FSDP reduces gradients itself, got the codec {intra.name!r} for "
                "it; give the codec between replicas alone"
            )
        for leaf in inter.leaves():
            check_feedback(leaf, self.error_feedback)
        object.__setattr__(self, "inter", inter)
        object.__setattr__(self, "intra", intra)

    @property
    def nodes(self) -> Nodes | None:
        """``rank_groups`` as tuples."""
        return None if self.rank_groups is None else nodes_of(self.rank_groups)

    @property
    def policy(self) -> Codec:
        """The codec of every parameter at every step, with ``start_step`` and the size limit."""
        from lightning_dist.codecs import after_steps
        from lightning_dist.codecs.policies import sized

        return after_steps(self.start_step, sized(self.inter, self.min_compress_numel))

    def memory_of(self, codec: Codec) -> Memory:
        """What is kept of a codec's errors, as the user wishes."""
        return codec.memory(self.error_feedback)

    def flat(self) -> Self:
        """These settings without a level inside nodes."""
        return replace(self, codec=self.inter, hierarchical=False)

    def fingerprint(self) -> dict[str, Any]:
        """The facts that must be equal on all ranks, JSON-able."""
        import torch

        from lightning_dist.settings.codecs import identity

        others = ("codec", "ranks_per_node", "rank_groups", "compile_kernels", "exchange_timeout")
        names = [name for name in settings_of(ExchangeSettings) if name not in others]
        return {
            "lightning_dist": __version__,
            "torch": torch.__version__.split("+")[0],
            "codec": identity(self.inter),
            "codec inside a node": identity(self.intra),
            **{name: getattr(self, name) for name in names},
        }


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
        optional(
            AllowedValues("a codec such as int8", is_text), "FSDP gathers parameters as they are"
        ),
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

        if self.start_step or self.state_update != "auto":
            raise ValueError(
                "With parameters= every step is compressed, and nothing is written later: leave "
                "start_step and state_update out"
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
        AllowedValues(
            "a number of ranks above 0", lambda value: value == "auto" or _is_count(value)
        ),
        'replicas of the model. ``"auto"``: as many as nodes; with ``parameters`` one.',
    )
    data_parallel_size: int | Literal["auto"] = setting(
        "auto",
        AllowedValues(
            "a number of ranks above 0", lambda value: value == "auto" or _is_count(value)
        ),
        'ranks that shard a replica. ``"auto"``: all that are left.',
    )
    tensor_parallel_size: int = setting(
        1,
        AllowedValues("a number of ranks above 0", _is_count),
        "ranks that have a part of each layer, within a shard.",
    )

    def __post_init__(self) -> None:
        check_values(self)
