"""Sliding caches: a band's text without end in k keys of memory, and every way to decode gives what full forwards give."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

import zoo
from families import CAUSAL, SHORT, build, inputs
from hf_fullpay import (
    AttentionPlan,
    Band,
    Bounded,
    Clamp,
    DynamicScale,
    FullPayWarning,
    Mixture,
    convert,
    sliding_cache,
)
from hf_fullpay.hf.sliding import FloorLayer
from small import load, states
from test_cache import in_pieces

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
EVERYTHING = AttentionPlan(Band(SHORT), payment=Mixture(floor=0.05, budget=0.4, pay="visible"))
PLANS = {
    "band": AttentionPlan(Band(SHORT)),
    "floor to everything": EVERYTHING,
    "floor to the band": AttentionPlan(Band(SHORT), payment=Mixture(budget=0.4, pay="reach")),
    "clamp": AttentionPlan(Band(SHORT), payment=Clamp(budget=0.4)),
    "bounded": AttentionPlan(Band(SHORT), Bounded(centre="median"), Mixture(floor=None, budget=[0.1, 0.2, 0.3, 0.4])),
    "gain": AttentionPlan(Band(SHORT), DynamicScale(alpha=0.5), Mixture(budget=0.4)),
    "itself alone": AttentionPlan(Band(1), payment=Mixture(budget=0.4)),
    "longer than the text": AttentionPlan(Band(50), payment=Mixture(budget=0.4)),
}
EACH = [(family, name) for family in CAUSAL for name in PLANS]
STEPS = 12


def close(one, other, tolerance=2e-4):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def prompt(family, length=9, left=3):
    given = inputs(family, length=length, left=left)
    return {key: given[key] for key in ("input_ids", "attention_mask") if key in given}


def generate(model: PreTrainedModel, given, cache, **options):
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None, "max_new_tokens": STEPS} | options
    found = model.generate(
        **given, **options, return_dict_in_generate=True, output_logits=True, **{"cache": cache} if cache else {}
    )
    return found.sequences, torch.stack(found.logits, 1)


def by_full_forwards(model, given):
    """Greedy decoding without any cache."""
    ids, mask = given["input_ids"], given.get("attention_mask", torch.ones_like(given["input_ids"]))
    logits = []
    for _ in range(STEPS):
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        logits.append(states(model, input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids, torch.stack(logits, 1)


@pytest.mark.parametrize(("family", "name"), EACH)
def test_greedy(family, name):
    """Prompts whole and in pieces, with left pads, behind a full window."""
    model, given = load(family, PLANS[name], head=True), prompt(family)
    tokens, logits = by_full_forwards(model, given)
    for options in ({}, {"prefill_chunk_size": 3}, {"prefill_chunk_size": 5}):
        found = generate(model, given, sliding_cache(model), **options)
        assert torch.equal(found[0], tokens)
        close(found[1], logits)


@pytest.mark.parametrize(("family", "name"), EACH)
def test_beams_and_sampling(family, name):
    model, given = load(family, PLANS[name], head=True), prompt(family)
    for options in ({"num_beams": 3}, {"num_beams": 2, "num_return_sequences": 2}, {"do_sample": True}):
        torch.manual_seed(5)
        tokens, logits = generate(model, given, None, use_cache=False, **options)
        torch.manual_seed(5)
        found = generate(model, given, sliding_cache(model), **options)
        assert torch.equal(found[0], tokens)
        if "num_beams" not in options:  # with beams, rows of logits are those of beams that may tie
            close(found[1], logits)


@pytest.mark.parametrize(("family", "name"), EACH)
def test_guessed_tokens(family, name):
    """O27: several tokens at once behind a full window, some of them taken back."""
    model = load(family, PLANS[name], head=True)
    given = {"input_ids": inputs(family, batch=1, length=4)["input_ids"].repeat(1, 3)}
    tokens, logits = by_full_forwards(model, given)
    found = generate(model, given, sliding_cache(model), prompt_lookup_num_tokens=2)
    assert torch.equal(found[0], tokens)
    close(found[1], logits)
    assistant = build(family, "sdpa", seed=0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    assert torch.equal(generate(model, given, sliding_cache(model), assistant_model=assistant)[0], tokens)


@pytest.mark.parametrize(("family", "name"), EACH)
@pytest.mark.parametrize("left", [0, 5])
def test_any_split_equals_one_pass(family, name, left):
    model, given = load(family, PLANS[name]), inputs(family, length=14, left=left)
    ids, mask = given["input_ids"], given.get("attention_mask")
    places = None if mask is None else (mask.cumsum(-1) - 1).clamp_min(0)
    extra = {} if mask is None else {"attention_mask": mask, "position_ids": places}
    whole = states(model, input_ids=ids, use_cache=False, **extra)
    for split in ([14], [1] * 14, [2, 12], [9, 1, 1, 3], [3, 3, 3, 3, 2], [5, 9]):
        found = in_pieces(model, sliding_cache(model), split, ids, mask, places)
        close(found[0, left:], whole[0, left:])
        close(found[1], whole[1])


@pytest.mark.parametrize("name", ["fullpay_band", "band_causal"])
@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_stays_and_the_floor_too(family, name, dtype):
    """Three hundred tokens in the memory of four, by the presets as they are."""
    changes = {"n_positions": 400} if family == "gpt2" else {}
    model = build(family, name, head=False, **changes).to(dtype)
    ids = torch.randint(3, 90, (2, 300))
    cache = sliding_cache(model)
    states(model, input_ids=ids[:, :150], cache=cache)
    sizes = set()
    for n in range(150, 300):
        found = states(model, input_ids=ids[:, n : n + 1], cache=cache)
        sizes.add(bytes_of(cache))
        assert cache.layers[0].keys.shape[2] == 127
    assert len(sizes) == 1
    close(found, states(model, input_ids=ids, use_cache=False)[:, -1:], 2e-4 if dtype == torch.float32 else 0.1)


def bytes_of(cache):
    """Memory behind everything that the cache holds."""
    held = [vars(layer).values() for layer in cache.layers]
    tensors = [value for values in held for value in values if isinstance(value, torch.Tensor)]
    sums = [layer.fed for layer in cache.layers if isinstance(layer, FloorLayer)]
    tensors += [tensor for kept in sums for tensor in (kept.total, kept.count)]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


ROWS = {
    "reorder": (lambda cache: cache.reorder_cache(torch.tensor([1, 1])), lambda ids: ids[[1, 1]]),
    "repeat": (lambda cache: cache.batch_repeat_interleave(2), lambda ids: ids.repeat_interleave(2, 0)),
    "select": (lambda cache: cache.batch_select_indices(torch.tensor([1])), lambda ids: ids[1:]),
}


@pytest.mark.parametrize("left", [0, 5])
@pytest.mark.parametrize("change", ROWS)
def test_rows_take_their_sums_along(change, left):
    model, given = load("llama", EVERYTHING), inputs("gpt2", length=12, left=left)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    ids, places, cache = given["input_ids"], (mask.cumsum(-1) - 1).clamp_min(0), sliding_cache(model)
    in_pieces(model, cache, [10], ids, mask, places)
    of_cache, of_ids = ROWS[change]
    of_cache(cache)
    ids, mask, places = of_ids(ids), of_ids(mask), of_ids(places)
    whole = states(model, input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False)
    for n in (10, 11):
        found = states(
            model, input_ids=ids[:, n : n + 1], attention_mask=mask[:, : n + 1], position_ids=places[:, n : n + 1],
            cache=cache,
        )  # fmt: skip
        close(found[:, 0], whole[:, n])


@pytest.mark.parametrize("left", [0, 4])
@pytest.mark.parametrize("fed", [2, 10])
def test_crop_takes_back(fed, left):
    """Before the window is full, and behind it while the past is recorded; several steps at a time."""
    model, given = load("llama", EVERYTHING), inputs("gpt2", length=16, left=left)
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    ids, places, cache = given["input_ids"], (mask.cumsum(-1) - 1).clamp_min(0), sliding_cache(model)
    given = lambda start, stop: {  # noqa: E731
        "input_ids": ids[:, start:stop], "attention_mask": mask[:, :stop], "position_ids": places[:, start:stop],
    }  # fmt: skip
    states(model, **given(0, fed), cache=cache)
    cache.activate_past_recording()
    for start, stop in ((fed, fed + 1), (fed + 1, fed + 4)):
        states(model, **given(start, stop), cache=cache)
    cache.crop(-2)
    cache.crop(0)
    assert cache.get_seq_length() == fed + 2
    whole = states(model, **given(0, 16), use_cache=False)
    found = states(model, **given(fed + 2, fed + 3), cache=cache)
    close(found[left > fed + 2 :, 0], whole[left > fed + 2 :, fed + 2])
    cache.crop(-1)
    found = states(model, **given(fed + 2, 16), cache=cache)
    close(found[left > fed + 2 :, :], whole[left > fed + 2 :, fed + 2 :])


def test_crop_beyond_the_window_is_refused():
    model, ids = load("llama", EVERYTHING), inputs("llama", length=14)["input_ids"]
    cache = sliding_cache(model)
    states(model, input_ids=ids[:, :10], cache=cache)
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    states(model, input_ids=ids[:, 10:12], cache=cache)
    with pytest.raises(ValueError, match="at most 2 tokens"):
        cache.crop(-3)
    cache.crop(-2)
    found = states(model, input_ids=ids[:, 10:], cache=cache)
    close(found, states(model, input_ids=ids, use_cache=False)[:, 10:])


def test_reset_and_copies():
    model, ids = load("llama", EVERYTHING), inputs("llama", length=14)["input_ids"]
    whole, cache = states(model, input_ids=ids, use_cache=False), sliding_cache(model)
    states(model, input_ids=ids.flip(1), cache=cache)
    cache.reset()
    close(in_pieces(model, cache, [6, 4], ids[:, :10]), whole[:, :10])
    twin = copy.deepcopy(cache)
    states(model, input_ids=ids[:, :3], cache=twin)
    close(states(model, input_ids=ids[:, 10:], cache=cache), whole[:, 10:])


def test_what_pads_hold_does_not_matter():
    """NaN under padding, in values that are summed and taken back."""
    layer, value = FloorLayer(SHORT), torch.randn(2, 2, 9, 8)
    from hf_fullpay.core.visible import Visible

    keys = torch.ones(2, 9, dtype=torch.bool)
    keys[0, [0, 7]] = False
    value[0, :, [0, 7]] = float("nan")
    layer.activate_past_recording()
    layer.update(value, value)
    mean = layer.sums(value, Visible(9, 9, value.device, keys=keys, offset=0)).mean
    assert mean.isfinite().all()
    layer.crop(-3)
    torch.testing.assert_close(layer.fed.mean[0, :, 0], value[0, :, 1:6].double().mean(1))
    torch.testing.assert_close(layer.fed.mean[1, :, 0], value[1, :, :6].double().mean(1))


def test_a_converted_model_with_a_gate_trains_behind_a_cache():
    plan = replace(EVERYTHING, payment=Mixture(floor=None, budget=0.2, learnable=True), gate=True)
    model, ids = convert(build("llama", head=False), plan), inputs("llama", length=14)["input_ids"]
    cache = sliding_cache(model)
    with torch.no_grad():
        model(input_ids=ids[:, :10], cache=cache)
    cached = model(input_ids=ids[:, 10:], cache=cache)[0]
    whole = model(input_ids=ids, use_cache=False)[0][:, 10:]
    close(cached, whole)
    cached.sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "fullpay" in name)


def test_a_window_of_the_models_own():
    """Mistral's window of four cuts a band of six further."""
    plan = AttentionPlan(Band(6))
    model = zoo.make("mistral", "fullpay_custom", fullpay=plan.to_dict())
    ids = inputs("llama", length=14)["input_ids"]
    found = in_pieces(model, sliding_cache(model), [5, 1, 1, 4, 3], ids)
    close(found, states(model, input_ids=ids, use_cache=False))
    model = zoo.make("mistral", "fullpay_band")
    with pytest.raises(ValueError, match="sliding window of its own"):
        sliding_cache(model)


REFUSED = {
    "full reach": (
        lambda: load("llama", "fullpay"),
        r"layer 0 of LlamaModel, which sees every key.*Leave the cache out",
    ),
    "some layers": (lambda: load("llama", AttentionPlan(Band(4), layers=[1])), "ordinary attention in layer 0"),
    "sdpa": (lambda: build("llama"), 'attn_implementation="band_causal"'),
    "an encoder": (lambda: load("bert", "band_causal"), "expected a decoder"),
    "encoder and decoder": (lambda: zoo.make("bart", "fullpay"), "expected a decoder"),
    "no model": (lambda: "gpt2", "expected a Transformers model"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    make, reason = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=reason):
        sliding_cache(model)


def test_weights_and_other_patterns_are_refused():
    model, ids = load("llama", EVERYTHING), inputs("llama", length=9)["input_ids"]
    with pytest.raises(ValueError, match="output_attentions"):
        model(input_ids=ids, cache=sliding_cache(model), output_attentions=True)
    model(input_ids=ids, cache=sliding_cache(load("llama", PLANS["band"])), output_attentions=True)
    pairs = torch.ones(9, 9, dtype=torch.bool).tril()
    model(input_ids=ids, attention_mask=pairs[None, None], cache=sliding_cache(model))
    pairs[5, 2] = False
    with pytest.raises(ValueError, match="another pattern of pairs"):
        model(input_ids=ids, attention_mask=pairs[None, None], cache=sliding_cache(model))


def test_tokens_that_went_past_the_sum_are_noticed():
    model, ids = load("llama", EVERYTHING), inputs("llama", length=9)["input_ids"]
    cache = sliding_cache(model)
    model.set_attn_implementation("sdpa")
    states(model, input_ids=ids, cache=cache)
    model.set_attn_implementation("fullpay_custom")
    with pytest.raises(RuntimeError, match="Start with a new cache"):
        states(model, input_ids=ids[:, :1], cache=cache)


def test_the_shortfall_is_told_as_ever():
    model, ids = build("llama", "fullpay_band"), inputs("llama")["input_ids"]
    with pytest.warns(FullPayWarning, match="over 9 keys"):
        states(model, input_ids=ids, cache=sliding_cache(model))
