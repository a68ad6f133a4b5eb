"""What `check` finds: every promise of every preset kept, and every broken one with its layer and head."""

import json

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

import hf_fullpay
import zoo
from converted import LEARNABLE, learn
from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Bounded, Mixture, check, convert
from hf_fullpay.diagnosis.promises import KINDS, NONE
from hf_fullpay.hf.strengths import Strengths
from hf_fullpay.payment import mixture
from hf_fullpay.plan import PRESETS
from small import EVERYWHERE, load

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
GENERAL = {"finite", "rows", "order", "reach", "gradients", "agreement", "batch mates"}
ON_TEXT = {"padding", "alone"}
LEARNED = AttentionPlan(payment=Mixture(floor=None, budget=0.2, learnable=True))


def names(found):
    return {promise.name for promise in found.promises}


def broken(found):
    return {promise.name: promise.where for promise in found.broken}


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_every_preset_keeps_its_promises(family, name):
    found = check(load(family, name))
    assert found.kept, str(found)
    plan, expected = PRESETS[name], set(GENERAL)
    expected |= ON_TEXT if family != "vit" else set()
    expected |= {"causal"} if family in CAUSAL or (family, name) == ("bert", "band_causal") else set()
    expected |= {"floor"} if hasattr(plan.payment, "floor") else set()
    expected |= {"bound", "certificate"} if isinstance(plan.scores, Bounded) else set()
    expected -= {"order"} if name in ("fullpay_block", "lia") else set()
    assert names(found) == expected
    assert NONE not in found.notes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_model_has_none_of_its_own(family, attention):
    found = check(build(family, attention, head=False))
    assert found.kept
    assert names(found) <= GENERAL | ON_TEXT | {"causal"}
    assert NONE in found.notes
    assert NONE in str(found).replace("\n", " ")


@pytest.mark.parametrize("name", ["roberta", "modernbert", "mistral", "gemma3", "t5", "swin", "vit_mae"])
def test_other_models(name):
    """Windows of their own, biases, images cut into windows, masks drawn at random: nothing is broken by them."""
    assert check(zoo.make(name)).kept
    assert check(zoo.make(name, "fullpay"), zoo.given(name)).kept


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_caps_and_sinks(name):
    found = check(zoo.make(name, "eager"))
    assert found.kept
    assert ("rows" in names(found)) == (name != "gpt_oss")  # a sink takes a part of every row


@pytest.mark.parametrize("what", LEARNABLE)
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_learned_numbers_keep_their_promises(family, what):
    found = check(learn(convert(build(family), LEARNABLE[what])))
    assert found.kept, str(found)
    budget = LEARNABLE[what].payment
    assert ("floor" in names(found)) == (hasattr(budget, "floor") and not getattr(budget, "signed", False))
    assert ("budget" in names(found)) == getattr(budget, "learnable", False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types(dtype):
    found = check(load("llama", "bounded_fullpay").to(dtype))
    assert found.kept, str(found)


def test_the_model_stays_as_it_was():
    model = convert(build("gpt2"), LEARNABLE["all"]).train()
    state = torch.get_rng_state()
    check(model)
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_inputs_of_ones_own():
    found = check(
        load("bert", "fullpay"), [inputs("bert", length=12), inputs("bert", right=3) | {"labels": torch.ones(2)}]
    )
    assert found.kept
    assert names(found) >= ON_TEXT


def test_half_a_floor(monkeypatch):
    share = mixture.share
    monkeypatch.setattr(mixture, "share", lambda *arguments: share(*arguments) / 2)
    found = check(load("bert", "fullpay"))
    assert broken(found)["floor"].startswith("layer 0, head")
    assert next(one.value for one in found.broken if one.name == "floor") < 0.9


def test_half_a_floor_in_the_model_alone(monkeypatch):
    """The weights shown would be right; the output is not."""
    forward = AttentionInterface()["fullpay"]

    def halved(module, query, key, value, mask, **options):
        output, _ = forward(module, query, key, value, mask, **options)
        plain, _ = AttentionInterface()["sdpa"](module, query, key, value, None, **options)
        return (output + plain) / 2, None

    monkeypatch.setitem(AttentionInterface._global_mapping, "fullpay", halved)
    assert "agreement" in broken(check(load("bert", "fullpay")))


@pytest.mark.parametrize(
    ("move", "layer", "head"), [(lambda numbers: numbers * 0, 1, 0), (lambda numbers: numbers + 0.5, 0, 0)]
)
def test_a_tampered_budget(move, layer, head, monkeypatch):
    """A budget of nothing is a floor of nothing; one above its limit is not the one that was promised."""
    model = convert(build("bert"), LEARNED)
    tampered = [module for module in model.modules() if isinstance(module, Strengths)][layer]
    stock = Strengths.forward

    def forward(self, hidden_states=None):
        found = stock(self, hidden_states)
        return {name: move(numbers) for name, numbers in found.items()} if self is tampered else found

    monkeypatch.setattr(Strengths, "forward", forward)
    assert broken(check(model))["budget"] == f"layer {layer}, head {head}"


def test_a_faded_budget():
    model = convert(build("bert"), LEARNED)
    with torch.no_grad():
        model.bert.encoder.layer[1].attention.self.fullpay.budget_bias[2] = -300.0
    assert broken(check(model)) == {"budget": "layer 1, head 2"}


def test_a_mask_that_is_ignored(monkeypatch):
    """Everything that a mask hides is found out: the future, padding, gradients."""
    forward = AttentionInterface()["sdpa"]

    def leaky(module, query, key, value, mask, **options):
        output, _ = forward(module, query, key, value, None, **options | {"is_causal": False})
        kept, _ = forward(module, query, key, value, mask, **options)
        only = torch.arange(query.shape[1])[:, None] == 2  # one head leaks
        return torch.where(only, output, kept), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", leaky)
    found = broken(check(build("gpt2", head=False)))
    assert {"causal", "gradients", "agreement"} <= found.keys()
    assert set(found.values()) == {"layer 0, head 2"}
    assert {"padding", "alone", "gradients"} <= broken(check(build("bert", head=False))).keys()


def test_batch_mates_that_meet(monkeypatch):
    forward = AttentionInterface()["sdpa"]

    def mixing(module, query, key, value, mask, **options):
        output, _ = forward(module, query, key, value, mask, **options)
        return output + 1e-3 * output.mean(0, keepdim=True), None

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", mixing)
    assert broken(check(build("vit", head=False)))["batch mates"].startswith("layer 0, head")


def test_a_bound_that_is_not_held(monkeypatch):
    import hf_fullpay.reference as reference

    bounded = reference.bounded_scores
    monkeypatch.setattr(reference, "bounded_scores", lambda *a, **o: bounded(*a, **o) * 3)
    assert {"bound", "agreement"} <= broken(check(load("bert", "bounded"))).keys()


def test_an_order_that_is_turned(monkeypatch):
    import hf_fullpay.reference as reference

    monkeypatch.setattr(reference, "softmax_weights", lambda scores, visible: torch.softmax(-scores, -1) * visible)
    assert {"order", "rows"} <= broken(check(load("gpt2", "band_causal"))).keys()


def test_nan_in_a_head():
    model = build("bert", "fullpay", head=False)
    with torch.no_grad():
        model.encoder.layer[1].attention.self.value.weight[17] = torch.nan  # width 8: of head 2
    found = check(model)
    assert broken(found) == {"finite": "layer 1, head 2"}
    assert "NaN" in found.notes[0]
    assert found.to_dict()["kept"] is False


def test_nan_behind_the_attention():
    model = build("bert", "sdpa", head=False)
    with torch.no_grad():
        model.encoder.layer[0].output.dense.weight[0, 0] = torch.nan
    assert broken(check(model))["finite"] == "output of layer 0, no one head"
    with torch.no_grad():
        model.embeddings.word_embeddings.weight.fill_(torch.nan)
    assert broken(check(model))["finite"] == "layer 0, head 0"


def test_what_cannot_be_checked_says_so():
    with pytest.raises(ValueError, match="attention interface"):
        check(nn.Linear(2, 2), {"input": torch.ones(1, 2)})
    with pytest.raises(ValueError, match="expected inputs"):
        check(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got an empty iterable"):
        check(build("bert", head=False), [])
    with pytest.raises(ValueError, match="length: expected an integer"):
        check(build("bert", head=False), length=0)


def test_forms():
    found = check(load("bert", "bounded_fullpay"))
    written = json.loads(found.to_json())
    assert written["kept"] is True
    assert [one["name"] for one in written["promises"]] == [name for name in KINDS if name in names(found)]
    assert all(name in str(found) for name in names(found))
    assert hf_fullpay.check is check
