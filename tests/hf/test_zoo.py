"""Families beyond the four: neutral equals eager, pads change nothing, gradients reach learned biases."""

import pytest
import torch
from transformers import EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

import zoo
from families import SHORT
from hf_fullpay import PRESETS, AttentionPlan, Band, Clamp, DynamicScale, Full, Mixture
from hf_fullpay.hf.bind import layers_of
from small import NEUTRAL, plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
FULL = [name for name, plan in PRESETS.items() if isinstance(plan.reach, Full)]
TEXTS = [name for name, (kind, *_) in zoo.ROUTING.items() if kind in ("text", "causal")]
CROSSED = [name for name, (kind, *_) in zoo.ROUTING.items() if kind in ("pair", "speech")]


def fitting(name):
    """Presets that make sense for a family: some have no meaning in cross-attention."""
    return [p for p in FULL if name not in CROSSED or not PRESETS[p].misfit(cross=True, causal=False, image=False)]


def carrying(name, plan):
    return zoo.make(name, "fullpay_custom", fullpay=plan.to_dict())


def close(one, other, tolerance=1e-4):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def real(given, output):
    """States of real tokens; those of pads have no meaning."""
    mask = given.get("attention_mask")
    return output if mask is None or "decoder_input_ids" in given else output[mask.bool()]


@pytest.mark.parametrize("name", zoo.ROUTING)
def test_neutral_equals_eager(name):
    """Also causal by argument without a mask (CLIP text), with learned biases (T5, BEiT), sliding windows, and where a
    module does not say whether it is causal (Splinter)."""
    for pads in (0, 3):
        given = zoo.given(name, pads=pads)
        eager, neutral = states(zoo.make(name, "eager"), **given), states(carrying(name, NEUTRAL), **given)
        close(real(given, neutral), real(given, eager))


@pytest.mark.parametrize("name", zoo.ROUTING)
def test_the_gradients_of_neutral_equal_those_of_eager(name):
    """The relative biases of T5, BEiT and Swin learn through our attention too."""
    given = zoo.given(name)
    gradients = []
    for model in (zoo.make(name, "eager"), carrying(name, NEUTRAL)):
        model(**given)[0].tanh().sum().backward()
        gradients.append({path: p.grad for path, p in model.named_parameters() if p.grad is not None})
    eager, neutral = gradients
    assert eager.keys() == neutral.keys()
    for path, gradient in eager.items():
        close(neutral[path], gradient, 1e-3 * max(float(gradient.abs().max()), 1.0))
    learned = [path for path in eager if "relative" in path and "bias" in path]
    assert bool(learned) == (name in ("t5", "beit", "swin"))
    assert all(eager[path].abs().max() > 1e-3 for path in learned)


@pytest.mark.parametrize("name", zoo.ROUTING)
def test_every_preset_matters(name):
    """The functions are called in every layer, and change what a model computes."""
    given = zoo.given(name)
    eager = states(zoo.make(name, "eager"), **given)
    for preset in fitting(name):
        model = zoo.make(name, preset)
        assert set(plans(model)) == {PRESETS[preset]}
        output = states(model, **given)
        assert output.isfinite().all()
        # A gain starts at one, and a clamp leaves weights alone that lie above the floor.
        if not isinstance(PRESETS[preset].scores, DynamicScale) and not isinstance(PRESETS[preset].payment, Clamp):
            assert (output - eager).abs().max() > 1e-3, preset


@pytest.mark.parametrize("name", TEXTS)
def test_padded_equals_alone(name):
    for preset in fitting(name):
        model, given = zoo.make(name, preset), zoo.given(name, pads=3)
        padded = states(model, **given)
        close(padded[:1, :6], states(model, input_ids=given["input_ids"][:1, :6]), 2e-4)
        close(padded[1:], states(model, input_ids=given["input_ids"][1:]), 2e-4)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_cutting_masked_encoder_states_changes_nothing(name):
    """Cross-attention: no causality, and the pads of the other sequence do not exist."""
    for preset in fitting(name):
        model, given = zoo.make(name, preset), zoo.given(name, pads=3)
        whole = states(model, **given)[:1]
        cut = {"input_ids": given["input_ids"][:1, :6], "decoder_input_ids": given["decoder_input_ids"][:1]}
        close(whole, states(model, **cut), 2e-4)
        changed = {**cut, "input_ids": cut["input_ids"].clone()}
        changed["input_ids"][0, -1] = 50
        assert (states(model, **changed)[0, 0] - whole[0, 0]).abs().max() > 1e-3  # the first query sees the last key


@pytest.mark.parametrize(("name", "preset"), [(name, preset) for name in CROSSED for preset in fitting(name)])
def test_decoding_beside_an_encoder(name, preset):
    model, given = zoo.make(name, preset), zoo.given(name)
    ids = given.pop("decoder_input_ids")
    source = given.get("input_features", given.get("input_ids"))
    encoded = BaseModelOutput(
        last_hidden_state=states(model.get_encoder(), **{model.get_encoder().main_input_name: source})
    )
    whole = states(model, encoder_outputs=encoded, decoder_input_ids=ids, use_cache=False)
    cache, found = None, []
    for start, stop in ((0, 3), (3, 4), (4, 6)):
        with torch.no_grad():
            result = model(encoder_outputs=encoded, decoder_input_ids=ids[:, start:stop], cache=cache, use_cache=True)
        cache = result.past_key_values
        assert isinstance(cache, EncoderDecoderCache)
        found.append(result[0])
    close(torch.cat(found, 1), whole, 2e-4)


@pytest.mark.parametrize("name", CROSSED)
def test_layers_count_from_zero_within_each_stack(name):
    """Also where a block keeps its parts in a list of its own (T5)."""
    model = carrying(name, AttentionPlan(payment=Mixture(), layers=[1]))
    numbers = [layer.index for _, _, layer in layers_of(model)]
    totals = {layer.total for _, _, layer in layers_of(model)}
    assert (numbers, totals) == ([0, 1, 0, 0, 1, 1], {2})
    assert [not plan.is_vanilla for plan in plans(model)] == [number == 1 for number in numbers]


@pytest.mark.parametrize("name", ["mistral", "qwen3", "gemma3"])
def test_a_window_of_the_model_is_narrowed_by_a_band(name):
    """The shorter of both decides, in one layer."""
    one = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    options = {} if name == "mistral" else {"layer_types": one["layer_types"]}
    for size in (2, SHORT, 7):
        plan = AttentionPlan(reach=Band(size))
        model = zoo.make(name, "fullpay_custom", fullpay=plan.to_dict(), num_hidden_layers=1, **options)
        embedded = torch.randn(1, 9, 32, requires_grad=True)
        output = model(inputs_embeds=embedded, use_cache=False)[0]
        probe = torch.randn(32)
        (gradient,) = torch.autograd.grad(output[0, 8] @ probe, embedded)
        reached = gradient[0].abs().sum(-1).nonzero().flatten().tolist()
        assert reached == list(range(9 - min(size, 4), 9))
