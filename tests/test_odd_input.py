"""Odd input to plans and plain tensors: the right value or a sentence, never a traceback of torch and never NaN."""

import math

import pytest
import torch

from hf_fullpay import (
    AttentionPlan,
    Blocks,
    Bounded,
    Chunks,
    DelayBias,
    Full,
    Mixture,
    WindowGlobal,
    Windows,
    attention,
)
from hf_fullpay.backends import backend, chosen
from hf_fullpay.plan import PRESETS
from hf_fullpay.reach.window_global import MASK

PLACELESS = {"window_global", "shifted_window"}  # whose inputs name tokens that must be there


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in PLACELESS])
@pytest.mark.parametrize("engine", ["auto", "reference"])
@pytest.mark.parametrize(("queries", "keys", "causal"), [(0, 0, False), (0, 0, True), (3, 0, "lower_right")])
def test_nothing_to_pay_gives_zeros(name, engine, queries, keys, causal):
    query = torch.randn(2, 4, queries, 8, requires_grad=True)
    key, value = torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 6)
    with backend(engine):
        output = attention(query, key, value, plan=name, is_causal=causal)
    assert output.shape == (2, 4, queries, 6)
    assert not output.any()
    output.sum().backward()
    assert not query.grad.any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("overlap", [0, 2**31 - 2])
def test_chunks_far_over_the_length_cost_no_memory(causal, overlap):
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    plan = AttentionPlan(Chunks(2**31 - 1, overlap, exchange=0.3))
    with backend("reference"):
        wanted = attention(query, key, value, plan=plan, is_causal=causal)
    torch.testing.assert_close(attention(query, key, value, plan=plan, is_causal=causal), wanted)
    step = attention(query[:, :, -1:], key, value, plan=plan, is_causal="lower_right")
    with backend("reference"):
        wanted = attention(query[:, :, -1:], key, value, plan=plan, is_causal="lower_right")
    torch.testing.assert_close(step, wanted)


@pytest.mark.parametrize(
    "plan",
    [
        AttentionPlan(Blocks(4), payment=Mixture(floor=None, budget=0.2)),
        AttentionPlan(Blocks(4), scores=Bounded()),
        AttentionPlan(Chunks(4, 1), payment=Mixture(floor=None, budget=0.2)),
        AttentionPlan(scores=DelayBias(beta=0.1), payment=Mixture(floor=None, budget=0.2)),
    ],
    ids=AttentionPlan.describe,
)
@pytest.mark.parametrize("queries", [9, 1])
def test_nan_in_padding_enters_no_mean(plan, queries):
    """Found by poisoning all that has a mean beside it: without causality the mean was a product with NaN."""
    query, key, value = torch.randn(1, 2, queries, 8), *torch.randn(2, 1, 2, 9, 8)
    exists = torch.arange(9)[None] < 6
    hidden = ~exists[:, None, :, None]
    leaves = [x.masked_fill(hidden, math.nan).requires_grad_() for x in (key, value)]
    output = attention(query, *leaves, plan=plan, visible=exists)
    clean = attention(query, *(x.masked_fill(hidden, 0) for x in (key, value)), plan=plan, visible=exists)
    torch.testing.assert_close(output, clean)
    assert all(g.isfinite().all() for g in torch.autograd.grad(output.sum(), leaves))


def test_blocks_of_threads_and_generators_end_in_any_order():
    first, second = backend("reference"), backend("sdpa")
    before = chosen()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert chosen() == "sdpa"
    second.__exit__(None, None, None)
    assert chosen() == before


def test_nanoseconds_are_told_apart():
    """2 ** 60 ns is the year 2006: FP64 knows such times to 256 ns only."""
    query, key, value = torch.randn(3, 1, 2, 9, 8)
    plan, times = AttentionPlan(scores=DelayBias(beta=0.5)), torch.arange(9)[None] * 3
    wanted = attention(query, key, value, plan=plan, given={"times": times})
    found = attention(query, key, value, plan=plan, given={"times": times + 2**60})
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    small = attention(query, key, value, plan=plan, given={"times": times.flip(1).to(torch.uint8)})
    torch.testing.assert_close(small, attention(query, key, value, plan=plan, given={"times": times.flip(1)}))


def test_tokens_are_global_wherever_the_mask_is_not_zero():
    query, key, value = torch.randn(3, 2, 2, 9, 8)
    plan = AttentionPlan(WindowGlobal(2))
    mask = torch.zeros(2, 9, dtype=torch.bool)
    mask[:, 3] = True
    found = [
        attention(query, key, value, plan=plan, given={MASK: m}) for m in (mask, mask.long(), -mask.long(), 0.5 * mask)
    ]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])
    for bad in (mask * math.nan, mask.to(torch.complex64)):
        with pytest.raises(ValueError, match="global_attention_mask: expected"):
            attention(query, key, value, plan=plan, given={MASK: bad})


@pytest.mark.parametrize("others", [True, 1.0, -1, "1"])
def test_other_tokens_are_counted(others):
    query = torch.randn(1, 2, 17, 8)
    with pytest.raises(ValueError, match=r"patch_grid.*expected"):
        attention(query, query, query, plan=AttentionPlan(Windows(2)), given={"patch_grid": (4, 4, others)})


def test_plans_say_what_they_are():
    assert "tokens=()" in AttentionPlan(WindowGlobal(8, tokens=())).describe()
    with pytest.raises(ValueError, match=r"DelayBias\(times=\.\.\.\): expected a list of one or more"):
        DelayBias(times=())
    with pytest.raises(ValueError, match=r"AttentionPlan\(layers=\.\.\.\): expected"):
        AttentionPlan(Full(), layers=[("0", "all"), ("0", "vanilla")])
