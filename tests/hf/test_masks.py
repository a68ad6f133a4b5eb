"""Masks that a caller makes: bool or added, per head, in any type; four dimensions pass as they are, three do not."""

import pytest
import torch

from families import TEXT, inputs
from small import ON_TEXT, load, on, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
LOWEST = [-float("inf"), torch.finfo(torch.float32).min, torch.finfo(torch.float32).min / 2, -65504.0, -1e4]


def pairs(*, heads=1, batch=2, n=9):
    """Random visible pairs on and below the diagonal."""
    generator = torch.Generator().manual_seed(5)
    drawn = torch.rand(batch, heads, n, n, generator=generator) < 0.6
    return (drawn | torch.eye(n, dtype=torch.bool)).tril()


def additive(visible, lowest, dtype=torch.float32):
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest)


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
def test_all_formats_agree(family, name):
    """O16: hidden is False, minus infinity, or anything from -10000 downwards."""
    model, given, visible = load(family, name), inputs(family), pairs()
    truth = states(model, **given, attention_mask=visible)
    assert (truth - states(model, **given)).abs().max() > 1e-2
    for lowest in LOWEST:
        ours = states(model, **given, attention_mask=additive(visible, lowest))
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lowest", [-1e4, -65504.0])
def test_half_precision_masks_hide(family, name, dtype, lowest):
    model, given, visible = load(family, name).to(dtype), inputs(family), pairs()
    weights = model(**given, attention_mask=additive(visible, lowest, dtype), output_attentions=True).attentions
    assert all((layer[~visible.expand_as(layer)] == 0).all() for layer in weights)


@pytest.mark.parametrize(("family", "name"), ON_TEXT)
def test_masks_per_head(family, name):
    """O17: each head counts and sees its own keys."""
    model, given, visible = load(family, name), inputs(family), pairs(heads=4)
    result = model(**given, attention_mask=visible, output_attentions=True)
    torch.testing.assert_close(result[0], states(model, **given, attention_mask=visible), rtol=0, atol=1e-4)
    for layer in result.attentions:
        assert not layer[~visible].any()
        torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 9))
    shared = states(model, **given, attention_mask=visible[:, :1])
    assert (shared - result[0]).abs().max() > 1e-2


@pytest.mark.parametrize("family", TEXT)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.long])
def test_three_dimensions_are_refused(family, dtype):
    model, given = load(family, "fullpay"), inputs(family)
    with pytest.raises((ValueError, NotImplementedError), match="mask"):
        states(model, **given, attention_mask=torch.ones(2, 9, 9).tril().to(dtype))


@pytest.mark.parametrize("family", TEXT)
def test_masks_that_do_not_fit_are_refused(family):
    model, given = load(family, "fullpay"), inputs(family)
    with pytest.raises(ValueError, match="expected"):
        states(model, **given, attention_mask=torch.ones(2, 3, 9, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="expected"):
        states(model, **given, attention_mask=torch.ones(2, 1, 9, 9, dtype=torch.long))
    for tokens in (8, 10):
        mask = torch.ones(2, tokens).index_fill(1, torch.tensor([0]), 0)
        with pytest.raises(ValueError, match="expected"):
            states(model, **given, attention_mask=mask)


@pytest.mark.parametrize("name", on("bert"))
def test_a_bias_is_added_and_learns(name):
    """Moderate numbers in a mask are scores, not hidden keys, and their gradient comes back."""
    model, given = load("bert", name).double(), inputs("bert")
    bias = (torch.randn(1, 4, 9, 9) * 2).double().requires_grad_()
    output = model(**given, attention_mask=bias)[0]
    assert (output - states(model, **given)).abs().max() > 1e-3
    probe = torch.randn_like(output)
    (gradient,) = torch.autograd.grad((output * probe).sum(), bias)
    step = 1e-4 * gradient / gradient.norm()
    ends = [(states(model, **given, attention_mask=bias.detach() + sign * step) * probe).sum() for sign in (1, -1)]
    assert float(ends[0] - ends[1]) / 2e-4 == pytest.approx(float(gradient.norm()), rel=1e-3)
