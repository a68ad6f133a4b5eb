"""Other numbers for a live model: as if it had been converted with them, and saved with them."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModel

from converted import given_to, stock
from hf_fullpay import AttentionPlan, Band, Bounded, DynamicScale, Mixture, convert
from hf_fullpay.hf.forward import PLAN
from hf_fullpay.hf.replan import replan
from small import plans, states

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
KINDS = ["FullPayBertModel", "FullPayViTModel", "FullPayGPT2Model", "FullPayLlamaModel"]
NEUTRAL = AttentionPlan(scores=Bounded(bound=None), payment=Mixture(floor=None, budget=0.0), layers="from:1")
FULL = AttentionPlan(
    scores=Bounded(bound=[[1.0] * 4, [0.1, 0.2, 0.3, 0.4]], temperature=0.5),
    payment=Mixture(floor=0.01, budget=[0.1, 0.2, 0.3, 0.4]),
    layers="from:1",
)


@pytest.mark.parametrize("kind", KINDS)
def test_as_if_converted_so(kind, tmp_path):
    model, given = convert(stock(kind), NEUTRAL), given_to(kind)
    before = states(model, **given)
    replan(model, FULL)
    wanted = states(convert(stock(kind), FULL), **given)
    assert not torch.equal(before, wanted)
    assert torch.equal(states(model, **given), wanted)
    model.save_pretrained(tmp_path)
    assert torch.equal(states(AutoModel.from_pretrained(tmp_path).eval(), **given), wanted)
    replan(model, NEUTRAL)
    assert torch.equal(states(model, **given), before)


def test_a_preset_becomes_a_plan():
    """Its name would promise other numbers, with a warning at every load."""
    model, given = convert(stock("FullPayBertModel"), "bounded"), given_to("FullPayBertModel")
    replan(model, AttentionPlan(scores=Bounded(bound=0.1)))
    assert torch.equal(states(model, **given), states(convert(stock("FullPayBertModel"), plans(model)[0]), **given))
    assert model.config._attn_implementation == "fullpay_custom"


@pytest.mark.parametrize("other", [
    replace(NEUTRAL, layers="all"), replace(NEUTRAL, reach=Band(4)), replace(NEUTRAL, scores=DynamicScale()),
    replace(NEUTRAL, payment=Mixture(learnable=True)), replace(NEUTRAL, scores=Bounded(centre="median")),
    replace(NEUTRAL, scores=Bounded(bound=((1.0,) * 4,) * 3)),
], ids=["layers", "reach", "scores", "learned", "centre", "rows"])  # fmt: skip
def test_more_than_numbers_is_refused(other):
    model, given = convert(stock("FullPayBertModel"), NEUTRAL), given_to("FullPayBertModel")
    before, written = states(model, **given), dict(getattr(model.config, PLAN))
    with pytest.raises(ValueError, match="expected"):
        replan(model, other)
    assert torch.equal(states(model, **given), before)
    assert getattr(model.config, PLAN) == written


def test_models_that_cannot():
    with pytest.raises(ValueError, match="expected a converted model"):
        replan(stock("FullPayBertModel"), NEUTRAL)
    model = convert(stock("FullPayBertModel"), NEUTRAL)
    model.compile()
    with pytest.raises(ValueError, match="expected a model that is not compiled"):
        replan(model, FULL)
    with pytest.raises(ValueError, match="expected a model that is not compiled"):
        replan(torch.compile(convert(stock("FullPayBertModel"), NEUTRAL)), FULL)
