"""Pattern matching: the formula, keys unchanged at the start, sensors apart."""

import math

import pytest
import torch

from hf_fullpay.layers import PatternMatch


def trained(width=8, window=6, patterns=3):
    layer = PatternMatch(width, window, patterns).double()
    torch.nn.init.normal_(layer.to_key.weight)
    return layer


def test_it_is_its_formula():
    layer = trained()
    key, past = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 5, 6, dtype=torch.float64)
    found = layer(key, past)
    for b in range(2):
        for i in range(5):
            u = layer.of_past.weight @ past[b, i]
            scores = torch.stack([u @ (layer.of_centroid.weight @ c) / math.sqrt(8) for c in layer.centroids])
            pattern = (scores.softmax(0)[:, None] * layer.centroids).sum(0)
            torch.testing.assert_close(found[b, i], key[b, i] + layer.to_key.weight @ pattern)
    torch.testing.assert_close(layer.match(past).sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_keys_start_unchanged_and_learn():
    layer, key, past = PatternMatch(8, 6, 3), torch.randn(2, 5, 8), torch.randn(2, 5, 6)
    output = layer(key, past)
    assert torch.equal(output, key)
    output.square().sum().backward()
    assert layer.to_key.weight.grad.abs().max() > 0


def test_the_past_of_another_sensor_never_enters():
    layer = trained()
    key, past = torch.randn(1, 5, 8, dtype=torch.float64), torch.randn(1, 5, 6, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(key, past)[:, 2].sum(), past)
    assert (gradient.abs().sum((0, 2)) > 0).nonzero().flatten().tolist() == [2]


def test_centroids_from_data():
    layer, windows = PatternMatch(8, 6, 3), torch.randn(20, 6)
    layer.seed_from(windows)
    assert all((windows == centroid).all(-1).any() for centroid in layer.centroids)
    for wrong in (windows[:2], windows[:, :5]):
        with pytest.raises(ValueError, match="at least 3 windows of 6 readings"):
            layer.seed_from(wrong)


@pytest.mark.parametrize(
    ("past", "word"), [(torch.zeros(2, 5, 7), "6"), (torch.zeros(5, 6), "6"), (torch.full((2, 5, 6), math.nan), "NaN")]
)
def test_bad_pasts(past, word):
    with pytest.raises(ValueError, match=f"expected.*{word}"):
        PatternMatch(8, 6, 3)(torch.zeros(2, 5, 8), past)


def test_bad_options():
    with pytest.raises(ValueError, match="patterns"):
        PatternMatch(8, 6, 0)
