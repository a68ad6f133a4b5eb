"""Blocks with relays and overlapping chunks: what they promise beyond what every plan does."""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

from families import build, inputs
from hf_fullpay import (
    AttentionPlan,
    Blocks,
    Bounded,
    Chunks,
    Clamp,
    DynamicScale,
    FullPayWarning,
    Mixture,
    Softmax,
    attention,
)
from hf_fullpay.attend import attend
from hf_fullpay.core.visible import Visible
from hf_fullpay.hf.forward import CARRIER
from largest import largest

BLOCKS = AttentionPlan(Blocks(4))
CHUNKS = AttentionPlan(Chunks(5, 2, exchange=0.3))
BOTH = pytest.mark.parametrize("plan", [BLOCKS, CHUNKS], ids=["blocks", "chunks"])


def tensors(n, heads=2, groups=2, batch=1, width=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randn(batch, count, n, width, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    return [draw(count).requires_grad_() for count in (heads, groups, groups)]


def reached(output, leaf):
    """Which slots of a leaf have a gradient on which rows of the output."""
    rows = [torch.autograd.grad(row.square().sum(), leaf, retain_graph=True)[0] for row in output.unbind(2)]
    return torch.stack([row.abs().sum((0, 1, 3)) > 0 for row in rows])


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("n", [1, 4, 13, 16])
def test_every_output_depends_on_every_visible_token(plan, causal, n):
    """O25: through values and through keys, in one layer, and on nothing else (O24)."""
    query, key, value = tensors(n)
    output = attention(query, key, value, plan=plan, is_causal=causal)
    wanted = torch.ones(n, n, dtype=torch.bool)
    wanted = wanted.tril() if causal else wanted
    assert torch.equal(reached(output, value), wanted)
    if n == 1:
        return
    by_key = reached(output, key)
    assert not (by_key & ~wanted).any()
    assert by_key[wanted].float().mean() > 0.6  # a softmax over one key has no gradient


@BOTH
@pytest.mark.parametrize("family", ["bert", "llama", "vit"])
def test_one_layer_of_a_model_reaches_everything(plan, family):
    """O25, end to end."""
    model = build(family, CARRIER, head=False, num_hidden_layers=1, fullpay=plan.to_dict())
    if family == "vit":
        leaf = inputs("vit", batch=1)["pixel_values"].requires_grad_()
        output = model(pixel_values=leaf)[0][0, 1:]
        tokens = lambda g: g.unfold(2, 8, 8).unfold(3, 8, 8).abs().sum((0, 1, 4, 5)).flatten()  # noqa: E731
    else:
        leaf = model.get_input_embeddings()(inputs(family, batch=1, length=16)["input_ids"]).detach().requires_grad_()
        output = model(inputs_embeds=leaf)[0][0]
        tokens = lambda g: g.abs().sum((0, 2))  # noqa: E731
    probe = torch.randn(output.shape[-1])
    seen = torch.stack([tokens(torch.autograd.grad(row @ probe, leaf, retain_graph=True)[0]) for row in output]) > 0
    assert torch.equal(seen, torch.ones_like(seen).tril() if family == "llama" else torch.ones_like(seen))


def test_a_relay_enters_only_after_its_block():
    """O24: until then a key of the block moves no row of another block, and rows of its own only token by token."""
    query, key, value = tensors(12)
    _, weights = attention(query, key, value, plan=BLOCKS, is_causal=True, return_weights=True)
    assert (weights[..., 8:, :4].diff(dim=-1).abs() < 1e-15).all()  # an equal part for every key of an ended block
    assert (weights[..., 3, :4].diff(dim=-1).abs() > 1e-6).all()
    _, weights = attention(query, key, value, plan=CHUNKS, is_causal=True, return_weights=True)
    alone = AttentionPlan(Chunks(5, 2, exchange=0.0, learnable=False))
    _, local = attention(query, key, value, plan=alone, is_causal=True, return_weights=True)
    torch.testing.assert_close(weights[..., :5, :], local[..., :5, :])  # no chunk has ended: only local attention
    assert (weights - local)[..., 5:, :].abs().amax((0, 1, 3)).min() > 1e-6


@pytest.mark.parametrize("causal", [False, True])
def test_a_size_over_the_length_is_full_attention(causal):
    query, key, value = tensors(9)
    stock = F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    for plan in (AttentionPlan(Blocks(9)), AttentionPlan(Blocks(2**31 - 1)), AttentionPlan(Blocks(100))):
        torch.testing.assert_close(attention(query, key, value, plan=plan, is_causal=causal), stock)
    one = Chunks(11, 2, exchange=0.3)
    wanted = stock if causal else 0.7 * stock + 0.3 * value.mean(2, keepdim=True)
    torch.testing.assert_close(attention(query, key, value, plan=AttentionPlan(one), is_causal=causal), wanted)


def test_chunks_without_overlap_or_exchange_are_blocks_of_attention():
    query, key, value = tensors(10)
    plan = AttentionPlan(Chunks(4, 0, exchange=0.0, learnable=False))
    parts = [F.scaled_dot_product_attention(*(x[:, :, i : i + 4] for x in (query, key, value))) for i in (0, 4, 8)]
    torch.testing.assert_close(attention(query, key, value, plan=plan), torch.cat(parts, 2))


def test_where_chunks_overlap_their_outputs_are_averaged():
    query, key, value = tensors(8)
    plan = AttentionPlan(Chunks(5, 2, exchange=0.0, learnable=False))
    cut = lambda a, b: F.scaled_dot_product_attention(*(x[:, :, a:b] for x in (query, key, value)))  # noqa: E731
    first, second, third = cut(0, 5), cut(3, 8), cut(6, 8)
    output = attention(query, key, value, plan=plan)
    torch.testing.assert_close(output[:, :, :3], first[:, :, :3])
    torch.testing.assert_close(output[:, :, 3:5], (first[:, :, 3:] + second[:, :, :2]) / 2)
    torch.testing.assert_close(output[:, :, 6:], (second[:, :, 3:] + third) / 2)


@BOTH
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pads", [1, 3, 7])
def test_pads_move_no_border(plan, causal, pads):
    """Left or right, whatever they hold: the real rows are those of the sequence alone, in values and gradients."""
    n, real = 13, {"left": slice(pads, None), "right": slice(None, 13 - pads)}
    for side, kept in real.items():
        exists = torch.zeros(1, n, dtype=torch.bool)
        exists[:, kept] = True
        leaves = tensors(n)
        poisoned = [leaf.masked_fill(~exists[:, None, :, None], torch.nan) for leaf in leaves]
        padded = attention(poisoned[0].nan_to_num(), *poisoned[1:], plan=plan, visible=exists, is_causal=causal)
        alone = attention(*(x[:, :, kept] for x in leaves), plan=plan, is_causal=causal)
        torch.testing.assert_close(padded[:, :, kept], alone, msg=side)
        ours = torch.autograd.grad(padded[:, :, kept].square().sum(), leaves)
        wanted = torch.autograd.grad(alone.square().sum(), leaves)
        for one, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(one, other, msg=side)


@BOTH
@pytest.mark.parametrize("first", [1, 5, 12])
def test_steps_and_pieces_equal_one_pass(plan, first):
    """O47: 13 tokens in blocks of 4, the cached ones before the new; padded rows of a batch stand elsewhere."""
    query, key, value = (x.detach() for x in tensors(13, batch=3))
    exists = torch.ones(3, 13, dtype=torch.bool)
    exists[0, :3] = exists[1, :6] = False
    whole = attention(query, key, value, plan=plan, visible=exists, is_causal=True)
    for step in (1, 4):
        for start in range(first, 13 - step + 1):
            stop = start + step
            part = attention(
                query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], plan=plan, visible=exists[:, :stop],
                is_causal="lower_right",
            )  # fmt: skip
            torch.testing.assert_close(part, whole[:, :, start:stop])
    alone = attention(query[2:, :, 12:], key[2:], value[2:], plan=plan)  # the newest token sees all there is
    torch.testing.assert_close(alone, whole[2:, :, 12:])


@BOTH
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_step_serves_every_length_of_the_cache(plan, padded):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")

    def step(query, key, value, keys):
        allowed = Visible(1, key.shape[2], key.device, keys=keys)
        return attend(query, key, value, plan=plan, allowed=allowed, scaling=0.3)

    fast = torch.compile(step, backend=counter, dynamic=True, fullgraph=True)
    for n in (9, 10, 14, 33):
        query, key, value = (x.detach() for x in tensors(n))
        keys = torch.arange(n)[None] > 2 if padded else None
        given = query[:, :, -1:], key, value, keys
        torch.testing.assert_close(fast(*given), step(*given))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "plan", [AttentionPlan(Blocks(64)), AttentionPlan(Chunks(64, 16), payment=Mixture())], ids=["blocks", "chunks"]
)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
def test_no_square_is_ever_made(plan, causal, padded):
    """Forward and backward: nothing of N x N, and no more than a few times the inputs."""
    n = 2048
    leaves = tensors(n, dtype=torch.float32)
    visible = torch.ones(1, n, dtype=torch.bool).index_fill(1, torch.arange(5), False) if padded else None

    def step():
        attention(*leaves, plan=plan, visible=visible, is_causal=causal).sum().backward()

    assert largest(step) < n * n / 16


@BOTH
def test_a_mask_of_pairs_is_told_what_it_costs_and_padding_is_quiet(plan, recwarn):
    query, key, value = tensors(9)
    attention(query, key, value, plan=plan, visible=torch.ones(1, 9, dtype=torch.bool), is_causal=True)
    assert not recwarn
    with pytest.warns(FullPayWarning, match="holds all N x M scores"):
        attention(query, key, value, plan=plan, visible=torch.ones(1, 1, 9, 9, dtype=torch.bool).tril())


def test_the_share_of_scores_saved():
    """Of full attention, and of causal attention, with blocks of 128."""
    saved = {n: Blocks(128).scores_saved(n) for n in (512, 1024, 4096, 16384)}
    assert [round(100 * share, 1) for share in saved.values()] == [74.2, 86.7, 96.1, 98.4]
    causal = {n: Blocks(128).scores_saved(n, causal=True) for n in saved}
    assert [round(100 * share, 1) for share in causal.values()] == [48.5, 73.5, 92.2, 96.9]
    assert Blocks(128).scores_saved(100) < 0.01


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *[(lambda v=v: Blocks(v), r"Blocks\(size") for v in (0, -1, 2.5, "8", True, None, 2**40)],
        *[(lambda v=v: Chunks(v, 0), r"Chunks\(size") for v in (0, -1, 2.5, True)],
        *[(lambda v=v: Chunks(8, v), r"Chunks\(overlap") for v in (8, 9, -1, 0.5)],
        *[(lambda v=v: Chunks(exchange=v), r"Chunks\(exchange") for v in (0, 1, -0.1, 1.1, float("nan"), "x")],
        (lambda: Chunks(learnable=1), r"Chunks\(learnable"),
        (lambda: AttentionPlan(Blocks(), payment=Clamp()), "relay or summary stands for many keys"),
        (lambda: AttentionPlan(Chunks(), payment=Clamp()), "relay or summary stands for many keys"),
        (lambda: AttentionPlan(Chunks(), Bounded()), "several softmaxes"),
        (lambda: AttentionPlan(Blocks(), Bounded(centre="median")), "mean score"),
        (lambda: attention(*tensors(5), plan=AttentionPlan(Chunks(exchange=[0.1] * 3))), "one per head"),
        (
            lambda: attention(tensors(4)[0], *tensors(6)[1:], plan=BLOCKS),
            "no meaning in cross-attention",
        ),
    ],
)
def test_bad_input_is_named(make, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*") as error:
        make()
    assert "expected" in str(error.value)


def test_what_goes_together():
    for scores in (DynamicScale(), Bounded(), Bounded(centre="none", slope="rescale")):
        for payment in (Softmax(), Mixture()):
            assert AttentionPlan(Blocks(), scores, payment).promises(64)
    assert AttentionPlan(Chunks(), DynamicScale(), Mixture()).promises(64)
    assert not AttentionPlan(Chunks(exchange=0.0, learnable=False)).promises(64)
