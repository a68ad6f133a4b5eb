"""Odd input to models: hosts that are ourselves, grids that contradict the image, forecasters fed with anything."""

import math

import pytest
import torch

from families import build, inputs
from hf_fullpay import (
    AttentionPlan,
    FullPayForecaster,
    FullPayForecasterConfig,
    Mixture,
    convert,
    register,
    sliding_cache,
)


def test_a_host_that_is_ourselves_is_refused():
    """It would call itself for ever."""
    for host in ("fullpay_custom", "fullpay"):
        plan = AttentionPlan(payment=Mixture(host=host))
        with pytest.raises(ValueError, match=r"Mixture\(host=\.\.\.\): expected one of") as caught:
            convert(build("llama"), plan)
        offered = str(caught.value).partition("got")[0]
        assert "sdpa" in offered
        assert "fullpay_custom" not in offered
        assert "flex_attention" not in offered  # which Mixture refuses
    register("itself", AttentionPlan(payment=Mixture(host="itself")))
    with pytest.raises(ValueError, match=r"Mixture\(host"):
        build("llama", "itself")


def test_a_grid_of_the_user_is_checked_against_the_tokens():
    model, given = build("vit", "shifted_window"), inputs("vit")
    torch.testing.assert_close(model(**given, patch_grid=(4, 4)).logits, model(**given).logits)
    with pytest.raises(ValueError, match="patch_grid: expected 1 other tokens and 3 x 3 patches"):
        model(**given, patch_grid=(3, 3))


@pytest.fixture
def forecaster():
    plan = AttentionPlan(payment=Mixture(floor=None, budget=0.2)).to_dict()
    model = FullPayForecaster(
        FullPayForecasterConfig(channels=2, context_length=8, initializer_range=0.3, fullpay=plan)
    )
    torch.nn.init.normal_(model.head.weight)
    return model.eval()


VALUES = torch.linspace(-1, 1, 24).view(2, 6, 2)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_forecaster_reads_finite_numbers_but_for_pads(forecaster, bad):
    values, mask = VALUES.clone(), torch.ones(2, 6, dtype=torch.long)
    values[0, 1], mask[0, :3] = bad, 0
    for call in (lambda: forecaster(values), lambda: forecaster.predict(values, 2)):
        with pytest.raises(ValueError, match="expected finite values"):
            call()
    output = forecaster(values, attention_mask=mask).prediction
    torch.testing.assert_close(output[0, 3:], forecaster(VALUES[:1, 3:]).prediction[0])
    assert output.isfinite().all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model([[1.0, 2.0]]), "values as a tensor of real numbers, got list"),
        (lambda model: model(VALUES.to(torch.complex64)), "real numbers, got torch.complex64"),
        (lambda model: model(VALUES, labels=VALUES[:, 1:]), "labels: expected the shape of values"),
        (lambda model: model(VALUES, labels=VALUES[..., :1]), "labels: expected the shape of values"),
    ],
)
def test_a_forecaster_says_what_it_expects(forecaster, call, message):
    with pytest.raises(ValueError, match=message):
        call(forecaster)


def test_a_forecaster_of_nobody(forecaster):
    assert forecaster(VALUES[:0]).prediction.shape == (0, 6, 2)
    assert forecaster.predict(VALUES[:0], 3).shape == (0, 3, 2)


@pytest.mark.parametrize("value", [-1, math.nan, "x"])
def test_the_range_of_the_initialiser(value):
    with pytest.raises((ValueError, TypeError), match="initializer_range"):
        FullPayForecasterConfig(initializer_range=value)


@pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
def test_a_cache_keeps_its_rows():
    model = build("llama", "fullpay_band")
    cache, tokens = sliding_cache(model), inputs("llama")["input_ids"]
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="sliding_cache: expected 2 rows as before, got 1"):
        model(tokens[:1], cache=cache)
