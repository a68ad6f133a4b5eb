"""Channel attention: the formula, and the identity at the start."""

import pytest
import torch

from hf_fullpay.layers import SqueezeExcite


def test_it_is_its_formula_and_starts_as_the_identity():
    layer, tokens = SqueezeExcite(32, 4).double(), torch.randn(2, 5, 32, dtype=torch.float64)
    assert torch.equal(layer(tokens), tokens)
    torch.nn.init.normal_(layer.excite.weight)
    hidden = torch.relu(layer.squeeze(tokens.mean(1)))
    gate = 2 * torch.sigmoid(layer.excite(hidden))
    torch.testing.assert_close(layer(tokens), tokens * gate[:, None])
    assert layer.float()(tokens.bfloat16()).dtype == torch.bfloat16


def test_the_start_is_no_dead_end():
    layer = SqueezeExcite(32, 4)
    layer(torch.randn(2, 5, 32)).square().sum().backward()
    assert layer.excite.weight.grad.abs().max() > 0


@pytest.mark.parametrize("options", [{"width": 0}, {"width": 8, "reduction": 0}])
def test_bad_options(options):
    with pytest.raises(ValueError, match="expected an integer"):
        SqueezeExcite(**options)
