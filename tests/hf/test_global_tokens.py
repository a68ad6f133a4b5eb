"""Window + global under Transformers: named tokens, a mask of the call, caches, and models that make no sense of it."""

from itertools import pairwise

import pytest
import torch
import transformers as t
from transformers import DynamicCache, StaticCache

import zoo
from families import CAUSAL, TEXT, build, inputs
from hf_fullpay import AttentionPlan, Mixture, WindowGlobal, convert
from hf_fullpay.hf.forward import CARRIER
from small import load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
N = 24
PLANS = {
    "class token": AttentionPlan(WindowGlobal(6)),
    "three tokens": AttentionPlan(WindowGlobal(4, tokens=(0, 5, 2))),
    "random blocks": AttentionPlan(WindowGlobal(4, tokens=(1,), random_blocks=2, seed=5)),
    "a floor to all": AttentionPlan(WindowGlobal(4), payment=Mixture(floor=None, budget=0.3)),
    "a floor to the reach": AttentionPlan(WindowGlobal(4), payment=Mixture(floor=None, budget=0.3, pay="reach")),
}
SLIDING = ("mistral", "modernbert", "qwen3", "gemma3")
ZOO = ("roberta", "distilbert", "electra", "albert", "opt", "gpt_neox")


def close(one, other, tolerance=2e-4):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def named(*slots, n=N, batch=2):
    return torch.zeros(batch, n, dtype=torch.long).index_fill(1, torch.tensor(slots, dtype=torch.long), 1)


def window(n, half, tokens, causal):
    """Who sees whom, (N, N)."""
    place = torch.arange(n)
    pairs = (place[:, None] - place).abs() <= half
    pairs[tokens] = pairs[:, tokens] = True
    return pairs.tril() if causal else pairs


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("tokens", [[0], [3, 17], []])
def test_a_mask_of_the_call_names_the_global_tokens(family, tokens):
    """As Longformer users know it; in every layer, and by weights as by states."""
    model, given = load(family, AttentionPlan(WindowGlobal(6, tokens=(9,)))), inputs(family, length=N)
    mask = {"global_attention_mask": named(*tokens)}
    result = model(**given, **mask, output_attentions=True)
    for weights in result.attentions:
        assert torch.equal(weights[0, 0] != 0, window(N, 3, tokens, family in CAUSAL))
    close(states(model, **given, **mask), result[0])
    by_plan = load(family, AttentionPlan(WindowGlobal(6, tokens=tuple(tokens))))
    close(states(by_plan, **given), result[0], 1e-5)
    assert (states(model, **given) - result[0]).abs().max() > 1e-3


@pytest.mark.parametrize("family", TEXT)
def test_a_head_and_training_take_the_mask_too(family):
    model = load(family, AttentionPlan(WindowGlobal(6)), head=True).train()
    given = inputs(family, length=N) | {"global_attention_mask": named(0, 12)}
    given["labels"] = given["input_ids"] if family in CAUSAL else torch.tensor([0, 1])
    model.config.use_cache = False
    gradients = []
    for again in (False, True):
        if again:
            model.activation_checkpointing_enable()
        model.zero_grad()
        model(**given).loss.backward()
        gradients.append({path: p.grad.clone() for path, p in model.named_parameters()})
    for path, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][path], gradient, rtol=1e-4, atol=1e-5, msg=path)


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("plan", PLANS)
def test_pads_change_nothing(family, side, plan):
    """Tokens and blocks are counted from the first real token; a named pad names nothing."""
    model = load(family, PLANS[plan])
    given = inputs(family, length=N, **{side: 7})
    given["position_ids"] = (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)
    real = slice(7, None) if side == "left" else slice(None, N - 7)
    close(states(model, **given)[:1, real], states(model, input_ids=given["input_ids"][:1, real]))
    mask = named(8, 16)
    masked = states(model, **given, global_attention_mask=mask)
    close(masked[:1, real], states(model, input_ids=given["input_ids"][:1, real], global_attention_mask=mask[:1, real]))
    mask[0, :7] = 1 if side == "left" else mask[0, :7]
    close(states(model, **given, global_attention_mask=mask)[:1, real], masked[:1, real], 1e-5)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("mask", [False, True])
def test_a_prompt_in_pieces_equals_one_pass(family, plan, left, cache, mask):
    model, given = load(family, PLANS[plan]), inputs(family, length=N, left=left)
    padding = given.get("attention_mask", torch.ones(2, N, dtype=torch.long))
    places = (padding.cumsum(-1) - 1).clamp_min(0)
    extra = {"global_attention_mask": named(5, 11)} if mask else {}
    whole = states(
        model, input_ids=given["input_ids"], attention_mask=padding, position_ids=places, use_cache=False, **extra
    )
    for cuts in ((0, 8, 9, 10, 11, 12, 24), (0, 13, 24)):
        memory = (
            DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(model.config, max_cache_len=30)
        )
        for start, stop in pairwise(cuts):
            part = states(
                model, input_ids=given["input_ids"][:, start:stop], attention_mask=padding[:, :stop],
                position_ids=places[:, start:stop], cache=memory, use_cache=True, **extra,
            )  # fmt: skip
            skip = max(left - start, 0)
            close(part[1:], whole[1:, start:stop])
            close(part[:1, skip:], whole[:1, start + skip : stop])


@pytest.mark.parametrize("family", CAUSAL)
def test_generation_takes_tokens_from_the_plan(family):
    """`generate` of Transformers refuses arguments that a model's forward does not name; it says so."""
    model, prompt = load(family, PLANS["three tokens"], head=True), inputs(family, length=12)["input_ids"]
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = prompt
    for _ in range(10):
        ids = torch.cat([ids, states(model, input_ids=ids, use_cache=False)[:, -1:].argmax(-1)], 1)
    assert torch.equal(model.generate(prompt, **options), ids)
    with pytest.raises(ValueError, match="global_attention_mask"):
        model.generate(prompt, global_attention_mask=named(2, n=12), **options)


@pytest.mark.parametrize("name", ZOO)
def test_other_families(name):
    model, given = zoo.make(name, CARRIER, fullpay=AttentionPlan(WindowGlobal(4)).to_dict()), zoo.given(name)
    causal = zoo.ROUTING[name][0] == "causal"
    result = model(**given, output_attentions=True)
    if len(result.attentions):  # OPT swallows the argument of the call for its layers, not for the function
        assert all(torch.equal(weights[0, 0] != 0, window(9, 2, [0], causal)) for weights in result.attentions)
    close(states(model, **given), result[0])
    padded = zoo.given(name, pads=3)
    close(states(model, **padded)[:1, :6], states(model, input_ids=padded["input_ids"][:1, :6]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        *[(lambda name=name: zoo.make(name, "window_global"), "sliding window of its own") for name in SLIDING],
        (lambda: zoo.make("bart", "window_global"), "no meaning in cross-attention"),
        (lambda: zoo.make("dinov2", "window_global"), "patches"),
    ],
)  # fmt: skip
def test_where_a_window_makes_no_sense(make, reason):
    with pytest.raises(ValueError, match=rf"{reason}.*Every plan with reach=Full\(\)"):
        make()


def test_full_layers_beside_sliding_ones_may_have_it():
    plan = AttentionPlan(WindowGlobal(4), layers=[0])
    options = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4, "use_sliding_window": True}
    model = zoo.make("qwen3", CARRIER, fullpay=plan.to_dict(), **options)
    assert torch.equal(
        model(**zoo.given("qwen3"), output_attentions=True).attentions[0][0, 0] != 0, window(9, 2, [0], True)
    )


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("shape", [(2, N - 1), (3, N), (N,), (2, 1, N)])
def test_masks_of_a_wrong_shape(family, shape):
    model = load(family, "window_global")
    with pytest.raises(ValueError, match=r"global_attention_mask: expected an entry for every token, \(2, 24\), got"):
        model(**inputs(family, length=N), global_attention_mask=torch.ones(shape), use_cache=False)


@pytest.mark.parametrize("family", TEXT)
def test_tokens_outside_the_sequence(family):
    model = load(family, AttentionPlan(WindowGlobal(4, tokens=(0, 30))))
    with pytest.raises(ValueError, match=r"tokens.*positions below 24, the number of tokens, got \(0, 30\)"):
        model(**inputs(family, length=N))


def test_a_converted_checkpoint_keeps_its_tokens(tmp_path):
    plan = PLANS["random blocks"]
    model, given = convert(build("bert"), plan), inputs("bert", length=N)
    model.save_pretrained(tmp_path)
    again = t.AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(states(again, **given), states(model, **given))
    assert (states(build("bert"), **given) - states(model, **given)).abs().max() > 1e-3
