"""Decoding with a cache: the floor's mean comes from a running sum, which is right whatever happens to the cache."""

import copy
import pickle
import weakref

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import zoo
from families import CAUSAL, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Band, Mixture, convert
from hf_fullpay.core.running import RunningSum
from hf_fullpay.hf import forward
from hf_fullpay.hf.running import KEPT
from small import load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
PAYING = [name for name, plan in PRESETS.items() if isinstance(plan.payment, Mixture)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture
def watch(monkeypatch):
    """Every running sum that reaches the attention is compared with the values; counts where it came from."""
    seen = {"carried": 0, "summed anew": 0, "without": 0}
    stock_over, stock_attend = RunningSum.over.__func__, forward.attend

    def over(cls, value, keys):
        seen["summed anew"] += 1
        return stock_over(cls, value, keys)

    def attend(query, key, value, *, past, allowed, **options):
        if past is None:
            seen["without"] += 1
        else:
            seen["carried"] += 1
            mask = allowed.to_dense()[:, :1, -1:].double()
            wanted = torch.where(mask.mT > 0, value.double(), 0).sum(2, keepdim=True) / mask.sum(-1, keepdim=True)
            torch.testing.assert_close(past.mean.double(), wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(past.count.expand(mask.shape[0], 1, 1, 1), mask.sum(-1, keepdim=True))
        return stock_attend(query, key, value, past=past, allowed=allowed, **options)

    monkeypatch.setattr(RunningSum, "over", classmethod(over))
    monkeypatch.setattr(forward, "attend", attend)

    def since():
        """Calls with a sum carried on, with one taken anew, and without any, since the last question."""
        found = seen["carried"] - seen["summed anew"], seen["summed anew"], seen["without"]
        seen.update(dict.fromkeys(seen, 0))
        return found

    return since


def step(model, cache, ids, mask=None):
    """States of the newest of `ids`, whose earlier tokens the cache holds."""
    extra = {}
    if mask is not None:
        extra = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, -1:]}
    return states(model, input_ids=ids[:, -1:], cache=cache, **extra)


def prompted(model, ids, mask=None, cache=None):
    """A cache that holds `ids`, the last of them fed alone, so that its layers carry a sum."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    extra = {}
    if mask is not None:
        extra = {"attention_mask": mask[:, :-1], "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)[:, :-1]}
    states(model, input_ids=ids[:, :-1], cache=cache, **extra)
    step(model, cache, ids, mask)
    return cache


def whole(model, ids, mask=None):
    """The same state without a cache."""
    extra = {} if mask is None else {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}
    return states(model, input_ids=ids, use_cache=False, **extra)[:, -1:]


def close(found, wanted):
    half = found.dtype == torch.bfloat16
    torch.testing.assert_close(found, wanted, rtol=0.05 if half else 0, atol=0.05 if half else 2e-4)


def tokens(batch=2, length=10, left=0):
    given = inputs("gpt2", batch, length, left=left)
    return given["input_ids"], given.get("attention_mask")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("name", PAYING)
@pytest.mark.parametrize("family", CAUSAL)
def test_steps_carry_the_sum(family, name, left, dtype, watch):
    model = load(family, name).to(dtype)
    ids, mask = tokens(length=20, left=left)
    cut = lambda n: (ids[:, :n], None if mask is None else mask[:, :n])  # noqa: E731
    cache = prompted(model, *cut(5))
    watch()
    for n in range(6, 21):
        close(step(model, cache, *cut(n)), whole(model, *cut(n)))
        carried, anew, _ = watch()
        assert (carried, anew) == (2, 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", CAUSAL)
def test_three_hundred_steps(family, dtype, watch):
    """`watch` compares every mean; no step computes a mean over all keys."""
    model = load(family, "fullpay", **{"n_positions": 320} if family == "gpt2" else {}).to(dtype)
    ids, _ = tokens(length=306)
    cache = prompted(model, ids[:, :6])
    watch()
    for n in range(7, 307):
        found = step(model, cache, ids[:, :n])
    assert watch() == (600, 0, 0)
    close(found, whole(model, ids))


CHANGES = {
    "crop": lambda cache, ids: (cache.crop(-3), ids[:, :-3])[1],
    "reorder": lambda cache, ids: (cache.reorder_cache(torch.tensor([1, 0])), ids.flip(0))[1],
    "select": lambda cache, ids: (cache.batch_select_indices(torch.tensor([1])), ids[1:])[1],
    "repeat": lambda cache, ids: (cache.batch_repeat_interleave(3), ids.repeat_interleave(3, 0))[1],
}


def and_one_more(ids):
    return torch.cat([ids, (ids[:, -1:] + 1) % 50], 1)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", CAUSAL)
def test_a_changed_cache_is_summed_anew_once(family, change, watch):
    model, (ids, _) = load(family, "fullpay"), tokens()
    cache = prompted(model, ids)
    ids = CHANGES[change](cache, ids)
    watch()
    for expected in ((0, 2), (2, 0)):
        ids = and_one_more(ids)
        found = step(model, cache, ids)
        assert watch()[:2] == expected
        close(found, whole(model, ids))


def test_values_written_in_place_are_noticed(watch):
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids)
    watch()
    cache.layers[0].values.mul_(2)
    step(model, cache, and_one_more(ids))
    assert watch() == (1, 1, 0)


def test_a_reset_cache_starts_again(watch):
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids)
    cache.reset()
    ids = ids.flip(1)
    prompted(model, ids, cache=cache)
    close(step(model, cache, and_one_more(ids)), whole(model, and_one_more(ids)))


def test_padding_that_changes_is_noticed(watch):
    model, (ids, mask) = load("llama", "fullpay"), tokens(left=2)
    cache = prompted(model, ids, mask)
    longer = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    for places, expected in (([], (2, 0)), ([2], (0, 2)), ([], (2, 0)), ([0, 1, 3], (0, 2))):
        ids = and_one_more(ids)
        longer[:, places] = 1 - longer[:, places]
        watch()
        step(model, cache, ids, longer)
        assert watch()[:2] == expected
        longer = torch.cat([longer, torch.ones_like(mask[:, :1])], 1)
    watch()
    step(model, cache, and_one_more(ids))  # no mask at all
    assert watch()[:2] == (0, 2)
    longer[:, 1] = 0
    step(model, cache, and_one_more(and_one_more(ids)), torch.cat([longer, longer[:, -1:]], 1))
    assert watch()[:2] == (0, 2)


def test_a_mask_written_in_place_is_noticed(watch):
    """A user may keep one mask for all steps and hand out its beginning."""
    model, (ids, _) = load("llama", "fullpay"), tokens(length=9)
    room = torch.ones(2, 12, dtype=torch.bool)
    room[0, :2] = False
    cache = prompted(model, ids, room[:, :9])
    room[1, 3] = False
    ids = and_one_more(ids)
    watch()
    step(model, cache, ids, room[:, :10])
    assert watch()[:2] == (0, 2)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_sum_for_themselves(copied, watch):
    """The copy goes on with another text, in turns with the original."""
    model, (ids, _) = load("llama", "fullpay"), tokens()
    one = prompted(model, ids)
    two = copied(one)
    texts = [and_one_more(ids), torch.cat([ids, ids[:, :1]], 1)]
    watch()
    for expected in ((2, 2), (4, 0), (4, 0)):
        for cache, text in zip((one, two), texts, strict=True):
            close(step(model, cache, text), whole(model, text))
        assert watch()[:2] == expected
        texts = [and_one_more(text) for text in texts]


def test_two_caches_in_turns(watch):
    model, texts = load("llama", "fullpay"), [tokens()[0], tokens(length=7)[0].flip(1)]
    caches = [prompted(model, text) for text in texts]
    watch()
    for _ in range(3):
        texts = [and_one_more(text) for text in texts]
        for cache, text in zip(caches, texts, strict=True):
            close(step(model, cache, text), whole(model, text))
        assert watch()[:2] == (4, 0)


def test_the_sum_dies_with_its_cache():
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids)
    kept = weakref.ref(getattr(cache.layers[0], KEPT))
    assert kept() is not None
    del cache
    assert kept() is None


@pytest.mark.parametrize("family", CAUSAL)
def test_beams_and_sampling(family, watch):
    model, (ids, mask) = load(family, "fullpay", head=True), tokens(length=7, left=3)
    given = {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    for options, carried in (({"num_beams": 3}, False), ({"do_sample": True}, True), ({}, True)):
        found = []
        for use_cache in (True, False):
            torch.manual_seed(3)
            found.append(model.generate(**given, **{"do_sample": False} | options, use_cache=use_cache))
            # Beams change the cache at every step, so that the sum is taken anew.
            assert not use_cache or watch()[:2] == ((20, 2) if carried else (0, 22))
        watch()
        assert torch.equal(*found)


def test_gradients_take_the_long_way(watch):
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids)
    watch()
    model(input_ids=and_one_more(ids)[:, -1:], cache=cache)[0].sum().backward()
    assert watch() == (0, 0, 2)


def test_inference_mode_and_back(watch):
    model, (ids, _) = convert(build("llama", head=False), "fullpay"), tokens()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.inference_mode():
        cache = prompted(model, ids)
        ids = and_one_more(ids)
        watch()
        step(model, cache, ids)
    ids = and_one_more(ids)
    found = model(input_ids=ids[:, -1:], cache=cache)[0]
    assert watch() == (4, 0, 0)
    close(found, whole(model, ids))


@pytest.mark.parametrize(
    "plan", [PRESETS["bounded"], PRESETS["fullpay_clamp"], AttentionPlan(Band(4), payment=Mixture(pay="reach"))]
)
def test_plans_that_need_no_sum_keep_none(plan):
    model, (ids, _) = load("llama", plan), tokens()
    assert not hasattr(prompted(model, ids).layers[0], KEPT)


def test_a_static_cache_takes_the_long_way(watch):
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids, cache=StaticCache(config=model.config, max_cache_len=16))
    close(step(model, cache, and_one_more(ids)), whole(model, and_one_more(ids)))
    assert watch()[:2] == (0, 0)


def test_another_attention_carries_nothing_on(watch):
    """Steps under sdpa in between change the cache unseen."""
    model, (ids, _) = load("llama", "fullpay"), tokens()
    cache = prompted(model, ids)
    model.set_attn_implementation("sdpa")
    assert not any(module._forward_pre_hooks for module in model.modules())
    ids = and_one_more(ids)
    step(model, cache, ids)
    model.set_attn_implementation("fullpay")
    ids = and_one_more(ids)
    watch()
    step(model, cache, ids)
    assert watch()[:2] == (0, 2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.set_attn_implementation("sdpa")
        assert not any(module._forward_pre_hooks for module in twin.modules())
    assert any(module._forward_pre_hooks for module in model.modules())


def test_encoder_and_decoder(watch):
    """The decoder's own tokens carry a sum; the encoder's states do not change."""
    model, (ids, _) = zoo.make("bart", "fullpay"), tokens()
    truth = states(model, input_ids=ids, decoder_input_ids=ids, use_cache=False)
    cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
    watch()
    for n in range(ids.shape[1]):
        found = states(model, input_ids=ids, decoder_input_ids=ids[:, n : n + 1], cache=cache)
        close(found, truth[:, n : n + 1])
        assert watch()[:2] == ((2, 0) if n else (0, 2))


def test_bert_as_a_decoder(watch):
    model, (ids, _) = build("bert", "fullpay", head=False, is_decoder=True), tokens()
    cache = prompted(model, ids)
    watch()
    close(step(model, cache, and_one_more(ids)), whole(model, and_one_more(ids)))
    assert watch()[:2] == (2, 0)
