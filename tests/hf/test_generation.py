"""Generation: every way to decode gives the tokens of repeated full forwards."""

import pytest
import torch

from families import CAUSAL, build, inputs
from small import ON_CAUSAL, load

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
STEPS = 8


def prompt(family):
    given = inputs(family, length=7, left=3)
    return {key: given[key] for key in ("input_ids", "attention_mask")}


def generate(model, given, **options):
    return model.generate(**given, max_new_tokens=STEPS, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


def by_full_forwards(model, ids, mask):
    """Greedy decoding without any cache."""
    for _ in range(STEPS):
        places = (mask.cumsum(-1) - 1).clamp_min(0)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return ids


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_greedy_decoding(family, name):
    """O27 for the bands: their window is shorter than the prompt."""
    model, given = load(family, name, head=True), prompt(family)
    truth = by_full_forwards(model, given["input_ids"], given["attention_mask"])
    assert torch.equal(generate(model, given), truth)
    assert torch.equal(generate(model, given, use_cache=False), truth)
    assert torch.equal(generate(model, given, prefill_chunk_size=3), truth)
    assert torch.equal(generate(model, given, cache_implementation="static", disable_compile=True), truth)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_beams(family, name):
    model, given = load(family, name, head=True), prompt(family)
    cached, plain = (generate(model, given, num_beams=3, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_guessed_tokens_are_checked_rightly(family, name):
    """Prompt lookup and an assistant feed several tokens at once behind a full cache."""
    model = load(family, name, head=True)
    given = {"input_ids": inputs(family, batch=1, length=4)["input_ids"].repeat(1, 3)}
    truth = generate(model, given)
    assert torch.equal(generate(model, given, prompt_lookup_num_tokens=3), truth)
    assistant = build(family, "sdpa", seed=0)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    assert torch.equal(generate(model, given, assistant_model=assistant), truth)


@pytest.mark.parametrize("family", CAUSAL)
def test_the_attention_matters(family):
    """Or every test above would pass with ordinary attention."""
    given = prompt(family)
    stock = generate(build(family), given)
    assert not torch.equal(generate(load(family, "band_causal", head=True), given), stock)
    assert not torch.equal(generate(load(family, "bounded_fullpay", head=True), given), stock)
