"""Window + global: who sees whom, exactly, in values and gradients; and padding, cuts of a prompt and masks.

Dimensions: B batch, H query heads, G key/value heads, N queries, M keys, D width.
"""

from itertools import pairwise

import pytest
import torch

from hf_fullpay import (
    AttentionPlan,
    Band,
    Bounded,
    Clamp,
    DynamicScale,
    Mixture,
    Plain,
    Softmax,
    WindowGlobal,
    attention,
)
from hf_fullpay.core.draws import drawn_blocks
from largest import largest

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
REACHES = [
    WindowGlobal(1, tokens=()),
    WindowGlobal(5),
    WindowGlobal(6, tokens=(0, 7, 3)),
    WindowGlobal(4, tokens=(2,), random_blocks=1, seed=3),
    WindowGlobal(7, tokens=(), random_blocks=3),
    WindowGlobal(40, random_blocks=2),
]


def tensors(n, m=None, *, batch=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, 4, n, 8), (batch, 2, m or n, 8), (batch, 2, m or n, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def pads(n, left, right=0):
    """(2, n), the first row padded."""
    keys = torch.ones(2, n, dtype=torch.bool)
    keys[0, :left] = keys[0, n - right :] = False
    return keys


def pattern(reach, real, causal):
    """Who sees whom among `real` tokens, straight from the definition."""
    pairs, block = torch.zeros(real, real, dtype=torch.bool), max(reach.size // 2, 1)
    for i in range(real):
        last = i if causal else real - 1
        drawn = drawn_blocks(torch.tensor(i // block), torch.tensor(last // block + 1), reach.random_blocks, reach.seed)
        for j in range(last + 1):
            near = abs(i - j) <= reach.size // 2
            pairs[i, j] = near or i in reach.tokens or j in reach.tokens or j // block in drawn.tolist()
    return pairs


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (5, 0), (0, 3), (4, 2)])
@pytest.mark.parametrize("by", ["weights", "gradients", "weights of reference"])
def test_the_reach_is_exactly_what_is_defined(reach, causal, left, right, by):
    n = 75
    query, key, value = tensors(n)
    arguments = {"plan": AttentionPlan(reach), "visible": pads(n, left, right), "is_causal": causal}
    for row, real in ((0, slice(left, n - right)), (1, slice(0, n))):
        wanted = torch.zeros(n, n, dtype=torch.bool)
        wanted[real, real] = pattern(reach, len(range(n)[real]), causal)
        if by == "weights of reference":
            found = attention(query, key, value, return_weights=True, **arguments)[1][row, 0] != 0
        elif by == "weights":  # out of one-hot values
            found = attention(query, key, torch.eye(n).double().expand(2, 2, n, n), **arguments)[row, 0] != 0
        else:
            output = attention(query, key, value, **arguments)
            rows = [torch.autograd.grad(output[row, :, i].sum(), value, retain_graph=True)[0] for i in range(n)]
            found = torch.stack([of_values[row].abs().sum((0, 2)) for of_values in rows]) != 0
            assert not any(of_values[1 - row].any() for of_values in rows)
        assert torch.equal(found[real], wanted[real])


@pytest.mark.parametrize(
    "payment", [Softmax(), Mixture(floor=None, budget=0.3, pay="reach"), Clamp(floor=None, budget=0.3)]
)
@pytest.mark.parametrize("scores", [Plain(), Bounded(bound=1.0), Bounded(centre="median"), DynamicScale(alpha=1.0)])
@pytest.mark.parametrize("causal", [False, True])
def test_nothing_leaks_from_outside(payment, scores, causal):
    """Through centres, counts, means and floors neither: other content there gives the same numbers, and no gradient."""
    n, reach = 70, WindowGlobal(6, tokens=(0, 9), random_blocks=1)
    plan, leaves = AttentionPlan(reach, scores, payment), tensors(n)
    visible = pads(n, 3)
    output = attention(*leaves, plan=plan, visible=visible, is_causal=causal)
    unseen = ~pattern(reach, n, causal)[50]
    gradients = torch.autograd.grad(output[1, :, 50].square().sum(), leaves)
    assert not any(g[1][:, unseen].any() for g in gradients[1:])
    loud = [leaf.detach().clone() for leaf in leaves]
    for rows in loud[1:]:
        rows[1][:, unseen] = 1e4
    again = attention(*loud, plan=plan, visible=visible, is_causal=causal)
    torch.testing.assert_close(again[1, :, 50], output[1, :, 50], rtol=0, atol=1e-13)


@pytest.mark.parametrize("payment", [Mixture(floor=None, budget=0.3), Mixture(floor=0.01, budget=0.3, pay="reach")])
@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [33, 150, 301])
def test_fast_equals_reference(payment, reach, causal, n):
    leaves, probe = tensors(n), torch.randn(2, 4, n, 8, dtype=torch.float64)
    for visible in (None, pads(n, 21, 3)):
        found = []
        for dense in (False, True):
            plan = AttentionPlan(reach, payment=payment)
            output = attention(*leaves, plan=plan, visible=visible, is_causal=causal, return_weights=dense)
            output = output[0] if dense else output
            found.append((output, *torch.autograd.grad((output * probe).sum(), leaves)))
        for fast, reference in zip(*found, strict=True):
            torch.testing.assert_close(fast, reference, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_on_either_side_changes_nothing(reach, causal):
    """Positions and blocks count from the first real token, and blocks are drawn out of the real ones."""
    n, left, right = 90, 13, 8
    query, key, value = tensors(n)
    plan, real = AttentionPlan(reach), slice(left, n - right)
    padded = attention(query, key, value, plan=plan, visible=pads(n, left, right), is_causal=causal)
    alone = attention(*(rows[:1, :, real] for rows in (query, key, value)), plan=plan, is_causal=causal)
    torch.testing.assert_close(padded[:1, :, real], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("reach", REACHES, ids=str)
@pytest.mark.parametrize("left", [0, 5])
def test_a_prompt_in_pieces_equals_one_pass(reach, left):
    n = 60
    query, key, value = (rows.detach() for rows in tensors(n))
    plan, keys = AttentionPlan(reach), pads(n, left)
    whole = attention(query, key, value, plan=plan, visible=keys, is_causal=True)
    for cuts in ((0, 20, 21, 22, 60), (0, 8, 41, 60)):
        for start, stop in pairwise(cuts):
            visible = keys[:, :stop] if left else None
            parts = query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop]
            part = attention(*parts, plan=plan, visible=visible, is_causal="lower_right")
            real = slice(max(left - start, 0), None)
            torch.testing.assert_close(part[:, :, real], whole[:, :, start:stop][:, :, real], rtol=0, atol=1e-12)


def test_a_step_reads_no_more_than_it_sees():
    query, key, value = tensors(1, 5000, batch=1, dtype=torch.float32)
    plan = AttentionPlan(WindowGlobal(64, tokens=(0, 3)))
    assert largest(lambda: attention(query, key, value, plan=plan, is_causal="lower_right")) <= 2 * 64 * 8


def test_random_blocks():
    """As many different ones as asked for or as there are, never neighbours, the same at any length and on any call."""
    own = torch.arange(40)
    for many in (1, 3, 50):
        for total in (torch.tensor(40), own + 1):
            drawn = drawn_blocks(own, total, many, 5)
            assert torch.equal(drawn, drawn_blocks(own, total, many, 5))
            for block, found, limit in zip(own, drawn, total.expand(40), strict=True):
                others = {b for b in range(int(limit)) if abs(b - int(block)) > 1}
                chosen = [b for b in found.tolist() if b >= 0]
                assert len(set(chosen)) == len(chosen) == min(many, len(others))
                assert set(chosen) <= others
    first, second = (drawn_blocks(own, torch.tensor(40), 2, seed) for seed in (0, 1))
    assert (first != second).float().mean() > 0.5
    # Spread over all blocks: each is drawn about as often as any other.
    spread = torch.cat([drawn_blocks(torch.tensor([0]), torch.tensor(12), 1, seed) for seed in range(2000)]).flatten()
    counts = spread.bincount(minlength=12)[2:]
    assert (counts - 200).abs().max() < 70  # five deviations


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [0, 2])
def test_a_mask_names_the_same_tokens(causal, blocks):
    n, keys = 50, pads(50, 6)
    leaves, named = tensors(n), torch.zeros(2, n, dtype=torch.long)
    for row, first in ((0, 6), (1, 0)):
        named[row, [first, first + 11]] = 1
    plan = AttentionPlan(WindowGlobal(6, tokens=(0, 11), random_blocks=blocks))
    other = AttentionPlan(WindowGlobal(6, tokens=(4,), random_blocks=blocks))  # the mask takes their place
    one = attention(*leaves, plan=plan, visible=keys, is_causal=causal)
    for kind in (torch.long, torch.bool, torch.float32):
        given = {"global_attention_mask": named.to(kind)}
        two = attention(*leaves, plan=other, visible=keys, is_causal=causal, given=given)
        torch.testing.assert_close(two, one, rtol=0, atol=1e-12)
    dense = attention(*leaves, plan=other, visible=keys, is_causal=causal, given=given, return_weights=True)[0]
    torch.testing.assert_close(dense, one, rtol=0, atol=1e-12)
    nobody = {"global_attention_mask": torch.zeros(2, n)}
    window = AttentionPlan(WindowGlobal(6, tokens=(), random_blocks=blocks))
    torch.testing.assert_close(
        attention(*leaves, plan=plan, visible=keys, is_causal=causal, given=nobody),
        attention(*leaves, plan=window, visible=keys, is_causal=causal),
    )


def test_a_decoder_with_half_a_window_is_a_band():
    leaves = tensors(80)
    for k in (1, 4, 33):
        ours = attention(*leaves, plan=AttentionPlan(WindowGlobal(max(2 * (k - 1), 1), tokens=())), is_causal=True)
        torch.testing.assert_close(ours, attention(*leaves, plan=AttentionPlan(Band(k))), rtol=0, atol=1e-12)


def test_a_window_over_everything_is_ordinary_attention():
    leaves = tensors(80)
    for causal in (False, True):
        ours = attention(*leaves, plan=AttentionPlan(WindowGlobal(160)), is_causal=causal)
        torch.testing.assert_close(ours, attention(*leaves, plan=AttentionPlan(), is_causal=causal), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "payment", [Softmax(), Mixture(budget=0.3), Mixture(budget=0.3, pay="reach"), Clamp(floor=None, budget=0.3)]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("blocks", [0, 2])
def test_memory_grows_with_the_length(payment, causal, blocks):
    plan, sizes = AttentionPlan(WindowGlobal(32, tokens=(0, 5), random_blocks=blocks), payment=payment), []
    for n in (1000, 4000):
        leaves = tensors(n, batch=1, dtype=torch.float32)
        for visible in (None, pads(n, 3)[:1]):

            def step(leaves=leaves, visible=visible):
                attention(*leaves, plan=plan, visible=visible, is_causal=causal).sum().backward()

            sizes.append(largest(step) / n)
    assert max(sizes[2:]) <= 1.1 * max(sizes[:2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reach", REACHES[2:], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_keeps_its_budget(dtype, reach, causal):
    """At most twice what the same formula errs in eager PyTorch in that type, outputs and gradients."""
    n = 150
    low = tensors(n, dtype=dtype)
    exact = [leaf.detach().double().requires_grad_() for leaf in low]
    probe = torch.randn(2, 4, n, 8).to(dtype)
    mask = pattern(reach, n, causal)

    def eager(query, key, value):
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
        scores = (query @ key.mT * 8**-0.5).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ value

    def with_gradients(call, leaves):
        output = call(*leaves)
        return output, *torch.autograd.grad((output * probe.to(output.dtype)).sum(), leaves)

    ours = with_gradients(lambda *t: attention(*t, plan=AttentionPlan(reach), is_causal=causal), low)
    for truth, fast, plain in zip(with_gradients(eager, exact), ours, with_gradients(eager, low), strict=True):
        error, allowed = ((result.double() - truth).abs().max() for result in (fast, plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * truth.abs().max()


@pytest.mark.parametrize(
    ("reach", "given", "reason"),
    [
        (WindowGlobal(tokens=(0, 9)), None, r"tokens.*positions below 9.*got \(0, 9\)"),
        *[
            (WindowGlobal(), {"global_attention_mask": torch.ones(shape)}, r"every token, \(2, 9\), got shape")
            for shape in ((2, 8), (2, 10), (3, 9), (9,), (2, 1, 1, 9), (2, 0))
        ],
        (WindowGlobal(), {"global_attention_mask": [1] * 9}, "got list"),
        (
            WindowGlobal(),
            {"global_mask": torch.ones(2, 9)},
            r"given: expected names out of \['global_attention_mask'\]",
        ),
    ],
)
def test_bad_input_is_named(reach, given, reason):
    for dense in (False, True):
        with pytest.raises(ValueError, match=reason):
            attention(*tensors(9), plan=AttentionPlan(reach), given=given, return_weights=dense)


def test_queries_that_nothing_places():
    with pytest.raises(ValueError, match=r"window: expected as many queries as keys or a causal mask"):
        attention(*tensors(3, 9), plan="window_global")


def test_promises_say_who_is_seen():
    (told,) = AttentionPlan(WindowGlobal(6, random_blocks=2)).promises(100)
    assert "the 3 to each side, the global tokens and 2 random blocks of 3" in told
