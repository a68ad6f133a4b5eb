"""Names: the same at every door of Transformers, and switching them on a live model is all or nothing."""

import pytest
import torch
import transformers as t
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

import hf_fullpay
from families import FAMILIES, build, inputs, randomise, tiny
from hf_fullpay import PRESETS, AttentionPlan, Band, Bounded, Mixture
from hf_fullpay.hf.forward import CARRIER
from hf_fullpay.hf.masks import compact_mask
from hf_fullpay.hf.register import MISREAD
from small import EVERYWHERE, load, plans, states, watched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def test_both_registries_know_the_same_names():
    """O01: with the attention alone, masks would be ignored in silence."""
    attentions = AttentionInterface()
    ours = {name for name in attentions if getattr(attentions[name], "__module__", "").startswith("hf_fullpay.")}
    masks = AttentionMaskInterface()
    assert ours == {name for name in masks if masks[name] is compact_mask} == {*PRESETS, CARRIER}


@pytest.mark.parametrize("name", [*PRESETS, CARRIER])
def test_names_mean_nothing_else_to_transformers(name):
    """O61."""
    assert not any(word in name for word in MISREAD)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_every_door_of_the_auto_classes(family, name, tmp_path):
    """O03: from_config, and from_pretrained with and without a config beside the name."""
    parts, given = tiny(family), inputs(family)
    model = build(family, name)
    model.save_pretrained(tmp_path)
    wanted = states(model, **given)
    made = parts.auto.from_config(parts.config, attn_implementation=name)
    assert made.config._attn_implementation == name
    assert plans(made) == [PRESETS[name]] * 2
    parts.config._attn_implementation = "sdpa"
    for config in ({}, {"config": parts.config}):
        loaded = parts.auto.from_pretrained(tmp_path, attn_implementation=name, **config)
        assert loaded.config._attn_implementation == name
        assert torch.equal(states(loaded, **given), wanted)
    assert parts.auto.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_switching_a_live_model_and_back(family, name):
    """O04: as if loaded so, training included, and back bit for bit."""
    model, given = build(family), inputs(family)
    first = states(model, **given)
    model.set_attn_implementation(name)
    assert torch.equal(states(model, **given), states(build(family, name), **given))
    model.train()
    model(**given)[0].square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval().set_attn_implementation("sdpa")
    assert torch.equal(states(model, **given), first)
    assert not plans(model)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_a_raw_assignment_to_the_config_runs_that_name(family, name):
    """It goes behind our back, on a stock model and on one that ran another of our names."""
    wanted, given = states(build(family, name), **inputs(family)), inputs(family)
    for before in ("sdpa", "bounded", "fullpay"):
        model = build(family, before)
        model.config._attn_implementation = name
        if "layer_index" in PRESETS[name].inputs:
            with pytest.raises(ValueError, match=r"knows its layer.*set_attn_implementation"):
                states(model, **given)
            continue
        assert torch.equal(states(model, **given), wanted), before


def test_a_raw_assignment_cannot_choose_layers(own_name):
    name = own_name(AttentionPlan(payment=Mixture(), layers=[1]))
    for before in ("sdpa", "fullpay"):
        model = build("bert", before)
        model.config._attn_implementation = name
        with pytest.raises(ValueError, match=r"set_attn_implementation"):
            states(model, **inputs("bert"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_refused_switch_changes_nothing(family, own_name):
    name = own_name(AttentionPlan(payment=Mixture(), layers="from:7"))
    for before in ("sdpa", "bounded_fullpay"):
        model, given = build(family, before), inputs(family)
        output, told = states(model, **given), plans(model)
        for wrong in (name, "no_such_name"):
            with pytest.raises(ValueError, match=r"layers|no_such_name"):
                model.set_attn_implementation(wrong)
        assert model.config._attn_implementation == before
        assert plans(model) == told
        assert torch.equal(states(model, **given), output)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_dict_form_of_a_model_without_parts(family, tmp_path):
    live, given = build(family), inputs(family)
    live.save_pretrained(tmp_path)
    live.set_attn_implementation({"": "bounded"})
    loaded = tiny(family).auto.from_pretrained(tmp_path, attn_implementation={"": "bounded"})
    for model in (live, loaded):
        assert plans(model) == [PRESETS["bounded"]] * 2
        torch.testing.assert_close(states(model, **given), states(build(family, "bounded"), **given), rtol=0, atol=2e-6)


def test_switching_a_part_of_a_model():
    model, given = build("llama"), inputs("llama")
    model.model.set_attn_implementation("fullpay")
    assert torch.equal(states(model, **given), states(build("llama", "fullpay"), **given))


def test_own_names(own_name):
    """A name of one's own runs its plan; registering it again changes what is loaded from then on."""
    given, first, second = inputs("llama"), AttentionPlan(Band(3)), AttentionPlan(scores=Bounded(bound=0.5))
    name = own_name(first)
    model = build("llama", name, head=False)
    assert torch.equal(states(model, **given), states(load("llama", first), **given))
    hf_fullpay.register(name, second)
    assert plans(model) == [first] * 2
    assert torch.equal(states(model, **given), states(load("llama", first), **given))
    assert torch.equal(states(build("llama", name, head=False), **given), states(load("llama", second), **given))


def composite(kind):
    """ViT or BERT that a GPT-2 with cross-attention looks at."""
    reader = tiny("gpt2", add_cross_attention=True, is_decoder=True).config
    first, outer, whole = {
        "image": ("vit", t.VisionEncoderDecoderConfig, t.VisionEncoderDecoderModel),
        "text": ("bert", t.EncoderDecoderConfig, t.EncoderDecoderModel),
    }[kind]
    config = outer.from_encoder_decoder_configs(tiny(first).config, reader)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    given = {"decoder_input_ids": inputs("gpt2")["input_ids"][:, :4], **inputs(first)}
    return config, whole, given


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize(
    "names",
    [
        "fullpay",
        {"encoder": "fullpay", "decoder": "sdpa"},
        {"": "sdpa", "decoder": "bounded"},
        {"encoder": "band_causal", "decoder": "fullpay"},
    ],
)
def test_parts_of_a_composite_model(kind, names, tmp_path):
    """O02: every part runs the name asked for, at every door, and no other."""
    config, whole, given = composite(kind)
    asked = {part: names if isinstance(names, str) else names.get(part, "sdpa") for part in ("encoder", "decoder")}
    torch.manual_seed(0)
    stock = randomise(whole(config)).eval()
    stock.save_pretrained(tmp_path)
    live = whole.from_pretrained(tmp_path)
    live.set_attn_implementation(names)
    found = []
    for model in (whole.from_pretrained(tmp_path, attn_implementation=names), live):
        assert model.encoder.config._attn_implementation == asked["encoder"]
        assert model.decoder.config._attn_implementation == asked["decoder"]
        calls = dict.fromkeys(asked.values(), 0)
        for name in calls:
            with watched(name) as seen:
                output = states(model, **given)
            calls[name] = len(seen)
        layers = {"encoder": 2, "decoder": 4}
        assert calls == {name: sum(layers[part] for part in asked if asked[part] == name) for name in calls}
        found.append(output)
    assert torch.equal(*found)
    assert (found[0] - states(stock, **given)).abs().max() > 1e-3
    live.set_attn_implementation("sdpa")
    assert torch.equal(states(live, **given), states(whole.from_pretrained(tmp_path), **given))


def test_a_misspelt_part_is_refused():
    """Transformers ignores it in silence."""
    config, whole, _ = composite("text")
    model = whole(config)
    with pytest.raises(ValueError, match=r"parts .*'decoder', 'encoder'.*got \['decodr'\]"):
        model.set_attn_implementation({"decodr": "fullpay"})
    assert model.decoder.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("before", ["sdpa", "bounded"])
def test_a_refused_part_leaves_the_whole_as_it_was(before, own_name):
    """Whichever part is refused, the first or the last."""
    missing = own_name(AttentionPlan(payment=Mixture(), layers="from:7"))
    config, whole, given = composite("text")
    model = whole(config).eval()
    model.set_attn_implementation(before)
    output, told = states(model, **given), plans(model)
    for names in ({"encoder": "fullpay", "decoder": "band_causal"}, {"encoder": missing, "decoder": "fullpay"}):
        with pytest.raises(ValueError, match=r"band has no meaning|layers"):
            model.set_attn_implementation(names)
        assert {model.encoder.config._attn_implementation, model.decoder.config._attn_implementation} == {before}
        assert plans(model) == told
        assert torch.equal(states(model, **given), output)
