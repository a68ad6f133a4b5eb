"""The learned numbers of one attention layer: a small module named `fullpay` under the attention module.

It is called, never read past its call, so that offloading, FSDP and PEFT hooks see every access. Each parameter is an
offset, zero at the start, from what the plan configures:

    budget_h = budget_max * sigmoid(logit(budget / budget_max) + budget_bias_h)
    alpha_h  = alpha + alpha_bias_h
    exchange_h = sigmoid(logit(exchange) + exchange_bias_h)
    gate     = OPEN + gate_bias + gate_bias_slope . x

so a parameter that a checkpoint lacks is initialised rightly by zeros, and the word "bias" in the names keeps
Trainer's weight decay away from them. FP32, one number per query head (a row of `hidden` numbers for the slope).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_fullpay.payment.gate import OPEN
from hf_fullpay.payment.mixture import Budget
from hf_fullpay.plan import AttentionPlan
from hf_fullpay.reach import Chunks
from hf_fullpay.scores import DynamicScale


class Strengths(nn.Module):
    """Learned budget, alpha, exchange and gate of one layer, whichever its plan makes learnable.

    Args:
        plan: the plan of the layer.
        heads: number of query heads.
        hidden: width of the layer's input, for the gate.
    """

    def __init__(self, plan: AttentionPlan, heads: int, hidden: int) -> None:
        super().__init__()
        self.plan = plan
        if isinstance(plan.payment, Budget) and plan.payment.learnable:
            self.budget_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        if isinstance(plan.scores, DynamicScale) and plan.scores.learnable:
            self.alpha_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        if isinstance(plan.reach, Chunks) and plan.reach.learnable:
            self.exchange_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
        if plan.gate:
            self.gate_bias = nn.Parameter(torch.zeros(heads, dtype=torch.float32))
            self.gate_bias_slope = nn.Parameter(torch.zeros(heads, hidden, dtype=torch.float32))

    def forward(self, hidden_states: Tensor | None = None) -> dict[str, Tensor]:
        """The numbers by name: "budget", "alpha" and "exchange" of shape (H,), "gate" logits of shape (B, H, N, 1).

        Args:
            hidden_states: input of the attention layer, (B, N, hidden); needed for a gate only.
        """
        found: dict[str, Tensor] = {}
        if (bias := self._offset("budget_bias")) is not None:
            payment: Any = self.plan.payment
            start = self._like(payment.budget, bias) / payment.budget_max
            signed = getattr(payment, "signed", False)
            if signed:
                found["budget"] = payment.budget_max * torch.tanh(torch.atanh(start) + bias)
            else:
                found["budget"] = payment.budget_max * torch.sigmoid(torch.logit(start) + bias)
        if (bias := self._offset("alpha_bias")) is not None:
            scores: Any = self.plan.scores
            found["alpha"] = self._like(scores.start(), bias) + bias
        if (bias := self._offset("exchange_bias")) is not None:
            reach: Any = self.plan.reach
            found["exchange"] = torch.sigmoid(torch.logit(self._like(reach.exchange, bias)) + bias)
        if (bias := self._offset("gate_bias")) is not None:
            if hidden_states is None:
                raise RuntimeError("output gate: expected the input of the attention layer, got none.")
            slope: Any = self._offset("gate_bias_slope")
            logits = nn.functional.linear(hidden_states.float(), slope, OPEN + bias)
            found["gate"] = logits.transpose(1, 2).unsqueeze(-1)
        return found

    def _offset(self, name: str) -> Tensor | None:
        """A parameter in FP32; under tensor parallelism the heads of this rank."""
        parameter = getattr(self, name, None)
        if parameter is None:
            return None
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        return local.float()

    @staticmethod
    def _like(value: float | tuple[float, ...], bias: Tensor) -> Tensor:
        if isinstance(value, tuple):
            return torch.tensor(value, dtype=bias.dtype, device=bias.device)
        return torch.full_like(bias, value)

    @torch.no_grad()
    def initialize(self) -> None:
        """Zero every parameter that no checkpoint filled."""
        for parameter in self.parameters():
            if not getattr(parameter, "_is_hf_initialized", False):
                parameter.zero_()
                parameter._is_hf_initialized = True  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        return self.plan.describe()


def strengths_of(plan: AttentionPlan, heads: int, hidden: int) -> Strengths | None:
    """The module a layer needs, or None where nothing is learned (an unused parameter stops DDP)."""
    return Strengths(plan, heads, hidden) if plan.is_learnable else None


def no_decay_parameters(model: nn.Module) -> list[str]:
    """Names of our parameters in a model: they want no weight decay, and often a learning rate of their own."""
    return [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if isinstance(module, Strengths)
        for name, _ in module.named_parameters(recurse=False)
    ]
