"""What is timed: every preset, full and causal, and what they are compared with, as candidates of one kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay import PRESETS, AttentionPlan, Band, attention, backend

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = {128: (8, 12), 512: (8, 12), 2048: (1, 12), 4096: (1, 12)}  # batch, heads by length
WIDTH = 64
DIRECTIONS = ("forward", "forward+backward")
Call = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Candidate:
    """Something that computes attention, or the reason why it cannot here.

    Args:
        name: of its rows.
        is_causal: compared with SDPA of the same causality.
        run: the call that is timed; None with a reason.
        truth: the same in float64, dense, for one head of (1, 1, n, 64); None for ordinary attention.
        has_backward: whether gradients can be timed.
        backend: what runs it.
        reason: why it cannot run here.
    """

    name: str
    is_causal: bool
    run: Call | None = None
    truth: Call | None = None
    has_backward: bool = True
    backend: str = "torch"
    reason: str = ""


def presets(names: Sequence[str] | None = None) -> list[Candidate]:
    """Every preset in every causality that its reach allows."""
    return [
        preset(name, is_causal)
        for name in names or PRESETS
        for is_causal in (False, True)
        if allows(PRESETS[name], is_causal)
    ]


def allows(plan: AttentionPlan, is_causal: bool) -> bool:
    """A band is causal by itself; windows on an image never are."""
    if isinstance(plan.reach, Band):
        return is_causal
    image = "patch_grid" in plan.inputs
    return plan.reach.misfit(cross=False, causal=is_causal, image=image) is None


def preset(name: str, is_causal: bool) -> Candidate:
    """A preset of ours."""
    plan = PRESETS[name]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(query, key, value, plan=plan, is_causal=is_causal, given=given(plan, key.shape[2]))

    return Candidate(name, is_causal, run, truth_of(plan, is_causal))


def under(chosen: str, plan: AttentionPlan, where: bool | str) -> Call:
    """A plan on one backend."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with backend(chosen):
            return attention(query, key, value, plan=plan, is_causal=where, given=given(plan, key.shape[2]))

    return run


def reach_mask(plan: AttentionPlan, is_causal: bool, n: int) -> Tensor:
    """(n, n) bool: the pairs of a plan's reach, read from the reference."""
    zeros = torch.zeros(1, 1, n, 1)
    softmax = AttentionPlan(reach=plan.reach)
    options: dict[str, Any] = {"plan": softmax, "is_causal": is_causal, "given": given(softmax, n)}
    return attention(zeros, zeros, zeros, **options, return_weights=True)[1][0, 0] > 0


def truth_of(plan: AttentionPlan, is_causal: bool) -> Call:
    """The dense reference of a plan."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options: dict[str, Any] = {"plan": plan, "is_causal": is_causal, "given": given(plan, key.shape[2])}
        return attention(query, key, value, **options, return_weights=True)[0]

    return run


def given(plan: AttentionPlan, n: int) -> dict[str, Any] | None:
    """What a call must bring besides for some plans: a grid of n patches as square as n allows, in a shifted layer."""
    rows = max(k for k in range(1, math.isqrt(n) + 1) if n % k == 0)
    known = {"patch_grid": (rows, n // rows), "layer_index": 1}
    return {name: known[name] for name in plan.inputs if name in known} or None


def sdpa(is_causal: bool) -> Call:
    """What all are compared with."""
    return lambda query, key, value: F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def inputs(n: int, dtype: str, device: str, batch: int, heads: int, width: int = WIDTH) -> list[Tensor]:
    """query, key, value that want gradients."""
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(batch, heads, n, width, generator=generator).to(device, DTYPES[dtype]).requires_grad_()
        for _ in range(3)
    ]
