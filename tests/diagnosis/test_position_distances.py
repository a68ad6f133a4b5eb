"""Distances of positions: embeddings whose geometry is known."""

import math

import pytest
import torch
from torch import nn

from families import build, inputs
from hf_fullpay.diagnosis.positions import check_positions, distances, rank_correlation
from hf_fullpay.diagnosis.settings import Settings
from probes import left_as_it_was, run


def along_a_line(length=160, width=32):
    return torch.arange(length, dtype=torch.float32)[:, None] * torch.ones(width)


@pytest.mark.parametrize("pads", [{}, {"left": 3}, {"right": 4}])
def test_positions_on_a_line(pads):
    model = build("gpt2", head=False)
    with torch.no_grad():
        model.wpe.weight.copy_(along_a_line())
    with left_as_it_was(model):
        found = run(check_positions, model, inputs("gpt2", length=20, **pads))
    assert found.values["position_decay"][0] == pytest.approx(1)
    first = torch.tensor(found.heatmaps["positions"].panels["first layer's input"])
    n = torch.arange(len(first))
    torch.testing.assert_close(first, (n[:, None] - n).abs() * math.sqrt(32), rtol=1e-5, atol=1e-4)


def test_random_positions_have_no_order():
    found = run(check_positions, build("gpt2", head=False), inputs("gpt2", length=150))
    assert abs(found.values["position_decay"][0]) < 0.1


def test_words_do_not_matter():
    model = build("bert", head=False)
    one, other = (run(check_positions, model, inputs("bert", length=20, seed=seed)) for seed in (1, 2))
    assert one == other


def test_long_texts_are_shown_by_even_steps():
    model = build("gpt2", head=False)
    with torch.no_grad():
        model.wpe.weight.copy_(along_a_line())
    found = run(check_positions, model, inputs("gpt2", length=150))
    heatmap = found.heatmaps["positions"]
    assert [len(panel) for panel in heatmap.panels.values()] == [50, 50]
    assert heatmap.x_label == "position, in steps of 3"
    assert heatmap.panels["first layer's input"][0][1] == pytest.approx(3 * math.sqrt(32))


def test_embeddings_as_input():
    model, given = build("gpt2", head=False), inputs("gpt2", length=20)
    embedded = {"inputs_embeds": model.wte(given["input_ids"]).detach()}
    assert run(check_positions, model, embedded) == run(check_positions, model, given)


def test_without_positions_weights_are_uniform():
    """Rotary positions with equal queries and keys say something; with zero queries nothing."""
    model = build("llama", head=False)
    given = inputs("llama", batch=1, length=40)
    found = run(check_positions, model, given)
    assert not found.values
    assert not found.heatmaps
    assert "do not reach the hidden states" in found.notes[0]
    curve = found.curves["position_weights"]
    assert curve.series["layer 0"] != pytest.approx(curve.series["uniform"], rel=1e-2)
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.zero_()
    found = run(check_positions, model, given)
    curve = found.curves["position_weights"]
    for layer in ("layer 0", "layer 1"):
        assert curve.series[layer] == pytest.approx(curve.series["uniform"], rel=1e-5)
    expected = sum(1 / (row + 1) for row in range(1, 40)) / 39  # rows that see a key at distance 1
    assert curve.series["uniform"][0] == pytest.approx(expected, rel=1e-5)


def test_a_recency_head():
    """Queries and keys that only rotate: the weight falls with the distance where the turn is small."""
    model = build("llama", head=False, num_hidden_layers=1)
    with torch.no_grad():
        attention = model.layers[0].self_attn
        attention.k_proj.weight.copy_(attention.q_proj.weight[:16])
        attention.q_proj.weight.copy_(attention.k_proj.weight.repeat(2, 1))
    found = run(check_positions, model, inputs("llama", batch=1, length=12))
    line = found.curves["position_weights"].series["layer 0"]
    assert line[0] == max(line)


@pytest.mark.parametrize("length", [1, 2])
def test_too_few_positions(length):
    found = run(check_positions, build("bert", head=False), inputs("bert", batch=1, length=length), settings=Settings())
    assert not found.values
    assert found.notes == [f"Positions were left out: {length} of them have no distances to compare."]


def test_rank_correlation():
    up = torch.tensor([1.0, 2.0, 3.0, 9.0])
    assert rank_correlation(up, up.square()) == pytest.approx(1)
    assert rank_correlation(up, -up) == pytest.approx(-1)
    tied = rank_correlation(torch.tensor([1, 2, 2, 3]), torch.tensor([1.0, 3.0, 2.0, 4.0]))
    assert tied == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(rank_correlation(up, torch.ones(4)))


def test_rounding_is_no_distance():
    same = nn.Parameter(torch.randn(32)).detach().expand(5, 32)
    assert not distances(same + torch.randn(5, 32) * 1e-8).any()
    assert distances(same + torch.randn(5, 32) * 1e-3).any()
