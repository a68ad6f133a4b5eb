"""A table of bounds: every layer runs its own row, checkpoints keep it, and what does not fit is refused."""

import json
import math

import pytest
import torch

from families import FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Bounded, attention, convert, register
from hf_fullpay.hf.blocks import watch_blocks
from hf_fullpay.hf.inspect import inspect_model
from small import load, plans, states

TABLE = ((0.5, 1.0, math.inf, 0.3), (2.0, 0.1, 0.7, 0.2))
PLAN = AttentionPlan(scores=Bounded(bound=TABLE))


def test_layers_run_their_own_row():
    assert [plan.scores.bound for plan in PLAN.for_layers(2)] == list(TABLE)
    assert [plan.layers for plan in PLAN.for_layers(2)] == ["all", "all"]
    upper = AttentionPlan(scores=Bounded(bound=TABLE), layers="from:1")
    assert [plan.is_vanilla for plan in upper.for_layers(2)] == [True, False]
    assert upper.for_layers(2)[1].scores.bound == TABLE[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_two_plans_of_one_layer_each(family):
    """Hidden states go through layer 0 under its row, then through layer 1 under its row."""
    given = inputs(family)
    found = load(family, PLAN)(**given, output_hidden_states=True).hidden_states
    for layer, row in enumerate(TABLE):
        alone = load(family, AttentionPlan(scores=Bounded(bound=row)))
        with watch_blocks(alone, enter=lambda index, _: found[index]):
            after = alone(**given, output_hidden_states=True).hidden_states[layer + 1]
        torch.testing.assert_close(after, found[layer + 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_keeps_the_table(family, tmp_path):
    model = convert(build(family, head=False), PLAN)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert plans(again) == plans(model) == PLAN.for_layers(2)
    assert AttentionPlan.from_dict(again.config.fullpay) == PLAN
    assert torch.equal(states(again, **inputs(family)), states(model, **inputs(family)))
    assert torch.equal(states(model, **inputs(family)), states(load(family, PLAN), **inputs(family)))
    assert "0.1 to 2" not in inspect_model(str(tmp_path))  # up to four heads are spelt out
    assert repr(TABLE[1]) in inspect_model(str(tmp_path))


def test_json_words_and_certificate():
    again = AttentionPlan.from_dict(json.loads(json.dumps(PLAN.to_dict(), allow_nan=False)))
    assert again == PLAN
    assert hash(again) == hash(PLAN)
    assert "bound=2 x 4" in PLAN.describe()
    assert "bound=0.1 to 0.6" in AttentionPlan(scores=Bounded(bound=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6])).describe()
    assert Bounded(bound=[[0.5, 1.0], [2.0, 0.1]]).certificate(64) == Bounded(bound=2.0).certificate(64)
    assert Bounded(bound=torch.tensor([[0.5], [0.25]])).bound == ((0.5,), (0.25,))


@pytest.mark.parametrize("bound", [[[1.0], [1.0, 2.0]], [[1.0], [-1.0]], [[1.0], 2.0], [[]], [["a"]], [[math.nan]]])
def test_bad_tables_are_named(bound):
    with pytest.raises(ValueError, match=r"Bounded\(bound=...\): expected .*got "):
        Bounded(bound=bound)


def test_tables_that_do_not_fit():
    with pytest.raises(ValueError, match="a row for each of the 3 layers, got '2 rows'"):
        PLAN.for_layers(3)
    with pytest.raises(ValueError, match="a row for each of the 2 layers, got '1 rows'"):
        convert(build("bert"), AttentionPlan(scores=Bounded(bound=TABLE[:1])))
    with pytest.raises(ValueError, match=r"bound: expected one number or one per head \(4\), got 3"):
        convert(build("bert"), AttentionPlan(scores=Bounded(bound=[[1.0] * 3] * 2)))
    with pytest.raises(ValueError, match="finite bound"):
        Bounded(bound=TABLE, slope="sharpen")
    query = torch.randn(1, 4, 5, 8)
    for path in ({}, {"return_weights": True}):
        with pytest.raises(ValueError, match=r"for a single layer, got 'a table'.*for_layers"):
            attention(query, query, query, plan=PLAN, **path)


def test_a_module_that_does_not_know_its_layer_is_told_so():
    register("two_rows", PLAN)
    model = build("bert", head=False)
    model.config._attn_implementation = "two_rows"
    with pytest.raises(ValueError, match="differs from layer to layer"):
        model(**inputs("bert"))
