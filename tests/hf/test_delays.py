"""Times and delays as arguments of the model call, in every family, with caches, and beta as a learned number."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from converted import learn, learned
from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Band, DelayBias, Mixture, convert
from hf_fullpay.hf.sliding import sliding_cache
from small import load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
PLAN = AttentionPlan(scores=DelayBias(beta=0.4), payment=Mixture(budget=0.1))


def clock(n, batch=2):
    generator = torch.Generator().manual_seed(5)
    return {
        "times": torch.rand(batch, n, generator=generator).cumsum(-1),
        "delays": torch.rand(n, n, generator=generator) * 4,
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_of_the_call_reach_every_layer(family):
    model, given = load(family, PLAN), inputs(family)
    n = 17 if family == "vit" else 9
    plain, told = states(model, **given), states(model, **given, **clock(n))
    assert (told - plain).abs().max() > 1e-3
    with torch.no_grad():
        weights = model(**given, **clock(n), output_attentions=True)
    torch.testing.assert_close(weights[0], told, rtol=0, atol=1e-4)
    slots = {"times": torch.arange(n).expand(2, -1), "delays": torch.zeros(n, n)}
    torch.testing.assert_close(states(model, **given, **slots), plain, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_with_times_of_all_keys(family, static):
    """At every step the times and delays of all tokens so far; with a static cache, of all its slots."""
    model, ids, told = load(family, PLAN), inputs(family)["input_ids"], clock(9)
    whole = states(model, input_ids=ids, use_cache=False, **told)
    cache = StaticCache(config=model.config, max_cache_len=9) if static else DynamicCache(config=model.config)
    found = []
    for start, stop in ((0, 4), (4, 6), (6, 7), (7, 8), (8, 9)):
        m = 9 if static else stop
        part = {"times": told["times"][:, :m], "delays": told["delays"][:m, :m]}
        found.append(states(model, input_ids=ids[:, start:stop], cache=cache, use_cache=True, **part))
    torch.testing.assert_close(torch.cat(found, 1), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", CAUSAL)
def test_times_of_the_new_tokens_alone_are_refused(family):
    model, ids, told = load(family, PLAN), inputs(family)["input_ids"], clock(9)
    cache = DynamicCache(config=model.config)
    states(model, input_ids=ids[:, :5], cache=cache, times=told["times"][:, :5])
    with pytest.raises(ValueError, match=r"times: expected shape \(2, 6\).*cached ones included"):
        states(model, input_ids=ids[:, 5:6], cache=cache, times=told["times"][:, 5:6])


@pytest.mark.parametrize("family", CAUSAL)
@pytest.mark.parametrize("kind", ["dynamic", "static", "sliding"])
def test_a_band_with_delays_and_a_cache(family, kind):
    """Slots as times: distances stay what they are where a cache forgets old keys, or has slots that nothing fills."""
    model = load(family, AttentionPlan(Band(4), DelayBias(beta=0.4), Mixture(budget=0.1)))
    ids = inputs(family)["input_ids"]
    whole = states(model, input_ids=ids, use_cache=False)
    cache = {
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=14),
        "sliding": lambda: sliding_cache(model),
    }[kind]()
    steps = [
        states(model, input_ids=ids[:, start:stop], cache=cache, use_cache=True)
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 9))
    ]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_compiled_with_times_and_delays(family):
    torch._dynamo.reset()
    model, given = load(family, PLAN), inputs(family) | clock(9)
    fast = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(states(fast, **given), states(model, **given), rtol=0, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_pads_change_nothing(family):
    model, told = load(family, PLAN), clock(9)
    given = inputs(family, right=3)
    whole = states(model, **given, **told)[0, :6]
    alone = states(
        model, input_ids=given["input_ids"][:1, :6], times=told["times"][:1, :6], delays=told["delays"][:6, :6]
    )
    torch.testing.assert_close(whole, alone[0], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_beta_is_learned_and_saved(family, tmp_path):
    model, given = convert(build(family, head=False), PLAN), inputs(family)
    assert [p.shape for p in learned(model).values()] == [(4,)] * 2
    torch.testing.assert_close(states(model, **given), states(load(family, PLAN), **given), rtol=0, atol=1e-5)
    model(**given)[0].square().sum().backward()
    assert all(p.grad.abs().min() > 0 for p in learned(model).values())
    learn(model)
    betas = [module()["beta"] for name, module in model.named_modules() if name.endswith("fullpay")]
    assert all((beta > 0).all() for beta in betas)
    model.save_pretrained(tmp_path)
    assert torch.equal(states(type(model).from_pretrained(tmp_path), **given), states(model, **given))


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_cross_attention_is_refused(family):
    decoder = {"is_decoder": True} if family == "bert" else {}
    with pytest.raises(ValueError, match="delay has no meaning in cross-attention"):
        build(family, "delay_aware", head=False, add_cross_attention=True, **decoder)


def test_a_table_of_times_is_no_number_per_head():
    plan = AttentionPlan(scores=DelayBias(beta=0.4, times=range(9), delays=torch.rand(9, 9)))
    model, given = load("bert", plan), inputs("bert")
    assert states(model, **given).isfinite().all()
    with pytest.raises(ValueError, match=r"times: expected shape \(2, 5\)"):
        states(model, **inputs("bert", length=5))
