"""Mixture: softmax plus an equal share for every visible key.

    t_i = min(floor * n_i, budget_h)          or budget_h when no floor is set
    p_ij = (1 - t_i) * w_ij + t_i / n_i       out_i = (1 - t_i) * softmax-attention_i + t_i * mean of visible values

Promise: p_ij >= min(floor, budget_h / n_i); rows sum to one; the order of keys is unchanged. A floor above budget / n
cannot be met in full: the budget is what the softmax gives up at most, and no attention at all can give more than 1 / n.
Gradient: dL/dv_j keeps at least t_i / n_i of the signal of every query that sees key j.
Cost: a mean of values beside any host attention, linear in N (a prefix mean where the reach is causal).
Dropout acts on w alone, never on the floor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_fullpay.core.errors import check_choice, check_flag, check_number, wrong
from hf_fullpay.core.numbers import PerHead, freeze, largest, smallest

NO_HOSTS = ("eager", "flex_attention")


@dataclass(frozen=True)
class Budget:
    """What a payment with a floor may spend: the part that `Mixture` and `Clamp` share.

    Args:
        floor: weight wanted for every visible key; None asks for as much as the budget gives.
        budget: largest part of a row's weight that goes to the floor, one number or one per head.
        budget_max: upper limit of a learned budget.
        learnable: whether `convert` makes the budget a parameter, budget_max * sigmoid(theta_h).
    """

    floor: float | None = 0.01
    budget: PerHead = 0.05
    budget_max: float = 0.5
    learnable: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        for option in ("floor", "budget", "budget_max"):
            object.__setattr__(self, option, freeze(getattr(self, option)))
        if self.floor is not None:
            check_number(f"{name}(floor=...)", self.floor, low=0, high=1)
        self._check_budget(name)
        check_number(f"{name}(budget_max=...)", self.budget_max, low=0, high=1, open_low=True)
        check_flag(f"{name}(learnable=...)", self.learnable)
        if self.learnable and not self._can_start(self.budget):
            raise wrong(
                f"{name}(budget=...)", f"a start inside {self._open_range()} for a learnable budget", self.budget,
                "A sigmoid never reaches its ends; choose a start between them or a larger budget_max.",
            )  # fmt: skip

    def _check_budget(self, name: str) -> None:
        check_number(f"{name}(budget=...)", self.budget, low=0, high=1, per_head=True)

    def _can_start(self, budget: PerHead) -> bool:
        return smallest(budget) > 0 and largest(budget) < self.budget_max

    def _open_range(self) -> str:
        return f"(0, {self.budget_max:g})"

    @property
    def is_neutral(self) -> bool:
        """Nothing is ever paid to the floor."""
        return not self.learnable and (self.floor == 0 or (smallest(self.budget) == 0 and largest(self.budget) == 0))

    def least(self, n: int) -> float:
        """Weight promised to every one of n visible keys (by the head with the smallest budget)."""
        given = smallest(self.budget) / max(n, 1)
        return given if self.floor is None else min(self.floor, given)

    def shortfall(self, n: int) -> str | None:
        """What to tell a user whose floor cannot be met over n keys; None when it can."""
        if self.floor is None or self.floor * n <= smallest(self.budget) * (1 + 1e-9):
            return None
        return (
            f"floor {self.floor:g} asked for, {self.least(n):.3g} given: over {n} keys the budget of "
            f"{smallest(self.budget):g} pays at most budget / n each, and no attention could give more than "
            f"1 / n = {1 / n:.3g}. A plan with floor=None asks for what the budget gives, and says nothing."
        )


@dataclass(frozen=True)
class Mixture(Budget):
    """Softmax mixed with the uniform distribution over the visible keys.

    Args:
        floor, budget, budget_max, learnable: see `Budget`.
        pay: who is paid. "visible": every key that the mask allows, also outside a local reach; "reach": only the keys
            that the softmax sees. The same thing for a full reach.
        signed: a budget may be negative, down to -budget_max, and then sharpens instead (AttnScale). There is no
            promise any more.
        host: the attention of Transformers that computes the softmax part, by its name there ("flash_attention_2",
            "sdpa", one that you registered); None for our own choice. The mask is then built as the host wants it.
    """

    pay: str = "visible"
    signed: bool = False
    host: str | None = None
    kind: ClassVar[str] = "mixture"

    def __post_init__(self) -> None:
        check_flag("Mixture(signed=...)", self.signed)
        check_choice("Mixture(pay=...)", self.pay, ("visible", "reach"))
        if self.host is not None and (not isinstance(self.host, str) or self.host in ("", *NO_HOSTS)):
            raise wrong(
                "Mixture(host=...)", "the name of an attention that Transformers registers, or None", self.host,
                '"eager" is another function in every model, and "flex_attention" has masks of its own: use '
                'hf_fullpay.backend("reference") or backend("flex").',
            )  # fmt: skip
        super().__post_init__()

    def _check_budget(self, name: str) -> None:
        check_number(f"{name}(budget=...)", self.budget, low=-1 if self.signed else 0, high=1, per_head=True)

    def _can_start(self, budget: PerHead) -> bool:
        if self.signed:
            return smallest(budget) > -self.budget_max and largest(budget) < self.budget_max
        return super()._can_start(budget)

    def _open_range(self) -> str:
        return f"({-self.budget_max if self.signed else 0:g}, {self.budget_max:g})"

    def least(self, n: int) -> float:
        """Weight promised to every one of n visible keys; minus infinity (no promise) when signed."""
        return -float("inf") if self.signed else super().least(n)

    def shortfall(self, n: int) -> str | None:
        """See `Budget.shortfall`; a signed mixture promises nothing, so it cannot fall short."""
        return None if self.signed else super().shortfall(n)


def share(floor: float | None, budget: Tensor | float, counts: Tensor) -> Tensor:
    """t_i, the part of a row that goes to the floor.

    Args:
        floor: weight wanted per key, or None.
        budget: number, or (1, H, 1, 1).
        counts: n_i, (B or 1, H or 1, N or 1, 1).

    Returns:
        Tensor that broadcasts against (B, H, N, 1), in the type of counts.
    """
    if floor is None:
        return torch.zeros_like(counts) + budget
    wanted = counts * floor
    return torch.minimum(wanted, budget) if isinstance(budget, Tensor) else wanted.clamp_max(budget)


def mixture_weights(weights: Tensor, paid: Tensor, *, floor: float | None, budget: Tensor | float) -> Tensor:
    """Reference: p = (1 - t) w + t / n over the paid keys.

    Args:
        weights: w, (B, H, N, M), rows that sum to one (or to zero where nothing is visible).
        paid: keys that the floor goes to, (B or 1, H or 1, N, M) bool.
        floor, budget: as in `share`.
    """
    counts = paid.sum(-1, keepdim=True).to(weights.dtype)
    t = share(floor, budget, counts)
    return (1 - t) * weights + paid * (t / counts.clamp_min(1))
