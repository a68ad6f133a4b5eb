"""From checked tensors to launches: what one attention call is, and its forward and backward passes.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths, R rows (B, H, N).
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from torch import Tensor

from .backward import delta_kernel, keys_kernel, queries_kernel
from .config import Tile, architecture, interpreted, padded, tile_for
from .forward import forward_kernel

STRAIGHT = 2.0**60  # a width in place of infinity: tanh(x / width) * width == x


@dataclass(frozen=True, eq=False)
class Segments:
    """Query i sees keys lows_i <= j < highs_i, and key j is seen by queries key_lows_j <= i < key_highs_j.

    Four int32 tensors that never fall from one entry to the next.
    """

    lows: Tensor
    highs: Tensor
    key_lows: Tensor
    key_highs: Tensor


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: its tensors in the form that the kernels take."""

    query: Tensor  # (B, H, N, D)
    key: Tensor  # (B, G, M, D)
    value: Tensor  # (B, G, M, Dv)
    scaling: float  # positive
    keys: Tensor | None = None  # (B, M) uint8
    mask: Tensor | None = None  # (B, H, N, M) uint8, expanded
    bias: Tensor | None = None  # (B, H, N, M), expanded
    segments: Segments | None = None
    offset: int | None = None
    window: int | None = None
    centre: Tensor | None = None  # this and all below but the mean: (B, H, N) fp32, contiguous
    rate: Tensor | None = None
    amplitude: Tensor | None = None
    share: Tensor | None = None
    mean: Tensor | None = None  # (B, G or H, N, Dv), expanded from N or one row
    floor: Tensor | None = None
    precision: str = "ieee"
    fast_tanh: bool = False
    arch: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", architecture(self.query.device))

    @property
    def rows_shape(self) -> tuple[int, int, int]:
        return tuple(self.query.shape[:3])

    @property
    def mean_group(self) -> int:
        """Query heads for each head of the mean."""
        return 1 if self.mean is None else self.query.shape[1] // self.mean.shape[1]

    def tile(self, kernel: str) -> Tile:
        width = max(padded(self.query.shape[3]), padded(self.value.shape[3]))
        heavy = self.keys, self.mask, self.bias, self.segments, self.window, self.rate, self.share, self.floor
        light, tanh = all(part is None for part in heavy), self.rate is not None
        return tile_for(kernel, width, self.query.dtype, self.arch, light, tanh)

    def lengths(self) -> dict[str, Any]:
        return {
            "n_queries": self.query.shape[2], "n_keys": self.key.shape[2],
            "offset": self.offset or 0, "window": self.window or 0,
        }  # fmt: skip

    def common(self) -> dict[str, Any]:
        """Arguments that all kernels over pairs share."""
        heads, groups = self.query.shape[1], self.key.shape[1]
        widths = self.query.shape[3], self.value.shape[3]
        return {
            "keys": self.keys, "mask": self.mask, "bias": self.bias,
            "lows": None if self.segments is None else self.segments.lows,
            "highs": None if self.segments is None else self.segments.highs,
            "centre": self.centre, "rate": self.rate, "amplitude": self.amplitude, "share": self.share,
            "q_strides": self.query.stride(), "k_strides": self.key.stride(), "v_strides": self.value.stride(),
            "keys_strides": strides(self.keys), "mask_strides": strides(self.mask), "bias_strides": strides(self.bias),
            "scaling": self.scaling, "heads": heads, "group": heads // groups,
            "D": widths[0], "DV": widths[1], "PAD": padded(widths[0]), "PAD_V": padded(widths[1]),
            "CAUSAL": self.offset is not None, "BAND": self.window is not None,
            "TANH": self.rate is not None, "FAST": self.fast_tanh and self.arch.startswith("sm_"),
            "PRECISION": self.precision, "WIDEN": interpreted() and self.query.dtype == torch.bfloat16,
            **self.lengths(),
        }  # fmt: skip


def packed(cu_seqlens: Tensor, tokens: int) -> Segments:
    """Where the sequence of each token starts and ends. Tokens after the last sequence see nothing."""
    place = torch.arange(tokens, device=cu_seqlens.device)
    ends = torch.cat([cu_seqlens[1:], cu_seqlens[-1:]])
    index = torch.searchsorted(cu_seqlens[1:].contiguous(), place, right=True)
    lows, highs = cu_seqlens[index].int(), ends[index].int()
    return Segments(lows, highs, lows, highs)


def strides(tensor: Tensor | None) -> tuple[int, ...] | None:
    """Strides of a tensor that may be absent."""
    return None if tensor is None else tensor.stride()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def sized(tile: Tile) -> dict[str, int]:
    return {"ROWS": tile.rows, "COLS": tile.cols, "num_warps": tile.warps, "num_stages": tile.stages}


def run_forward(call: Call, lse_only: bool = False) -> tuple[Tensor, Tensor]:
    """Output (B, H, N, Dv), in memory (B, N, H, Dv), not written if only the other is wanted: lse (B, H, N)."""
    batch, heads, queries = call.rows_shape
    out = call.query.new_empty(batch, queries, heads, call.value.shape[3]).transpose(1, 2)
    lse = torch.empty(call.rows_shape, dtype=torch.float32, device=out.device)
    if out.numel() == 0:
        return out, lse
    tile = call.tile("forward")
    with on(out.device):
        forward_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
            call.query, call.key, call.value, None if lse_only else out, lse, mean=call.mean,
            mean_strides=strides(call.mean), mean_group=call.mean_group, o_strides=out.stride(), **call.common(),
            **sized(tile),
        )  # fmt: skip
    return out, lse


def run_delta(call: Call, d_out: Tensor, out: Tensor, mean_rows: int | None) -> tuple[Tensor, Tensor | None]:
    """D (B, H, N), and the gradient of a mean of `mean_rows` rows (B, its heads, rows, Dv) if that is wanted."""
    batch, heads, queries = call.rows_shape
    delta = torch.empty(call.rows_shape, dtype=torch.float32, device=out.device)
    tile = call.tile("rows")
    tiles, means = triton.cdiv(queries, tile.rows), heads // call.mean_group
    d_mean = None
    if mean_rows is not None and call.mean is not None:
        one = mean_rows == 1 and queries > 1
        shape = (batch, means, tiles if one else queries, out.shape[3])
        d_mean = torch.empty(shape, dtype=torch.float32 if one else call.mean.dtype, device=out.device)
    with on(out.device):
        delta_kernel[(tiles * batch * means,)](
            d_out, out, call.share, call.mean, delta, d_mean,
            d_out.stride(), out.stride(), strides(call.mean), strides(d_mean), heads, call.mean_group, queries,
            DV=out.shape[3], PAD_V=padded(out.shape[3]), ROWS=tile.rows,
            ONE=d_mean is not None and mean_rows == 1 and queries > 1, num_warps=tile.warps,
        )  # fmt: skip
    if d_mean is not None and call.mean is not None and mean_rows == 1 and queries > 1:
        d_mean = d_mean.sum(2, keepdim=True).to(call.mean.dtype)
    return delta, d_mean


def run_queries(call: Call, d_out: Tensor, lse: Tensor, delta: Tensor, wanted: set[str]) -> dict[str, Tensor]:
    """Gradients of query, bias (B, H, N, M) fp32, and row numbers (B, H, N) fp32, as far as wanted."""
    batch, heads, queries = call.rows_shape
    grads = {
        name: torch.empty(call.rows_shape, dtype=torch.float32, device=lse.device)
        for name in ("centre", "rate", "amplitude", "share") if name in wanted
    }  # fmt: skip
    if "query" in wanted:
        grads["query"] = torch.empty_like(call.query)
    if "bias" in wanted:  # zeros where whole tiles are hidden
        shape = (*call.rows_shape, call.key.shape[2])
        grads["bias"] = torch.zeros(shape, dtype=torch.float32, device=lse.device)
    tile = call.tile("queries")
    with on(lse.device):
        queries_kernel[(triton.cdiv(queries, tile.rows) * batch * heads,)](
            call.query, call.key, call.value, d_out, lse, delta, grads.get("query"), grads.get("bias"),
            mean=call.mean, floor=call.floor,
            **{f"d_{name}": grads.get(name) for name in ("centre", "rate", "amplitude", "share")},
            do_strides=d_out.stride(), dq_strides=strides(grads.get("query")), mean_strides=strides(call.mean),
            db_strides=strides(grads.get("bias")), mean_group=call.mean_group, **call.common(), **sized(tile),
        )  # fmt: skip
    return grads


def run_keys(call: Call, d_out: Tensor, lse: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of key and value."""
    d_key, d_value = torch.empty_like(call.key), torch.empty_like(call.value)
    batch, groups, n_keys = call.key.shape[:3]
    tile = call.tile("keys")
    if d_key.numel() == 0 or d_out.numel() == 0:
        return d_key.zero_(), d_value.zero_()
    # Above width 128 the sums of both do not fit the registers: each in a launch of its own costs one product more.
    wide = max(call.query.shape[3], call.value.shape[3]) > 128
    launches = [(d_key, None), (None, d_value)] if wide else [(d_key, d_value)]
    with on(lse.device):
        for of_key, of_value in launches:
            keys_kernel[(triton.cdiv(n_keys, tile.cols) * batch * groups,)](
                call.query, call.key, call.value, d_out, lse, delta, of_key, of_value, floor=call.floor,
                key_lows=None if call.segments is None else call.segments.key_lows,
                key_highs=None if call.segments is None else call.segments.key_highs,
                do_strides=d_out.stride(), dk_strides=d_key.stride(), dv_strides=d_value.stride(),
                GROUPED=groups < call.query.shape[1], **call.common(), **sized(tile),
            )  # fmt: skip
    return d_key, d_value
