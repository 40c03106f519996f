"""Adam whose momentum travels compressed instead of its gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_dist.reducer.plan.slices import ParameterSlice
from lightning_dist.reducer.reducer import Reducer


class OneBitAdam(torch.optim.Optimizer):
    """1-bit Adam: ``freeze_step`` steps of Adam, then compressed momentum over a frozen variance.

    Adam is not linear in its gradients, so error feedback on them harms its variance. After the
    warm-up the variance ``v`` is frozen, and rank ``i`` sends ``m_i = b1 m + (1 - b1) g_i`` through
    the strategy's codec with error feedback; their mean is the next ``m``, equal on all ranks, and
    ``x -= lr * m / (sqrt(v) + eps)``. During the warm-up gradients are uncompressed.

    Use it in ``configure_optimizers`` with ``strategy=CompressedDDPStrategy(codec="sign")``, or any
    other codec that keeps a residual. The strategies connect themselves; with plain DDP call
    :meth:`attach`. Elements whose variance is 0 at the freeze (rows of an embedding that no batch
    has used) are not updated after it. Weight decay is decoupled, as in AdamW. Do not clip: after
    the warm-up that would clip momenta (Lightning's ``gradient_clip_val`` is refused).

    Tang et al., "1-bit Adam: Communication efficient large-scale training with Adam's convergence
    speed" (arXiv 2102.02888), algorithm 1. The bias corrections of Adam are kept, by the
    optimizer's steps, that of ``v`` at its value at the freeze. During the warm-up no parameter of
    the model is compressed, including those of other optimizers. A group of parameters that is
    added during it has its variance frozen with the others; after it none can be added.

    Args:
        freeze_step: steps of the warm-up; the paper uses 15 to 25 % of the training. The learning
            rate's own warm-up should be over by then.
        lr: as in ``torch.optim.AdamW``.
        betas: as in ``torch.optim.AdamW``.
        eps: as in ``torch.optim.AdamW``.
        weight_decay: as in ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        freeze_step: int,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(
                "freeze_step must be at least 1 step, in which the variance is learnt, got "
                f"{freeze_step}; 15 to 25 % of the training is usual"
            )
        if not (0 <= betas[0] < 1 and 0 <= betas[1] < 1):
            raise ValueError(f"betas must be in [0, 1), got {betas}")
        if lr < 0 or eps <= 0 or weight_decay < 0:
            raise ValueError(
                f"lr and weight_decay must not be negative and eps must be positive, got lr={lr}, "
                f"weight_decay={weight_decay}, eps={eps}"
            )
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "freeze_step": freeze_step,
            "step": 0,
        }
        super().__init__(params, defaults)
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        odd = next((parameter.dtype for parameter in parameters if parameter.is_complex()), None)
        if odd is not None:
            raise ValueError(
                f"OneBitAdam needs real parameters, got one of {odd}; keep its real and imaginary "
                "part in two, or use torch.optim.AdamW"
            )
        self._adjusted: set[Tensor] = set()

    _reducer: Reducer | None = None
    _places: Mapping[str, tuple[Tensor, int]] = MappingProxyType({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_adjusted", set())  # a copy is attached to nothing

    @property
    def freeze_step(self) -> int:
        """Steps of the warm-up."""
        return int(self.param_groups[0]["freeze_step"])

    def attach(self, reducer: Reducer) -> None:
        """Connect ``reducer``, which exchanges momenta once the variance is frozen.

        Raises:
            ValueError: the reducer serves another OneBitAdam already, or this one another model; or
                its codec keeps no residual.
        """
        if self._reducer is not None and self._reducer is not reducer and not self._reducer.closed:
            raise ValueError(
                "A OneBitAdam serves one model, got the parameters of two; make one for each"
            )
        if reducer.adjustment not in (None, self):
            raise ValueError(
                "One OneBitAdam can be used at a time, got a second one; give all its parameters "
                "to the first, in parameter groups"
            )
        for codec in reducer.settings.inter.leaves():
            kinds = reducer.settings.memory_of(codec).kinds
            if not codec.lossless and "residual" not in kinds:
                raise ValueError(
                    "OneBitAdam needs a codec that keeps a residual, as what is lost of a momentum "
                    f"is lost for good, got {codec} with error_feedback="
                    f"{reducer.settings.error_feedback!r}; use 'sign' or 'int8'"
                )
        self._reducer = reducer
        self._find_places()
        reducer.adjustment = self

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As every optimizer's, during the warm-up.

        Raises:
            ValueError: the warm-up is over.
        """
        if self.param_groups and self.active:
            raise ValueError(
                "OneBitAdam learns the variance of its parameters before freeze_step, got a group "
                f"of new ones {self.param_groups[0]['step'] - self.freeze_step} steps after "
                f"freeze_step={self.freeze_step}; add it earlier, or give it to an optimizer of "
                "its own, such as torch.optim.AdamW"
            )
        super().add_param_group(param_group)

    def _find_places(self) -> None:
        if self._reducer is None:
            return
        # By number: loading a state replaces the groups themselves.
        groups = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        names = self._reducer.names
        self._places = {name: (p, groups[p]) for p, name in names.items() if p in groups}

    @property
    def active(self) -> bool:
        """Whether the warm-up is over."""
        return int(self.param_groups[0]["step"]) >= self.freeze_step

    def __call__(self, slices: Sequence[ParameterSlice], bucket: Tensor, scale: Tensor) -> None:
        """Local gradients in the flat ``bucket`` -> local momenta. What the reducer calls."""
        for part in slices:
            if part.name not in self._places:  # of another optimizer
                continue
            parameter, group = self._places[part.name]
            beta = self.param_groups[group]["betas"][0]
            # Under a GradScaler the step of the pass before may have been skipped.
            if parameter in self._adjusted and float(scale) == 1.0:
                raise ValueError(
                    "OneBitAdam takes one synchronised backward pass per step, got a second one; "
                    "accumulate under no_sync, or with accumulate_grad_batches"
                )
            if "exp_avg" not in self.state[parameter]:  # never used so far
                continue
            momentum = self.state[parameter]["exp_avg"]
            gradient = part.shaped(part.of(bucket))
            gradient.copy_((1 - beta) * gradient + beta * momentum * scale)
            self._adjusted.add(parameter)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._require_exchange()
        self._find_places()  # a callback may have replaced the groups
        frozen = self.active
        for group in self.param_groups:
            group["step"] += 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, frozen=frozen)
        self._adjusted.clear()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As every optimizer's; also after a step that a GradScaler skips."""
        self._adjusted.clear()
        super().zero_grad(set_to_none)

    def _update(self, parameter: Tensor, group: dict[str, Any], *, frozen: bool) -> None:
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        momentum, variance, gradient = state["exp_avg"], state["exp_avg_sq"], parameter.grad
        assert gradient is not None
        if not frozen:
            momentum.lerp_(gradient, 1 - beta1)
            variance.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        else:
            # What the reducer has exchanged is the mean of the ranks' momenta already.
            exchanged = parameter in self._adjusted
            new = gradient if exchanged else momentum.lerp(gradient, 1 - beta1)
            momentum.copy_(torch.where(variance > 0, new, 0.0))
        steps = group["step"]
        later = self.param_groups[0]["step"] - steps  # that the group was added
        learnt = min(steps, self.freeze_step - later)
        root = (variance / (1 - beta2**learnt)).sqrt_().add_(group["eps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.addcdiv_(momentum, root, value=-group["lr"] / (1 - beta1**steps))

    def _require_exchange(self) -> None:
        if self._reducer is None and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                "OneBitAdam needs compressed DDP to exchange its momentum, and found none: use "
                "strategy='compressed_ddp_sign' (Lightning), CompressedDDPStrategy (Fabric), or "
                "optimizer.attach(compress_ddp(model, 'sign'))"
            )
