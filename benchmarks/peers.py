"""What else a user could run: eager attention, SDPA with a dense mask, FlexAttention, linear attention (FAVOR+), another
package of normalizers; and bounded scores around the exact median, which no preset has.

A peer that cannot run here keeps its row, which says why.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from cases import Call, Candidate, allows, reach_mask, truth_of, under
from hf_fullpay import PRESETS, AttentionPlan, Band, Bounded, Full
from hf_fullpay.backends import LACKS, lacks
from hf_fullpay.fast.flex import has_compiler

MASKS = ("band", "windows", "window_global")  # reaches that are a mask of pairs
LEFT_OUT = "left out of this run"
NORMALIZERS = "hf-attention-normalizers"


def peers(names: Sequence[str] | None, device: str, flex_names: Sequence[str] | None = None) -> list[Candidate]:
    """All peers; FlexAttention for the presets `flex_names`, or all."""
    found = [Candidate("eager", causal, eager(causal)) for causal in (False, True)]
    found += [masked("sdpa_mask", AttentionPlan(), causal) for causal in (False, True)]
    found += [softmax1(causal) for causal in (False, True)]
    found += [linear(causal) for causal in (False, True)]
    if names is None or "bounded" in names:
        found += [exact_median(causal) for causal in (False, True)]
    for name in names or PRESETS:
        plan = PRESETS[name]
        for is_causal in (False, True):
            if not allows(plan, is_causal):
                continue
            if plan.reach.kind in MASKS:
                found.append(masked(f"sdpa_mask:{name}", AttentionPlan(reach=plan.reach), is_causal))
            left_out = flex_names is not None and name not in flex_names
            found.append(flexed(name, is_causal, device, LEFT_OUT if left_out else ""))
    return found


def eager(is_causal: bool) -> Call:
    """Products and a softmax, as Transformers' eager attention has them."""

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        scores = query @ key.mT * query.shape[-1] ** -0.5
        if is_causal:
            scores = scores + _triangle(query.shape[2], query.dtype, query.device)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)
        return weights @ value

    return run


@cache
def _triangle(n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((n, n), torch.finfo(dtype).min, dtype=dtype, device=device).triu(1)


def dense_mask(plan: AttentionPlan, is_causal: bool, n: int, device: torch.device) -> Tensor:
    """(n, n) bool."""
    if not isinstance(plan.reach, Full | Band):
        return reach_mask(plan, is_causal, n).to(device)
    mask = torch.ones(n, n, dtype=torch.bool, device=device)
    if is_causal:
        mask = mask.tril_()
    return mask.triu_(1 - plan.reach.size) if isinstance(plan.reach, Band) else mask


def masked(name: str, plan: AttentionPlan, is_causal: bool) -> Candidate:
    """SDPA with a dense boolean mask: made at the first call of a shape, so it counts as memory and not as time."""
    masks: dict[tuple[int, torch.device], Tensor] = {}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        place = key.shape[2], query.device
        if place not in masks:
            masks[place] = dense_mask(plan, is_causal, *place)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=masks[place])

    return Candidate(name, is_causal, run, truth_of(plan, is_causal), backend="sdpa")


def flexed(name: str, is_causal: bool, device: str, reason: str = "") -> Candidate:
    """FlexAttention for a preset; on the CPU it has no gradients and needs a C++ compiler."""
    plan = PRESETS[name]
    reason = reason or lacks("flex", plan) or ""
    if not reason and device == "cpu" and not has_compiler():
        reason = LACKS["flex"]["no compiler"]
    here = {"has_backward": device != "cpu", "backend": "inductor", "reason": reason}
    run = None if reason else under("flex", plan, is_causal)
    return Candidate(f"flex:{name}", is_causal, run, truth_of(plan, is_causal), **here)


def softmax1(is_causal: bool) -> Candidate:
    """The softmax-one of hf-attention-normalizers: another function, so its time compares and its output does not."""
    name = f"{NORMALIZERS}:softmax1"
    if importlib.util.find_spec("hf_attention_normalizers") is None:
        return Candidate(name, is_causal, reason="not installed")
    try:
        from hf_attention_normalizers.backends import resolve_softmax_fn, scaled_dot_product_attention
    except ImportError as error:
        return Candidate(name, is_causal, reason=f"cannot be imported: {error}")
    normalizer = resolve_softmax_fn("softmax1")

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, key, value, softmax_fn=normalizer, is_causal=is_causal)

    def truth(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """exp(s) / (1 + sum exp(s)): one more key, of score and value 0."""
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
        return torch.softmax(F.pad(scores, (0, 1)), -1)[..., :-1] @ value

    return Candidate(name, is_causal, run, truth)


def linear(is_causal: bool) -> Candidate:
    """FAVOR+ of recipes/peer_attentions.py: another function too, checked against itself in float64."""
    recipes = str(Path(__file__).parent.parent / "recipes")
    if recipes not in sys.path:
        sys.path.append(recipes)
    from peer_attentions import linear_attention

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return linear_attention(query, key, value, scaling=query.shape[-1] ** -0.5, causal=is_causal)

    return Candidate("linear", is_causal, run, run)


def exact_median(is_causal: bool) -> Candidate:
    """The preset `bounded` with the median in the place of the mean."""
    plan = AttentionPlan(scores=Bounded(bound=2.0, centre="median", temperature="auto"))
    return Candidate("bounded:median", is_causal, under("torch", plan, is_causal), truth_of(plan, is_causal))
