"""Every option of `attention`, on odd shapes, against the dense formula in float64: outputs and all gradients."""

import pytest
import torch
from formula import DEVICE, compare, dense, leaf, results
from fullpay_kernels import attention
from fullpay_kernels.align import aligned
from fullpay_kernels.config import Tile

B, H, G = 2, 4, 2


def tensors(n, m, width, *, dtype=torch.float32, heads=H, groups=G, batch=B, wide=None):
    return {
        "query": leaf(batch, heads, n, width, dtype=dtype),
        "key": leaf(batch, groups, m, width, dtype=dtype),
        "value": leaf(batch, groups, m, wide or width, dtype=dtype),
        "scaling": width**-0.5,
    }


def padding(m, left, batch=B):
    """The first sequence is whole, the others lose some keys, the last has none."""
    lengths = torch.linspace(m, 0, batch, device=DEVICE).long()[:, None]
    place = torch.arange(m, device=DEVICE)
    return place >= m - lengths if left else place < lengths


def bounded(n, shared=False):
    """Row numbers of bounded scores."""
    rows = (1, H, 1, 1) if shared else (B, H, n, 1)
    return {
        "centre": leaf(B, H, n, 1), "width": leaf(*rows, low=0.5, high=2.0), "amplitude": leaf(*rows, low=0.5, high=3.0),
    }  # fmt: skip


def mixture(n, width, rows=None, heads=G):
    return {"share": leaf(1, H, rows or n, 1, low=0.0, high=0.5), "mean": leaf(B, heads, rows or n, width)}


def check(inputs, **kwargs):
    return compare(attention, dense, inputs, **kwargs)


@pytest.mark.parametrize(
    ("n", "m", "width"),
    [(1, 1, 16), (1, 65, 24), (17, 33, 16), (33, 17, 64), (65, 65, 24), (65, 129, 16), (129, 65, 16)],
)
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_and_widths(n, m, width, causal):
    heads = 2
    visible = {"offset": m - n} if causal else {}
    check(tensors(n, m, width, heads=heads, groups=1, batch=1) | visible)


@pytest.mark.parametrize(("width", "wide"), [(1, 5), (17, 40), (40, 16), (80, 80), (256, 130)])
def test_odd_widths(width, wide):
    check(tensors(17, 19, width, wide=wide, heads=2, groups=1, batch=1) | {"offset": 2})


@pytest.mark.parametrize(
    "visible",
    [
        {"offset": 0},
        {"offset": -5},
        {"offset": 8},
        {"offset": 8, "window": 1},
        {"offset": 8, "window": 20},
        {"offset": 0, "window": 500},
        {"offset": -30, "window": 7},
        {"offset": 100, "window": 60},
    ],
    ids=str,
)
def test_causality_and_band(visible):
    check(tensors(65, 73, 16, heads=2, groups=1, batch=1) | visible)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("visible", [{}, {"offset": 0}, {"offset": 0, "window": 9}], ids=str)
def test_padding_is_never_read(left, visible):
    inputs = tensors(33, 33, 16) | visible
    inputs["keys"] = padding(33, left)
    with torch.no_grad():
        for name in ("key", "value"):
            inputs[name] = inputs[name].masked_fill(~inputs["keys"][:, None, :, None], float("nan")).requires_grad_()
    got = check(inputs)
    assert (got["out"][1] == 0).all()
    assert all((got[name][1] == 0).all() for name in ("query", "key", "value"))


@pytest.mark.parametrize("shape", [(B, H), (1, H), (B, 1), (1, 1)])
def test_dense_masks(shape):
    mask = torch.rand(*shape, 33, 40, device=DEVICE) > 0.5
    mask[..., 3, :] = False
    got = check(tensors(33, 40, 16) | {"mask": mask, "offset": 7})
    assert (got["out"][:, :, 3] == 0).all()


@pytest.mark.parametrize("shape", [(B, H, 33, 40), (1, H, 33, 40), (B, 1, 1, 40), (1, H, 33, 1)])
def test_bias_and_its_gradient(shape):
    check(tensors(33, 40, 16) | {"bias": leaf(*shape), "offset": 7, "window": 30})


@pytest.mark.parametrize(
    "extra",
    [
        lambda: {},
        lambda: bounded(33),
        lambda: bounded(33, shared=True) | {"width": torch.full((1, H, 1, 1), torch.inf, device=DEVICE)},
        lambda: {"clamp_floor": leaf(1, H, 1, 1, low=0.0, high=0.02)},
    ],
    ids=["plain", "bounded", "unbounded", "clamp"],
)
def test_a_bias_of_minus_infinity_hides(extra):
    """As a mask does, and leaves no NaN in any gradient; a whole row of it gives zeros."""
    bias = leaf(B, H, 33, 40)
    with torch.no_grad():
        bias[..., ::3] = -torch.inf
        bias[:, :, 5] = -torch.inf
    got = check(tensors(33, 40, 16) | extra() | {"bias": bias})
    assert (got["out"][:, :, 5] == 0).all()
    assert (got["bias"][..., ::3] == 0).all()


@pytest.mark.parametrize("visible", [{}, {"offset": 0}, {"offset": 0, "window": 6}], ids=str)
def test_packed(visible):
    cu_seqlens = torch.tensor([0, 3, 20, 20, 57, 60], dtype=torch.int32, device=DEVICE)
    inputs = tensors(65, 65, 16, batch=1, heads=2, groups=1) | visible | {"cu_seqlens": cu_seqlens}
    got = check(inputs)
    assert (got["out"][:, :, 60:] == 0).all()


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_grouped_heads(groups):
    check(tensors(33, 35, 16, groups=groups) | {"offset": 2})


@pytest.mark.parametrize(("rows", "heads"), [(33, 2), (33, 4), (1, 2)])
def test_mixture(rows, heads):
    visible = {"offset": 2} if rows > 1 else {}
    check(tensors(33, 35, 16) | mixture(33, 16, rows, heads) | visible)


def test_mixture_ends():
    """A share of 0 is ordinary attention bit for bit, and 1 the mean."""
    inputs = tensors(17, 17, 16) | {"mean": leaf(B, G, 17, 16)}
    plain = attention(**{name: x for name, x in inputs.items() if name != "mean"})
    assert torch.equal(attention(**inputs, share=torch.zeros(1, 1, 1, 1, device=DEVICE)), plain)
    check(inputs | {"share": torch.ones(1, 1, 1, 1, device=DEVICE).requires_grad_()})


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("visible", [{}, {"offset": 2}, {"offset": 2, "window": 9}], ids=str)
def test_bounded(shared, visible):
    check(tensors(33, 35, 16) | bounded(33, shared) | visible)


def test_bounded_without_centre_and_with_a_bias():
    rows = bounded(33)
    del rows["centre"]
    check(tensors(33, 35, 16) | rows | {"bias": leaf(1, H, 33, 35)})


def test_infinite_width_is_no_bound():
    inputs = tensors(33, 35, 16) | bounded(33, shared=True)
    with torch.no_grad():
        inputs["width"][:, 1] = float("inf")
    check(inputs)


def test_wide_bound_is_accurate():
    """A large amplitude needs a tanh that is right near zero and near one."""
    inputs = tensors(33, 35, 16) | bounded(33)
    with torch.no_grad():
        inputs["width"] *= 30
        inputs["amplitude"] *= 30
    check(inputs, precise=1e-5)  # z of up to 90 has 9e-6 of rounding


def test_all_together():
    inputs = tensors(33, 40, 24) | bounded(33) | mixture(33, 24)
    inputs |= {"keys": padding(40, left=True), "offset": 7, "window": 20, "bias": leaf(1, 1, 33, 40)}
    check(inputs)


@pytest.mark.parametrize("visible", [{}, {"offset": 2}, {"offset": 2, "window": 9}], ids=str)
def test_clamp(visible):
    inputs = tensors(17, 19, 16) | visible | {"clamp_floor": leaf(1, H, 1, 1, low=0.0, high=1 / 20)}
    check(inputs)


def test_clamp_of_bounded_scores_with_padding_and_bias():
    inputs = tensors(17, 40, 16) | bounded(17) | {"bias": leaf(1, H, 17, 40), "keys": padding(40, left=False)}
    check(inputs | {"clamp_floor": leaf(B, H, 17, 1, low=0.0, high=1 / 41)})


def test_clamp_at_one_over_n():
    """A floor of 1 / n leaves the mean of the values, and no gradient to the scores."""
    inputs = tensors(17, 19, 16) | {"clamp_floor": torch.full((1, 1, 1, 1), 1 / 19, device=DEVICE)}
    got = results(attention, inputs)
    mean = inputs["value"].mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(got["out"])
    torch.testing.assert_close(got["out"], mean, atol=1e-6, rtol=1e-6)
    assert (got["query"] == 0).all()
    assert (got["key"] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        lambda: {},
        lambda: {"offset": 0} | mixture(33, 16),
        lambda: {"offset": 0} | bounded(33),
        lambda: {"offset": 0, "window": 9, "bias": leaf(1, H, 33, 33)},
        lambda: {"keys": padding(33, left=True), "clamp_floor": leaf(1, H, 1, 1, low=0.0, high=0.02)},
    ],
    ids=["plain", "mixture", "bounded", "band-bias", "clamp"],
)
def test_half_precision(dtype, options):
    extra = {name: x.detach().to(dtype).requires_grad_() if isinstance(x, torch.Tensor) and x.requires_grad else x
             for name, x in options().items()}  # fmt: skip
    check(tensors(33, 33, 16, dtype=dtype) | extra)


@pytest.mark.parametrize("kind", ["mixture", "clamp"])
def test_two_runs_are_equal_bit_for_bit(kind):
    extra = mixture(33, 16) if kind == "mixture" else {"clamp_floor": leaf(1, H, 1, 1, low=0.0, high=0.02)}
    inputs = tensors(33, 35, 16) | bounded(33) | extra | {"bias": leaf(1, 1, 33, 35), "keys": padding(35, left=False)}
    first, second = results(attention, inputs), results(attention, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_any_strides():
    inputs = tensors(33, 35, 16) | mixture(33, 16) | {"bias": leaf(H, 35, B, 33)}
    straight = results(attention, inputs | {"bias": inputs["bias"].permute(2, 0, 3, 1).contiguous()})
    bent = {
        "query": inputs["query"].transpose(1, 2).contiguous().transpose(1, 2),
        "key": inputs["key"].transpose(2, 3).contiguous().transpose(2, 3),
        "value": torch.stack([inputs["value"]] * 2, -1)[..., 0],
        "mean": inputs["mean"].flip(2).contiguous().flip(2),
        "bias": inputs["bias"].permute(2, 0, 3, 1),
    }
    got = results(attention, inputs | bent)
    assert all(torch.equal(got[name], straight[name]) for name in straight if name not in ("bias", "mean"))


@pytest.mark.parametrize("tile", [Tile(16, 16), Tile(64, 16), Tile(16, 64)], ids=str)
def test_the_tile_does_not_matter(tile, monkeypatch):
    monkeypatch.setattr("fullpay_kernels.launch.tile_for", lambda *_: tile)
    inputs = tensors(65, 73, 16, heads=2, groups=1, batch=1) | {"offset": 8, "window": 20}
    check(inputs | {"share": leaf(1, 2, 1, 1, low=0.0, high=0.5), "mean": leaf(1, 1, 65, 16)})


def test_fewer_dimensions_broadcast():
    inputs = tensors(17, 19, 16) | {"centre": leaf(B, H, 17), "width": leaf(low=0.5), "amplitude": leaf(17, 1)}
    inputs |= {"bias": leaf(17, 19), "share": leaf(low=0.0), "mean": leaf(B, G, 1, 16)}

    def formula(centre, **others):
        return dense(centre=centre[..., None], **others)

    compare(attention, formula, inputs, precise=1e-5)  # gradients of single numbers are sums over all rows


def test_only_some_gradients():
    inputs = tensors(17, 17, 16) | bounded(17)
    for name in ("query", "key", "amplitude"):
        inputs[name] = inputs[name].detach()
    check(inputs)


def test_no_queries_or_keys():
    inputs = tensors(0, 5, 16)
    assert attention(**inputs).shape == (B, H, 0, 16)
    got = results(attention, tensors(5, 0, 16))
    assert (got["out"] == 0).all()
    assert (got["query"] == 0).all()


def test_negative_and_zero_scaling():
    for scaling in (-0.5, 0.0):
        check(tensors(17, 17, 16) | {"scaling": scaling, "offset": 0})


def test_not_differentiable_twice():
    inputs = tensors(5, 5, 16)
    grad = torch.autograd.grad(attention(**inputs).sum(), inputs["query"], create_graph=True)[0]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.sum(), inputs["query"])


@pytest.mark.parametrize(
    ("width", "stride", "first", "copied"), [(16, 32, 0, 0), (24, 24, 0, 1), (16, 24, 0, 1), (16, 32, 1, 1)]
)
def test_rows_that_are_not_aligned_are_copied(width, stride, first, copied):
    x = torch.randn(2, 3, 5, stride, device=DEVICE)[..., first : first + width]
    y = aligned(x)
    assert (y.data_ptr() != x.data_ptr()) == bool(copied)
    assert torch.equal(y[..., :width], x)
    assert y.shape[-1] % 16 == 0
    assert not y[..., width:].any()
