"""Host attention against plain float64 formulas.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast.host import band_attention, host_attention
from hf_fullpay.fast.mean import blend, visible_mean
from padded import B, padding

CPU = torch.device("cpu")
G, H = 2, 4
LENGTHS = [(1, 1), (5, 5), (17, 63), (63, 17), (64, 64), (65, 65), (130, 130), (5, 130), (1, 65)]


def inputs(n: int, m: int, d: int = 8, dv: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value with three kinds of strides."""
    query = torch.randn(B, n, H, d, dtype=torch.float64).transpose(1, 2)
    key = torch.randn(B, G, d, m, dtype=torch.float64).transpose(2, 3)
    value = torch.randn(B, G, m, dv, dtype=torch.float64)
    return [x.to(dtype).requires_grad_() for x in (query, key, value)]


def dense_attention(query: Tensor, key: Tensor, value: Tensor, visible: Visible, bias: Tensor | None = None) -> Tensor:
    key, value = key.repeat_interleave(H // G, 1), value.repeat_interleave(H // G, 1)
    logits = query @ key.mT * 0.4
    if bias is not None:
        logits = logits + bias
    mask = visible.to_dense()
    logits = logits.masked_fill(~mask, torch.finfo(logits.dtype).min)
    return (torch.softmax(logits, -1) * mask) @ value


def compare(visible: Visible, tensors: list[Tensor], bias: Tensor | None = None) -> list[Tensor]:
    """Asserts output and gradients; returns the gradients."""
    query, key, value = tensors[:3]
    out = host_attention(query, key, value, visible=visible, scaling=0.4, bias=bias)
    expected = dense_attention(query, key, value, visible, bias)
    torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)
    weight = torch.randn(expected.shape, dtype=torch.float64)
    found = torch.autograd.grad((out * weight).sum(), tensors)
    wanted = torch.autograd.grad((expected * weight).sum(), tensors)
    for left, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(left, right, atol=1e-12, rtol=1e-12)
    if visible.keys is not None:
        assert not out[1].any()
        assert not any(x[1].any() for x in found[:3])
        hidden = ~visible.keys[:, None, :, None].expand(B, G, -1, 8)
        assert not found[1][hidden].any()
    return list(found)


def sets(n: int, m: int) -> list[tuple[int | None, int | None]]:
    windows = sorted({w for w in (1, 2, 7, 64, n - 1, n, n + 5) if w > 0})
    offsets = sorted({0, m - n})
    return [(None, None), *((offset, None) for offset in offsets), *((o, w) for o in offsets for w in windows)]


@pytest.mark.parametrize("kind", ["none", "left", "right"])
@pytest.mark.parametrize(("n", "m"), LENGTHS)
def test_output_and_gradients(n: int, m: int, kind: str) -> None:
    for offset, window in sets(n, m):
        compare(Visible(n, m, CPU, keys=padding(kind, m), offset=offset, window=window), inputs(n, m))


@pytest.mark.parametrize(("d", "dv"), [(4, 4), (25, 25), (64, 25), (4, 64)])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 7)])
def test_widths(d: int, dv: int, offset: int | None, window: int | None) -> None:
    compare(Visible(65, 65, CPU, offset=offset, window=window), inputs(65, 65, d, dv))


@pytest.mark.parametrize("heads", [1, H])
def test_dense_mask(heads: int) -> None:
    dense = torch.rand(B, heads, 17, 63) > 0.6
    dense[0, 0, 3] = False
    for offset, window in [(None, None), (46, None), (46, 7)]:
        for kind in ("none", "right"):
            compare(
                Visible(17, 63, CPU, keys=padding(kind, 63), offset=offset, window=window, dense=dense), inputs(17, 63)
            )


@pytest.mark.parametrize("shape", [(1, 1, 1, 63), (B, H, 63, 63), (1, H, 1, 63), (1, H, 63, 63)])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_bias(kind: str, shape: tuple[int, ...]) -> None:
    for offset, window in [(None, None), (0, None), (0, 7)]:
        bias = torch.randn(shape, dtype=torch.float64, requires_grad=True)
        visible = Visible(63, 63, CPU, keys=padding(kind, 63), offset=offset, window=window)
        gradient = compare(visible, [*inputs(63, 63), bias], bias)[3]
        if shape == (B, H, 63, 63):
            assert not gradient[~visible.to_dense().expand(shape)].any()


@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 3), (2, 5)])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_gradcheck(kind: str, offset: int | None, window: int | None) -> None:
    visible = Visible(7, 9, CPU, keys=padding(kind, 9), offset=offset, window=window)
    tensors = [x.detach()[..., :2].clone().requires_grad_() for x in inputs(7, 9)]
    assert torch.autograd.gradcheck(lambda q, k, v: host_attention(q, k, v, visible=visible, scaling=0.4), tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 7), (0, 64)])
@pytest.mark.parametrize("kind", ["none", "left"])
def test_no_less_exact_than_eager(dtype: torch.dtype, kind: str, offset: int | None, window: int | None) -> None:
    visible = Visible(130, 130, CPU, keys=padding(kind, 130), offset=offset, window=window)
    low = inputs(130, 130, dtype=dtype)
    weight = torch.randn(B, H, 130, 8).to(dtype)

    def run(function: Any, tensors: list[Tensor]) -> list[Tensor]:
        out = function(*tensors)
        return [x.double() for x in (out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), tensors))]

    ours = run(lambda q, k, v: host_attention(q, k, v, visible=visible, scaling=0.4), low)
    eager = run(lambda q, k, v: dense_attention(q, k, v, visible), low)
    exact = run(lambda q, k, v: dense_attention(q, k, v, visible), [x.detach().double().requires_grad_() for x in low])
    for a, b, c in zip(ours, eager, exact, strict=True):
        assert a.isfinite().all()
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("offset", "window"), [(None, None), (0, None), (0, 7), (0, 64)])
def test_hidden_content_does_not_matter(dtype: torch.dtype, offset: int | None, window: int | None) -> None:
    for kind in ("left", "right"):
        keys = padding(kind, 65)
        assert keys is not None
        visible = Visible(65, 65, CPU, keys=keys, offset=offset, window=window)
        query, key, value = inputs(65, 65, dtype=dtype)
        quiet = host_attention(query, key, value, visible=visible, scaling=0.4)
        key, value = (torch.where(keys[:, None, :, None], x, 1e4) for x in (key, value))
        assert torch.equal(host_attention(query, key, value, visible=visible, scaling=0.4), quiet)


@pytest.mark.parametrize("window", [None, 1, 7, 40, 64])
def test_unseen_keys_get_exactly_no_gradient(window: int | None) -> None:
    tensors = [x.detach().float().requires_grad_() for x in inputs(130, 130)]
    visible = Visible(130, 130, CPU, offset=0, window=window)
    out = host_attention(*tensors, visible=visible, scaling=0.4)
    for gradient in torch.autograd.grad(out[:, :, 70].sum(), tensors[1:]):
        assert not gradient[:, :, 71:].any()
        if window is not None:
            assert not gradient[:, :, : 71 - window].any()


def test_inputs_stay_unmodified_and_a_band_needs_a_window() -> None:
    tensors = [x.detach().float() for x in inputs(65, 65)]
    kept = [x.clone() for x in tensors]
    for kind in ("none", "left"):
        for offset, window in [(None, None), (0, None), (0, 7)]:
            host_attention(*tensors, visible=Visible(65, 65, CPU, padding(kind, 65), None, offset, window), scaling=0.4)
    assert all(torch.equal(x, y) for x, y in zip(tensors, kept, strict=True))
    with pytest.raises(ValueError, match="offset and a window"):
        band_attention(*tensors, visible=Visible(65, 65, CPU), scaling=0.4)


def test_dropout_acts() -> None:
    tensors = inputs(64, 64)
    for offset, window in [(None, None), (0, None), (0, 7)]:
        visible = Visible(64, 64, CPU, keys=padding("right", 64), offset=offset, window=window)
        plain = host_attention(*tensors, visible=visible, scaling=0.4)
        torch.manual_seed(0)
        runs = torch.stack([host_attention(*tensors, visible=visible, scaling=0.4, dropout=0.2) for _ in range(200)])
        assert not torch.equal(runs[0], runs[1])
        torch.testing.assert_close(runs.mean(0), plain, atol=0.35, rtol=0)


class Mixture(nn.Module):
    """What the library builds on the two files."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.share = nn.Parameter(torch.full((H, 1, 1), 0.2))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, keys: Tensor) -> Tensor:
        n = query.shape[2]
        dense = (torch.arange(n)[:, None] % 3 >= torch.arange(n) % 3)[None, None]
        parts: dict[str, Any] = {
            "full": {},
            "padded": {"keys": keys},
            "causal": {"offset": 0},
            "causal padded": {"keys": keys, "offset": 0},
            "band": {"offset": 0, "window": 7},
            "band padded": {"keys": keys, "offset": 0, "window": 40},
            "dense": {"dense": dense},
        }[self.kind]
        visible = Visible(n, n, query.device, **parts)
        return blend(
            host_attention(query, key, value, visible=visible, scaling=0.4), visible_mean(value, visible), self.share
        )


KINDS = ["full", "padded", "causal", "causal padded", "band", "band padded", "dense"]


def example(n: int, batch: int = 2) -> tuple[Tensor, ...]:
    keys = torch.ones(batch, n, dtype=torch.bool)
    keys[1, : n // 2] = False
    shapes = [(batch, H, n, 8), (batch, G, n, 8), (batch, G, n, 8)]
    return (*(torch.randn(shape, requires_grad=True) for shape in shapes), keys)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_without_a_break(kind: str) -> None:
    torch._dynamo.reset()
    model = Mixture(kind)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (65, 130):
        tensors = example(n)
        learned = [*tensors[:3], model.share]
        found, wanted = compiled(*tensors), model(*tensors)
        torch.testing.assert_close(found, wanted)
        for left, right in zip(
            torch.autograd.grad(found.square().sum(), learned),
            torch.autograd.grad(wanted.square().sum(), learned),
            strict=True,
        ):
            torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_exports_with_a_dynamic_length(kind: str) -> None:
    length, batch = torch.export.Dim("length", min=2, max=4096), torch.export.Dim("batch", min=2, max=64)
    model = Mixture(kind)
    rows = {0: batch, 2: length}
    shapes = (rows, rows, rows, {0: batch, 1: length})
    program = torch.export.export(model, tuple(x.detach() for x in example(65)), dynamic_shapes=shapes).module()
    for n in (5, 64, 130):
        tensors = [x.detach() for x in example(n, 3)]
        torch.testing.assert_close(program(*tensors), model(*tensors))
