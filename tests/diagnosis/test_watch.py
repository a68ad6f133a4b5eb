"""Watching: what is seen is what the model computes, in every family, and nobody else notices."""

import pytest
import torch
from transformers import AttentionInterface

import zoo
from families import FAMILIES, build, inputs
from hf_fullpay.hf.watch import watch
from small import EVERYWHERE, load, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")


def watched(model, size=60, **given):
    """Calls, and the largest error of the weights seen, over tiles of `size` weights."""
    calls, errors = [], []

    def see(seen):
        calls.append(seen)
        for start, stop in seen.tiles(size):
            errors.append(seen.error(start, stop, seen.rows(start, stop).weights))

    with watch(model, see), torch.no_grad():
        result = model(**given)[0]
    return result, calls, errors


@pytest.mark.parametrize(("family", "name"), EVERYWHERE)
@pytest.mark.parametrize("left", [0, 3])
def test_weights_seen_are_the_models(family, name, left):
    model, given = load(family, name), inputs(family, left=left)
    result, calls, errors = watched(model, **given)
    assert torch.equal(result, states(model, **given))
    assert [seen.index for seen in calls] == [0, 1]
    assert len(errors) > 2  # tiles, not wholes
    assert max(errors) < 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [0, 3])
def test_stock_attention_is_seen(family, attention, left):
    model, given = build(family, attention), inputs(family, left=left)
    result, calls, errors = watched(model, **given)
    assert torch.equal(result, states(model, **given))
    assert max(errors) < 1e-5
    assert calls[0].is_causal == (family in ("llama", "gpt2"))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("other", zoo.ROUTING)
def test_other_families_are_seen(other, attention):
    attention = "eager" if other == "splinter" else attention  # it refuses SDPA
    model, given = zoo.make(other, attention), zoo.given(other)
    _, calls, errors = watched(model, **given)
    assert len(calls) > 1
    assert max(errors) < 1e-4


@pytest.mark.parametrize(("other", "softcap", "sinks"), [("gemma2", 50.0, False), ("gpt_oss", None, True)])
def test_soft_caps_and_sinks_are_seen(other, softcap, sinks):
    model = zoo.make(other, "eager")
    _, calls, errors = watched(model, input_ids=torch.arange(14).view(2, 7))
    assert calls[0].softcap == softcap
    assert (calls[0].sinks is not None) == sinks
    assert max(errors) < 1e-5


def test_rows_do_not_depend_on_the_tile():
    model, given = load("llama", "bounded_fullpay"), inputs("llama", left=2)
    _, calls, _ = watched(model, **given)
    whole = calls[0].rows(0, calls[0].query.shape[2])
    for start, stop in calls[0].tiles(30):
        part = calls[0].rows(start, stop)
        for name in ("weights", "scores", "logits"):
            torch.testing.assert_close(
                getattr(part, name), getattr(whole, name)[:, :, start:stop], rtol=1e-5, atol=1e-6
            )
        assert torch.equal(part.paid, whole.paid[:, :, start:stop])


def test_a_shared_module_is_as_many_layers_as_calls():
    model, given = zoo.make("albert"), zoo.given("albert")
    _, calls, _ = watched(model, **given)
    assert len({seen.path for seen in calls}) == 1
    assert [seen.index for seen in calls] == [0, 1]


def test_others_are_not_watched_and_nothing_stays():
    model, other, given = build("bert", "sdpa"), build("bert", "sdpa"), inputs("bert")
    stock, calls = AttentionInterface.get_interface, []
    with watch(model, calls.append):
        states(other, **given)
    assert not calls
    assert AttentionInterface.get_interface is stock
    with (
        pytest.raises(RuntimeError, match="stop"),
        watch(model, lambda seen: (_ for _ in ()).throw(RuntimeError("stop"))),
    ):
        states(model, **given)
    assert AttentionInterface.get_interface is stock
    assert not model._forward_pre_hooks


def test_two_models_can_be_watched_at_once():
    one, other, given = build("bert", "sdpa"), build("bert", "fullpay"), inputs("bert")
    first, second = [], []
    with watch(one, first.append), watch(other, second.append):
        states(one, **given)
        states(other, **given)
    assert ([seen.name for seen in first], [seen.name for seen in second]) == (["sdpa"] * 2, ["fullpay"] * 2)


def test_a_mask_that_is_no_tensor_is_refused():
    model = build("llama", "flex_attention")
    with pytest.raises(ValueError, match=r"expected a mask as a tensor, got BlockMask.*sdpa"), watch(model, print):
        states(model, **inputs("llama"))


def test_a_model_that_does_not_route_is_refused():
    with (
        pytest.raises(ValueError, match="found none, so nothing of its attention"),
        watch(torch.nn.Linear(2, 2), print),
    ):
        pass
