"""convert and revert: the same weights, the same numbers as the stateless path, and nothing else changes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import RobertaConfig, RobertaModel

from converted import LEARNABLE, equal, given_to, learn, learned, stock
from families import FAMILIES, build, inputs
from hf_fullpay import MODELS, PRESETS, AttentionPlan, Bounded, Mixture, convert, revert
from hf_fullpay.hf.forward import CARRIER
from hf_fullpay.hf.models import stock_of
from small import EVERYWHERE, load, plans, short, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
CONVERTIBLE = {
    "llama": "FullPayLlamaForCausalLM",
    "gpt2": "FullPayGPT2LMHeadModel",
    "bert": "FullPayBertForSequenceClassification",
    "vit": "FullPayViTForImageClassification",
}


def test_every_family_has_its_classes():
    assert set(CONVERTIBLE) == set(FAMILIES)
    assert set(CONVERTIBLE.values()) <= set(MODELS)


@pytest.mark.parametrize("name", MODELS)
def test_every_class_there_and_back(name):
    """Numbers of the stateless path; the very parameters of the original, which runs on as it did."""
    original, given = stock(name), given_to(name)
    first = states(original, **given)
    converted = convert(original, LEARNABLE["budget"])
    assert type(converted) is MODELS[name]
    assert plans(converted) == [LEARNABLE["budget"]] * 2
    ours = dict(converted.named_parameters())
    assert all(ours[path] is parameter for path, parameter in original.named_parameters())
    buffers = dict(converted.named_buffers())
    assert all(buffers[path] is buffer for path, buffer in original.named_buffers())
    assert set(ours) - set(dict(original.named_parameters())) == set(learned(converted))
    stateless = stock(name)
    stateless.config.fullpay = LEARNABLE["budget"].to_dict()
    stateless.set_attn_implementation(CARRIER)
    output = states(converted, **given)
    torch.testing.assert_close(output, states(stateless, **given), rtol=0, atol=1e-5)
    assert (output - first).abs().max() > 1e-4
    assert torch.equal(states(original, **given), first)
    back = revert(converted)
    assert type(back) is stock_of(MODELS[name])
    assert torch.equal(states(back, **given), first)
    assert not learned(back)
    assert back.config.model_type == original.config.model_type


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_presets_give_the_same_by_name_and_converted(family, name):
    original, given = stock(CONVERTIBLE[family]), inputs(family)
    by_plan = convert(original, short(name))
    torch.testing.assert_close(
        states(by_plan, **given), states(load(family, name, head=True), **given), rtol=0, atol=1e-5
    )
    by_name = convert(original, name)
    assert by_name.config._attn_implementation == name
    assert plans(by_name) == [PRESETS[name]] * 2
    assert bool(learned(by_name)) == PRESETS[name].is_learnable


@pytest.mark.parametrize("what", LEARNABLE)
@pytest.mark.parametrize("family", FAMILIES)
def test_learned_numbers_start_where_the_plan_says_and_matter(family, what):
    plan, given = LEARNABLE[what], inputs(family)
    model = convert(build(family, head=False), plan)
    numbers = learned(model)
    assert len(numbers) == 2 * (
        2 * plan.gate + sum(getattr(part, "learnable", False) for part in (plan.reach, plan.scores, plan.payment))
    )
    for parameter in numbers.values():
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert not parameter.any()
    start = states(model, **given)
    if not plan.gate:
        torch.testing.assert_close(start, states(load(family, plan), **given), rtol=0, atol=1e-5)
    for path, parameter in numbers.items():
        with torch.no_grad():
            parameter.normal_(std=2)
        assert (states(model, **given) - start).abs().max() > 1e-4, path
        with torch.no_grad():
            parameter.zero_()
    assert torch.equal(states(model, **given), start)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_own_only_what_they_use(family):
    plan = AttentionPlan(payment=Mixture(learnable=True), gate=True, layers=[1])
    model = convert(stock(CONVERTIBLE[family]), plan)
    assert len(learned(model)) == 3
    assert all(".1." in path for path in learned(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_else_a_model_carries_is_kept(family):
    original = stock(CONVERTIBLE[family], id2label={0: "no", 1: "yes", 2: "may be"}).train().to(torch.bfloat16)
    original.requires_grad_(False)
    original.activation_checkpointing_enable()
    if original.can_generate():
        original.generation_config.max_new_tokens = 3
    converted = convert(original, LEARNABLE["budget"])
    assert converted.training
    assert converted.dtype == torch.bfloat16
    assert converted.is_activation_checkpointing
    assert converted.config.id2label == {0: "no", 1: "yes", 2: "may be"}
    assert {p.requires_grad for n, p in converted.named_parameters() if n not in learned(converted)} == {False}
    assert {p.dtype for p in learned(converted).values()} == {torch.float32}
    if original.can_generate():
        assert converted.generation_config.max_new_tokens == 3
    if family == "gpt2":
        assert converted.get_output_embeddings().weight is converted.get_input_embeddings().weight
    back = revert(converted)
    assert back.training
    assert back.dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies(family, copied):
    model, given = learn(convert(stock(CONVERTIBLE[family]), LEARNABLE["all"])), inputs(family)
    output, twin = states(model, **given), copied(model)
    assert equal(learned(model), learned(twin))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert torch.equal(states(model, **given), output)
    assert torch.equal(states(copied(model), **given), output)
    stateless = load(family, "bounded_fullpay")
    assert torch.equal(states(copied(stateless), **given), states(stateless, **given))


def test_converting_again_drops_what_was_learned():
    model = learn(convert(stock(CONVERTIBLE["bert"]), LEARNABLE["all"]))
    again = convert(model, LEARNABLE["gate"])
    assert plans(again) == [LEARNABLE["gate"]] * 2
    assert not any(p.any() for p in learned(again).values())
    assert equal(learned(model), learned(learn(convert(stock(CONVERTIBLE["bert"]), LEARNABLE["all"]))))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_switches_live(family):
    """To ordinary attention and back: the learned numbers wait."""
    model, given = learn(convert(stock(CONVERTIBLE[family]), LEARNABLE["gate"])), inputs(family)
    output = states(model, **given)
    model.set_attn_implementation("sdpa")
    assert torch.equal(states(model, **given), states(build(family), **given))
    model.set_attn_implementation(CARRIER)
    assert torch.equal(states(model, **given), output)


def test_refusals():
    roberta = RobertaModel(
        RobertaConfig(vocab_size=97, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64)
    )
    with pytest.raises(ValueError, match=r"expected one of .*BertModel.*got RobertaModel.*attn_implementation"):
        convert(roberta, "fullpay")
    with pytest.raises(ValueError, match=r"expected a FullPay model, got RobertaModel"):
        revert(roberta)
    with pytest.raises(ValueError, match=r"one of the presets .*got 'fulpay'"):
        convert(build("bert"), "fulpay")
    with pytest.raises(ValueError, match=r"layers"):
        convert(build("bert"), AttentionPlan(layers="from:2"))
    with pytest.raises(ValueError, match=r"one per head \(4\), got 3"):
        convert(build("bert"), AttentionPlan(payment=Mixture(budget=[0.1, 0.2, 0.3], learnable=True)))
    with pytest.raises(ValueError, match=r"band has no meaning"):
        convert(build("gpt2", head=False, add_cross_attention=True), "band_causal")


def test_a_subclass_of_a_stock_class_is_no_stock_class():
    """It may compute anything; we would silently drop that."""

    class Mine(type(build("bert"))):
        pass

    with pytest.raises(ValueError, match="got Mine"):
        convert(Mine(build("bert").config), "fullpay")


def test_infinite_options_survive():
    plan = AttentionPlan(scores=Bounded(bound=[1.0, float("inf"), 2.0, 3.0]), gate=True)
    model = convert(stock(CONVERTIBLE["bert"]), plan)
    assert AttentionPlan.from_dict(model.config.fullpay) == plan
    assert isinstance(model, nn.Module)
