"""Delayed attention in tiles against the dense formula and autograd: times, delays and strengths get gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast import delay
from hf_fullpay.fast.delay import delayed_attention
from hf_fullpay.scores.delay import lags
from largest import largest
from padded import B, padding

H, G, CPU = 4, 2, torch.device("cpu")
KINDS = ("full", "causal", "band", "left", "right", "dense", "cached")


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, with odd rests, even for tiny shapes."""
    monkeypatch.setitem(delay.TILE_ELEMENTS, "cpu", 150)
    monkeypatch.setattr(delay, "MIN_ROWS", 3)


def seen(kind: str, n: int) -> Visible:
    if kind == "cached":
        return Visible(3, n, CPU, offset=n - 3)
    options: dict[str, Any] = {
        "causal": {"offset": 0},
        "band": {"offset": 0, "window": 4},
        "left": {"keys": padding("left", n), "offset": 0},
        "right": {"keys": padding("right", n)},
        "dense": {"dense": torch.rand(B, H, n, n) < 0.6},
    }.get(kind, {})
    return Visible(n, n, CPU, **options)


def case(visible: Visible, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Tensors of a call; times in the wider type, as they come from `clocks`."""
    n, m, wide = visible.n_queries, visible.n_keys, torch.promote_types(dtype, torch.float32)
    draw = lambda *shape, kind=dtype: torch.randn(*shape, dtype=torch.float64).to(kind).requires_grad_()  # noqa: E731
    return {
        "query": draw(B, H, n, 8), "key": draw(B, G, m, 8), "value": draw(B, G, m, 5),
        "beta": torch.rand(1, H, 1, 1, dtype=wide).requires_grad_(), "query_times": draw(B, n, kind=wide),
        "key_times": draw(B, m, kind=wide), "delays": draw(1, n, m, kind=wide), "bias": draw(1, H, n, m),
    }  # fmt: skip


def dense(given: dict[str, Tensor], visible: Visible) -> Tensor:
    """The definition, N x M, in the type of query but for what is elementwise."""
    query, key, value = (given[name] for name in ("query", "key", "value"))
    key, value = (x.repeat_interleave(H // G, 1) for x in (key, value))
    wide, mask = torch.promote_types(query.dtype, torch.float32), visible.to_dense()
    scores = (query @ key.mT).to(wide) * 0.3
    if given.get("bias") is not None:
        scores = scores + given["bias"]
    lag = lags(given["query_times"], given["key_times"], given.get("delays"))
    scores = scores - given["beta"] * lag.abs()[:, None]
    weights = scores.masked_fill(~mask, torch.finfo(wide).min).softmax(-1) * mask
    return weights.to(query.dtype) @ value


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("without", [(), ("delays",), ("bias",), ("delays", "bias")])
def test_equals_dense_with_all_gradients(kind: str, without: tuple[str, ...]) -> None:
    visible = seen(kind, 11)
    given = {name: x for name, x in case(visible).items() if name not in without}
    found = []
    for output in (delayed_attention(visible=visible, scaling=0.3, **given), dense(given, visible)):
        probe = torch.randn(output.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found.append((output, *torch.autograd.grad((output * probe).sum(), list(given.values()))))
    for name, ours, formula in zip(["output", *given], *found, strict=True):
        torch.testing.assert_close(ours, formula, rtol=0, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "causal", "left"])
def test_errs_at_most_twice_as_much_as_dense(kind: str, dtype: torch.dtype) -> None:
    visible = seen(kind, 64)
    given = case(visible, dtype)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    runs = (
        (given, lambda: delayed_attention(visible=visible, scaling=0.3, **given)),
        (given, lambda: dense(given, visible)),
        (exact, lambda: dense(exact, visible)),
    )
    found = []
    for leaves, run in runs:
        output = run()
        probe = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
        found.append((output, *torch.autograd.grad((output * probe).sum(), list(leaves.values()))))
    for name, ours, eager, truth in zip(["output", *given], *found, strict=True):
        allowed = 2 * (eager.double() - truth).abs().max() + torch.finfo(dtype).eps
        assert (ours.double() - truth).abs().max() <= allowed, name


@pytest.mark.usefixtures("small_tiles")
def test_fp32() -> None:
    visible = seen("left", 64)
    given = case(visible, torch.float32)
    exact = {name: x.detach().double().requires_grad_() for name, x in given.items()}
    found = []
    for leaves, output in (
        (given, delayed_attention(visible=visible, scaling=0.3, **given)),
        (exact, dense(exact, visible)),
    ):
        found.append((output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))))
    for ours, truth in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - truth).norm() <= 2e-6 * truth.norm()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_full_of_nan_changes_nothing(side: str) -> None:
    visible = seen(side, 11)
    assert visible.keys is not None
    given = case(visible)
    hidden = ~visible.keys[:, None, :, None]
    loud = {
        name: x.detach().masked_fill(hidden, torch.nan).requires_grad_() if name in ("key", "value") else x
        for name, x in given.items()
    }
    found = []
    for leaves in (given, loud):
        output = delayed_attention(visible=visible, scaling=0.3, **leaves)
        found.append((output, *torch.autograd.grad(output.square().sum(), list(leaves.values()))))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_dropout_is_unbiased_and_the_same_in_backward() -> None:
    visible = seen("full", 6)
    given = case(visible)
    value = torch.eye(6, dtype=torch.float64).expand(B, G, 6, 6).requires_grad_()
    given["value"] = value
    run = lambda dropout: delayed_attention(visible=visible, scaling=0.3, dropout=dropout, **given)  # noqa: E731
    once = run(0.5)
    (gradient,) = torch.autograd.grad(once.sum(), value)
    # The values are the identity, so that the output shows the weights.
    torch.testing.assert_close(gradient.sum(-1), once.unflatten(1, (G, -1)).sum((2, 3)) * 6)
    mean = torch.stack([run(0.5) for _ in range(400)]).mean(0)
    torch.testing.assert_close(mean, run(0.0), rtol=0, atol=0.12)


def test_no_tensor_of_queries_times_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(delay.TILE_ELEMENTS, "cpu", 1 << 12)
    n = 1024
    query, rows = torch.randn(1, 1, n, 4), torch.arange(n, dtype=torch.float32)[None]
    inputs = (query, query, query, None, torch.ones(1, 1, 1, 1), rows, rows, None, None, None, None, 0, None, 0.5, 0.0)
    needs = [True, True, True, False, True, False, False, False]
    assert largest(lambda: (delay._forward(*inputs), delay._backward(query, needs, *inputs))) <= 16 * n
