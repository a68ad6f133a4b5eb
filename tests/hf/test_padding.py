"""Pads change nothing for real tokens, whatever their number and side; rows of a batch never meet."""

import pytest
import torch

from families import CAUSAL, TEXT, build, inputs
from hf_fullpay import Band
from small import EVERYWHERE, ON_TEXT, load, short, states, watched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def close(one, other, tolerance=2e-4):
    torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


def places(given):
    """Positions that count real tokens only, which learned positions need."""
    return {**given, "position_ids": (given["attention_mask"].cumsum(-1) - 1).clamp_min(0)}


def as_embeddings(model, given):
    """The same inputs as embeddings that want a gradient."""
    given = dict(given)
    if "pixel_values" in given:
        pixels = given["pixel_values"].clone().requires_grad_()
        return pixels, {"pixel_values": pixels}
    embedded = model.get_input_embeddings()(given.pop("input_ids")).detach().requires_grad_()
    return embedded, {**given, "inputs_embeds": embedded}


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_alone(family, name, side):
    """O01, O09, O10: any number of pads on either side; and the mask matters, or this would prove nothing."""
    model = load(family, name)
    # Pads after the real tokens of a causal model are invisible anyway.
    matters = side == "left" or not (family in CAUSAL or isinstance(short(name).reach, Band))
    for pads in (1, 4, 8):
        given = places(inputs(family, length=9, **{side: pads}))
        ids, real = given["input_ids"], slice(pads, None) if side == "left" else slice(None, 9 - pads)
        padded = states(model, **given)
        close(padded[:1, real], states(model, input_ids=ids[:1, real]))
        close(padded[1:], states(model, input_ids=ids[1:]))
        unmasked = states(model, input_ids=ids, position_ids=given["position_ids"])
        if matters and not (isinstance(short(name).reach, Band) and pads == 8):
            assert (unmasked[:1, real] - padded[:1, real]).abs().max() > 1e-3


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
def test_a_mask_of_ones_is_no_mask(family, name):
    model, given = load(family, name), inputs(family)
    ones = torch.ones_like(given["input_ids"])
    assert torch.equal(states(model, **given), states(model, **given, attention_mask=ones))


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
def test_a_row_of_pads_alone_harms_nobody(family, name):
    """O14: finite for itself, nothing for its mate, in values and gradients."""
    model, given = load(family, name), inputs(family)
    given["attention_mask"] = torch.tensor([[1] * 9, [0] * 9])
    embedded, wanted = as_embeddings(model, given)
    output = model(**wanted)[0]
    close(output[:1], states(model, input_ids=given["input_ids"][:1]))
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(p.grad.isfinite().all() for p in [embedded, *model.parameters()] if p.grad is not None)


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_batch_mates_do_not_meet(family, name):
    """O11: alone or in company the same result, and no gradient from one row to another."""
    model, given = load(family, name), inputs(family, batch=8)
    together = states(model, **given)
    for size in (1, 3):
        part = {key: value[:size] for key, value in given.items()}
        close(together[:size], states(model, **part), 1e-5)
    order = torch.randperm(8)
    close(together[order], states(model, **{key: value[order] for key, value in given.items()}), 1e-5)
    leaf, wanted = as_embeddings(model, given)
    model(**wanted)[0][0].square().sum().backward()
    assert leaf.grad[0].abs().max() > 0
    assert not leaf.grad[1:].any()


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
def test_half_precision_ranks_alike_in_any_company(family, name):
    """O11 in BF16, where sums may round differently: the first choice stays wherever it was clear."""
    model = load(family, name, head=family != "bert").to(torch.bfloat16)
    given = inputs(family, batch=8)
    together, alone = (states(model, input_ids=given["input_ids"][:size]).float()[0] for size in (8, 1))
    best = alone.topk(2, -1).values
    clear = best[..., 0] - best[..., 1] > 0.1
    assert torch.equal(together.argmax(-1)[clear], alone.argmax(-1)[clear])
    assert clear.any()


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
def test_the_mask_stays_as_small_as_the_case_allows(family, name):
    """Encoders get key padding, causal models a flag or padding with a third dimension; never a square."""
    plain, padded = {"bert": (None, 2), "gpt2": (0, 3), "llama": (0, 3), "vit": (None, None)}[family]
    model = build(family, name, head=False)
    for given, dimensions in ((inputs(family), plain), (inputs(family, left=2), padded)):
        with watched(name) as calls:
            states(model, **given)
        assert [call.mask if call.mask is None else call.mask.ndim for call in calls] == [dimensions] * 2


@pytest.mark.parametrize("family", TEXT)
def test_long_inputs_never_make_a_square(family, monkeypatch):
    """No tensor with N x M entries per head appears on the host path: what the mean adds is linear in N."""
    n, made = 150, []
    model = build(family, "fullpay", head=False)
    stock = torch.arange

    def counted(*args, **kwargs):
        made.append(stock(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(torch, "arange", counted)
    with watched("fullpay") as calls:
        states(model, **inputs(family, length=n, right=3, batch=1))
    assert all(call.mask.numel() == n for call in calls)
    assert all(tensor.numel() <= n + 1 for tensor in made)
