"""A plan for some layers only: those run it, the others are ordinary, on stock classes and in every family."""

import pytest
import torch

import hf_fullpay
from families import FAMILIES, build, inputs
from hf_fullpay import PRESETS, AttentionPlan, Mixture
from hf_fullpay.hf.bind import layers_of
from hf_fullpay.plan import ORDINARY
from small import load, plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
DEPTH = 4
POLICIES = [
    ("all_but_last", [1, 1, 1, 0]),
    ("from:1", [0, 1, 1, 1]),
    ([0], [1, 0, 0, 0]),
    ([], [0, 0, 0, 0]),
    ({"0-1": "vanilla", "2-": "all"}, [0, 0, 1, 1]),
    ({"0": "all", "1-2": "vanilla", "3": "all"}, [1, 0, 0, 1]),
]
STRONG = Mixture(floor=None, budget=0.5)


def deep(family, attention):
    depth = {"n_layer" if family == "gpt2" else "num_hidden_layers": DEPTH}
    model = build(family, "sdpa", head=False, **depth) if attention == "sdpa" else load(family, attention, **depth)
    with torch.no_grad():  # deep down the tokens of an encoder are alike, and so are their weights: sharpen
        for path, parameter in model.named_parameters():
            if any(word in path for word in ("q_proj.weight", "query.weight", "c_attn.weight")):
                parameter[..., :32] *= 10
    return model


def blocks(model):
    """The blocks of any of the four, in order."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module) == DEPTH]
    assert len(lists) == 1
    return lists[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "chosen"), POLICIES)
def test_each_layer_runs_what_it_was_told(family, layers, chosen):
    plan = AttentionPlan(payment=STRONG, layers=layers)
    model = deep(family, plan)
    assert plans(model) == [plan if active else ORDINARY for active in chosen]
    assert [layer.index for _, _, layer in layers_of(model)] == list(range(DEPTH))
    weights = model(**inputs(family), output_attentions=True).attentions
    for layer, active in zip(weights, chosen, strict=True):
        n = layer.shape[-1]
        rows = layer[:, :, -1]  # the last query sees every key in all families
        assert (rows.min() >= 0.5 / n - 1e-6) == bool(active)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("layers", "chosen"), POLICIES)
def test_vanilla_layers_equal_sdpa(family, layers, chosen):
    """Given the same input, bit for bit; and the others do not."""
    model, stock = deep(family, AttentionPlan(payment=STRONG, layers=layers)), deep(family, "sdpa")
    given, kept = inputs(family), []
    hooks = [
        block.register_forward_hook(lambda block, args, kwargs, out: kept.append((args, kwargs, out)), with_kwargs=True)
        for block in blocks(model)
    ]
    states(model, **given)
    for hook in hooks:
        hook.remove()
    for block, (args, kwargs, ours), active in zip(blocks(stock), kept, chosen, strict=True):
        # Our own mask says "causal" in one number; SDPA wants none for that, but GPT-2 passes it by position.
        args = [None if isinstance(a, torch.Tensor) and a.ndim == 0 else a for a in args]
        kwargs = {
            key: None if key in ("attention_mask", "cache", "past_key_values") else value
            for key, value in kwargs.items()
        }
        with torch.no_grad():
            theirs = block(*args, **kwargs)
        one, other = (out[0] if isinstance(out, tuple) else out for out in (ours, theirs))
        assert torch.equal(one, other) != bool(active)


@pytest.mark.parametrize("family", FAMILIES)
def test_policies_of_registered_names(family, own_name):
    name = own_name(AttentionPlan(payment=STRONG, layers="from:1"))
    assert [plan.is_vanilla for plan in plans(build(family, name))] == [True, False]
    live = build(family)
    live.set_attn_implementation(name)
    assert [plan.is_vanilla for plan in plans(live)] == [True, False]
    assert torch.equal(states(live, **inputs(family)), states(build(family, name), **inputs(family)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_overrides_the_preset_and_says_so(family):
    plan = AttentionPlan(payment=STRONG, layers="all_but_last")
    with pytest.warns(hf_fullpay.FullPayWarning, match=r"config.fullpay carries a plan of its own.*'bounded'"):
        model = build(family, "bounded", head=False, fullpay=plan.to_dict())
    assert plans(model) == [plan, ORDINARY]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_preset_in_a_config_is_no_surprise(family, recwarn):
    build(family, "bounded", fullpay=PRESETS["bounded"].to_dict())
    assert not [w for w in recwarn if issubclass(w.category, hf_fullpay.FullPayWarning)]


def test_cross_attention_layers_follow_their_block():
    """O28: they have no number of their own, and GPT-2 divides scores by the layer."""
    plan = AttentionPlan(payment=STRONG, layers=[1])
    model = load("gpt2", plan, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
    told = {path: not layer.plan.is_vanilla for path, _, layer in layers_of(model)}
    assert told == {"h.0.attn": False, "h.0.crossattention": False, "h.1.attn": True, "h.1.crossattention": True}
    given = {**inputs("gpt2"), "encoder_hidden_states": torch.randn(2, 5, 32)}
    result = model(**given, output_attentions=True)
    assert result.cross_attentions[0].min() < 0.05 < 0.5 / 5 <= result.cross_attentions[1].min() + 1e-6
    stock = build("gpt2", "sdpa", head=False, add_cross_attention=True, scale_attn_by_inverse_layer_idx=True)
    vanilla = load(
        "gpt2", AttentionPlan(payment=STRONG, layers=[]), add_cross_attention=True, scale_attn_by_inverse_layer_idx=True
    )
    torch.testing.assert_close(states(vanilla, **given), states(stock, **given), rtol=0, atol=1e-5)
