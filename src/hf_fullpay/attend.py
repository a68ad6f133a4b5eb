"""One attention call: reach, scores and payment composed on the fast paths. The only place that knows them all.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths.

The softmax part takes one of the fast paths of `paths`; a mixture blends it with the mean of the visible values, linear in
N (decoding: from a running sum); a gate scales the result. Asked for weights, the dense reference answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.backends import choose
from hf_fullpay.core.errors import check_flag, check_number, wrong
from hf_fullpay.core.numbers import accumulate, to_heads
from hf_fullpay.core.places import one_row
from hf_fullpay.core.running import RunningSum
from hf_fullpay.core.shapes import check_shapes, split_mask
from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.fast.cut import Cut
from hf_fullpay.fast.kernels import kernel_mean
from hf_fullpay.fast.mean import blend, visible_mean
from hf_fullpay.paths import Call, cut_by_reach, has_fast_path, weigh
from hf_fullpay.payment import Mixture
from hf_fullpay.payment.gate import gated
from hf_fullpay.payment.mixture import Budget, share
from hf_fullpay.plan import AttentionPlan, resolve
from hf_fullpay.reach import Blocks, Chunks
from hf_fullpay.reference import reference_attention
from hf_fullpay.scores import DynamicScale
from hf_fullpay.scores.dynamic_scale import dynamic_gain

Strengths = Mapping[str, Tensor]
Given = Mapping[str, Any]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: AttentionPlan,
    allowed: Visible,
    scaling: float,
    bias: Tensor | None = None,
    strengths: Strengths | None = None,
    given: Given | None = None,
    dropout: float = 0.0,
    hosted: Tensor | None = None,
    past: RunningSum | None = None,
) -> Tensor:
    """Attention of one layer on the fast paths.

    Args:
        query: (B, H, N, D).
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        plan: what this layer does; its `layers` policy plays no part here.
        allowed: the keys that the model's mask allows; the plan's reach cuts it further.
        scaling: factor of the scores.
        bias: added to the scores, broadcastable to (B, H, N, M); its gradient is returned.
        strengths: learned numbers that take the place of the plan's: "budget", "alpha", "bound", "beta",
            "exchange" of shape (H,), and "gate", logits of shape (B, H, N, 1).
        given: what this call brings besides, by the names in `plan.inputs`.
        dropout: probability with which a softmax weight is dropped; the floor is never dropped.
        hosted: (B, H, N, Dv), the softmax part where the plan leaves it to a host.
        past: sums and numbers of all values that the floor of each query goes to, where the caller keeps them; they
            may count keys that are not in `value` any more.

    Returns:
        (B, H, N, Dv) in the type of query. A query that sees no key gives zeros.
    """
    strengths = strengths or {}
    if 0 in (query.shape[2], key.shape[2]) and hosted is None:
        return reference_attention(query, key, value, plan=plan, allowed=allowed, scaling=scaling)[0]
    backend = "host"
    if hosted is None:
        backend = choose(plan, query, key, value, bias=bias, dropout=dropout, allowed=allowed)
    if isinstance(plan.reach, Blocks | Chunks) and backend != "reference":
        allowed = one_row(allowed)
        backend = backend if has_fast_path(query, allowed, bias) else "reference"
    if backend == "reference":
        return reference_attention(
            query, key, value, plan=plan, allowed=allowed, scaling=scaling, bias=bias, strengths=strengths,
            given=given, dropout=dropout,
        )[0]  # fmt: skip

    if isinstance(plan.scores, DynamicScale):
        gain = dynamic_gain(
            to_heads("alpha", strengths.get("alpha", plan.scores.start()), query), plan.scores.max_scale
        )
        if not (isinstance(gain, float) and gain == 1.0):
            query = (query.to(accumulate(query.dtype)) * gain).to(query.dtype)
            bias = bias * gain if bias is not None else None

    call = Call(plan, allowed, scaling, bias, strengths, given, dropout)
    cut, paid = cut_by_reach(query, key, value, call), None
    if isinstance(plan.payment, Mixture) and not (plan.payment.is_neutral and "budget" not in strengths):
        paid = _paid(query, value, cut, call, past, backend)
    # The kernels blend as they write, but for the one of relays.
    fused = paid if backend == "triton" and not isinstance(plan.reach, Blocks) else None
    output = cut.join([weigh(piece, call, backend, fused) for piece in cut.pieces]) if hosted is None else hosted
    if paid is not None and fused is None:
        output = blend(output, *paid)
    if plan.gate:
        output = gated(output, strengths["gate"])
    return output


def _paid(
    query: Tensor, value: Tensor, cut: Cut, call: Call, past: RunningSum | None, backend: str
) -> tuple[Tensor, Tensor]:
    """Mean of the values that a mixture pays, (B, G or H, N or 1, Dv), and its share, which broadcasts to (B, H, N, 1)."""
    payment: Any = call.plan.payment
    mean_of = kernel_mean if backend == "triton" else visible_mean
    budget = to_heads("budget", call.strengths.get("budget", payment.budget), query)
    limited = any(piece.visible is not call.allowed for piece in cut.pieces)
    seen = cut.join([piece.visible.counts() for piece in cut.pieces]) if limited else None
    if past is not None:
        counts, mean = past.count, past.mean
    elif payment.pay == "visible" or seen is None:
        counts, mean = call.allowed.counts(), mean_of(value, call.allowed)
    else:
        counts, mean = seen, cut.join([mean_of(piece.value, piece.visible) for piece in cut.pieces])
    t = share(payment.floor, budget, counts.to(accumulate(query.dtype)))
    if payment.pay == "visible" and seen is not None:
        t = t * (seen > 0)  # a query whose reach is empty gives zeros
    return mean, t


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    plan: AttentionPlan | str,
    visible: Tensor | None = None,
    is_causal: bool | str = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    given: Given | None = None,
    return_weights: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention under a plan, on plain tensors.

    Args:
        query: (B, H, N, D), any strides, FP32, BF16, FP16 or FP64.
        key: (B, G, M, D), where G divides H: head h reads key head h // (H // G).
        value: (B, G, M, Dv).
        plan: an AttentionPlan or the name of a preset.
        visible: None, key padding (B, M) bool (True: the key exists), or a mask that broadcasts to (B, H, N, M): bool
            (True is visible) or floating (added to the scores; a key is hidden where it is -10000 or less). It may
            require a gradient.
        is_causal: False, True (needs N = M), "upper_left" (query i sees keys j <= i, as torch's SDPA has it) or
            "lower_right" (the last query sees all keys, as in decoding with a cache). Combines with `visible`.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: probability in [0, 1) of dropping a softmax weight (others grow by 1 / (1 - dropout)); never the floor.
        given: tensors that the plan reads besides, by the names in `plan.inputs`.
        return_weights: also return the weights, computed by the dense reference: N x M memory.

    Returns:
        Output (B, H, N, Dv) in the type of query, or (output, weights (B, H, N, M)). A query without any visible key
        gives zeros and has zero gradients.

    Raises:
        ValueError: for shapes, masks or options that do not fit, as "expected ..., got ...".
    """
    plan = resolve(plan)
    check_shapes(query, key, value)
    check_number("dropout", dropout, low=0, high=1, open_high=True)
    check_flag("return_weights", return_weights)
    if unknown := set(given or {}) - set(plan.inputs):
        raise wrong("given", f"names out of {sorted(plan.inputs)} for {plan.describe()}", sorted(unknown))
    if scaling is not None:
        check_number("scaling", scaling, low=0, open_low=True)
    if plan.gate:
        raise wrong(
            "plan", "gate=False on plain tensors", "gate=True", "The gate reads a layer's input: use convert()."
        )
    if plan.host is not None:
        raise wrong("plan", "no host on plain tensors", plan.host, "A host is an attention of a Transformers model.")
    allowed, bias = visible_of(query, key.shape[2], visible, is_causal)
    if isinstance(plan.payment, Budget) and (shortfall := plan.payment.shortfall(key.shape[2])):
        warn(shortfall)
    arguments: dict[str, Any] = {
        "plan": plan,
        "allowed": allowed,
        "scaling": query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        "bias": bias,
        "given": given,
        "dropout": dropout,
    }
    # What is computed in FP32 must stay so under autocast.
    with torch.autocast(query.device.type, enabled=False):
        if return_weights:
            return reference_attention(query, key, value, **arguments)
        return attend(query, key, value, **arguments)


def visible_of(query: Tensor, n_keys: int, mask: Tensor | None, is_causal: bool | str) -> tuple[Visible, Tensor | None]:
    """The allowed keys and the additive bias that `attention` is asked for; see there."""
    batch, _, queries, _ = query.shape
    if not isinstance(is_causal, bool) and is_causal not in ("upper_left", "lower_right"):
        raise wrong("is_causal", 'False, True, "upper_left" or "lower_right"', is_causal)
    if is_causal is True and queries != n_keys:
        raise wrong(
            "is_causal", f"as many queries as keys when True ({queries} queries, {n_keys} keys)", True,
            'Say where the queries stand: "lower_right" (decoding with a cache) or "upper_left" (torch\'s SDPA).',
        )  # fmt: skip
    offset = None if is_causal is False else n_keys - queries if is_causal == "lower_right" else 0
    keys = dense = bias = None
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise wrong("visible", "a tensor or None", mask)
        if mask.device != query.device:
            raise ValueError(f"visible: expected the device of query, {query.device}, got {mask.device}.")
        if mask.ndim == 2:
            if mask.dtype != torch.bool or mask.shape != (batch, n_keys):
                got = f"{mask.dtype} of shape {tuple(mask.shape)}"
                raise ValueError(f"visible: expected key padding as bool of shape {(batch, n_keys)}, got {got}.")
            keys = mask
        else:
            dense, bias = split_mask(mask, query, n_keys)
            dense = dense.expand(dense.shape[0], dense.shape[1], queries, n_keys)
    return Visible(queries, n_keys, query.device, keys=keys, dense=dense, offset=offset), bias
