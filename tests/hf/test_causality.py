"""Who sees whom, through a whole model: no future in a decoder, everything in an encoder, a band exactly its window."""

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from families import CAUSAL, build, inputs, tiny
from hf_fullpay import PRESETS, AttentionPlan, Band, DelayBias, Full, FullPayWarning, Mixture, WindowGlobal, Windows
from hf_fullpay.payment.mixture import Budget
from small import EVERYWHERE, ON_CAUSAL, load, on, pairs_of, short, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
N = 9
ENCODERS = [(family, name) for family, name in EVERYWHERE if family in ("bert", "vit")]


def is_local(name):
    return isinstance(PRESETS[name].reach, Band | WindowGlobal | Windows)


def in_two_layers(name, allowed):
    """What reaches what through two layers of a preset, out of the pairs (N, N) that the mask allows."""
    if pays_all(name):
        return allowed
    first, second = (pairs_of(short(name), allowed, layer)[0, 0].float() for layer in (0, 1))
    return second @ first > 0


def pays_all(name):
    """A floor to everything that the mask allows, also outside a band."""
    return getattr(PRESETS[name].payment, "pay", None) == "visible"


def reached(model, **extra):
    """Which inputs have a gradient on which outputs, (N, N): tokens of a text, or patches of an image."""
    if "ViT" in type(model).__name__:
        pixels = inputs("vit", batch=1)["pixel_values"].requires_grad_()
        output, leaf = model(pixel_values=pixels)[0][:, 1:], pixels
        tokens = lambda g: g.unfold(2, 8, 8).unfold(3, 8, 8).abs().sum((0, 1, 4, 5)).flatten()  # noqa: E731
    else:
        leaf = model.get_input_embeddings()(inputs("llama", batch=1, length=N)["input_ids"]).detach().requires_grad_()
        output = model(inputs_embeds=leaf, use_cache=False, **extra)[0]
        tokens = lambda g: g.abs().sum((0, 2))  # noqa: E731
    probe = torch.randn(output.shape[-1])
    rows = [
        torch.autograd.grad((output[0, i] * probe).sum(), leaf, retain_graph=True)[0] for i in range(output.shape[1])
    ]
    return torch.stack([tokens(row) for row in rows]) != 0


@pytest.mark.parametrize(("family", "name"), ON_CAUSAL)
def test_no_future(family, name):
    """Exactly zero, through centres, means and counts too; and all that may be seen is."""
    seen = reached(load(family, name))
    assert torch.equal(seen, in_two_layers(name, torch.ones(N, N, dtype=torch.bool).tril()))


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_band_of_one_layer_is_its_window(family, size):
    seen = reached(
        load(family, AttentionPlan(reach=Band(size)), num_hidden_layers=1)
        if family != "gpt2"
        else load(family, AttentionPlan(reach=Band(size)), n_layer=1)
    )
    assert torch.equal(seen, torch.ones(N, N, dtype=torch.bool).tril().triu(1 - size))


@pytest.mark.parametrize(("family", "name"), ENCODERS)
def test_encoders_see_everything(family, name):
    """O05: their all-true mask must not be taken for causality."""
    seen = reached(load(family, name))
    n = 17 if family == "vit" else N
    wanted = in_two_layers(name, torch.ones(n, n, dtype=torch.bool))
    assert torch.equal(seen, wanted[1:, 1:] if family == "vit" else wanted)  # of an image, patches to patches


@pytest.mark.parametrize("name", [name for name, plan in PRESETS.items() if isinstance(plan.payment, Budget)])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "vit"])
def test_a_floor_keeps_the_way_open_where_softmax_closes_it(family, name):
    """Scores so large that softmax sends nothing to most keys: no gradient under SDPA, always one with a floor."""
    models = [build(family, head=False), load(family, name)]
    with torch.no_grad():
        for model in models:
            for path, parameter in model.named_parameters():
                if any(word in path for word in ("q_proj", "k_proj", "query", "key", "c_attn.weight")):
                    parameter[..., : 64 if "c_attn" in path else None] *= 40
    stock, ours = (reached(model) for model in models)
    wanted = torch.ones_like(ours).tril() if family in CAUSAL else torch.ones_like(ours)
    assert not torch.equal(stock & wanted, wanted)
    assert torch.equal(ours, wanted)


@pytest.mark.parametrize(("family", "name"), [pair for pair in ON_CAUSAL if not is_local(pair[1])])
@pytest.mark.parametrize("way", ["argument", "config"])
@pytest.mark.parametrize("pad", [False, True])
def test_a_decoder_as_encoder(family, name, way, pad):
    """O06: is_causal=False opens every row, and the floor counts all keys."""
    model = load(family, name)
    given = inputs(family, length=6, right=int(pad))
    causal = states(model, **given)
    extra = {}
    if way == "argument":
        extra["is_causal"] = False
    else:
        model.config.is_causal = False
    opened = model(**given, **extra, use_cache=False, output_attentions=True)
    n = 6 - pad
    visible = torch.zeros(6, 6, dtype=torch.bool)
    visible[:, :n] = True
    for layer in opened.attentions:
        assert (layer[0, :, :, :n] > 0).all()
        assert not layer[0, :, :, n:].any()
        payment = PRESETS[name].payment
        if isinstance(payment, Budget):
            assert layer[0, :, :, :n].min() >= min(payment.floor, payment.budget / n) - 1e-6
    assert (opened[0] - causal)[0, 0].abs().max() > 1e-3


@pytest.mark.parametrize("name", on("bert"))
def test_permuting_tokens_without_positions(name):
    """An encoder without positions knows no order, unless its reach does or its scores count distances."""
    model, given = load("bert", name), inputs("bert")
    with torch.no_grad():
        model.embeddings.position_embeddings.weight.zero_()
    order = torch.tensor([3, 0, 8, 1, 7, 2, 6, 4, 5])
    plain, permuted = states(model, **given), states(model, input_ids=given["input_ids"][:, order])
    error = (permuted - plain[:, order]).abs().max()
    blind = isinstance(PRESETS[name].reach, Full) and not isinstance(PRESETS[name].scores, DelayBias)
    assert error < 1e-5 if blind else error > 1e-2


class Stub(nn.Module):
    """An attention module that does not say whether it is causal."""


@pytest.mark.parametrize("name", [name for name in PRESETS if not is_local(name)])
def test_a_module_that_says_nothing_sees_everything_and_is_told(name):
    """O05."""
    query, key, value = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    with pytest.warns(FullPayWarning, match=r"Stub says neither .* every query sees every key"):
        output, _ = AttentionInterface()[name](Stub(), query, key, value, None)
    (gradient,) = torch.autograd.grad(output[:, 0].sum(), value)
    assert (gradient[:, :, -1] != 0).all()


@pytest.mark.parametrize("name", on("vit"))
@pytest.mark.parametrize(("size", "tokens"), [((48, 32), 1 + 6 * 4), ((32, 40), 1 + 4 * 5)])
def test_images_that_are_not_square(name, size, tokens):
    """O55: nothing is tied to the size that the model was built for."""
    pixels = torch.randn(2, 3, *size)
    output = states(load("vit", name), pixel_values=pixels, interpolate_pos_encoding=True)
    assert output.shape == (2, tokens, 32)
    assert output.isfinite().all()
    neutral = states(
        load("vit", AttentionPlan(payment=Mixture(budget=0.0))), pixel_values=pixels, interpolate_pos_encoding=True
    )
    stock = states(build("vit", head=False), pixel_values=pixels, interpolate_pos_encoding=True)
    torch.testing.assert_close(neutral, stock, rtol=0, atol=1e-5)
    assert (
        short(name).is_vanilla
        or PRESETS[name].describe().startswith("DynamicScale")
        or (output - stock).abs().max() > 1e-3
    )


def test_the_families_are_what_their_configs_say():
    """A guard of this file: two decoders, two encoders."""
    assert [
        bool(getattr(tiny(family).config, "is_decoder", False) or family in CAUSAL)
        for family in ("llama", "gpt2", "bert", "vit")
    ] == [True, True, False, False]
