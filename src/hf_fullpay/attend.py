"""One attention call: reach, scores and payment composed on the fast paths. The only place that knows them all.

Dimensions: B batch, H query heads, G key/value heads (G divides H), N queries, M keys, D and Dv widths.

    scores \\ payment      softmax          mixture                   clamp
    plain                 host             host + mean               tiles
    dynamic scale         host             host + mean               tiles
    delay bias            delay            delay + mean              refused by the plan
    bounded               tiles            tiles + mean              tiles

Blocks go through relays and chunks through chunks, with the mean beside them for a mixture; a mask of pairs or a bias
sends both to the reference. Windows are cut into pieces, and each piece goes its way by the table (where the model itself
brings a mask or a bias of pairs, the reach joins that mask instead). host is torch's scaled_dot_product_attention (chunked
for a band), tiles and delay recompute scores in tiles of rows, mean is the mean of visible values, linear in N (decoding:
from a running sum). FlexAttention or our Triton kernels take the place of host and tiles where `backends` says so. Asked
for weights, the dense reference answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.backends import choose
from hf_fullpay.core.errors import check_flag, check_number, wrong
from hf_fullpay.core.numbers import accumulate, to_heads
from hf_fullpay.core.places import one_row, query_slots
from hf_fullpay.core.running import RunningSum
from hf_fullpay.core.shapes import check_shapes, split_mask
from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.fast.chunks import chunk_attention
from hf_fullpay.fast.cut import Cut, Piece, whole
from hf_fullpay.fast.delay import delayed_attention
from hf_fullpay.fast.grid import Grid, grid_cut
from hf_fullpay.fast.host import host_attention
from hf_fullpay.fast.kernels import kernel_attention
from hf_fullpay.fast.mean import blend, visible_mean
from hf_fullpay.fast.relays import Squash, relay_attention
from hf_fullpay.fast.sliding import sliding_cut, step_cut
from hf_fullpay.fast.tiles import tiled_attention
from hf_fullpay.payment import Clamp, Mixture
from hf_fullpay.payment.clamp import floor_of
from hf_fullpay.payment.gate import gated
from hf_fullpay.payment.mixture import Budget, share
from hf_fullpay.plan import AttentionPlan, resolve
from hf_fullpay.reach import Blocks, Chunks, Reach, WindowGlobal, Windows, restricted
from hf_fullpay.reference import reference_attention
from hf_fullpay.scores import Bounded, DelayBias, DynamicScale
from hf_fullpay.scores.bounded import width_and_amplitude
from hf_fullpay.scores.delay import clocks
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
    backend = "host" if hosted is not None else choose(plan, query, key, value, bias=bias, dropout=dropout)
    if isinstance(plan.reach, Blocks | Chunks) and backend != "reference":
        allowed = one_row(allowed)
        backend = backend if _has_path(query, allowed, bias) else "reference"
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

    cut = _cut(query, key, value, plan.reach, allowed, given, bias is not None)
    output = hosted
    if output is None and isinstance(plan.scores, DelayBias):
        output = _delayed(
            query, key, value, plan.scores, cut.pieces[0].visible, allowed, scaling, bias, strengths, given, dropout
        )
    elif output is None:
        parts = [_attend(piece, plan, scaling, bias, strengths, dropout, backend) for piece in cut.pieces]
        output = cut.join(parts)

    if isinstance(plan.payment, Mixture) and not (plan.payment.is_neutral and "budget" not in strengths):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        limited = any(piece.visible is not allowed for piece in cut.pieces)
        seen = cut.join([piece.visible.counts() for piece in cut.pieces]) if limited else None
        if past is not None:
            counts, mean = past.count, past.mean
        elif plan.payment.pay == "visible" or seen is None:
            counts, mean = allowed.counts(), visible_mean(value, allowed)
        else:
            counts, mean = seen, cut.join([visible_mean(piece.value, piece.visible) for piece in cut.pieces])
        t = share(plan.payment.floor, budget, counts.to(accumulate(query.dtype)))
        if plan.payment.pay == "visible" and seen is not None:
            t = t * (seen > 0)  # a query whose reach is empty gives zeros
        output = blend(output, mean, t)
    if plan.gate:
        output = gated(output, strengths["gate"])
    return output


def _cut(
    query: Tensor, key: Tensor, value: Tensor, reach: Reach, allowed: Visible, given: Given | None, biased: bool
) -> Cut:
    """Pieces of a local reach. A mask or a bias of pairs has the size of all pairs anyway: then nothing is cut."""
    if allowed.dense is None and not biased:
        if isinstance(reach, WindowGlobal):
            named = reach.named(allowed, given, query.shape[0])
            if allowed.n_queries == 1 and named is None and not reach.random_blocks:
                if cut := step_cut(query, key, value, allowed=allowed, half=reach.half, tokens=reach.tokens):
                    return cut
            elif allowed.n_queries > 1 and (allowed.offset is not None or allowed.n_queries == allowed.n_keys):
                return sliding_cut(
                    query, key, value, allowed=allowed, half=reach.half, tokens=reach.tokens, named=named,
                    random_blocks=reach.random_blocks, seed=reach.seed,
                )  # fmt: skip
        if isinstance(reach, Windows):
            layout = reach.layout(allowed, given)
            axes = layout.rows, layout.columns
            grid = Grid(*(tuple(getattr(axis, name) for axis in axes) for name in ("length", "size", "shift")))
            return grid_cut(query, key, value, allowed=allowed, grid=grid, others=layout.others)
    return whole(query, key, value, restricted(reach, allowed, given, query))


def _delayed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scores: DelayBias,
    visible: Visible,
    allowed: Visible,
    scaling: float,
    bias: Tensor | None,
    strengths: Strengths,
    given: Given | None,
    dropout: float,
) -> Tensor:
    """Softmax weights of delayed scores; a strength of nothing is the host's business."""
    arguments: dict[str, Any] = {"visible": visible, "scaling": scaling, "bias": bias, "dropout": dropout}
    if scores.is_neutral and "beta" not in strengths:
        return host_attention(query, key, value, **arguments)
    beta = to_heads("beta", strengths.get("beta", scores.beta), query)
    if not isinstance(beta, Tensor):
        beta = query.new_full((1, 1, 1, 1), beta, dtype=accumulate(query.dtype))
    query_times, key_times, delays = clocks(scores, given, allowed, query)
    return delayed_attention(
        query, key, value, beta=beta, query_times=query_times, key_times=key_times, delays=delays, **arguments
    )


def _attend(
    piece: Piece,
    plan: AttentionPlan,
    scaling: float,
    bias: Tensor | None,
    strengths: Strengths,
    dropout: float,
    backend: str,
) -> Tensor:
    """Softmax or clamped weights over what the queries of a piece see."""
    query, key, value, visible = piece.query, piece.key, piece.value, piece.visible
    rows = _row_numbers(query, key, plan, visible, scaling, bias, strengths)
    if isinstance(plan.reach, Blocks):
        return relay_attention(
            query, key, value, visible=visible, size=plan.reach.size, scaling=scaling, squash=_squash(rows),
            dropout=dropout,
        )  # fmt: skip
    if isinstance(plan.reach, Chunks):
        exchange = to_heads("exchange", strengths.get("exchange", plan.reach.exchange), query)
        return chunk_attention(
            query, key, value, visible=visible, size=plan.reach.size, stride=plan.reach.stride, exchange=exchange,
            scaling=scaling, dropout=dropout,
        )  # fmt: skip
    if backend == "flex":
        from hf_fullpay.fast.flex import flexible_attention  # loads the compiler, which most never need

        return flexible_attention(query, key, value, visible=visible, scaling=scaling, **rows)
    if backend == "triton":
        return kernel_attention(query, key, value, visible=visible, scaling=scaling, bias=bias, **rows)
    attend_rows = tiled_attention if rows else host_attention
    return attend_rows(query, key, value, visible=visible, scaling=scaling, bias=bias, dropout=dropout, **rows)


def _row_numbers(
    query: Tensor,
    key: Tensor,
    plan: AttentionPlan,
    visible: Visible,
    scaling: float,
    bias: Tensor | None,
    strengths: Strengths,
) -> dict[str, Any]:
    """The numbers of every row that bounded scores and clamped weights need, by the names of `tiled_attention`; empty
    for ordinary ones."""
    rows: dict[str, Any] = {}
    if not isinstance(plan.scores, Bounded) and not isinstance(plan.payment, Clamp):
        return rows
    counts = visible.counts().to(accumulate(query.dtype))
    if isinstance(plan.scores, Bounded):
        options = plan.scores
        bound = to_heads("bound", strengths.get("bound", options.limit), query)
        rows["width"], amplitude = width_and_amplitude(bound, options.temperature, options.slope, counts)
        rows |= {"rescale": True} if options.slope == "rescale" else {"amplitude": amplitude}
        if options.centre == "median":
            rows["median"] = True
        elif options.centre == "mean":
            rows["centre"] = _mean_score(query, key, visible, scaling, bias, counts)
    if isinstance(plan.payment, Clamp):
        budget = to_heads("budget", strengths.get("budget", plan.payment.budget), query)
        rows["floor"] = floor_of(plan.payment.floor, budget, counts)
    return rows


def _has_path(query: Tensor, allowed: Visible, bias: Tensor | None) -> bool:
    """Whether blocks and chunks have a fast path for a set; says so where they have none and that costs something."""
    query_slots(allowed)  # raises where queries have no place
    if allowed.dense is None and bias is None and (allowed.offset or 0) >= 0:
        return True
    if query.shape[2] > 1:
        warn(
            "blocks and chunks: a bias or a mask of pairs (four dimensions, packing, a prompt into a static cache) has no "
            "fast path: this call holds all N x M scores. Key padding and causality alone are fast."
        )
    return False


def _squash(rows: dict[str, Any]) -> Squash | None:
    """Bounded scores of blocks. A relay has the mean score of its keys, so the mean over tokens and relays, each as often
    as it has keys, is that over all keys."""
    if not rows:
        return None
    width = rows["width"]
    return Squash(
        rows.get("centre", torch.zeros_like(width)), width, rows.get("amplitude", width), rows.get("rescale", False)
    )


def _mean_score(
    query: Tensor, key: Tensor, visible: Visible, scaling: float, bias: Tensor | None, counts: Tensor
) -> Tensor:
    """Mean score of every row, scaling * q_i . (mean of its visible keys): linear in N. (B, H, N, 1)."""
    kind = accumulate(query.dtype)
    mean = visible_mean(key.to(kind), visible)
    rows = query.to(kind).unflatten(1, (mean.shape[1], -1))
    centre = (rows * mean[:, :, None]).sum(-1, keepdim=True).flatten(1, 2) * scaling
    if bias is not None:
        seen = visible.to_dense()
        centre = centre + (bias * seen).sum(-1, keepdim=True) / counts.clamp_min(1)
    return centre


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
