"""One differentiable attention call on the kernels.

    x_ij = scaling * q_i . k_j + bias_ij
    z_ij = x_ij, or amplitude_i * tanh((x_ij - centre_i) / width_i)
    w_i  = softmax of z_i over the keys that query i sees, and one of
    out_i = sum_j w_ij v_j
    out_i = (1 - share_i) * sum_j w_ij v_j + share_i * mean_i                 mixture
    out_i = sum_j max(a_i * w_ij, clamp_floor_i) v_j, the row summing to one  clamp

A query that sees no key gets zeros (with a mixture: share * mean) and passes no gradient.

Dimensions: B batch, H query heads, G key/value heads (G divides H; head h reads h // (H // G)), N queries, M keys,
D width of query and key, Dv width of value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .align import aligned
from .checks import check_call, precision_of
from .clamp import run_clamp, run_clamp_delta
from .compiled import uncompiled
from .decode import run_decode
from .launch import STRAIGHT, Call, packed, run_delta, run_forward, run_keys, run_queries
from .median import Median

_INPUTS = ("query", "key", "value", "bias", "centre", "width", "amplitude", "share", "mean", "clamp_floor")
_ROWS = _INPUTS[4:8] + _INPUTS[9:]


@uncompiled
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    keys: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    offset: int | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    centre: Tensor | None = None,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
    share: Tensor | None = None,
    mean: Tensor | None = None,
    clamp_floor: Tensor | None = None,
    precision: str | None = None,
    fast_tanh: bool = False,
) -> Tensor:
    """Attention by the module's formulas; differentiable once in all floating-point tensors.

    Args:
        query: (B, H, N, D) of FP32, FP16 or BF16, any strides; D and Dv up to 256. Widths and strides that are no multiples
            of 16 cost a copy.
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        scaling: factor of q . k.
        keys: (B, M) bool, True for keys that exist. What lies in the others is never read.
        mask: bool that broadcasts to (B, H, N, M), True for visible pairs.
        bias: added to the scores, broadcastable to (B, H, N, M); -inf hides a pair, as `mask` does. Its gradient needs
            N x M memory.
        offset: causality, query i sees keys j <= i + offset: 0 upper left, M - N lower right.
        window: band, query i sees only keys j > i + offset - window; needs an offset.
        cu_seqlens: (S + 1,) int32, where S packed sequences start, and the end of the last. B = 1, N = M; a token sees
            its own sequence only.
        centre: subtracted before the tanh, (B, H, N) or broadcastable to (B, H, N, 1).
        width: of the tanh, broadcastable to (B, H, N, 1); where infinite, z = x - centre.
        amplitude: of the tanh, broadcastable to (B, H, N, 1).
        share: of the mean, broadcastable to (B, H, N, 1).
        mean: (B, G or H, N or 1, Dv), see `visible_mean`.
        clamp_floor: smallest weight of a visible key, broadcastable to (B, H, N, 1), at most 1 / (visible keys).
        precision: of products of FP32 tensors, "ieee" or "tf32"; None follows torch.get_float32_matmul_precision().
        fast_tanh: NVIDIA's approximate instruction, a relative error of 2**-11 of z; order may break among ties.

    Returns:
        (B, H, N, Dv) in the dtype of query, in memory (B, N, H, Dv), Dv filled up to a multiple of 16.

    Raises:
        ValueError: for tensors or options that do not fit, as "expected ..., got ...".
    """
    if centre is not None and centre.ndim == 3:
        centre = centre.unsqueeze(-1)
    bias, mask, centre, width, amplitude, share, clamp_floor = _four(
        bias, mask, centre, width, amplitude, share, clamp_floor
    )
    rows = {"centre": centre, "width": width, "amplitude": amplitude, "share": share, "clamp_floor": clamp_floor}
    check_call(query, key, value, keys, mask, bias, offset, window, cu_seqlens, mean, rows)
    if not scaling > 0:  # kernels take the maximum before they scale
        query, scaling = query * scaling, 1.0
    if width is None:
        centre = None  # softmax ignores a shift
    options = {
        "scaling": float(scaling), "keys": keys, "mask": mask, "offset": offset, "window": window,
        "cu_seqlens": cu_seqlens, "precision": precision_of(precision), "fast_tanh": fast_tanh,
    }  # fmt: skip
    columns = value.shape[3]
    query, key, value = aligned(query), aligned(key), aligned(value)
    mean = mean if mean is None else aligned(mean)
    out = _Attention.apply(query, key, value, bias, centre, width, amplitude, share, mean, clamp_floor, options)
    return out[..., :columns]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, options = inputs
        call = _call(dict(zip(_INPUTS, tensors, strict=True)), options)
        if call.floor is None:
            out, lse = run_forward(call)
        else:
            out, lse = run_clamp(call)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, out, lse = ctx.saved_tensors
        inputs = dict(zip(_INPUTS, tensors, strict=True))
        wanted = {name for name, need in zip(_INPUTS, ctx.needs_input_grad, strict=False) if need}
        call, grads, d_out = _call(inputs, ctx.options), {}, aligned(d_out)
        if out.numel() == 0:
            return *(torch.zeros_like(x) if name in wanted else None for name, x in inputs.items()), None
        if call.floor is None:
            mean_rows = inputs["mean"].shape[2] if "mean" in wanted else None
            delta, grads["mean"] = run_delta(call, d_out, out, mean_rows)
        else:
            delta, grads["clamp_floor"] = run_clamp_delta(call, d_out, lse)
        if "key" in wanted or "value" in wanted:
            grads["key"], grads["value"] = run_keys(call, d_out, lse, delta)
        if wanted & {"query", "bias", *_ROWS} - {"clamp_floor"}:
            kernel_names = {"rate" if name == "width" else name for name in wanted}
            grads |= run_queries(call, d_out, lse, delta, kernel_names)
        if "rate" in grads:
            # d z / d width = -amplitude (1 - tanh^2) x / width^2, and the kernel summed dz (1 - tanh^2) x / width.
            slope = call.amplitude * call.rate
            grads["width"] = torch.where(_row(inputs["width"], call.rows_shape).isinf(), 0.0, -slope * grads["rate"])
        return *(_like(grads[name], x, name) if name in wanted else None for name, x in inputs.items()), None


@uncompiled
def lower_median(
    query: Tensor,
    key: Tensor,
    *,
    scaling: float,
    keys: Tensor | None = None,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    offset: int | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
    precision: str | None = None,
) -> Tensor:
    """Exact lower median of x_ij over the keys that each query sees, for use as `centre`; arguments as in `attention`.

    Returns:
        (B, H, N, 1) fp32, 0 where a query sees no key; differentiable once in query, key and bias.
    """
    bias, mask = _four(bias, mask)
    check_call(query, key, key, keys, mask, bias, offset, window, cu_seqlens, None, {})
    options = {
        "scaling": float(scaling), "keys": keys, "mask": mask, "offset": offset, "window": window,
        "cu_seqlens": cu_seqlens, "precision": precision_of(precision), "fast_tanh": False,
    }  # fmt: skip

    def build(query: Tensor, key: Tensor, bias: Tensor | None) -> Call:
        return _call(dict.fromkeys(_INPUTS) | {"query": query, "key": key, "value": key, "bias": bias}, options)

    return Median.apply(aligned(query), aligned(key), bias, build)


@uncompiled
@torch.no_grad()
def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    keys: Tensor | None = None,
    bias: Tensor | None = None,
    offset: int | None = None,
    window: int | None = None,
    centre: Tensor | None = None,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
    share: Tensor | None = None,
    mean: Tensor | None = None,
    splits: int | None = None,
) -> Tensor:
    """`attention` of one query a sequence (N = 1), its keys split over many programs. No gradients, mask or clamp.

    Args:
        splits: into how many parts; None chooses by the device. All others are as in `attention`.

    Returns:
        (B, H, 1, Dv).
    """
    if centre is not None and centre.ndim == 3:
        centre = centre.unsqueeze(-1)
    bias, centre, width, amplitude, share = _four(bias, centre, width, amplitude, share)
    rows = {"centre": centre, "width": width, "amplitude": amplitude, "share": share}
    check_call(query, key, value, keys, None, bias, offset, window, None, mean, rows)
    if query.shape[2] != 1:
        raise ValueError(f"query: expected one query a sequence, got {query.shape[2]}.")
    n_keys, shape = key.shape[2], tuple(query.shape[:3])
    high = n_keys if offset is None else min(max(offset + 1, 0), n_keys)
    low = 0 if offset is None or window is None else min(max(offset + 1 - window, 0), high)
    rate = None
    if width is not None:
        rate, amplitude = _rate(width, amplitude, shape)
    numbers = {"centre": None if width is None else centre, "share": share}
    return run_decode(
        query, key, value, scaling=float(scaling), keys=_bytes(keys),
        bias=None if bias is None else bias.expand(*shape, n_keys), low=low, high=high, rate=rate,
        amplitude=amplitude, mean=mean, splits=splits,
        **{name: None if row is None else _row(row, shape) for name, row in numbers.items()},
    )  # fmt: skip


def _four(*tensors: Tensor | None) -> tuple[Any, ...]:
    """With leading dimensions of 1, as many as are missing."""
    return tuple(x if x is None or x.ndim >= 4 else x[(None,) * (4 - x.ndim)] for x in tensors)


def _rate(width: Tensor, amplitude: Tensor, shape: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """1 / width, and the amplitude; finite for an infinite width."""
    width = _row(width, shape)
    infinite = width.isinf()
    return 1.0 / width.masked_fill(infinite, STRAIGHT), _row(amplitude, shape).masked_fill(infinite, STRAIGHT)


def _like(grad: Tensor, tensor: Tensor, name: str) -> Tensor:
    """A gradient in the shape and dtype of its tensor, summed where that was broadcast."""
    if name in _ROWS:
        grad = grad.unsqueeze(-1)
    if grad.shape != tensor.shape:
        grad = grad.sum_to_size(tensor.shape)
    return grad.to(tensor.dtype)


def _call(inputs: dict[str, Any], options: dict[str, Any]) -> Call:
    """The form that the kernels take."""
    query, key = inputs["query"], inputs["key"]
    rows, pairs = tuple(query.shape[:3]), (*query.shape[:3], key.shape[2])
    keys, mask, bias, mean, rate, amplitude = (
        options["keys"], options["mask"], inputs["bias"], inputs["mean"], None, None
    )  # fmt: skip
    if inputs["width"] is not None:
        rate, amplitude = _rate(inputs["width"], inputs["amplitude"], rows)
    return Call(
        query, key, inputs["value"], options["scaling"],
        keys=_bytes(keys),
        mask=None if mask is None else mask.view(torch.uint8).expand(pairs),
        bias=None if bias is None else bias.expand(pairs),
        segments=None if options["cu_seqlens"] is None else packed(options["cu_seqlens"], query.shape[2]),
        offset=options["offset"], window=options["window"],
        centre=None if inputs["centre"] is None else _row(inputs["centre"], rows), rate=rate, amplitude=amplitude,
        share=None if inputs["share"] is None else _row(inputs["share"], rows),
        mean=None if mean is None else mean.expand(-1, -1, query.shape[2], -1),
        floor=None if inputs["clamp_floor"] is None else _row(inputs["clamp_floor"], rows),
        precision=options["precision"], fast_tanh=options["fast_tanh"],
    )  # fmt: skip


def _bytes(keys: Tensor | None) -> Tensor | None:
    """Key padding as the kernels read it: contiguous, so that 32 bits hold every offset in a row."""
    return None if keys is None else keys.contiguous().view(torch.uint8)


def _row(row: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """(B, H, N) fp32, contiguous, of what broadcasts to (B, H, N, 1)."""
    return row.expand(*shape, 1)[..., 0].to(torch.float32).contiguous()
