"""Visible means and the blend against plain float64 formulas.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.mean import blend, visible_mean
from padded import B, padding

CPU = torch.device("cpu")
G, H = 2, 4
LENGTHS = [(1, 1), (5, 17), (17, 5), (63, 63), (64, 130), (130, 130), (1, 65)]


def dense_mean(value: Tensor, visible: Visible) -> Tensor:
    mask = visible.to_dense().double()
    weights = mask / mask.sum(-1, keepdim=True).clamp(min=1)
    return weights @ value.double().repeat_interleave(H // G, 1)


def per_head(mean: Tensor) -> Tensor:
    return mean if mean.shape[1] == H else mean.repeat_interleave(H // G, 1)


def sets(n: int, m: int) -> list[tuple[int | None, int | None]]:
    windows = sorted({w for w in (1, 2, 7, 64, n - 1, n, n + 5) if w > 0})
    offsets = sorted({0, m - n})
    return [(None, None), *((offset, None) for offset in offsets), *((o, w) for o in offsets for w in windows)]


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_mean_and_gradient(n: int, m: int, kind: str) -> None:
    for offset, window in sets(n, m):
        visible = Visible(n, m, CPU, keys=padding(kind, m), offset=offset, window=window)
        value = torch.randn(B, m, G, 5, dtype=torch.float64).transpose(1, 2).requires_grad_()
        kept = value.detach().clone()
        mean = visible_mean(value, visible)
        assert mean.shape == (B, G, 1 if offset is None else n, 5)
        expected = dense_mean(value, visible)
        torch.testing.assert_close(per_head(mean).expand_as(expected), expected, atol=1e-12, rtol=0)
        weight = torch.randn(B, H, n, 5, dtype=torch.float64)
        (found,) = torch.autograd.grad((per_head(mean) * weight).sum(), value)
        (wanted,) = torch.autograd.grad((expected * weight).sum(), value)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
        assert torch.equal(value, kept)
        if kind != "none":
            assert not mean[1].any()
            assert not found[1].any()


@pytest.mark.parametrize("heads", [1, H])
def test_dense_mask(heads: int) -> None:
    visible = Visible(17, 63, CPU, dense=torch.rand(B, heads, 17, 63) > 0.8, keys=padding("left", 63), offset=40)
    value = torch.randn(B, G, 63, 8, dtype=torch.float64, requires_grad=True)
    mean = visible_mean(value, visible)
    assert mean.shape[1] == (G if heads == 1 else H)
    torch.testing.assert_close(per_head(mean), dense_mean(value, visible), atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(lambda x: visible_mean(x, visible), (value,))


@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 7), (2, 1)])
def test_gradcheck(offset: int | None, window: int | None) -> None:
    visible = Visible(17, 18, CPU, keys=padding("left", 18), offset=offset, window=window)
    value = torch.randn(B, G, 18, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: visible_mean(x, visible), (value,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 1), (0, 7), (0, 100), (0, 512)])
def test_no_less_exact_than_eager(dtype: torch.dtype, offset: int | None, window: int | None) -> None:
    n = 2048
    visible = Visible(n, n, CPU, offset=offset, window=window)
    # A mean far from 0: in half precision the plain sum would leave the range.
    value = (torch.randn(1, H, n, 4) + 40).to(dtype)
    mask = visible.to_dense().to(dtype)
    eager = ((mask / mask.sum(-1, keepdim=True)) @ value).double()
    exact = dense_mean(value, visible)[:, :: H // G]
    error = (visible_mean(value, visible).double() - exact).norm()
    assert error <= 2 * (eager - exact).norm() + torch.finfo(dtype).eps * exact.norm() / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 7)])
def test_hidden_values_do_not_matter(dtype: torch.dtype, offset: int | None, window: int | None) -> None:
    keys = padding("left", 65)
    assert keys is not None
    visible = Visible(65, 65, CPU, keys=keys, offset=offset, window=window)
    value = torch.randn(B, G, 65, 4).to(dtype)
    loud = torch.where(keys[:, None, :, None], value, 1e4)
    assert torch.equal(visible_mean(loud, visible), visible_mean(value, visible))
    if offset is not None:  # neither do future values, nor those that left the window
        loud = value.clone()
        loud[:, :, 60:] = 1e4
        assert torch.equal(visible_mean(loud, visible)[:, :, :60], visible_mean(value, visible)[:, :, :60])
    if window is not None:
        loud[:, :, :40] = 1e4
        assert torch.equal(visible_mean(loud, visible)[:, :, 46:60], visible_mean(value, visible)[:, :, 46:60])


@pytest.mark.parametrize("window", [None, 7, 40])
def test_unseen_keys_get_exactly_no_gradient(window: int | None) -> None:
    value = torch.randn(1, 2, 130, 4, requires_grad=True)
    visible_mean(value, Visible(130, 130, CPU, offset=0, window=window))[:, :, 70].sum().backward()
    assert value.grad is not None
    assert not value.grad[:, :, 71:].any()
    assert value.grad[:, :, 70].all()
    if window is not None:
        assert not value.grad[:, :, : 71 - window].any()


@pytest.mark.parametrize("shape", [(), (H, 1, 1), (17, 1), (B, H, 17, 1)])
@pytest.mark.parametrize("rows", [1, 17])
@pytest.mark.parametrize("groups", [G, H])
def test_blend(groups: int, rows: int, shape: tuple[int, ...]) -> None:
    attended = torch.randn(B, 17, H, 3, dtype=torch.float64).transpose(1, 2).requires_grad_()
    mean = torch.randn(B, groups, rows, 3, dtype=torch.float64, requires_grad=True)
    share = torch.rand(shape, dtype=torch.float64, requires_grad=True)
    out = blend(attended, mean, share)
    assert out.stride() == attended.stride()
    expected = (1 - share) * attended + share * mean.repeat_interleave(H // groups, 1)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    assert torch.autograd.gradcheck(blend, (attended, mean, share))


@pytest.mark.parametrize("shape", [(), (H, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blend_in_low_precision(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(B, H, 63, 8).to(dtype), torch.randn(B, H, 63, 8).to(dtype), torch.rand(shape)]
    low = [x.clone().requires_grad_() for x in inputs]
    high = [x.double().requires_grad_() for x in inputs]
    out = blend(low[0], low[1], low[2])
    exact = high[0] + high[2] * (high[1] - high[0])
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, atol=1e-6, rtol=torch.finfo(dtype).eps)
    assert torch.equal(blend(inputs[0], inputs[1], torch.zeros(())), inputs[0])
    weight = torch.randn(out.shape).to(dtype)
    out.backward(weight)
    exact.backward(weight.double())
    for left, right in zip(low, high, strict=True):
        assert left.grad is not None
        assert right.grad is not None
        assert left.grad.dtype == left.dtype
        torch.testing.assert_close(left.grad.double(), right.grad, atol=1e-4, rtol=torch.finfo(dtype).eps)
