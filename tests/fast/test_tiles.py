"""Tiled attention against a dense float64 formula and autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_fullpay.core.visible import Visible
from hf_fullpay.fast import squash, tiling
from hf_fullpay.fast.tiles import tiled_attention

B, H = 2, 4
CPU = torch.device("cpu")
Options = dict[str, Any]


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, with odd rests, even for tiny shapes."""
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 150)
    monkeypatch.setattr(tiling, "MIN_ROWS", 3)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visible: Visible,
    scaling: float,
    bias: Tensor | None = None,
    centre: Tensor | None = None,
    median: bool = False,
    width: Tensor | None = None,
    amplitude: Tensor | None = None,
    rescale: bool = False,
    floor: Tensor | None = None,
) -> Tensor:
    """The definition, N x M, in the dtype of the inputs; everything elementwise in at least fp32."""
    share = query.shape[1] // key.shape[1]
    mask = visible.to_dense()
    raw = query @ key.repeat_interleave(share, 1).transpose(-1, -2)
    work = torch.promote_types(raw.dtype, torch.float32)
    scores = raw.to(work) * scaling
    if bias is not None:
        scores = scores + bias.to(work)
    seen = mask.sum(-1, keepdim=True)
    if centre is not None:
        scores = scores - centre.reshape(*query.shape[:3], 1)
    if median:
        ordered = torch.where(mask, scores, torch.inf).sort(-1).values
        chosen = ordered.gather(-1, ((seen - 1).clamp(min=0) // 2).expand(*query.shape[:3], 1))
        scores = scores - torch.where(seen > 0, chosen, 0.0)
    if rescale:
        assert width is not None
        peak = torch.where(mask, scores, 0.0).abs().max(-1, keepdim=True).values
        scores = scores * (width / peak.clamp(min=1e-30)).clamp(max=1.0)
    elif width is not None:
        assert amplitude is not None
        finite = torch.where(width.isinf(), 1.0, width)
        scores = torch.where(width.isinf(), scores, amplitude * torch.tanh(scores / finite))
    weights = scores.masked_fill(~mask, torch.finfo(work).min).softmax(-1) * mask
    if floor is not None:
        weights = clamp(weights, mask, floor, seen)
    return weights.to(query.dtype) @ value.repeat_interleave(share, 1)


def clamp(weights: Tensor, mask: Tensor, floor: Tensor, seen: Tensor) -> Tensor:
    """max(a * weights, floor), with a from bisection."""
    low, high = torch.zeros_like(weights[..., :1]), torch.ones_like(weights[..., :1])
    with torch.no_grad():
        for _ in range(80):
            middle = (low + high) / 2
            excess = (torch.maximum(middle * weights, floor) * mask).sum(-1, keepdim=True) > 1.0
            low, high = torch.where(excess, low, middle), torch.where(excess, middle, high)
        kept = (low * weights > floor) & (floor * seen < 1.0 - 1e-9)
    rest = 1.0 - floor * (mask & ~kept).sum(-1, keepdim=True)
    total = torch.where(kept, weights, 0.0).sum(-1, keepdim=True)
    return torch.where(kept, weights * rest / total.clamp(min=1e-30), floor) * mask


def visible_set(kind: str, n: int, m: int, batch: int = B) -> Visible:
    """One of the kinds of visible sets, among them some with queries that see nothing."""
    columns = torch.arange(m)
    lengths = torch.linspace(m, m // 2, batch).long()[:, None]
    right, left = columns < lengths, columns >= m - lengths
    dense = torch.rand(batch, H, n, m, generator=torch.Generator().manual_seed(3)) < 0.6
    return {
        "full": Visible(n, m, CPU),
        "right padded": Visible(n, m, CPU, keys=right),
        "left padded": Visible(n, m, CPU, keys=left),
        "one hidden": Visible(n, m, CPU, keys=right & (torch.arange(batch)[:, None] > 0)),
        "dense": Visible(n, m, CPU, dense=dense),
        "shared dense": Visible(n, m, CPU, dense=dense[:1, :1]),
        "causal": Visible(n, m, CPU, offset=0),
        "lower right": Visible(n, m, CPU, offset=m - n),
        "window": Visible(n, m, CPU, offset=m - n, window=4),
        "padded causal": Visible(n, m, CPU, keys=left, offset=m - n),
        "all": Visible(n, m, CPU, keys=left, dense=dense, offset=m - n, window=9),
    }[kind]


KINDS = ["full", "right padded", "left padded", "one hidden", "dense", "shared dense", "causal", "lower right",
         "window", "padded causal", "all"]  # fmt: skip


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(dtype)


def row_options(n: int, m: int, visible: Visible) -> dict[str, Options]:
    """Combinations of options; tensors in float64."""
    even = (1.0 / visible.counts().double().clamp(min=1.0)).expand(B, H, n, 1)
    heads = torch.rand(1, H, 1, 1, dtype=torch.float64) + 0.5
    rows = torch.rand(B, H, n, 1, dtype=torch.float64) + 0.5
    one_infinite = heads.clone()
    one_infinite[:, 1] = torch.inf
    centre = random(B, H, n)
    return {
        "plain": {},
        "bias": {"bias": random(1, H, n, m)},
        "key bias": {"bias": random(B, 1, 1, m), "centre": centre},
        "tanh": {"width": heads, "amplitude": heads * 20.0, "centre": centre.unsqueeze(-1)},
        "sigmoid": {"width": heads, "amplitude": rows, "centre": centre, "bias": random(B, H, 1, m)},
        "median": {"median": True, "width": rows, "amplitude": rows + 1.0},
        "median of biased": {"median": True, "width": heads, "amplitude": heads * 10.0, "bias": random(1, 1, n, m)},
        "infinite": {"width": one_infinite, "amplitude": heads, "median": True},
        "rescale": {"width": heads, "rescale": True, "centre": centre},
        "rescale median": {"width": rows * 2.0, "rescale": True, "median": True},
        "no floor": {"floor": even * 0.0},
        "low floor": {"floor": even * 0.3 * torch.rand(B, H, n, 1, dtype=torch.float64)},
        "floor": {"floor": even * 0.9, "width": heads, "amplitude": heads * 2.0, "centre": centre},
        "one floor": {"floor": even.amin((0, 1, 2), keepdim=True) / 2.0, "width": heads, "rescale": True},
        "even": {"floor": even, "bias": random(B, H, n, m)},
    }


def inputs(
    n: int, m: int, groups: int = 2, d: int = 8, dv: int = 5, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Query, key and value."""
    return [random(*shape, dtype=dtype) for shape in ((B, H, n, d), (B, groups, m, d), (B, groups, m, dv))]


def run(
    function: Callable[..., Tensor],
    tensors: list[Tensor],
    options: Options,
    visible: Visible,
    dtype: torch.dtype = torch.float64,
    scaling: float = 0.4,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and gradients of all tensors; query, key, value (and bias) in `dtype`, rows in at least fp32."""
    work = torch.promote_types(dtype, torch.float32)
    leaves = {
        name: x.detach().to(dtype if name in ("query", "key", "value") else work).clone().requires_grad_()
        for name, x in {**dict(zip(("query", "key", "value"), tensors, strict=True)), **options}.items()
        if isinstance(x, Tensor)
    }
    flags = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
    before = {name: x.detach().clone() for name, x in leaves.items()}
    out = function(**leaves, **flags, visible=visible, scaling=scaling)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), weight)
    assert all(torch.equal(before[name], x) for name, x in leaves.items()), "an input was modified"
    return out.detach(), dict(zip(leaves, grads, strict=True))


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-3))


def check(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], limit: float) -> None:
    assert distance(got[0], expected[0]) < limit
    for name, grad in expected[1].items():
        assert got[1][name].shape == grad.shape
        assert got[1][name].isfinite().all(), name
        assert distance(got[1][name], grad) < 10.0 * limit, name


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", row_options(1, 1, Visible(1, 1, CPU)))
def test_matches_the_dense_formula(name: str, kind: str) -> None:
    torch.manual_seed(0)
    for n, m in ((17, 17), (5, 17), (17, 5)):
        visible = visible_set(kind, n, m)
        options = row_options(n, m, visible)[name]
        tensors = inputs(n, m)
        expected = run(dense_attention, tensors, options, visible)
        check(run(tiled_attention, tensors, options, visible), expected, 1e-12)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("n", "m", "d", "dv"), [(1, 1, 4, 4), (1, 130, 25, 8), (130, 17, 64, 64), (130, 130, 8, 25)])
def test_odd_shapes(n: int, m: int, d: int, dv: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for elements in (1 << 18, 3000):
        monkeypatch.setattr(tiling, "TILE_ELEMENTS", elements)
        for kind in ("right padded", "lower right", "window"):
            visible = visible_set(kind, n, m)
            options = row_options(n, m, visible)["floor"]
            tensors = inputs(n, m, groups, d, dv)
            check(
                run(tiled_attention, tensors, options, visible),
                run(dense_attention, tensors, options, visible),
                1e-12,
            )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ["tanh", "sigmoid", "median", "rescale median", "low floor", "infinite"])
def test_fp32(name: str) -> None:
    torch.manual_seed(0)
    visible = visible_set("padded causal", 130, 130)
    options = row_options(130, 130, visible)[name]
    options = {key: x.float().double() if isinstance(x, Tensor) else x for key, x in options.items()}
    tensors = [x.float().double() for x in inputs(130, 130)]
    expected = run(dense_attention, tensors, options, visible)
    check(run(tiled_attention, tensors, options, visible, torch.float32), expected, 1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["full", "padded causal"])
@pytest.mark.parametrize("name", ["plain", "tanh", "sigmoid", "median of biased", "rescale", "low floor", "floor"])
def test_low_precision_errs_at_most_twice_as_much_as_dense(name: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    visible = visible_set(kind, 130, 130)
    options = row_options(130, 130, visible)[name]
    tensors = inputs(130, 130, d=64, dv=64, dtype=dtype)
    exact = run(dense_attention, tensors, options, visible, scaling=0.125)
    dense = run(dense_attention, tensors, options, visible, dtype, scaling=0.125)
    tiled = run(tiled_attention, tensors, options, visible, dtype, scaling=0.125)
    assert tiled[0].dtype == dtype
    assert distance(tiled[0], exact[0]) <= 2.0 * distance(dense[0], exact[0])
    for key, grad in exact[1].items():
        assert tiled[1][key].dtype == dense[1][key].dtype
        assert distance(tiled[1][key], grad) <= 2.0 * distance(dense[1][key], grad), key


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "name", ["key bias", "tanh", "sigmoid", "median", "rescale", "rescale median", "low floor", "floor"]
)
def test_gradcheck(name: str, dropout: float) -> None:
    # With dropout this checks that the backward pass draws what the forward pass drew.
    torch.manual_seed(0)
    n, m = 5, 6
    visible = visible_set("padded causal", n, m)
    options = row_options(n, m, visible)[name]
    names = [key for key, x in options.items() if isinstance(x, Tensor)]
    flags = {key: x for key, x in options.items() if not isinstance(x, Tensor)}

    def function(*leaves: Tensor) -> Tensor:
        torch.manual_seed(5)
        query, key, value, *rows = leaves
        named: Options = {**flags, **dict(zip(names, rows, strict=True))}
        return tiled_attention(query, key, value, visible=visible, scaling=0.4, dropout=dropout, **named)

    leaves = [*inputs(n, m, d=3, dv=2), *(options[key] for key in names)]
    assert torch.autograd.gradcheck(function, [x.clone().requires_grad_() for x in leaves], fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clamp_pays_the_floor_and_sums_to_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n = m = 130
    visible = visible_set("causal", n, m)
    query, key, _ = (x.to(dtype) * 3.0 for x in inputs(n, m))
    for share in (0.0, 1e-3, 0.5, 0.99, 1.0 - 1e-6, 1.0):
        floor = share / visible.counts().to(dtype)
        value = torch.eye(m, dtype=dtype).expand(B, 2, m, m)  # the output is the matrix of weights
        paid = tiled_attention(query, key, value, visible=visible, scaling=1.0, floor=floor)
        assert (paid.sum(-1) - 1.0).abs().max() < 1e-6
        assert (paid >= floor * visible.to_dense() * (1.0 - 1e-6)).all()
        assert (paid.masked_select(~visible.to_dense()) == 0.0).all()
    assert torch.equal(paid, (floor * visible.to_dense()).expand_as(paid))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["right padded", "one hidden", "dense"])
@pytest.mark.parametrize("name", ["plain", "sigmoid", "median", "rescale", "low floor"])
def test_hidden_content_changes_nothing(name: str, kind: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    n, m = 17, 33
    visible = visible_set(kind, n, m)
    if kind == "dense":  # a column that nobody sees
        assert visible.dense is not None
        visible.dense[..., -1:] = False
        hidden = torch.arange(m) == m - 1
    else:
        assert visible.keys is not None
        hidden = ~visible.keys[:, None, :]
    options = {key: x for key, x in row_options(n, m, visible)[name].items() if key != "bias"}
    query, key, value = inputs(n, m, dtype=dtype)
    expected = run(tiled_attention, [query, key, value], options, visible, dtype)
    signs = torch.randn(m, 1).sign()
    key, value = (torch.where(hidden[..., None], 1e4 * signs, x.double()) for x in (key, value))
    out, grads = run(tiled_attention, [query, key, value], options, visible, dtype)
    assert torch.equal(out, expected[0])
    for name_, grad in expected[1].items():
        torch.testing.assert_close(grads[name_], grad, rtol=1e-5, atol=1e-6, msg=name_)


def test_queries_that_see_nothing_get_zeros() -> None:
    torch.manual_seed(0)
    visible = visible_set("lower right", 17, 5)
    for name, options in row_options(17, 5, visible).items():
        out, grads = run(tiled_attention, inputs(17, 5), options, visible)
        assert (out[:, :, :12] == 0.0).all(), name
        assert (grads["query"][:, :, :12] == 0.0).all(), name


@pytest.mark.usefixtures("small_tiles")
def test_dropout() -> None:
    torch.manual_seed(0)
    n = m = 130
    visible = visible_set("full", n, m)
    query, key, _ = inputs(n, m)
    value = torch.eye(m, dtype=torch.float64).expand(B, 2, m, m)

    def pay(seed: int, dropout: float, floor: Tensor | None = None) -> Tensor:
        torch.manual_seed(seed)
        return tiled_attention(query, key, value, visible=visible, scaling=0.4, floor=floor, dropout=dropout)

    exact, dropped = pay(1, 0.0), pay(1, 0.25)
    assert torch.equal(dropped, pay(1, 0.25))
    assert not torch.equal(dropped, pay(2, 0.25))
    zero = dropped == 0.0
    torch.testing.assert_close(dropped[~zero], exact[~zero] / 0.75)
    assert abs(zero.double().mean() - 0.25) < 0.01
    floor = torch.full((1, 1, 1, 1), 0.5 / m, dtype=torch.float64)
    exact, dropped = (x - floor for x in (pay(1, 0.0, floor), pay(1, 0.25, floor)))
    assert dropped.min() > -1e-12  # the floor is never dropped
    above = exact > 1e-9
    zero = dropped[above] < 1e-12
    torch.testing.assert_close(dropped[above][~zero], exact[above][~zero] / 0.75)
    assert abs(zero.double().mean() - 0.25) < 0.01


def test_no_dropout_draws_nothing() -> None:
    tensors, state = inputs(5, 5), torch.get_rng_state()
    tiled_attention(*tensors, visible=visible_set("full", 5, 5), scaling=1.0)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.usefixtures("small_tiles")
def test_strides() -> None:
    torch.manual_seed(0)
    visible = visible_set("padded causal", 17, 17)
    options = row_options(17, 17, visible)["sigmoid"]
    expected = run(tiled_attention, tensors := inputs(17, 17), options, visible)

    def strided(query: Tensor, key: Tensor, value: Tensor, **rest: Any) -> Tensor:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
        value = torch.stack([value, value], -1)[..., 0]
        return tiled_attention(query, key, value, **rest)

    check(run(strided, tensors, options, visible), expected, 1e-13)
    repeated = [x[:1].expand(B, -1, -1, -1) for x in tensors]
    out = tiled_attention(*repeated, visible=visible_set("full", 17, 17), scaling=0.4)
    assert torch.equal(out[0], out[1])


def test_only_needed_gradients() -> None:
    query, key, value = inputs(5, 7)
    out = tiled_attention(query, key.requires_grad_(), value, visible=visible_set("full", 5, 7), scaling=0.4)
    out.sum().backward()
    assert key.grad is not None
    assert query.grad is None
    assert value.grad is None


def test_second_derivative_raises() -> None:
    query, key, value = (x.requires_grad_() for x in inputs(5, 5))
    out = tiled_attention(query, key, value, visible=visible_set("full", 5, 5), scaling=0.4)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="tiles_backward"):
        grad.sum().backward()


def test_wrong_options() -> None:
    tensors, visible, one = inputs(5, 5), visible_set("full", 5, 5), torch.ones(1, 1, 1, 1)
    with pytest.raises(ValueError, match="centre"):
        tiled_attention(*tensors, visible=visible, scaling=1.0, centre=torch.zeros(B, H, 5), median=True)
    for options in ({"width": one}, {"amplitude": one}, {"rescale": True}):
        with pytest.raises(ValueError, match="width"):
            tiled_attention(*tensors, visible=visible, scaling=1.0, **options)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile(backend: str) -> None:
    torch.manual_seed(0)

    def attend(query: Tensor, key: Tensor, value: Tensor, width: Tensor, centre: Tensor) -> Tensor:
        visible = Visible(query.shape[2], key.shape[2], query.device, offset=key.shape[2] - query.shape[2])
        return tiled_attention(
            query, key, value, visible=visible, scaling=0.4, centre=centre, width=width, amplitude=width * 2.0,
            floor=0.5 / visible.counts(), dropout=0.1,
        )  # fmt: skip

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=backend)
    for n in (9, 17):
        leaves = [*inputs(n, n, dtype=torch.float32), torch.rand(1, H, 1, 1) + 0.5, torch.randn(B, H, n)]
        results = []
        for function in (attend, compiled):
            torch.manual_seed(7)
            used = [x.clone().requires_grad_() for x in leaves]
            out = function(*used)
            results.append([out.detach(), *torch.autograd.grad(out.square().sum(), used)])
        for got, expected in zip(*results, strict=True):
            assert torch.equal(got, expected)


def test_export() -> None:
    class Attend(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            visible = Visible(query.shape[2], key.shape[2], query.device, offset=0)
            return tiled_attention(query, key, value, visible=visible, scaling=0.4, median=True)

    length = torch.export.Dim("length", min=2, max=512)
    shapes = {name: {2: length} for name in ("query", "key", "value")}
    program = torch.export.export(Attend(), tuple(inputs(9, 9)), dynamic_shapes=shapes)
    tensors = inputs(17, 17)
    assert torch.equal(program.module()(*tensors), Attend()(*tensors))


def test_operator_conventions() -> None:
    torch.manual_seed(0)
    visible = visible_set("padded causal", 5, 6)
    rows = [random(B, H, 5, 1), torch.ones(1, H, 1, 1), torch.ones(1, 1, 1, 1), torch.full((1, 1, 5, 1), 0.1)]
    leaves = [x.double().requires_grad_() for x in (*inputs(5, 6), random(1, H, 1, 6), *rows)]
    arguments = (*leaves, None, visible.keys, None, visible.offset, None, 0.4, 0.0, False, False)
    torch.library.opcheck(torch.ops.hf_fullpay.tiles_forward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_tanh_is_within_two_roundings(dtype):
    y = torch.cat([torch.linspace(-30, 30, 200_001), torch.logspace(-30, 1.5, 100_001)]).to(dtype)
    for part in (y, *(y[y.abs() <= limit] for limit in squash.SERIES)):
        exact = torch.tanh(part.double())
        error = (squash.tanh(part).double() - exact).abs()
        assert (error <= 2 * torch.finfo(dtype).eps * exact.abs()).all()
    special = torch.tensor([torch.inf, -torch.inf, 0.0, torch.nan], dtype=dtype)
    assert torch.equal(squash.tanh(special)[:3], torch.tensor([1.0, -1.0, 0.0], dtype=dtype))
    assert squash.tanh(special)[3].isnan()
