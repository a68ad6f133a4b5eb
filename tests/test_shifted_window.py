"""Windows on a patch grid: who sees whom, exactly, in values and gradients, for any grid, window, shift and prefix.

Dimensions: B batch, H query heads, G key/value heads, N tokens, D width.
"""

import itertools

import pytest
import torch

from hf_fullpay import (
    AttentionPlan,
    Bounded,
    Clamp,
    DynamicScale,
    Mixture,
    Plain,
    Softmax,
    Windows,
    attention,
)
from largest import largest

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
# Rows, columns, size, shift, other tokens: square or not, dividing or not, one window along an axis, no other tokens.
GRIDS = [
    (7, 7, 4, 2, 1), (7, 7, 4, 0, 1), (4, 4, 2, 1, 1), (3, 8, 4, 2, 5), (5, 9, 3, 1, 0), (5, 9, 3, 2, 2), (1, 6, 2, 1, 1),
    (4, 4, 7, 3, 1), (8, 8, 4, 2, 0), (6, 4, 1, 0, 1),
]  # fmt: skip


def tensors(n, *, batch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, 4, n, 8), (batch, 2, n, 8), (batch, 2, n, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def pattern(rows, columns, size, shift, others):
    """Who sees whom, straight from the definition: windows begin at `shift` and every `size` patches."""

    def window(place, length):
        return 0 if length <= size else sum(place >= begin for begin in range(shift or size, length, size))

    n = others + rows * columns
    pairs = torch.ones(n, n, dtype=torch.bool)
    patches = list(itertools.product(range(rows), range(columns)))
    for (i, (r, c)), (j, (s, d)) in itertools.product(enumerate(patches), repeat=2):
        pairs[others + i, others + j] = (window(r, rows), window(c, columns)) == (window(s, rows), window(d, columns))
    return pairs


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("by", ["values", "gradients", "weights of reference"])
def test_the_reach_is_exactly_what_is_defined(grid, by):
    """O56: patches meet that are neighbours in the image; those across the wrap, and what fills the grid up, do not."""
    rows, columns, size, shift, others = grid
    n, wanted = others + rows * columns, pattern(*grid)
    query, key, value = tensors(n)
    arguments = {"plan": AttentionPlan(Windows(size, shift)), "given": {"patch_grid": (rows, columns, others)}}
    if by == "weights of reference":
        found = attention(query, key, value, return_weights=True, **arguments)[1][0, 0] != 0
    elif by == "values":
        found = attention(query, key, torch.eye(n).double().expand(2, 2, n, n), **arguments)[0, 0] != 0
    else:
        output = attention(query, key, value, **arguments)
        reached = [torch.autograd.grad(output[0, :, i].sum(), value, retain_graph=True)[0] for i in range(n)]
        found = torch.stack([of_values[0].abs().sum((0, 2)) for of_values in reached]) != 0
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize(
    "payment",
    [Softmax(), Mixture(floor=None, budget=0.3), Mixture(budget=0.3, pay="reach"), Clamp(floor=None, budget=0.3)],
)
@pytest.mark.parametrize("scores", [Plain(), Bounded(bound=1.0), Bounded(centre="median"), DynamicScale(alpha=1.0)])
def test_fast_equals_reference(grid, payment, scores):
    rows, columns, size, shift, others = grid
    n = others + rows * columns
    leaves, probe = tensors(n), torch.randn(2, 4, n, 8, dtype=torch.float64)
    keys = torch.rand(2, n, generator=torch.Generator().manual_seed(1)) < 0.7
    for visible in (None, keys):
        found = []
        for dense in (False, True):
            output = attention(
                *leaves, plan=AttentionPlan(Windows(size, shift), scores, payment), visible=visible,
                given={"patch_grid": (rows, columns)}, return_weights=dense,
            )  # fmt: skip
            output = output[0] if dense else output
            found.append((output, *torch.autograd.grad((output * probe).sum(), leaves)))
        for fast, reference in zip(*found, strict=True):
            torch.testing.assert_close(fast, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("scores", [Plain(), Bounded(bound=1.0)])
@pytest.mark.parametrize("payment", [Softmax(), Mixture(floor=None, budget=0.3, pay="reach"), Clamp(budget=0.3)])
def test_nothing_leaks_from_another_window(scores, payment):
    grid = (7, 9, 4, 2, 1)
    plan, leaves = AttentionPlan(Windows(4, 2), scores, payment), tensors(64)
    given = {"patch_grid": (7, 9)}
    output = attention(*leaves, plan=plan, given=given)
    for row in (1, 5, 33, 63):
        unseen = ~pattern(*grid)[row]
        gradients = torch.autograd.grad(output[:, :, row].square().sum(), leaves[1:], retain_graph=True)
        assert unseen.any()
        assert not any(gradient[:, :, unseen].any() for gradient in gradients)
        loud = [leaf.detach().masked_fill(unseen[:, None], 1e4) for leaf in leaves[1:]]
        again = attention(leaves[0], *loud, plan=plan, given=given)
        torch.testing.assert_close(again[:, :, row], output[:, :, row], rtol=0, atol=1e-13)


def test_every_other_layer_is_shifted():
    leaves = tensors(65)
    at = lambda size, shift, layer: attention(  # noqa: E731
        *leaves, plan=AttentionPlan(Windows(size, shift)), given={"patch_grid": (8, 8), "layer_index": layer}
    )
    for size in (3, 4):
        for layer in range(4):
            assert torch.equal(at(size, "alternate", layer), at(size, layer % 2 * (size // 2), 0))
    assert (at(4, "alternate", 0) - at(4, "alternate", 1)).abs().max() > 1e-2


def test_one_window_is_ordinary_attention():
    leaves = tensors(17)
    ours = attention(*leaves, plan="shifted_window", given={"patch_grid": (4, 4), "layer_index": 1})
    torch.testing.assert_close(ours, attention(*leaves, plan=AttentionPlan()), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "payment", [Softmax(), Mixture(budget=0.3), Mixture(budget=0.3, pay="reach"), Clamp(budget=0.3)]
)
def test_memory_grows_with_the_grid(payment):
    sizes = []
    for side in (28, 56):
        leaves = tensors(side * side + 1, batch=1, dtype=torch.float32)
        plan, given = AttentionPlan(Windows(7), payment=payment), {"patch_grid": (side, side), "layer_index": 1}

        def step(leaves=leaves, plan=plan, given=given):
            attention(*leaves, plan=plan, given=given).sum().backward()

        sizes.append(largest(step) / side**2)
    assert sizes[1] <= 1.1 * sizes[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_budget(dtype):
    """At most twice what the same formula errs in eager PyTorch in that type, outputs and gradients."""
    grid = (9, 11, 4, 2, 3)
    low = tensors(102, dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in low]
    probe, mask = torch.randn(2, 4, 102, 8).to(dtype), pattern(*grid)

    def eager(query, key, value):
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        return (query @ key.mT * 8**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ value

    def ours(*leaves):
        return attention(*leaves, plan=AttentionPlan(Windows(4, 2)), given={"patch_grid": (9, 11)})

    def with_gradients(call, leaves):
        output = call(*leaves)
        return output, *torch.autograd.grad((output * probe.to(output.dtype)).sum(), leaves)

    results = (with_gradients(*pair) for pair in ((eager, exact), (ours, low), (eager, low)))
    for truth, fast, plain in zip(*results, strict=True):
        error, allowed = ((result.double() - truth).abs().max() for result in (fast, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize(
    ("given", "options", "reason"),
    [
        (None, {}, r"patch_grid: expected \(rows, columns\).*got None.*given="),
        ({"patch_grid": 4}, {}, "patch_grid"),
        ({"patch_grid": (4,)}, {}, "patch_grid"),
        ({"patch_grid": (0, 4)}, {}, "patch_grid.*at least 1"),
        ({"patch_grid": (4, 2.0)}, {}, "patch_grid.*integer"),
        ({"patch_grid": (5, 4)}, {}, "5 x 4 patches to be the 17 tokens, got 20"),
        ({"patch_grid": (4, 4, 2)}, {}, "2 other tokens and 4 x 4 patches to be the 17 tokens, got 18"),
        ({"patch_grid": (3, 4, 1)}, {}, "1 other tokens and 3 x 4 patches to be the 17 tokens, got 13"),
        ({"patch_grid": (4, 4, -1)}, {}, "patch_grid"),
        ({"patch_grid": (4, 4), "layer_index": -1}, {}, "layer_index"),
        ({"patch_grid": (4, 4), "layer": 1}, {}, "given: expected names"),
        ({"patch_grid": (4, 4)}, {"is_causal": True}, "without causality"),
    ],
)
def test_bad_input_is_named(given, options, reason):
    for dense in (False, True):
        with pytest.raises(ValueError, match=reason):
            attention(*tensors(17), plan="shifted_window", given=given, return_weights=dense, **options)


def test_queries_and_keys_are_the_same_patches():
    query, key, value = tensors(17)
    with pytest.raises(ValueError, match="16 queries, 17 keys"):
        attention(query[:, :, :16], key, value, plan="shifted_window", given={"patch_grid": (4, 4)})
