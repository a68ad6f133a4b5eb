"""What cannot be honoured is refused, with the model, the reason and what to do; never run in silence."""

import pytest
import torch
import transformers as t

import zoo
from families import build, inputs, tiny
from hf_fullpay import PRESETS, AttentionPlan, Bounded, Mixture, convert
from hf_fullpay.hf.forward import CARRIER
from small import NEUTRAL, home, load, plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
LOCAL = [name for name, plan in PRESETS.items() if plan.reach.misfit(cross=True, causal=True, image=False)]
TO_DO = r"attn_implementation=|Use a plan|Load "


def says(error, *words):
    for word in words:
        assert word in str(error.value), f"{word!r} is not in {error.value}"


@pytest.mark.parametrize("name", zoo.REFUSED)
@pytest.mark.parametrize("attention", PRESETS)
def test_models_that_we_cannot_serve(name, attention):
    kind, _, reason = zoo.REFUSED[name]
    stem = kind.removesuffix("Model")
    with pytest.raises(ValueError, match=TO_DO) as error:
        zoo.make(name, attention)
    says(error, stem, reason)
    model = zoo.make(name, "eager" if name != "resnet" else None)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=TO_DO) as error:
        model.set_attn_implementation(attention)
    says(error, stem, reason)
    assert model.config._attn_implementation == before
    assert not plans(model)


@pytest.mark.parametrize("name", zoo.REFUSED)
def test_refused_at_every_door(name, tmp_path):
    model = zoo.make(name, "eager" if name != "resnet" else None)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=TO_DO):
        t.AutoModel.from_pretrained(tmp_path, attn_implementation="fullpay")
    with pytest.raises(ValueError, match=TO_DO):
        t.AutoModel.from_config(model.config, attn_implementation="fullpay")
    assert t.AutoModel.from_pretrained(tmp_path) is not None


def with_cross_attention(attention, name):
    """A GPT-2 and a BERT that read a second sequence, and the models with an encoder of the zoo."""
    if name == "gpt2":
        return build("gpt2", attention, head=False, add_cross_attention=True)
    if name == "bert":
        return build("bert", attention, head=False, add_cross_attention=True, is_decoder=True)
    return zoo.make(name, attention)


@pytest.mark.parametrize("name", ["gpt2", "bert", "t5", "bart", "whisper"])
@pytest.mark.parametrize("attention", LOCAL)
def test_a_local_reach_has_no_meaning_in_cross_attention(name, attention):
    reason = "no meaning in cross-attention"
    if home(attention) == "vit":  # refused before: its layers read text
        reason = "patches of an image|in a decoder"
    with pytest.raises(ValueError, match=rf"({reason}).*reach=Full\(\)"):
        with_cross_attention(attention, name)
    model = with_cross_attention("sdpa", name)
    with pytest.raises(ValueError, match=reason):
        model.set_attn_implementation(attention)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_cross_attention_sees_every_key(name):
    """And none of the hidden ones; neutral equals the stock model."""
    given = {"input_ids": inputs("gpt2")["input_ids"], "encoder_hidden_states": torch.randn(2, 5, 32)}
    mask = torch.tensor([[1, 1, 1, 0, 0], [1] * 5])
    for attention in ("fullpay", "bounded", "fullpay_clamp"):
        model = with_cross_attention(attention, name)
        whole = states(model, **given, encoder_attention_mask=mask)
        cut = states(
            model, input_ids=given["input_ids"][:1], encoder_hidden_states=given["encoder_hidden_states"][:1, :3]
        )
        torch.testing.assert_close(whole[:1], cut, rtol=0, atol=2e-4)
        assert (states(model, **given)[0] - whole[0]).abs().max() > 1e-3
    stock = states(with_cross_attention("sdpa", name), **given, encoder_attention_mask=mask)
    neutral = with_cross_attention("sdpa", name)
    neutral.config.fullpay = NEUTRAL.to_dict()
    neutral.set_attn_implementation(CARRIER)
    torch.testing.assert_close(states(neutral, **given, encoder_attention_mask=mask), stock, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
@pytest.mark.parametrize("layers", ["from:2", [0, 2], {"0-5": "all"}, {"1": "all"}])
def test_layers_that_a_model_does_not_have(family, layers):
    plan = AttentionPlan(payment=NEUTRAL.payment, layers=layers)
    with pytest.raises(ValueError, match=r"layers.*expected .*got "):
        load(family, plan)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_a_name_without_its_plan(family):
    with pytest.raises(ValueError, match=r"expected a plan in config.fullpay"):
        build(family, CARRIER)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
@pytest.mark.parametrize(
    ("plan", "reason"), [({"version": 99}, "newer hf-fullpay"), ("fullpay", "a dict"), ({"reech": 1}, "reech")]
)
def test_plans_that_cannot_be_read(family, plan, reason):
    with pytest.raises(ValueError, match=reason):
        build(family, CARRIER, fullpay=plan)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_options_per_head_that_do_not_fit(family):
    """At load, not at the first forward; and a converted checkpoint that cannot run is never written."""
    for part in ({"payment": Mixture(budget=[0.1, 0.2, 0.3])}, {"scores": Bounded(bound=[1.0, 2.0])}):
        with pytest.raises(ValueError, match=r"(budget|bound): expected one number or one per head \(4\), got [23]"):
            load(family, AttentionPlan(**part))
        with pytest.raises(ValueError, match=r"one per head \(4\)"):
            convert(build(family), AttentionPlan(**part))
    fits = AttentionPlan(payment=Mixture(budget=[0.1, 0.2, 0.3, 0.4]))
    assert states(load(family, fits), **inputs(family)).isfinite().all()


def test_an_unknown_name_is_refused_by_transformers():
    with pytest.raises(ValueError, match="fulpay"):
        tiny("llama").base(t.LlamaConfig(num_hidden_layers=1, attn_implementation="fulpay"))
