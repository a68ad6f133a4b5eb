"""Widths that would broadcast in silence, and types that torch alone would complain about."""

import math

import pytest
import torch

from hf_fullpay.layers import FEED_FORWARDS, Learned, PatternMatch, Rotary, Sinusoidal, SqueezeExcite

TOKENS, KEY, PAST = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 4)
WRONG = ["width 1", "width 7", "no batch", "integers", "a list"]


@pytest.mark.parametrize(
    "layer", [Sinusoidal(8, 4), Learned(8, 4), SqueezeExcite(8)], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("tokens", [TOKENS[..., :1], TOKENS[..., :7], TOKENS[0], TOKENS.long(), [1.0]], ids=WRONG)
def test_tokens_have_the_width_of_the_layer(layer, tokens):
    with pytest.raises(
        ValueError, match=rf"{type(layer).__name__}: expected floating tokens \(batch, tokens, 8\), got"
    ):
        layer(tokens)


@pytest.mark.parametrize(
    ("query", "key"),
    [((2, 4, 3, 6), (2, 4, 3, 6)), ((2, 4, 3, 8), (2, 4, 5, 8)), ((2, 3, 8), (2, 3, 8)), ((2, 4, 3, 8), (2, 4, 3, 2))],
)
def test_rotary_turns_rows_of_its_width(query, key):
    with pytest.raises(ValueError, match=r"Rotary: expected \w+ as floating"):
        Rotary(8)(torch.randn(query), torch.randn(key))
    with pytest.raises(ValueError, match="Rotary: expected query as floating"):
        Rotary(2)(torch.ones(1, 1, 3, 8), torch.ones(1, 1, 3, 8))


def test_pattern_match_has_a_window_for_each_key():
    match = PatternMatch(8, 4, 3)
    for key, past, message in (
        (KEY[..., :7], PAST, "expected floating tokens"),
        (KEY, PAST[:, :1], "expected a window for each key"),
        (KEY, PAST[:1], "expected a window for each key"),
        (KEY, PAST * math.nan, "expected finite readings"),
    ):
        with pytest.raises(ValueError, match=f"PatternMatch: {message}"):
            match(key, past)
    with pytest.raises(ValueError, match="seed_from: expected finite"):
        match.seed_from(torch.full((5, 4), math.nan))


def test_pattern_match_reads_any_real_type():
    match = PatternMatch(8, 4, 3)
    torch.nn.init.normal_(match.to_key.weight)
    counts = (PAST * 5).long()
    torch.testing.assert_close(match(KEY, counts), match(KEY, counts.float()))
    assert match.bfloat16()(KEY.bfloat16(), PAST).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", FEED_FORWARDS.values(), ids=FEED_FORWARDS)
def test_feed_forwards_take_their_width(kind):
    with pytest.raises(ValueError, match=rf"{kind.__name__}: expected tokens \(\.\.\., 8\), got \(2, 7\)"):
        kind(8)(torch.randn(2, 7))
