"""Ordinary softmax attention on PyTorch's scaled_dot_product_attention, for any visible set.

Dimensions: B batch, H query heads, G key/value heads (G divides H; head h uses group h // (H // G)), N queries, M keys,
D width of query and key, Dv width of value, W window of a band, C queries of a chunk, P chunks.

An N x M mask is built only where the visible set is dense, where a bias meets causality, and where causality meets
unequal lengths (off the CPU, with dropout and while exporting: padding too).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_fullpay.core.numbers import accumulate
from hf_fullpay.core.visible import Visible


def host_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    bias: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention over the visible keys; a query that sees none gives zeros and passes no gradient.

    Args:
        query: (B, H, N, D), any strides.
        key: (B, G, M, D).
        value: (B, G, M, Dv).
        visible: which keys each query sees.
        scaling: factor on the dot products.
        bias: float (B or 1, H or 1, N or 1, M) added to the scaled dot products, may require a gradient.
        dropout: share of the weights dropped; above 0 PyTorch falls to its slow path.

    Returns:
        (B, H, N, Dv) in the dtype of `query`; on CPU a transposed view of (B, N, H, Dv) memory.
    """
    exporting = torch.compiler.is_exporting()  # an exported program must not depend on comparisons of lengths
    if visible.dense is None and visible.offset is not None and visible.window is not None and not exporting:
        if visible.window >= visible.n_queries + visible.offset:
            visible = replace(visible, window=None)
        elif visible.n_queries == 1 and bias is None:
            visible, key, value = _last_window(visible, key, value)
    if bias is None and visible.dense is None:
        if visible.window is not None and visible.n_queries > 1:
            return band_attention(query, key, value, visible=visible, scaling=scaling, dropout=dropout)
        if visible.offset == 0 and visible.window is None:
            if visible.keys is None:
                return sdpa(query, key, value, None, scaling, dropout, causal=True)
            if query.device.type == "cpu" and dropout == 0.0 and not exporting:
                out = _causal_padded(query, key, value, visible.keys, scaling)
                return torch.where(visible.counts() > 0, out, 0.0)
    mask, seen = visible.tile(0, visible.n_queries), None
    if mask is not None and _may_be_blind(visible):
        mask, seen = open_blind_rows(mask)
    if bias is not None:
        mask = (bias if mask is None else torch.where(mask, bias, -torch.inf)).to(query.dtype)
    out = sdpa(query, key, value, mask, scaling, dropout)
    return out if seen is None else torch.where(seen, out, 0.0)


def band_attention(
    query: Tensor, key: Tensor, value: Tensor, *, visible: Visible, scaling: float, dropout: float = 0.0
) -> Tensor:
    """`host_attention` for a set with an offset and a window and no dense part; time and memory grow with N W.

    Queries are cut into P chunks of C. A chunk sees its own C keys and the W - 1 before them, so all chunks make one
    batch of P small attentions.
    """
    offset, window = visible.offset, visible.window
    if offset is None or window is None or visible.dense is not None:
        raise ValueError("visible: expected an offset and a window without a dense part.")
    # Measured: shorter chunks waste fewer products on hidden pairs, longer ones fill the matrix units.
    size = 32 if window <= 64 else 64 if window <= 256 else 256
    before = -(-(window - 1) // size)
    exporting = torch.compiler.is_exporting()
    # Traced, one chunk would be a case of its own: never fewer than two.
    chunks = visible.n_queries // size + 2 if torch.compiler.is_compiling() else -(-visible.n_queries // size)
    # Key slots are shifted so that query i stands at slot before * size + i.
    front, back = before * size - offset, chunks * size + offset - visible.n_keys

    def windows(rows: Tensor, pieces: int) -> Tensor:
        """(B, G, (pieces + P - 1) * C, D) -> (B * P, G, pieces * C, D), the window moving by C."""
        if exporting:  # views of symbolic sizes would put conditions on the length
            cut = rows.unfold(2, pieces * size, size).transpose(3, 4)
        else:  # a cheaper gradient
            rows = rows.unflatten(2, (-1, size))
            cut = torch.cat([rows[:, :, first : first + chunks] for first in range(pieces)], 3) if pieces > 1 else rows
        return cut.transpose(1, 2).flatten(0, 1)

    def around(rows: Tensor) -> Tensor:
        return windows(F.pad(rows, (0, 0, front, back)), before + 1)

    keys = visible.keys
    if keys is None:
        keys = torch.ones(1, 1, dtype=torch.bool, device=key.device).expand(key.shape[0], visible.n_keys)
    row = torch.arange(size, device=key.device)[:, None] + before * size
    slot = torch.arange((before + 1) * size, device=key.device)
    mask = around(keys[:, None, :, None]).transpose(2, 3) & (slot <= row) & (slot > row - window)
    own = windows(F.pad(query, (0, 0, 0, chunks * size - visible.n_queries)), 1)
    out = sdpa(own, around(key), around(value), open_blind_rows(mask)[0], scaling, dropout)
    out = out.unflatten(0, (query.shape[0], chunks))
    if exporting:
        place = torch.arange(visible.n_queries, device=out.device)
        out = out[:, place // size, :, place % size].permute(1, 2, 0, 3)
    else:
        out = out.transpose(1, 2).flatten(2, 3)[:, :, : visible.n_queries]
    return torch.where(visible.counts() > 0, out, 0.0) if _may_be_blind(visible) else out


def sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, dropout: float, causal: bool = False
) -> Tensor:
    query, key, padded = _even(query, key, value)
    grouped = {"enable_gqa": True} if query.shape[1] != key.shape[1] else {}
    out = F.scaled_dot_product_attention(query, key, padded, mask, dropout, causal, scale=scaling, **grouped)
    return out[..., : value.shape[-1]]


def _causal_padded(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, scaling: float) -> Tensor:
    """Causality and padding without an N x M mask: the CPU kernel takes `is_causal` and a (B, 1, 1, M) mask together.

    The public function does not promise that, hence the operator itself. Hidden keys get a finite score so low that
    their weight is exactly 0; rows that see nothing come out finite, for the caller to zero.
    """
    wide = accumulate(query.dtype)
    lowest = torch.finfo(wide).min / 2
    mask = torch.zeros_like(keys, dtype=wide).masked_fill(~keys, lowest)[:, None, None, :]
    query, key, padded = _even(query, key, value)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, key, padded, 0.0, True, attn_mask=mask, scale=scaling)[0][..., : value.shape[-1]]


def _even(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Zeros bring all to one width and the last stride to 1, without which PyTorch falls to its slow path."""
    width = max(query.shape[-1], value.shape[-1])
    wide = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    return tuple(x if x.stride(-1) == 1 else x.contiguous() for x in wide)


def _last_window(visible: Visible, key: Tensor, value: Tensor) -> tuple[Visible, Tensor, Tensor]:
    """Cuts out what a single query sees of a band."""
    low, high = visible.columns(0, 1)
    if visible.offset is None or low == high:
        return visible, key, value
    keys = None if visible.keys is None else visible.keys[:, low:high]
    cut = replace(visible, n_keys=high - low, keys=keys, offset=visible.offset - low)
    return cut, key[:, :, low:high], value[:, :, low:high]


def _may_be_blind(visible: Visible) -> bool:
    """Whether some query may see no key at all."""
    if visible.keys is not None or visible.dense is not None:
        return True
    if visible.offset is None:
        return False
    if visible.offset < 0 or visible.window is None:
        return visible.offset < 0
    return visible.n_queries + visible.offset - visible.window >= visible.n_keys


def open_blind_rows(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Lets rows that see nothing see everything, for softmax over nothing is NaN; also which rows did see something."""
    seen = mask.any(-1, keepdim=True)
    return mask | ~seen, seen
