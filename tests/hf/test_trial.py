"""A plan on trial in some layers: what runs, and that the model is as it was afterwards."""

from dataclasses import replace

import pytest
import torch
import transformers

import zoo
from converted import LEARNABLE, learn, stock
from families import FAMILIES, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Bounded, Mixture, Windows, convert
from hf_fullpay.hf.trial import trial
from small import home, load, short, states
from untouched import snapshot, untouched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
TIGHT = AttentionPlan(scores=Bounded(bound=0.2))
GENEROUS = AttentionPlan(payment=Mixture(floor=None, budget=0.4))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_chosen_layers_run_the_plan(family, attention):
    """As a model that was loaded with that policy; none of them is the stock model."""
    model, given = build(family, attention, head=False), inputs(family, right=0 if family == "vit" else 2)
    with untouched(model, given), trial(model, TIGHT) as tried:
        assert tried.total == 2
        torch.testing.assert_close(
            states(model, **given), states(build(family, head=False), **given), rtol=0, atol=2e-5
        )
        for layers in ([0], [1], [0, 1]):
            tried.run(layers)
            wanted = states(load(family, replace(TIGHT, layers=layers)), **given)
            assert torch.equal(states(model, **given), wanted)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_on_trial(preset):
    """Learned numbers stand where convert starts them."""
    family = home(preset)
    model, given = build(family, head=False), inputs(family)
    if "times" in PRESETS[preset].inputs:
        given["times"] = torch.rand(2, 9)
    with untouched(model, inputs(family)), trial(model, short(preset)) as tried:
        tried.run([0, 1])
        found = states(model, **given)
    torch.testing.assert_close(
        found, states(convert(build(family, head=False), short(preset)), **given), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize("what", LEARNABLE)
def test_a_converted_model_keeps_what_it_learned(what):
    """Layers that are not on trial run on with their learned numbers, the others under the plan without them."""
    model = learn(convert(stock("FullPayBertModel"), LEARNABLE[what])).eval()
    given = inputs("bert")
    given |= {"times": torch.rand(2, 9)} if "times" in LEARNABLE[what].inputs else {}
    wanted = load("bert", GENEROUS)
    wanted.load_state_dict(model.state_dict(), strict=False)
    first = states(model, **given)
    with untouched(model, given), trial(model, GENEROUS) as tried:
        torch.testing.assert_close(states(model, **given), first, rtol=0, atol=1e-6)
        tried.run([0, 1])
        torch.testing.assert_close(states(model, **given), states(wanted, **given), rtol=0, atol=1e-6)


def test_by_name_with_a_host():
    model, given = build("bert", head=False), inputs("bert", right=3)
    hosted = AttentionPlan(payment=Mixture(host="sdpa"))
    with untouched(model, given), trial(model, hosted) as tried:
        tried.run([0, 1])
        torch.testing.assert_close(states(model, **given), states(load("bert", "fullpay"), **given), rtol=0, atol=1e-6)
    model = load("bert", hosted)
    with untouched(model, given), trial(model, TIGHT):
        torch.testing.assert_close(states(model, **given), states(load("bert", "fullpay"), **given), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bart", "t5", "modernbert", "clip_vision", "albert"])
def test_other_families(name):
    model, given = zoo.make(name), zoo.given(name)
    with untouched(model, given), trial(model, PRESETS["fullpay"]) as tried:
        tried.run(range(tried.total))
        states(model, **given)


def test_restored_when_something_fails():
    model, given = build("gpt2", head=False), inputs("gpt2")

    def interrupted():
        with trial(model, TIGHT) as tried:
            tried.run([1])
            raise KeyboardInterrupt

    with untouched(model, given), pytest.raises(KeyboardInterrupt):
        interrupted()


GEMMA = {"num_key_value_heads": 2, "head_dim": 8, "vocab_size": 97} | zoo.SIZES
REFUSED = {
    "reach": (lambda: build("bert", head=False), AttentionPlan(Windows(2)), "BertModel: .*windows"),
    "heads": (lambda: build("bert"), AttentionPlan(scores=Bounded(bound=[1.0, 2.0])), r"one per head \(4\), got 2"),
    "layers": (lambda: build("vit"), AttentionPlan(scores=Bounded(bound=[[1.0] * 4])), "each of the 2 layers"),
    "soft cap": (lambda: transformers.Gemma2Model(transformers.Gemma2Config(**GEMMA)), TIGHT, "soft-capped"),
    "no model": (lambda: torch.nn.Linear(2, 2), TIGHT, "a Transformers model, got 'Linear'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_leave_the_model_as_it_was(what):
    make, plan, reason = REFUSED[what]
    model = make()
    before = snapshot(model) if what != "no model" else None
    with pytest.raises(ValueError, match=reason), trial(model, plan):
        pass
    assert before is None or snapshot(model) == before


def test_layers_that_the_model_does_not_have():
    with trial(build("bert"), TIGHT) as tried, pytest.raises(ValueError, match=r"numbers from 0 to 1, got \[2\]"):
        tried.run([0, 2])
