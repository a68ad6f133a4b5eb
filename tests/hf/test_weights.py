"""output_attentions=True: the same states, and weights that keep the promises, in every family."""

import pytest
import torch
from transformers import DynamicCache

from families import FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Bounded, Mixture
from hf_fullpay.payment.mixture import Budget
from small import EVERYWHERE, ON_CAUSAL, load, on, pairs_of, short, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def allowed(family, given):
    """Keys that the model's mask allows, (2, 1, N, N)."""
    n = 17 if family == "vit" else given["input_ids"].shape[1]
    pairs = torch.ones(n, n, dtype=torch.bool)
    pairs = pairs.tril() if family in ("llama", "gpt2") else pairs
    keys = given.get("attention_mask", torch.ones(2, n)).bool()
    return (pairs & keys[:, None]).unsqueeze(1)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
@pytest.mark.parametrize("left", [0, 3])
def test_weights_keep_the_promises(family, name, left):
    plan, model, given = short(name), load(family, name), inputs(family, left=left)
    result = model(**given, output_attentions=True)
    torch.testing.assert_close(result[0], states(model, **given), rtol=0, atol=1e-5)
    pairs = allowed(family, given)
    assert len(result.attentions) == 2
    for layer, weights in enumerate(result.attentions):
        reach = pairs_of(plan, pairs, layer)
        paid = pairs if getattr(plan.payment, "pay", None) == "visible" else reach
        paid, some = paid & reach.any(-1, keepdim=True), reach.any(-1)
        assert weights.shape == (2, 4, *pairs.shape[-2:])
        torch.testing.assert_close(weights.sum(-1), some.float().expand_as(weights[..., 0]), rtol=0, atol=1e-5)
        assert not weights[~(paid | reach).expand_as(weights)].any()
        counts = paid.sum(-1, keepdim=True).float().clamp_min(1)
        if isinstance(plan.payment, Budget):
            floor = (plan.payment.budget / counts).clamp_max(plan.payment.floor)
            assert ((weights >= floor - 1e-6) | ~paid).all()
        elif isinstance(plan.scores, Bounded):
            for n in range(2, pairs.shape[-1] + 1):
                low, high = plan.scores.certificate(n)
                rows = weights[(counts == n).expand_as(weights)[..., :1].squeeze(-1)]
                seen = paid.expand_as(weights)[(counts == n).expand_as(weights)[..., :1].squeeze(-1)]
                assert (rows[seen] >= low * (1 - 1e-4)).all()
                assert (rows[seen] <= high * (1 + 1e-4)).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_vanilla_weights_equal_eager(family):
    given = inputs(family, left=3)
    eager = build(family, "eager", head=False)(**given, output_attentions=True).attentions
    ours = load(family, AttentionPlan(payment=Mixture(budget=0.9), layers=[]))(
        **given, output_attentions=True
    ).attentions
    for one, other in zip(eager, ours, strict=True):
        seen = allowed(family, given).any(-1).expand(2, 4, -1)  # eager spreads the rows of pads evenly
        torch.testing.assert_close(one[seen], other[seen], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_weights_of_a_step(family, name):
    """With a cache the weights of the newest token are the last row of all."""
    model, ids = load(family, name), inputs(family)["input_ids"]
    whole = model(input_ids=ids, output_attentions=True, use_cache=False).attentions
    cache = DynamicCache(config=model.config)
    states(model, input_ids=ids[:, :8], cache=cache)
    step = model(input_ids=ids[:, 8:], cache=cache, output_attentions=True).attentions
    for one, other in zip(step, whole, strict=True):
        torch.testing.assert_close(one[:, :, 0], other[:, :, 8], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_only_when_asked(family):
    """Recording once leaves no trace in the next call."""
    model, given = load(family, "fullpay"), inputs(family)
    before = states(model, **given)
    model(**given, output_attentions=True)
    result = model(**given)
    assert result.get("attentions") is None
    assert torch.equal(result[0], before)
    hidden = model(**given, output_hidden_states=True)
    assert len(hidden.hidden_states) == 3
    assert hidden.get("attentions") is None


@pytest.mark.parametrize("name", on("bert"))
def test_weights_carry_gradients(name):
    """A loss on the weights themselves (an entropy, say) trains the queries."""
    model, given = load("bert", name), inputs("bert")
    weights = model(**given, output_attentions=True).attentions[0]
    (weights.clamp_min(1e-9).log() * weights).sum().backward()
    gradient = model.encoder.layer[0].attention.self.query.weight.grad
    assert gradient.isfinite().all()
    assert gradient.abs().max() > 0
