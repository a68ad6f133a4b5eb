"""What must equal ordinary attention does, forward and backward; what must differ does; heads keep to themselves."""

from dataclasses import replace

import pytest
import torch

from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Band, Blocks, Bounded, Chunks, Clamp, DynamicScale, Mixture
from small import load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
NEUTRAL = {
    "ordinary": AttentionPlan(),
    "no budget": AttentionPlan(payment=Mixture(budget=0.0)),
    "no floor": AttentionPlan(payment=Mixture(floor=0.0)),
    "clamp of nothing": AttentionPlan(payment=Clamp(floor=0.0)),
    "no bound": AttentionPlan(scores=Bounded(bound=None, temperature=1.0)),
    "a bound out of reach": AttentionPlan(scores=Bounded(bound=1e6, temperature=1.0)),
    "gain of one": AttentionPlan(scores=DynamicScale()),
    "one block": AttentionPlan(Blocks(1000)),
    "one chunk, no exchange": AttentionPlan(Chunks(1000, exchange=0.0, learnable=False)),
    "no layer": AttentionPlan(Band(1), Bounded(bound=0.1), Mixture(budget=1.0), layers=[]),
}
OPTIONS = [
    (AttentionPlan(reach=Band(2)), {"reach": {"size": 3}}),
    (AttentionPlan(reach=Blocks(2)), {"reach": {"size": 3}}),
    (AttentionPlan(reach=Chunks(4, 1)), {"reach": {"size": 5}}),
    (AttentionPlan(reach=Chunks(4, 1)), {"reach": {"overlap": 2}}),
    (AttentionPlan(reach=Chunks(4, 1)), {"reach": {"exchange": 0.5}}),
    (AttentionPlan(payment=Mixture(floor=0.01, budget=0.5)), {"payment": {"floor": 0.05}}),
    (AttentionPlan(payment=Mixture(floor=None, budget=0.5)), {"payment": {"budget": 0.3}}),
    (AttentionPlan(payment=Mixture(floor=None, budget=0.5)), {"payment": {"budget": (0.5, 0.5, 0.5, 0.1)}}),
    (AttentionPlan(Band(2), payment=Mixture(floor=None, budget=0.5)), {"payment": {"pay": "reach"}}),
    (AttentionPlan(payment=Mixture(floor=None, budget=0.3, signed=True)), {"payment": {"budget": -0.3}}),
    (AttentionPlan(payment=Clamp(floor=0.02, budget=1.0)), {"payment": {"floor": 0.05}}),
    (AttentionPlan(payment=Clamp(floor=None, budget=0.9)), {"payment": {"budget": 0.3}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"bound": 0.2}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"centre": "median"}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"centre": "none"}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"temperature": 0.9}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"slope": "sharpen"}}),
    (AttentionPlan(scores=Bounded(bound=0.5)), {"scores": {"slope": "rescale"}}),
    (AttentionPlan(scores=DynamicScale(alpha=1.0)), {"scores": {"alpha": -1.0}}),
    (AttentionPlan(scores=DynamicScale(alpha=1.0)), {"scores": {"max_scale": 4.0}}),
]


def gradients(model, given):
    model(**given)[0].tanh().sum().backward()
    return {path: p.grad for path, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("what", NEUTRAL)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [0, 3])
def test_neutral_options_equal_sdpa(family, what, left):
    """Forward and all gradients; where the host runs alone and without a mask, bit for bit."""
    given = inputs(family, left=left)
    stock, ours = build(family, head=False), load(family, NEUTRAL[what])
    real = given.get("attention_mask", torch.ones(2, 1)).bool()
    one, other = (states(model, **given) for model in (stock, ours))
    keep = real if left and family != "vit" else slice(None)
    torch.testing.assert_close(other[keep], one[keep], rtol=0, atol=1e-5)
    if not left:
        if what in ("ordinary", "no budget", "no floor", "gain of one", "no layer"):
            assert torch.equal(one, other)
        wanted, found = gradients(stock, given), gradients(ours, given)
        assert wanted.keys() == found.keys()
        for path, gradient in wanted.items():
            torch.testing.assert_close(found[path], gradient, rtol=1e-4, atol=1e-4, msg=path)


@pytest.mark.parametrize("family", CAUSAL)
def test_a_window_over_everything_is_causal(family):
    given = inputs(family)
    stock = states(build(family, head=False), **given)
    for size in (9, 10, 1000):
        torch.testing.assert_close(states(load(family, AttentionPlan(Band(size))), **given), stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("plan", "change"), OPTIONS, ids=lambda value: str(value) if isinstance(value, dict) else "")
@pytest.mark.parametrize("family", FAMILIES)
def test_every_option_changes_what_a_model_computes(family, plan, change):
    """O32: none is accepted and then ignored."""
    ((part, options),) = change.items()
    other = replace(plan, **{part: replace(getattr(plan, part), **options)})
    one, two = (states(load(family, which), **inputs(family, length=14)) for which in (plan, other))
    assert (one - two).abs().max() > 1e-3


@pytest.mark.parametrize(
    "plan",
    [
        AttentionPlan(payment=Mixture(floor=None, budget=[0.1, 0.2, 0.3, 0.9])),
        AttentionPlan(Band(4), Bounded(bound=[1, 2, 3, 0.1])),
        AttentionPlan(Blocks(4), Bounded(bound=[1, 2, 3, 0.1])),
        AttentionPlan(Chunks(4, 1, exchange=[0.1, 0.2, 0.3, 0.9])),
    ],
)
def test_grouped_heads_equal_repeated_ones(plan):
    """A Llama with two key heads, and the same one with four whose weights are repeated."""
    grouped, repeated = load("llama", plan), load("llama", plan, num_key_value_heads=4)
    weights = grouped.state_dict()
    for path in [path for path in weights if "k_proj" in path or "v_proj" in path]:
        weights[path] = weights[path].view(2, 8, 32).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(weights)
    torch.testing.assert_close(
        states(grouped, **inputs("llama")), states(repeated, **inputs("llama")), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("part", ["payment", "scores", "gain"])
def test_heads_change_places_with_their_options(part):
    """Permuting the heads of every layer, their options along, changes nothing after the output projection."""
    values, order = (0.1, 0.3, 0.6, 0.9), torch.tensor([2, 0, 3, 1])
    make = {
        "payment": lambda numbers: AttentionPlan(payment=Mixture(floor=None, budget=numbers)),
        "scores": lambda numbers: AttentionPlan(scores=Bounded(bound=numbers)),
        "gain": lambda numbers: AttentionPlan(scores=DynamicScale(alpha=numbers)),
    }[part]
    one, other, given = load("bert", make(values)), load("bert", make([values[i] for i in order])), inputs("bert")
    wanted = states(one, **given)
    assert (states(other, **given) - wanted).abs().max() > 1e-3
    with torch.no_grad():
        for layer in other.encoder.layer:
            attention = layer.attention
            for projection in (attention.self.query, attention.self.key, attention.self.value):
                projection.weight.copy_(projection.weight.view(4, 8, 32)[order].flatten(0, 1))
                projection.bias.copy_(projection.bias.view(4, 8)[order].flatten())
            dense = attention.output.dense.weight
            dense.copy_(dense.view(32, 4, 8)[:, order].flatten(1, 2))
    torch.testing.assert_close(states(other, **given), wanted, rtol=0, atol=1e-5)
