"""The formulas of the kernels, dense and plain, and the comparison with them.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

import os

import torch

DEVICE = "cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda"


def pairs(n, m, keys=None, mask=None, offset=None, window=None, cu_seqlens=None):
    """Visible pairs, (B or 1, H or 1, N, M) bool."""
    i, j = torch.arange(n, device=DEVICE)[:, None], torch.arange(m, device=DEVICE)[None]
    seen = torch.ones(1, 1, n, m, dtype=torch.bool, device=DEVICE)
    if offset is not None:
        seen = seen & (j <= i + offset)
        if window is not None:
            seen = seen & (j > i + offset - window)
    if keys is not None:
        seen = seen & keys[:, None, None]
    if mask is not None:
        seen = seen & mask
    if cu_seqlens is not None:
        inside = torch.zeros(n, n, dtype=torch.bool, device=DEVICE)
        for start, stop in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
            inside[start:stop, start:stop] = True
        seen = seen & inside
    return seen


def clamped(weights, seen, floor):
    """max(a * w, floor) over visible keys, a by bisection."""
    low, high = torch.zeros_like(weights[..., :1]), torch.ones_like(weights[..., :1])
    floor = floor.expand_as(low)
    for _ in range(100):
        a = (low + high) / 2
        over = (torch.maximum(a * weights, floor) * seen).sum(-1, keepdim=True) > 1
        low, high = torch.where(over, low, a), torch.where(over, a, high)
    above = (low * weights > floor).detach()
    # Differentiable: the keys above share what the others leave.
    total = (weights * above).sum(-1, keepdim=True)
    rest = 1 - floor * (seen & ~above).sum(-1, keepdim=True)
    return torch.where(above, weights * (rest / torch.where(total > 0, total, 1.0)), floor * (seen & ~above))


def dense(query, key, value, *, scaling, bias=None, centre=None, width=None, amplitude=None, share=None, mean=None,
          clamp_floor=None, **visible):  # fmt: skip
    """The attention of fullpay_kernels in the dtype of its arguments, N x M memory."""
    heads = query.shape[1]
    key, value = (x.repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    if visible.get("keys") is not None:
        key, value = (x.masked_fill(~visible["keys"][:, None, :, None], 0.0) for x in (key, value))
    seen = pairs(query.shape[2], key.shape[2], **visible)
    scores = query @ key.mT * scaling
    if bias is not None:  # -inf hides a pair
        seen = seen & (bias > -torch.inf)
        scores = scores + bias.masked_fill(bias == -torch.inf, 0.0)
    if width is not None:
        centred = scores if centre is None else scores - centre
        finite = torch.where(width.isinf(), 1.0, width)
        scores = torch.where(width.isinf(), centred, amplitude * torch.tanh(centred / finite))
    weights = torch.softmax(scores.masked_fill(~seen, -3e4), -1) * seen
    if clamp_floor is not None:
        weights = clamped(weights, seen, clamp_floor)
    out = weights @ value
    if share is not None:
        mean = mean.repeat_interleave(heads // mean.shape[1], 1)
        out = (1 - share) * out + share * mean
    return out


def mean_of(value, seen):
    """Mean of the values that each query sees."""
    weights = seen.to(value.dtype)
    return weights / weights.sum(-1, keepdim=True).clamp_min(1) @ value


def compare(kernel, formula, inputs, *, precise=2e-6):
    """Output and gradients of `kernel(**inputs)` against `formula` in float64; returns the kernel's.

    FP32: errors below `precise` times the largest value, or 1. Below: at most twice what the formula errs in that dtype, and
    one unit of rounding of the largest value.
    """
    dtype = next(x.dtype for x in inputs.values() if isinstance(x, torch.Tensor) and x.is_floating_point())
    got = results(kernel, inputs)
    want = results(formula, inputs, torch.float64)
    eager = results(formula, inputs, dtype) if dtype != torch.float32 else None
    for name, exact in want.items():
        size = exact.abs().max() if exact.numel() else torch.zeros(())
        limit = precise * max(float(size), 1.0)  # the gradient of the output is about 1; some cancel to 0
        if eager is not None:
            limit = 2 * float(error(eager[name], exact)) + torch.finfo(dtype).eps * float(size)
        wrong = error(got[name], exact)
        assert wrong <= limit, f"{name}: error {wrong:.2e}, limit {limit:.2e}"
    return got


def error(have, exact):
    """Largest difference; infinite if any is NaN."""
    if not have.numel():
        return torch.zeros((), dtype=torch.float64)
    return (have.double() - exact).abs().nan_to_num(float("inf")).max()


def results(function, inputs, dtype=None):
    """Output and gradients, for a fixed gradient of the output."""
    leaves = {name: x.detach() for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    if dtype is not None:
        leaves = {name: x.to(dtype) if x.is_floating_point() else x for name, x in leaves.items()}
    wanted = [name for name, x in leaves.items() if x.is_floating_point() and inputs[name].requires_grad]
    for name in wanted:
        leaves[name].requires_grad_()
    out = function(**(inputs | leaves))
    if not wanted:
        return {"out": out}
    generator = torch.Generator().manual_seed(1)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(inputs["value"].dtype)
    grads = torch.autograd.grad(out, [leaves[name] for name in wanted], grad.to(out), allow_unused=True)
    zeros = (torch.zeros_like(leaves[name]) for name in wanted)
    filled = (zero if grad is None else grad for grad, zero in zip(grads, zeros, strict=True))
    return {"out": out.detach()} | dict(zip(wanted, filled, strict=True))


def leaf(*shape, dtype=torch.float32, low=None, high=1.0):
    """A tensor whose gradient is checked: normal, or uniform in [low, high)."""
    x = torch.randn(shape) if low is None else low + (high - low) * torch.rand(shape)
    return x.to(DEVICE, dtype).requires_grad_()
