"""Feed-forward layers against their formulas; SwiGLU costs what GELU costs."""

import pytest
import torch
from torch.nn.functional import gelu, silu

from hf_fullpay.layers import FEED_FORWARDS, GELUFeedForward, SwiGLUFeedForward


def test_gelu_is_its_formula():
    layer, tokens = GELUFeedForward(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    up, down = layer.up, layer.down
    torch.testing.assert_close(layer(tokens), gelu(tokens @ up.weight.T + up.bias) @ down.weight.T + down.bias)


def test_swiglu_is_its_formula():
    layer, tokens = SwiGLUFeedForward(6, 10).double(), torch.randn(2, 3, 6, dtype=torch.float64)
    inner = silu(tokens @ layer.gate.weight.T) * (tokens @ layer.up.weight.T)
    torch.testing.assert_close(layer(tokens), inner @ layer.down.weight.T)


def test_both_cost_the_same_by_default():
    sizes = [sum(p.numel() for p in kind(96).parameters() if p.ndim > 1) for kind in FEED_FORWARDS.values()]
    assert sizes == [8 * 96**2] * 2


@pytest.mark.parametrize("kind", FEED_FORWARDS.values())
def test_dropout_is_for_training_alone(kind):
    layer, tokens = kind(8, dropout=0.5), torch.randn(1, 4, 8)
    assert not torch.equal(layer(tokens), layer(tokens))
    layer.eval()
    assert torch.equal(layer(tokens), layer(tokens))


@pytest.mark.parametrize("kind", FEED_FORWARDS.values())
@pytest.mark.parametrize("options", [{"width": 0}, {"width": 8, "hidden": 0}, {"width": 8, "dropout": 1.0}])
def test_bad_options(kind, options):
    with pytest.raises(ValueError, match="expected"):
        kind(**options)
