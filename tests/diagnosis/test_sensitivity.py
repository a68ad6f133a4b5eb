"""What a layer does not bear: the numbers against models loaded under the same policy, the transition, and refusals."""

import json
from dataclasses import replace

import pytest
import torch

import zoo
from families import CAUSAL, FAMILIES, build, inputs
from hf_fullpay import AttentionPlan, Bounded, Mixture, Windows, convert
from hf_fullpay.diagnosis import Report, sensitivity, suggest
from hf_fullpay.diagnosis.sensitivity import Change, Sensitivity
from hf_fullpay.hf.bind import layers_of
from small import load, states
from untouched import untouched

pytestmark = pytest.mark.filterwarnings("ignore::hf_fullpay.FullPayWarning")
TIGHT = AttentionPlan(scores=Bounded(bound=0.2))


def labels(family, given):
    return given["input_ids"] if family in CAUSAL else torch.tensor([1, 0])


def relative(after, before):
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_against_models_under_the_same_policy(family):
    """Output, KL and loss of each layer alone and of all layers together."""
    model, given = build(family), inputs(family)
    given["labels"] = labels(family, given)
    with untouched(model, given):
        found = sensitivity(model, given, TIGHT)
    with torch.no_grad():
        before = model(**given)
        assert found.loss == pytest.approx(float(before.loss), rel=1e-4)
        for layer in (0, 1):
            after = load(family, replace(TIGHT, layers=[layer]), head=True)(**given)
            change = found.alone[layer]
            assert change.output == pytest.approx(relative(after.logits, before.logits), rel=1e-3, abs=1e-5)
            assert change.loss == pytest.approx(float(after.loss - before.loss), rel=1e-3, abs=1e-4)
            logs = [output.logits.double().log_softmax(-1).flatten(0, -2) for output in (after, before)]
            kl = torch.nn.functional.kl_div(*logs, reduction="batchmean", log_target=True)
            assert change.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-5)
    assert found.judged == "loss"
    assert found.last == (1 if family in CAUSAL else 0)  # the others are classifiers
    if family in CAUSAL:
        together = states(load(family, TIGHT, head=True), **{k: v for k, v in given.items() if k != "labels"})
        assert found.upward[0].output == pytest.approx(relative(together, before.logits), rel=1e-3)
        assert found.upward[1] == found.alone[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("huge", [0, 2])
def test_a_layer_made_huge_is_the_most_sensitive(family, huge):
    """Queries are small but for one layer; a bound that holds the others touches it alone."""
    depth = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    model = build(family, head=False, **depth)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".weight" in name and ("c_attn" in name or "q_proj" in name or "query" in name):
                queries = parameter[:, :32] if "c_attn" in name else parameter
                queries *= 1.0 if f".{huge}." in f".{name}" else 0.01
    found = sensitivity(model, inputs(family), AttentionPlan(scores=Bounded(bound=0.3)))
    changes = [change.output for change in found.alone]
    assert found.most == huge
    assert changes[huge] > 10 * max(changes[:huge] + changes[huge + 1 :])
    found = replace(found, budget=changes[huge] / 2)
    assert found.first == (None if huge == 2 else 1)
    assert found.layers == (() if huge == 2 else "from:1")


def test_nothing_changes_under_the_ordinary_plan():
    found = sensitivity(build("llama"), inputs("llama"), AttentionPlan(payment=Mixture(budget=0.0)))
    assert all(change == Change(0.0, 0.0, None) for change in found.alone + found.upward)
    assert (found.judged, found.layers) == ("kl", "all")


def test_a_table_of_bounds_gives_each_layer_its_row():
    rows = ((1e-3, 1e-3, 1e-3, 1e-3), (1e5, 1e5, 1e5, 1e5))
    found = sensitivity(build("bert", head=False), inputs("bert"), AttentionPlan(scores=Bounded(bound=rows)))
    assert found.alone[0].output > 0.05
    assert found.alone[1].output < 1e-4


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_padding_and_batches_change_nothing(family):
    """One padded batch, and its documents one by one without padding; for models of language the loss too."""
    model, loss = build(family, head=family in CAUSAL), "lm" if family in CAUSAL else None
    left = 0 if family == "bert" else 3
    given = inputs(family, length=12, left=left, right=0 if left else 3)
    kept = given["attention_mask"][0].bool()
    alone = [{"input_ids": given["input_ids"][:1, kept]}, {"input_ids": given["input_ids"][1:]}]
    if family == "gpt2":
        given["position_ids"][0, :3] = 0
    padded, single = (sensitivity(model, batches, TIGHT, loss=loss) for batches in (given, iter(alone)))
    if loss:
        assert padded.loss == pytest.approx(single.loss, rel=1e-4)
    for one, other in zip(padded.alone + padded.upward, single.alone + single.upward, strict=True):
        for name in ("output", "kl", "loss"):
            values = getattr(one, name), getattr(other, name)
            assert values == (None, None) or values[0] == pytest.approx(values[1], rel=1e-3, abs=1e-4)


def test_a_converted_model_runs_on_in_the_other_layers():
    own = AttentionPlan(payment=Mixture(floor=None, budget=0.3, learnable=True))
    model, given = convert(build("bert", head=False), own).eval(), inputs("bert")
    with untouched(model, given):
        found = sensitivity(model, given, TIGHT)
    mixed = AttentionPlan(payment=Mixture(floor=None, budget=0.3))
    before = states(load("bert", mixed), **given)
    for layer in (0, 1):
        plans = [TIGHT if number == layer else mixed for number in (0, 1)]
        other = load("bert", mixed)
        for (_, _, bound), plan in zip(layers_of(other), plans, strict=True):
            bound.plan = plan
        assert found.alone[layer].output == pytest.approx(relative(states(other, **given), before), rel=1e-3)


def test_bf16_training_mode_and_a_loss_of_ones_own():
    model = build("llama").bfloat16().train()
    wanted = sensitivity(build("llama"), inputs("llama"), TIGHT)
    found = sensitivity(model, inputs("llama"), TIGHT, loss=lambda output, batch: output.logits.float().square().mean())
    assert model.training
    assert found.judged == "loss"
    for one, other in zip(found.alone, wanted.alone, strict=True):
        assert one.output == pytest.approx(other.output, rel=0.2)


@pytest.mark.parametrize("name", ["bart", "albert", "modernbert", "clip_vision"])
def test_other_families(name):
    model, given = zoo.make(name), zoo.given(name)
    with untouched(model, given):
        found = sensitivity(model, given, TIGHT)
    assert all(change.output > 0 for change in found.alone)


def made(upward, last=None, **changes):
    changed = [Change(number, None, None) for number in upward]
    last = len(upward) - 1 if last is None else last
    return Sensitivity(TIGHT, "Model", changed, changed, last, None, **{"budget": 0.1, "judged": "output"} | changes)


@pytest.mark.parametrize(
    ("found", "layers"),
    [
        (made([0.3, 0.2, 0.1, 0.05]), "from:2"),
        (made([0.0, 0.0, 0.0]), "all"),
        (made([0.0, 0.2, 0.05]), "from:2"),  # from the top: a layer below one that does not bear it is not asked
        (made([0.0, 0.0, 0.5], last=1), "all_but_last"),
        (made([0.3, 0.0, 0.1, 0.5], last=2), (1, 2)),
        (made([0.0, float("nan")]), ()),
        (made([0.2, 0.2]), ()),
    ],
)
def test_the_transition(found, layers):
    assert found.layers == layers
    if layers:
        assert found.suggestion() == replace(TIGHT, layers=layers)
    else:
        with pytest.raises(ValueError, match=r"expected a layer that changes the output .* by at most 0.1, got"):
            found.suggestion()


def test_suggest_gives_a_plan_to_convert():
    """Bounds for every layer, in the upper ones of those that may run them."""
    model = build("bert", num_hidden_layers=3)
    given = [inputs("bert", seed=seed) | {"labels": torch.tensor([0, 1])} for seed in (1, 2)]
    with untouched(model, given[0]):
        plan = suggest(model, iter(given), reduction=1.2, budget=10.0, centre="median")
    assert plan.layers == "all_but_last"
    assert plan.scores.centre == "median"
    assert len(plan.scores.bound) == 3
    assert states(convert(model, plan), input_ids=given[0]["input_ids"]).isfinite().all()
    with pytest.raises(ValueError, match="expected a layer that changes the distribution"):
        suggest(model, given[0]["input_ids"], reduction=50, budget=0.0)


def test_what_a_user_reads():
    found = sensitivity(build("llama"), inputs("llama"), TIGHT, loss="lm", budget=100.0)
    assert "Layers that bear it, with the loss changed by at most 100: 'all'" in " ".join(str(found).split())
    written = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert AttentionPlan.from_dict(written["plan"]) == TIGHT
    assert (written["first"], written["layers"]) == (0, "all")
    findings = found.findings()
    assert findings.tables["sensitivity"].columns[1:4] == ["loss, alone", "kl, alone", "output, alone"]
    assert set(findings.curves["sensitivity"].series) == {"this layer alone", "from here up", "budget"}
    report = Report("m", "sdpa", "ordinary", ["0", "1"], {}, findings, {})
    assert Report.from_dict(report.to_dict()) == report


GIVEN = {"input_ids": torch.arange(3, 9)[None]}
BAD = {
    "no batch": ({"inputs": iter(())}, "at least one batch"),
    "labels": ({"loss": "task"}, "expected labels in every batch"),
    "loss": ({"loss": "nll"}, 'loss: expected None, "task", "lm" or a function'),
    "budget": ({"budget": -1}, r"budget=...\): expected a number in \[0, inf\]"),
    "plan": ({"plan": "fulpay"}, "one of the presets"),
    "reach": ({"plan": AttentionPlan(Windows(2))}, "LlamaForCausalLM|LlamaModel"),
    "heads": ({"plan": AttentionPlan(scores=Bounded(bound=[1.0]))}, r"one per head \(4\), got 1"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input(what):
    changes, reason = BAD[what]
    model = build("llama")
    with untouched(model, GIVEN), pytest.raises(ValueError, match=reason):
        sensitivity(model, **{"inputs": GIVEN, "plan": TIGHT} | changes)


def test_no_labels_for_a_model_that_takes_none():
    model = build("bert", head=False)
    assert sensitivity(model, GIVEN | {"labels": torch.tensor([1])}, TIGHT).loss is None
    with pytest.raises(ValueError, match="a head that takes labels, got 'BertModel'"):
        sensitivity(model, GIVEN, TIGHT, loss="lm")
    with pytest.raises(ValueError, match="a causal language model, got 'ViTForImageClassification'"):
        sensitivity(build("vit"), inputs("vit"), TIGHT, loss="lm")
    with pytest.raises(ValueError, match="batches with input_ids, got"):
        sensitivity(build("llama"), {"inputs_embeds": torch.randn(1, 4, 32)}, TIGHT, loss="lm")


def test_an_exception_in_the_middle_leaves_the_model_as_it_was():
    model = build("gpt2")

    def batches():
        yield GIVEN
        raise KeyboardInterrupt

    with untouched(model, GIVEN), pytest.raises(KeyboardInterrupt):
        sensitivity(model, batches(), TIGHT)
