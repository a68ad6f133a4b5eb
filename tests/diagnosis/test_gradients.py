"""Gradient reach: attentions whose reach is known."""

import math

import pytest
import torch
from torch import nn

from families import build, inputs
from hf_fullpay.diagnosis import gradient_reach
from hf_fullpay.diagnosis.distances import ByDistance
from hf_fullpay.diagnosis.gradients import check_reach
from hf_fullpay.diagnosis.settings import Settings
from hf_fullpay.diagnosis.states import record
from probes import SHORT, attention_named, run


def looking(pairs):
    """An attention with given weights, n -> (n, n), whatever queries and keys say."""

    def attention(module, query, key, value, attention_mask, **options):
        weights = pairs(torch.arange(query.shape[2])).to(value)
        return (weights @ value).transpose(1, 2).contiguous(), None

    return attention


def within(distance):
    return looking(lambda n: nn.functional.normalize(((n[:, None] - n).abs() <= distance).float(), p=1, dim=1))


def back(steps):
    return looking(lambda n: ((n[:, None] - n) == steps).float())


def test_uniform_attention_is_near_uniform():
    with attention_named("everyone", within(1000)) as name:
        model = build("bert", name, head=False, num_hidden_layers=1)
        found = run(check_reach, model, inputs("bert", length=60), settings=Settings(queries=4))
    assert found.values["near_over_far"][0] == pytest.approx(1, abs=0.15)
    assert found.uniform["near_over_far"] == pytest.approx(1)
    assert found.values["gradient_range"][0] <= found.uniform["gradient_range"]
    assert "far begins at 30 tokens in a text of 60" in found.notes[0]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_local_attention_reaches_one_window_a_layer(layers):
    with attention_named("local", within(2)) as name:
        model = build("bert", name, head=False, num_hidden_layers=layers)
        found = run(check_reach, model, inputs("bert", length=40), settings=Settings(near=1, far=5, queries=4))
    for layer in range(layers):
        reached = 2 * (layers - layer)
        assert (found.values["near_over_far"][layer] == math.inf) == (reached < 5)
        assert found.values["gradient_range"][layer] <= reached
        curve = found.curves["gradient"]
        line = curve.series[f"input of layer {layer}"]
        assert all((number > 0) == (at <= reached) for at, number in zip(curve.x, line, strict=True) if at in (1, 2, 3))
        assert all(math.isnan(number) for at, number in zip(curve.x, line, strict=True) if at > reached + 1)


def test_one_far_place():
    with attention_named("far", back(6)) as name:
        found = run(check_reach, build("gpt2", name, head=False, num_hidden_layers=1), inputs("gpt2", length=20))
    assert found.values["near_over_far"] == [0.0]
    assert 0 <= found.values["gradient_range"][0] <= 6
    found = found.curves["gradient"]
    assert [at for at, number in zip(found.x, found.series["input of layer 0"], strict=True) if number > 0] == [6.48]


def test_the_same_numbers_as_gradient_reach():
    model, given = build("llama", head=False), inputs("llama", batch=1, length=40)
    found = run(check_reach, model, given, settings=Settings(far=20, queries=4))

    def through(embeddings):
        states = []
        handle = model.layers[-1].register_forward_hook(lambda *call: states.append(call[-1]))
        model(inputs_embeds=embeddings)
        handle.remove()
        return states[0]

    near, far = gradient_reach(through, model.embed_tokens(given["input_ids"]), far=20, queries=4)
    assert found.values["near_over_far"][0] == pytest.approx(near / far, rel=1e-5)


def test_norms_are_those_of_the_whole_jacobian():
    """Over many directions the mean squared norm is the squared norm of the block d out_i / d x_j."""
    model, given = build("bert", head=False).double(), inputs("bert", batch=1, length=8)
    states = record(model, given, graph=True)
    rows = [
        torch.autograd.grad(number, states.inputs[1], retain_graph=True)[0][0] for number in states.outputs[-1][0, 5]
    ]
    whole = torch.stack(rows).square().sum((0, 2))
    from hf_fullpay.diagnosis.gradients import gradient_norms

    generator = torch.Generator().manual_seed(0)
    drawn = [gradient_norms(states.outputs[-1], [states.inputs[1]], 5, generator, keep=True) for _ in range(400)]
    torch.testing.assert_close(torch.stack(drawn).square().mean(0)[0], whole, rtol=0.15, atol=0)


def test_packed_texts_are_texts_of_their_own():
    model, apart = build("llama", head=False), inputs("llama", batch=2, length=12)
    packed = {"input_ids": apart["input_ids"].reshape(1, -1), "position_ids": torch.arange(12).repeat(2)[None]}
    one, other = run(check_reach, model, apart), run(check_reach, model, packed)
    assert one.values["near_over_far"] == pytest.approx(other.values["near_over_far"], rel=1e-4)
    assert one.values["gradient_range"] == other.values["gradient_range"]


def test_only_texts_long_enough():
    model = build("bert", head=False)
    found = run(check_reach, model, inputs("bert", length=11), settings=Settings())
    assert not found.values
    assert found.notes == ["Gradient reach was left out: no text has the 12 tokens that it takes."]
    mixed = run(check_reach, model, inputs("bert", length=13, right=6), settings=Settings())
    alone = run(check_reach, model, {"input_ids": inputs("bert", length=13)["input_ids"][1:]}, settings=Settings())
    assert mixed.values == alone.values


def test_the_longest_texts_are_looked_at():
    model, given = build("bert", head=False), inputs("bert", length=20, right=9)
    found = run(check_reach, model, given, settings=Settings(near=1, far=4, queries=2, documents=1))
    alone = run(check_reach, model, {"input_ids": given["input_ids"][1:]}, settings=SHORT)
    assert found.values["near_over_far"] != alone.values["near_over_far"]  # other queries
    alone = {"input_ids": given["input_ids"][1:]}
    assert found.values == run(check_reach, model, alone, settings=Settings(near=1, far=4, queries=2)).values


def test_means_by_distance():
    held = ByDistance()
    held.add("a", torch.tensor([9.0, 1.0, 3.0, 5.0]), torch.tensor([0, 1, 1, 2]))
    held.add("a", torch.tensor([2.0, 4.0]), torch.tensor([4, 5]))
    held.add("b", torch.tensor([0.0]), torch.tensor([2]))
    at, lines = held.lines()
    assert at == pytest.approx([1, 2, 3, 4.47], abs=0.01)
    assert lines["a"] == [2, 5, pytest.approx(math.nan, nan_ok=True), 3]
    assert all(math.isnan(number) for number in lines["b"])
    assert ByDistance().lines() == ([], {})
