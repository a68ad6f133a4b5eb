"""A floor that cannot be met is told, once per model and doubling of the length; everything else is quiet."""

import warnings

import pytest
import torch

from converted import LEARNABLE
from families import FAMILIES, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, FullPayWarning, Mixture, convert
from hf_fullpay.payment.mixture import Budget
from small import EVERYWHERE, load, states

PROMISING = [name for name, plan in PRESETS.items() if isinstance(plan.payment, Budget)]


def told(call):
    """Our warnings during a call, each as often as it was raised."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call()
    return [str(warning.message) for warning in seen if issubclass(warning.category, FullPayWarning)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", PROMISING)
def test_a_shortfall_is_told_with_its_numbers(family, name):
    model = build(family, name, head=False)
    (message,) = told(lambda: states(model, **inputs(family)))
    n, payment = 17 if family == "vit" else 9, PRESETS[name].payment
    assert message.startswith(f"{type(model).__name__}: ")
    for number in (payment.floor, payment.budget / n, 1 / n):
        assert f"{number:.3g}" in message
    assert not told(lambda: states(model, **inputs(family)))


@pytest.mark.parametrize("name", PROMISING)
def test_once_per_model_and_doubling_of_the_length(name):
    """Batches of ever new lengths would flood."""
    model = build("bert", name)
    # Five keys can be paid in full.
    for length, count in ((5, 0), (9, 1), (9, 0), (12, 0), (7, 0), (17, 0), (18, 1), (35, 0), (80, 1), (18, 0)):
        assert len(told(lambda length=length: states(model, **inputs("bert", length=length)))) == count
    other = build("bert", name)
    assert len(told(lambda: states(other, **inputs("bert")))) == 1


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", PROMISING)
def test_steps_of_generation_are_quiet(family, name):
    model, given = build(family, name), {"input_ids": inputs(family)["input_ids"]}
    messages = told(lambda: model.generate(**given, max_new_tokens=6, do_sample=False, pad_token_id=0))
    assert len(messages) == 1
    assert "over 9 keys" in messages[0]


@pytest.mark.parametrize(("family", "name"), [pair for pair in EVERYWHERE if pair[1] not in PROMISING])
def test_what_promises_nothing_is_quiet(family, name):
    assert not told(lambda: states(build(family, name), **inputs(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_floors_that_are_met_are_quiet(family):
    for payment in (Mixture(floor=0.001), Mixture(floor=None, budget=0.3), Mixture(budget=0.5)):
        assert not told(lambda payment=payment: states(load(family, AttentionPlan(payment=payment)), **inputs(family)))
    assert not told(lambda: states(convert(build(family), LEARNABLE["all"]), **inputs(family)))


def test_compiled_models_are_quiet():
    """A warning is no part of a graph."""
    torch._dynamo.reset()
    model = torch.compile(load("vit", "fullpay", num_hidden_layers=1), backend="eager", fullgraph=True)
    assert not told(lambda: states(model, **inputs("vit")))


def test_arguments_that_the_plan_does_not_read_are_told():
    model = build("bert", "band_causal")
    with pytest.warns(FullPayWarning, match=r"BertModel: times is not read by the plan .*Band"):
        model(**inputs("bert"), times=torch.rand(2, 9))
    build("bert", "delay_aware")(**inputs("bert"), times=torch.rand(2, 9))
