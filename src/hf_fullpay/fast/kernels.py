"""Our Triton kernels (fullpay_kernels), loaded when first asked for.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D and Dv widths.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.core.warning import warn
from hf_fullpay.fast.mean import blend, visible_mean
from hf_fullpay.fast.tiles import tiled_attention


@cache
def load() -> Any:
    """The kernel package, or None where Triton is missing or broken; a broken one is named in a warning."""
    try:
        import fullpay_kernels
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "triton":
            return None
        raise
    except Exception as error:  # a Triton that does not fit its driver or its PyTorch may raise anything
        warn(f"Triton is installed but could not be loaded ({type(error).__name__}: {error}).")
        return None
    return fullpay_kernels


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on the CPU."""
    from fullpay_kernels.config import interpreted

    return interpreted()


def kernel_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    bias: Tensor | None = None,
    median: bool = False,
    centre: Tensor | None = None,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
    floor: Tensor | None = None,
    share: Tensor | None = None,
    mean: Tensor | None = None,
) -> Tensor:
    """`fast.tiles.tiled_attention` on the kernels, arguments as there; with a share, `fast.mean.blend` of it and a mean."""
    kernels = load()
    at: dict[str, Any] = {
        "keys": visible.keys, "mask": visible.dense, "offset": visible.offset, "window": visible.window,
    }  # fmt: skip
    if median:
        centre = kernels.lower_median(query, key, scaling=scaling, bias=bias, **at)
    needs = torch.is_grad_enabled() and any(
        x is not None and x.requires_grad
        for x in (query, key, value, bias, centre, width, amplitude, floor, share, mean)
    )
    rows: dict[str, Any] = {
        "bias": bias, "centre": centre, "width": width, "amplitude": amplitude, "share": share, "mean": mean,
    }  # fmt: skip
    if query.shape[2] == 1 and not needs and visible.dense is None and floor is None:
        del at["mask"]
        out = kernels.decode_attention(query, key, value, scaling=scaling, **at, **rows)
    else:
        out = kernels.attention(query, key, value, scaling=scaling, **at, **rows, clamp_floor=floor)
    return torch.where(visible.counts() > 0, out, 0.0)


def kernel_relays(query: Tensor, key: Tensor, value: Tensor, *, visible: Visible, scaling: float, size: int) -> Tensor:
    """`fast.relays.relay_attention` on the kernels, for ordinary scores and as many queries as keys."""
    causal = visible.offset is not None
    out = load().relay_attention(query, key, value, scaling=scaling, size=size, causal=causal, keys=visible.keys)
    return torch.where(visible.counts() > 0, out, 0.0)


def kernel_mean(value: Tensor, visible: Visible) -> Tensor:
    """`fast.mean.visible_mean` on the kernels, which know no dense masks."""
    if visible.dense is not None:
        return visible_mean(value, visible)
    at: dict[str, Any] = {"keys": visible.keys, "offset": visible.offset, "window": visible.window}
    return load().visible_mean(value, n_queries=visible.n_queries, **at)


@cache
def passes_check(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels agree with PyTorch on a small case, on this device and in this type: a compiler or a driver
    that miscompiles must not go unnoticed. Costs a few compilations once."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((1, 4, 80, 64), (1, 2, 80, 64), (1, 2, 80, 64))
    tensors = [torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes]
    visible = Visible(80, 80, device, offset=0)
    counts = visible.counts()
    width = torch.full_like(counts, 2.0)
    results = []
    share = torch.full_like(counts, 0.25)
    for attend in (kernel_attention, tiled_attention):
        inputs = [x.clone().requires_grad_() for x in tensors]
        with torch.enable_grad():
            squashed: dict[str, Any] = {"visible": visible, "scaling": 0.125, "width": width, "amplitude": width}
            if attend is kernel_attention:
                mixed = attend(*inputs, **squashed, share=share, mean=kernel_mean(inputs[2], visible))
            else:
                mixed = blend(attend(*inputs, **squashed), visible_mean(inputs[2], visible), share)
            clamped = attend(*inputs, visible=visible, scaling=0.125, floor=0.05 / counts)
            out = mixed.float() + clamped.float()
            results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    # Two roundings of each kind that TF32 and half precision make, of the largest number.
    unit = max(torch.finfo(dtype).eps, 2**-10)
    if all((a - b).abs().max() <= 8 * unit * b.abs().max() for a, b in zip(*results, strict=True)):
        return True
    warn(f"the Triton kernels disagree with PyTorch on {device} in {dtype}: please report this.")
    return False
