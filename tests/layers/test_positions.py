"""Positions: the formula in FP64, an error past the length, distances alone for rotary ones."""

import math

import pytest
import torch

from hf_fullpay.layers import Learned, Rotary, Sinusoidal


def test_sinusoidal_is_the_formula_rounded_once():
    table = Sinusoidal(16, 10_000).table
    assert table.dtype == torch.float32
    for n in (0, 1, 77, 9_999):
        for c in range(8):
            angle = n / 10_000 ** (2 * c / 16)
            assert table[n, 2 * c].item() == torch.tensor(math.sin(angle), dtype=torch.float32).item()
            assert table[n, 2 * c + 1].item() == torch.tensor(math.cos(angle), dtype=torch.float32).item()


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
@pytest.mark.parametrize(("start", "count"), [(0, 9), (8, 1), (5, 4)])
def test_past_the_length_is_an_error_that_names_it(kind, start, count):
    positions = kind(4, 8)
    with pytest.raises(ValueError, match=r"below its length 8, got \d to 8"):
        positions(torch.zeros(1, count, 4), start)


@pytest.mark.parametrize("kind", [Sinusoidal, Learned])
def test_a_piece_of_the_sequence_gets_its_own_positions(kind):
    positions, tokens = kind(6, 12), torch.randn(2, 12, 6)
    whole = positions(tokens)
    pieces = [positions(tokens[:, :5]), positions(tokens[:, 5:6], 5), positions(tokens[:, 6:], 6)]
    assert torch.equal(torch.cat(pieces, 1), whole)
    assert positions(tokens.bfloat16()).dtype == torch.bfloat16


def test_the_table_stays_fp32_when_the_model_is_cast():
    positions = torch.nn.Sequential(Sinusoidal(8, 64), torch.nn.Linear(8, 8))
    before = positions[0].table.clone()
    positions.bfloat16().half().float()
    assert torch.equal(positions[0].table, before)


def test_an_emptied_table_can_be_filled():
    positions = Sinusoidal(8, 64)
    before = positions.table.clone()
    positions.table.fill_(math.nan)
    positions.initialize()
    assert torch.equal(positions.table, before)


def test_rotary_scores_depend_on_the_distance_alone():
    """At ten thousand as at the start; and norms are kept."""
    rotary = Rotary(32)
    query, key = torch.randn(1, 2, 20, 32), torch.randn(1, 2, 20, 32)
    near, far = (torch.einsum("bhnd,bhmd->bhnm", *rotary(query, key, start)) for start in (0, 10_000))
    torch.testing.assert_close(near, far, rtol=0, atol=2e-5)
    torch.testing.assert_close(rotary(query, key, 10_000)[0].norm(dim=-1), query.norm(dim=-1))
    assert (near - query @ key.mT).abs().max() > 1e-2


def test_rotary_cuts_and_types():
    rotary = Rotary(8)
    query, key = torch.randn(1, 4, 10, 8), torch.randn(1, 2, 10, 8)
    whole = rotary(query, key)
    part = rotary(query[:, :, 6:], key[:, :, 6:], 6)
    assert all(torch.equal(one[:, :, 6:], two) for one, two in zip(whole, part, strict=True))
    assert rotary(query.bfloat16(), key.bfloat16())[0].dtype == torch.bfloat16
    assert rotary(query.double(), key.double())[0].dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: Sinusoidal(5, 8), "even"),
        (lambda: Sinusoidal(4, 0), "length"),
        (lambda: Sinusoidal(4, 8, base=1.0), "base"),
        (lambda: Rotary(7), "even"),
        (lambda: Rotary(8, base=float("nan")), "base"),
        (lambda: Learned(0, 8), "width"),
        (lambda: Sinusoidal(4, 8)(torch.zeros(1, 2, 4), -1), "start"),
    ],
)
def test_bad_options(make, word):
    with pytest.raises(ValueError, match=rf"{word}.*expected|expected.*{word}"):
        make()
