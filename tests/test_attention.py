"""`attention` on plain tensors: fast against reference, and the promises, for every preset and every kind of mask.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from families import shortened
from hf_fullpay import (
    PRESETS,
    AttentionPlan,
    Band,
    Blocks,
    Bounded,
    Chunks,
    Clamp,
    DelayBias,
    DynamicScale,
    Full,
    FullPayWarning,
    Mixture,
    WindowGlobal,
    attention,
)
from hf_fullpay.attend import visible_of
from hf_fullpay.payment.mixture import Budget

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")

# Presets with a small band and strong settings, so that what they do shows on a few tokens; and options of no preset.
PLANS = {
    **{
        name: replace(plan, reach=shortened(plan.reach))
        for name, plan in PRESETS.items()
        if not plan.reach.misfit(cross=False, causal=True, image=False)
    },
    "strong floor": AttentionPlan(payment=Mixture(floor=0.05, budget=(0.3, 0.1, 0.9, 0.0))),
    "no floor": AttentionPlan(payment=Mixture(floor=None, budget=0.4)),
    "pay reach": AttentionPlan(reach=Band(3), payment=Mixture(floor=None, budget=0.4, pay="reach")),
    "strong clamp": AttentionPlan(payment=Clamp(floor=0.05, budget=(0.3, 0.1, 0.9, 0.0))),
    "median": AttentionPlan(scores=Bounded(bound=1.0, centre="median", temperature=0.7)),
    "no centre": AttentionPlan(scores=Bounded(bound=(1.0, 2.0, math.inf, 0.5), centre="none", temperature=1.0)),
    "sharpen": AttentionPlan(scores=Bounded(bound=1.0, slope="sharpen", temperature=0.5)),
    "rescale": AttentionPlan(scores=Bounded(bound=3.0, slope="rescale", temperature=1.0)),
    "gain": AttentionPlan(scores=DynamicScale(alpha=(1.0, -1.0, 0.0, 2.0)), payment=Mixture(budget=0.2)),
    "delay": AttentionPlan(Band(6), DelayBias(beta=(0.5, 1.0, 0.0, 2.0), learnable=False), Mixture(budget=0.2)),
    "window pays reach": AttentionPlan(WindowGlobal(3), payment=Mixture(floor=None, budget=0.4, pay="reach")),
    "window of blocks": AttentionPlan(
        WindowGlobal(4, random_blocks=2), Bounded(bound=1.0), Clamp(floor=None, budget=0.3)
    ),
    "relays and budget": AttentionPlan(
        Blocks(3), payment=Mixture(floor=None, budget=(0.3, 0.1, 0.9, 0.0), pay="reach")
    ),
    "relays and gain": AttentionPlan(Blocks(5), DynamicScale(alpha=(1.0, -1.0, 0.0, 2.0))),
    "bounded relays": AttentionPlan(
        Blocks(4), Bounded(bound=(1.0, 2.0, math.inf, 0.5), temperature=1.0), Mixture(budget=0.2)
    ),
    "bounded relays, no centre": AttentionPlan(Blocks(2), Bounded(bound=1.0, centre="none")),
    "sharpened relays": AttentionPlan(Blocks(4), Bounded(bound=1.0, slope="sharpen", temperature=0.5)),
    "rescaled relays": AttentionPlan(Blocks(3), Bounded(bound=3.0, slope="rescale", temperature=1.0)),
    "chunks and budget": AttentionPlan(
        Chunks(5, 3, exchange=(0.2, 0.5, 0.0, 1.0), learnable=False), payment=Mixture(budget=0.2)
    ),
    "chunks and gain": AttentionPlan(Chunks(3, 0), DynamicScale(alpha=(1.0, -1.0, 0.0, 2.0))),
    "all at once": AttentionPlan(Band(5), Bounded(bound=1.0), Clamp(floor=None, budget=0.3)),
}
MASKS = (
    "none",
    "left",
    "right",
    "causal",
    "causal left",
    "causal right",
    "lower right",
    "heads",
    "additive",
    "empty rows",
)


def tensors(n=9, m=None, heads=4, groups=2, width=8, batch=2, dtype=torch.float64, seed=0):
    m = n if m is None else m
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: (torch.randn(*shape, generator=generator, dtype=torch.float64) * 2).to(dtype)  # noqa: E731
    return draw(batch, heads, n, width), draw(batch, groups, m, width), draw(batch, groups, m, width)


def mask(kind, n, m, batch=2, heads=4):
    """Arguments `visible` and `is_causal`. Row 0 of the batch has pads: 3, or nearly all of a short sequence."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.ones(batch, m, dtype=torch.bool)
    if "left" in kind:
        keys[0, : min(3, m - 1)] = False
    if kind.endswith("right") and kind != "lower right":
        keys[0, m - min(3, m - 1) :] = False
    if kind == "none":
        return {}
    if kind in ("left", "right"):
        return {"visible": keys}
    if kind == "causal":
        return {"is_causal": "upper_left"}
    if kind.startswith("causal"):
        return {"visible": keys, "is_causal": "upper_left"}
    if kind == "lower right":
        return {"is_causal": "lower_right"}
    pairs = torch.rand(batch, heads, n, m, generator=generator) < 0.6
    pairs[..., 0] = True
    if kind == "heads":
        return {"visible": pairs}
    if kind == "additive":
        bias = torch.randn(1, heads, n, m, generator=generator, dtype=torch.float64)
        return {"visible": bias.expand(batch, heads, n, m).masked_fill(~pairs, torch.finfo(torch.float32).min)}
    pairs[0, :, : max(n // 2, 1)] = False
    return {"visible": pairs}


def seen(plan, kind, n, m, query):
    """Keys in reach and keys that are paid, as dense masks."""
    allowed, _ = visible_of(
        query, m, **({"mask": mask(kind, n, m).get("visible")}), is_causal=mask(kind, n, m).get("is_causal", False)
    )
    visible = plan.reach.restrict(allowed)
    everyone = isinstance(plan.payment, Mixture) and plan.payment.pay == "visible"
    return visible.to_dense(), (allowed if everyone else visible).to_dense()


def applies(plan, kind, n, m):
    """Causality or the last key places a query of a local reach or a delay; without either it must be one, or as many as
    the keys."""
    placed = not isinstance(plan.reach, Full) or isinstance(plan.scores, DelayBias)
    return not placed or n in (1, m) or kind not in ("none", "left", "right")


CASES = pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in PLANS for kind in MASKS])


@CASES
@pytest.mark.parametrize(("n", "m"), [(9, 9), (1, 1), (4, 9), (1, 6), (17, 17)])
def test_fast_equals_reference(name, kind, n, m):
    plan = PLANS[name]
    if not applies(plan, kind, n, m):
        with pytest.raises(ValueError, match=r"band|blocks|delay|window"):
            attention(*tensors(n, m), plan=plan, **mask(kind, n, m))
        return
    leaves = [t.requires_grad_() for t in tensors(n, m)]
    probe = torch.randn(2, 4, n, 8, dtype=torch.float64)
    found = []
    for return_weights in (False, True):
        output = attention(*leaves, plan=plan, return_weights=return_weights, **mask(kind, n, m))
        output = output[0] if return_weights else output
        found.append((output, *torch.autograd.grad((output * probe).sum(), leaves)))
    for fast, reference in zip(*found, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-9, atol=1e-10)


@CASES
def test_rows_floor_order_and_hidden_keys(name, kind):
    n = 13
    plan = PLANS[name]
    query, key, value = tensors(n)
    output, weights = attention(query, key, value, plan=plan, return_weights=True, **mask(kind, n, n))
    visible, paid = (part.expand_as(weights) for part in seen(plan, kind, n, n, query))
    some = visible.any(-1)
    torch.testing.assert_close(weights.sum(-1), some.double(), rtol=0, atol=1e-12)
    assert (weights[~(visible | paid)] == 0).all()
    assert (output[~some] == 0).all()
    torch.testing.assert_close(output, weights @ value.repeat_interleave(2, 1), rtol=0, atol=1e-12)
    if isinstance(plan.payment, Budget):
        counts = paid.sum(-1, keepdim=True).double()
        budget = torch.tensor(plan.payment.budget, dtype=torch.float64).reshape(1, -1, 1, 1)
        floor = torch.full_like(counts, math.inf if plan.payment.floor is None else plan.payment.floor)
        promised = torch.minimum(floor, budget / counts.clamp_min(1)).expand_as(weights)
        assert (weights[paid & some[..., None]] >= promised[paid & some[..., None]] - 1e-12).all()
    kept = isinstance(plan.reach, Full | Band) and not isinstance(plan.scores, DelayBias)
    if kept and not isinstance(plan.payment, Clamp):
        bias = mask(kind, n, n).get("visible")
        scores = query @ key.repeat_interleave(2, 1).mT / math.sqrt(8)
        if kind == "additive":
            scores = scores + bias.masked_fill(~visible, 0)
        ranked = weights.gather(-1, scores.masked_fill(~visible, -math.inf).argsort(-1))
        start = (n - visible.sum(-1, keepdim=True)).expand(*weights.shape[:-1], 1)
        rising = (ranked.diff(dim=-1) >= -1e-12) | (torch.arange(n - 1) < start)
        assert rising.all()


@CASES
def test_hidden_content_changes_nothing(name, kind):
    """Keys and values at slots that nobody may see: any finite content, the same bits."""
    n, plan = 9, PLANS[name]
    query, key, value = tensors(n, dtype=torch.float32)
    visible, paid = seen(plan, kind, n, n, query)
    unseen = ~(visible | paid).expand(2, 4, n, n).any(-2).view(2, 2, 2, n).any(2)  # (B, G, M)
    before = attention(query, key, value, plan=plan, **mask(kind, n, n))
    loud = [t.masked_fill(unseen[..., None], 1e4) for t in (key, value)]
    after = attention(query, *loud, plan=plan, **mask(kind, n, n))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("kind", ["causal", "causal left", "lower right"])
def test_nothing_leaks_from_the_future(name, kind):
    """Exactly zero gradient from any output to any later key or value, through centres, means and counts too."""
    n, plan = 9, PLANS[name]
    query, key, value = (t.requires_grad_() for t in tensors(n))
    output = attention(query, key, value, plan=plan, **mask(kind, n, n))
    for row in range(n - 1):
        of_key, of_value = torch.autograd.grad(output[:, :, row].square().sum(), (key, value), retain_graph=True)
        assert (of_key[:, :, row + 1 :] == 0).all()
        assert (of_value[:, :, row + 1 :] == 0).all()


@pytest.mark.parametrize("path", [False, True], ids=["fast", "reference"])
def test_band_reaches_exactly_its_window(path):
    n, size = 11, 4
    query, key, value = (t.requires_grad_() for t in tensors(n, batch=1))
    output = attention(query, key, value, plan=AttentionPlan(reach=Band(size)), return_weights=path)
    output = output[0] if path else output
    for row in range(n):
        (gradient,) = torch.autograd.grad(output[:, :, row].sum(), value, retain_graph=True)
        reached = set(gradient.abs().sum((0, 1, 3)).nonzero().flatten().tolist())
        assert reached == set(range(max(row - size + 1, 0), row + 1))


@pytest.mark.parametrize(
    "plan", [PLANS["fullpay"], PLANS["fullpay_band"], PLANS["strong clamp"], PLANS["bounded_fullpay"]]
)
def test_full_payment_reaches_every_visible_value(plan):
    query, key, value = (t.requires_grad_() for t in tensors(9, batch=1))
    output = attention(query * 40, key, value, plan=plan, is_causal=True)
    budgets = torch.tensor(plan.payment.budget).expand(4)
    for row in range(9):
        (gradient,) = torch.autograd.grad(output[:, :, row].sum(), value, retain_graph=True)
        assert (gradient[0, :, : row + 1].abs().amin(-1)[budgets.view(2, 2).amax(1) > 0] > 0).all()


def same_with_gradients(one, other, *leaves, tolerance=1e-12):
    probe = torch.randn_like(one)
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
    gradients = (torch.autograd.grad((output * probe).sum(), leaves) for output in (one, other))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


NEUTRAL = {
    "no budget": AttentionPlan(payment=Mixture(budget=0.0)),
    "no floor": AttentionPlan(payment=Mixture(floor=0.0)),
    "clamp of nothing": AttentionPlan(payment=Clamp(floor=0.0)),
    "no bound": AttentionPlan(scores=Bounded(bound=None, temperature=1.0)),
    "infinite bound": AttentionPlan(scores=Bounded(bound=math.inf, centre="median")),
    "gain of one": PRESETS["dynamic_scale"],
}


@pytest.mark.parametrize("name", NEUTRAL)
@pytest.mark.parametrize("is_causal", [False, True])
def test_neutral_options_are_sdpa(name, is_causal):
    query, key, value = (t.requires_grad_() for t in tensors(10))
    ours = attention(query, key, value, plan=NEUTRAL[name], is_causal=is_causal)
    stock = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=True)
    same_with_gradients(ours, stock, query, key, value)


@pytest.mark.parametrize("name", ["no budget", "no floor", "gain of one"])
def test_a_floor_of_nothing_is_the_host_bit_for_bit(name):
    query, key, value = tensors(33, dtype=torch.float32, groups=4)
    stock = F.scaled_dot_product_attention(query, key, value)
    assert torch.equal(attention(query, key, value, plan=NEUTRAL[name]), stock)


def test_a_window_over_everything_is_causal():
    query, key, value = (t.requires_grad_() for t in tensors(10))
    ours = attention(query, key, value, plan=AttentionPlan(reach=Band(10)))
    stock = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    same_with_gradients(ours, stock, query, key, value)
    short = attention(query, key, value, plan=AttentionPlan(reach=Band(9)))
    assert torch.equal((short - ours).abs().amax((0, 1, 3)) > 1e-9, torch.arange(10) == 9)


def test_the_other_end():
    query, key, value = (t.requires_grad_() for t in tensors(7))
    everything = attention(query, key, value, plan=AttentionPlan(payment=Mixture(floor=None, budget=1.0)))
    torch.testing.assert_close(everything, value.mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(everything))
    of_query, of_key, of_value = torch.autograd.grad(everything.sum(), (query, key, value))
    assert not of_query.any()
    assert not of_key.any()
    torch.testing.assert_close(of_value, torch.full_like(of_value, 2.0))
    alone = attention(query, key, value, plan=AttentionPlan(reach=Band(1)))
    torch.testing.assert_close(alone, value.repeat_interleave(2, 1))


@pytest.mark.parametrize("slope", ["preserve", "rescale"])
@pytest.mark.parametrize("centre", ["mean", "median", "none"])
def test_bounded_weights_keep_their_certificate(slope, centre):
    options = Bounded(bound=1.5, centre=centre, temperature=0.5, slope=slope)
    query, key, value = tensors(12)
    _, weights = attention(query * 50, key * 50, value, plan=AttentionPlan(scores=options), return_weights=True)
    low, high = options.certificate(12)
    assert weights.min() >= low * (1 - 1e-9)
    assert weights.max() <= high * (1 + 1e-9)
    assert weights.max() > 5 * weights.min()


@pytest.mark.parametrize("centre", ["mean", "median"])
def test_a_shift_of_all_scores_of_a_row_changes_nothing(centre):
    query, key, value = tensors(9)
    plan = AttentionPlan(scores=Bounded(bound=1.0, centre=centre, temperature=1.0))
    shift = torch.randn(2, 4, 9, 1, dtype=torch.float64).expand(2, 4, 9, 9) * 5
    torch.testing.assert_close(
        attention(query, key, value, plan=plan, visible=shift), attention(query, key, value, plan=plan)
    )


def test_the_order_is_strict_within_nine_widths():
    scores = torch.linspace(-8.9, 8.9, 60)[None, None, None]
    key = torch.zeros(1, 1, 60, 4)
    plan = AttentionPlan(scores=Bounded(bound=1.0, centre="none", temperature=1.0))
    _, weights = attention(key[:, :, :1], key, key, plan=plan, visible=scores, return_weights=True)
    assert (weights.diff() >= 0).all()
    # Where softmax weights are closer than FP32 resolves, the scores still differ.
    compressed = torch.tanh(scores)
    assert (compressed.diff() > 0).sum() >= 55


NUMBERS = {name: ("scores", "bound") for name, plan in PLANS.items() if isinstance(plan.scores, Bounded)}
NUMBERS |= {name: ("payment", "budget") for name, plan in PLANS.items() if isinstance(plan.payment, Budget)}


@pytest.mark.parametrize("name", NUMBERS)
def test_per_head_strength_moves_its_head_alone(name):
    plan, (part, option) = PLANS[name], NUMBERS[name]
    query, key, value = tensors(9)
    old = getattr(getattr(plan, part), option)
    values = list(old) if isinstance(old, tuple) else [old] * 4
    values[1] = values[1] * 1.7 + 0.01 if math.isfinite(values[1]) else 1.0
    other = replace(plan, **{part: replace(getattr(plan, part), **{option: values})})
    # A floor that the budget does not limit hides a change of the budget: ask for more.
    if option == "budget" and plan.payment.floor is not None:
        plan, other = (replace(p, payment=replace(p.payment, floor=0.9)) for p in (plan, other))
    a, b = (attention(query, key, value, plan=p, is_causal=True) for p in (plan, other))
    moved = (a - b).abs().amax((0, 2, 3)) > 1e-9
    assert moved.tolist() == [False, True, False, False]


@pytest.mark.parametrize("name", PLANS)
def test_grouped_heads_equal_repeated_ones(name):
    query, key, value = tensors(9)
    repeated = (t.repeat_interleave(2, 1) for t in (key, value))
    ours = attention(query, key, value, plan=PLANS[name], is_causal=True)
    torch.testing.assert_close(ours, attention(query, *repeated, plan=PLANS[name], is_causal=True))


@pytest.mark.parametrize("name", PLANS)
def test_strides_do_not_matter_and_inputs_stay(name):
    plan = PLANS[name]
    query, key, value = tensors(9)
    strided = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    copies = [t.clone() for t in strided]
    torch.testing.assert_close(
        attention(*strided, plan=plan), attention(query, key, value, plan=plan), rtol=0, atol=1e-12
    )
    assert all(torch.equal(a, b) for a, b in zip(strided, copies, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_scaling_is_used_as_passed(name):
    query, key, value = tensors(9)
    one = attention(query, key, value, plan=PLANS[name], scaling=0.3)
    torch.testing.assert_close(one, attention(query * 3, key, value, plan=PLANS[name], scaling=0.1))
    assert (one - attention(query, key, value, plan=PLANS[name], scaling=1.0)).abs().max() > 1e-3


@pytest.mark.parametrize("name", PLANS)
def test_batch_mates_do_not_meet(name):
    query, key, value = (t.requires_grad_() for t in tensors(9, batch=3))
    output = attention(query, key, value, plan=PLANS[name])
    for leaf in (query, key, value):
        (gradient,) = torch.autograd.grad(output[0].square().sum(), leaf, retain_graph=True)
        assert not gradient[1:].any()
    alone = attention(query[:1], key[:1], value[:1], plan=PLANS[name])
    torch.testing.assert_close(output[:1], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_budget(name, dtype):
    """At most twice what the same formula errs in eager PyTorch in that type."""
    plan = PLANS[name]
    exact = tensors(65)
    rounded = [t.to(dtype) for t in exact]
    truth = attention(*(t.double() for t in rounded), plan=plan, is_causal=True, return_weights=True)[0]
    ours = attention(*rounded, plan=plan, is_causal=True)
    assert ours.dtype == dtype
    eager = eager_in(dtype, *rounded, plan=plan)
    error, allowed = ((result.double() - truth).abs().max().item() for result in (ours, eager))
    assert error <= 2 * allowed + torch.finfo(dtype).eps


def eager_in(dtype, query, key, value, *, plan):
    """The reference's steps, with every result rounded to `dtype`, as plain PyTorch code in that type would."""
    from hf_fullpay.payment.clamp import clamp_weights, floor_of
    from hf_fullpay.payment.mixture import mixture_weights
    from hf_fullpay.payment.softmax import softmax_weights
    from hf_fullpay.reach.blocks import relayed_scores
    from hf_fullpay.reach.chunks import chunk_weights
    from hf_fullpay.scores.bounded import bounded_scores
    from hf_fullpay.scores.dynamic_scale import dynamic_gain

    n, heads = query.shape[2], query.shape[1]
    allowed, _ = visible_of(query, n, None, True)
    visible, paid = plan.reach.restrict(allowed).to_dense(), allowed.to_dense()
    row = lambda v: torch.tensor(v).expand(heads).view(1, -1, 1, 1)  # noqa: E731
    scores = (query @ key.repeat_interleave(2, 1).mT * query.shape[-1] ** -0.5).float()
    if isinstance(plan.scores, DynamicScale):
        scores = (scores * dynamic_gain(row(plan.scores.start()), plan.scores.max_scale)).to(dtype).float()
    slots, origin = torch.arange(n)[:, None], torch.zeros(1, 1, dtype=torch.long)
    if isinstance(plan.reach, Blocks):
        scores = relayed_scores(scores, visible, slots, origin, plan.reach.size).to(dtype).float()
    if isinstance(plan.scores, Bounded):
        options = {name: getattr(plan.scores, name) for name in ("centre", "temperature", "slope")}
        scores = bounded_scores(scores, visible, bound=row(plan.scores.limit), **options).to(dtype).float()
    if isinstance(plan.reach, Chunks):
        options = {"size": plan.reach.size, "stride": plan.reach.stride, "exchange": row(plan.reach.exchange)}
        weights = chunk_weights(
            scores, visible, slots, origin, torch.ones(1, 1, dtype=torch.bool), softmax=softmax_weights, **options
        )
    else:
        weights = softmax_weights(scores, visible)
    weights = weights.to(dtype).float()
    if isinstance(plan.payment, Mixture):
        paid = visible if plan.payment.pay == "reach" else paid
        weights = mixture_weights(weights, paid, floor=plan.payment.floor, budget=row(plan.payment.budget))
    if isinstance(plan.payment, Clamp):
        weights = clamp_weights(
            weights,
            visible,
            floor_of(plan.payment.floor, row(plan.payment.budget), visible.sum(-1, keepdim=True).float()),
        )
    return weights.to(dtype) @ value.repeat_interleave(2, 1)


@pytest.mark.parametrize("name", PLANS)
def test_dropout_spares_the_floor_and_is_unbiased(name):
    plan = PLANS[name]
    query, key, value = tensors(6, dtype=torch.float32)
    runs = torch.stack([attention(query, key, value, plan=plan, dropout=0.4) for _ in range(600)])
    still = attention(query, key, value, plan=plan)
    error = (runs.mean(0) - still).abs()
    assert (error <= 6 * runs.std(0) / math.sqrt(600) + 1e-5).all()
    assert runs.std(0).max() > 0.05
    if isinstance(plan.payment, Budget):
        drops = torch.stack(
            [attention(query, key, value, plan=plan, dropout=0.4, return_weights=True)[1] for _ in range(20)]
        )
        _, paid = seen(plan, "none", 6, 6, query)
        budget = torch.tensor(plan.payment.budget).reshape(1, -1, 1, 1)
        counts = paid.sum(-1, keepdim=True)
        floor = torch.full((1, 1, 1, 1), math.inf if plan.payment.floor is None else plan.payment.floor)
        promised = torch.minimum(floor, budget / counts.clamp_min(1)).expand_as(drops[0])
        mask_ = paid.expand_as(drops[0])
        assert (drops[:, mask_] >= promised[mask_] - 1e-6).all()


@pytest.mark.parametrize("name", PLANS)
def test_two_runs_are_equal_bit_for_bit(name):
    leaves = [t.requires_grad_() for t in tensors(70, dtype=torch.float32)]
    runs = []
    for _ in range(2):
        output = attention(*leaves, plan=PLANS[name], is_causal=True)
        runs.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", PLANS)
def test_gradcheck(name):
    plan = PLANS[name]
    leaves = [t.requires_grad_() for t in tensors(5, batch=1, width=3)]
    bias = torch.randn(1, 4, 5, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *t: attention(*t[:3], plan=plan, visible=t[3], is_causal=True), (*leaves, bias)
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    name=st.sampled_from(sorted(PLANS)),
    kind=st.sampled_from(MASKS),
    n=st.one_of(st.integers(1, 130), st.sampled_from([1, 63, 64, 65, 127, 128, 129])),
    width=st.sampled_from([4, 8, 16, 24, 25, 64]),
    groups=st.sampled_from([1, 2, 4]),
)
def test_any_shape_and_mask(name, kind, n, width, groups):
    query, key, value = tensors(n, width=width, groups=groups)
    fast = attention(query, key, value, plan=PLANS[name], **mask(kind, n, n))
    reference, _ = attention(query, key, value, plan=PLANS[name], return_weights=True, **mask(kind, n, n))
    torch.testing.assert_close(fast, reference, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", PLANS)
def test_all_mask_formats_agree(name):
    n = 9
    pairs = mask("heads", n, n)["visible"]
    query, key, value = tensors(n)
    lows = (-math.inf, torch.finfo(torch.float32).min, -65504.0, -1e4)
    additive = [torch.zeros(pairs.shape, dtype=torch.float64).masked_fill(~pairs, low) for low in lows]
    runs = [attention(query, key, value, plan=PLANS[name], visible=visible) for visible in (pairs, *additive)]
    for run in runs[1:]:
        torch.testing.assert_close(run, runs[0], rtol=0, atol=1e-12)
    by_head = []
    for h in range(4):
        one, group = slice(h, h + 1), slice(h // 2, h // 2 + 1)
        arguments = {"plan": one_head(PLANS[name], h), "visible": pairs[:, one]}
        by_head.append(attention(query[:, one], key[:, group], value[:, group], **arguments))
    torch.testing.assert_close(torch.cat(by_head, 1), runs[0], rtol=0, atol=1e-12)


def one_head(plan, head):
    changes = {}
    for part in ("reach", "scores", "payment"):
        options = {k: v[head] for k, v in vars(getattr(plan, part)).items() if isinstance(v, tuple) and k != "tokens"}
        changes[part] = replace(getattr(plan, part), **options)
    return replace(plan, **changes)


@pytest.mark.parametrize("return_weights", [False, True])
def test_a_head_without_a_bound_shrinks_nothing(return_weights):
    plan = AttentionPlan(scores=Bounded(bound=(1.0, math.inf, 2.0, math.inf), slope="rescale", temperature=1.0))
    leaves = [t.requires_grad_() for t in tensors(9)]
    output = attention(*leaves, plan=plan, return_weights=return_weights)
    output = output[0] if return_weights else output
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("name", PLANS)
def test_autocast_does_not_reach_inside(name):
    query, key, value = tensors(9, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        output = attention(query, key, value, plan=PLANS[name])
    assert torch.equal(output, attention(query, key, value, plan=PLANS[name]))


def test_large_scores_stay_finite():
    for name, plan in PLANS.items():
        leaves = [(t * 100).requires_grad_() for t in tensors(9, dtype=torch.float32)]
        output = attention(*leaves, plan=plan)
        gradients = torch.autograd.grad(output.sum(), leaves)
        assert all(t.isfinite().all() for t in (output, *gradients)), name


def test_second_backward_equals_the_first_and_double_backward_is_refused():
    for name in ("bounded", "strong clamp", "fullpay", "band_causal"):
        leaves = [t.requires_grad_() for t in tensors(9)]
        total = attention(*leaves, plan=PLANS[name], is_causal=True).square().sum()
        first = torch.autograd.grad(total, leaves, retain_graph=True)
        second = torch.autograd.grad(total, leaves, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    leaves = [t.requires_grad_() for t in tensors(9)]
    total = attention(*leaves, plan=PLANS["bounded"]).square().sum()
    with pytest.raises(RuntimeError):
        torch.autograd.grad(torch.autograd.grad(total, leaves, create_graph=True)[0].sum(), leaves)


def test_alignments():
    key, value = tensors(5)[1:]
    query = tensors(2)[0]
    lower = attention(query, key, value, plan="bounded", is_causal="lower_right", return_weights=True)[1]
    assert (lower[..., 0, 4] == 0).all()
    assert (lower[..., 0, :4] > 0).all()
    upper = attention(query, key, value, plan="bounded", is_causal="upper_left", return_weights=True)[1]
    assert (upper[..., 0, 1:] == 0).all()
    with pytest.raises(ValueError, match="lower_right"):
        attention(query, key, value, plan="bounded", is_causal=True)


def test_more_queries_than_keys_leave_empty_rows():
    for plan in PLANS.values():
        query, key, value = (t.requires_grad_() for t in tensors(5, 3))
        output = attention(query, key, value, plan=plan, is_causal="lower_right")
        assert not output[:, :, :2].any()
        assert output[:, :, 2:].abs().min() > 0
        assert all(g.isfinite().all() for g in torch.autograd.grad(output.sum(), (query, key, value)))


def test_the_shortfall_is_told():
    with pytest.warns(FullPayWarning, match=r"floor 0.01 asked for, 0.00556 given"):
        attention(*tensors(9), plan="fullpay")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"query": torch.zeros(2, 4, 9)}, "query: expected a tensor"),
        ({"query": torch.zeros(2, 4, 9, 8, dtype=torch.long)}, "query: expected a floating"),
        ({"key": torch.zeros(2, 2, 9, 7)}, "key: expected"),
        ({"key": torch.zeros(2, 3, 9, 8), "value": torch.zeros(2, 3, 9, 8)}, "divides the 4"),
        ({"value": torch.zeros(2, 2, 8, 8)}, "value: expected"),
        ({"visible": torch.ones(2, 8, dtype=torch.bool)}, "visible: expected key padding"),
        ({"visible": torch.ones(2, 9)}, "visible: expected key padding"),
        ({"visible": torch.ones(1, 9, 9, dtype=torch.bool)}, "mask: expected a shape"),
        ({"visible": torch.ones(2, 3, 9, 9, dtype=torch.bool)}, "mask: expected a shape"),
        ({"visible": torch.ones(2, 1, 9, 9, dtype=torch.int)}, "mask: expected bool"),
        ({"visible": "all"}, "visible: expected a tensor"),
        ({"visible": torch.ones(2, 9, dtype=torch.bool, device="meta")}, "visible: expected the device"),
        ({"key": torch.zeros(2, 2, 9, 8).bfloat16()}, "expected one dtype"),
        ({"query": torch.zeros(2, 4, 9, 8).to(torch.float8_e4m3fn)}, "query: expected a floating"),
        *[({"is_causal": value}, "is_causal: expected") for value in ("middle", 0, 1, 0.0, None, torch.tensor(False))],
        ({"scaling": 0.0}, "scaling: expected"),
        ({"scaling": -0.5}, "scaling: expected"),
        ({"scaling": math.nan}, "scaling: expected"),
        ({"dropout": 1.0}, "dropout: expected"),
        ({"plan": "fulpay"}, "plan: expected"),
        ({"plan": AttentionPlan(gate=True)}, "convert"),
        ({"plan": AttentionPlan(payment=Mixture(budget=[0.1, 0.2]))}, "budget: expected one number"),
        ({"plan": AttentionPlan(scores=Bounded(bound=[1, 2, 3]))}, "bound: expected one number"),
    ],
)
def test_bad_input_is_named(change, reason):
    query, key, value = tensors(9, dtype=torch.float32)
    arguments = {"query": query, "key": key, "value": value, "plan": "fullpay"} | change
    with pytest.raises(ValueError, match=reason):
        attention(**arguments)
